"""Manual data parallelism: broadcast, scatter, gather and sum tensors over devices, which torch offers for CUDA only.

torch.nn.parallel.replicate, scatter and gather stay torch's own; the functions that they call are replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.cuda.comm  # imported now: later it would copy our functions and keep them
from torch import Tensor
from torch._utils import _handle_complex

from sightline_migrate import zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Rule, dressed
from sightline_migrate.rules.tensors import MOVE
from sightline_migrate.targets import HOST_MEMORY

if TYPE_CHECKING:
    from sightline_migrate.session import Session

COMM = "broadcast broadcast_coalesced reduce_add reduce_add_coalesced scatter gather".split()
PARTS = "Broadcast ReduceAddCoalesced Scatter Gather".split()
BY_MOVES = "copies between the target's devices; on cpu there is one"
IN_TURN = "runs one module after the other: the target is one device"


def rules() -> list[Rule]:
    return [*_comm(), *_functions(), *_public()]


def _comm() -> Iterator[Rule]:
    for name in COMM:
        for owner in ("torch.nn.parallel.comm", "torch.cuda.comm"):
            yield Rule(f"{owner}.{name}", "adapted", dressed(_make_comm), BY_MOVES)


def _functions() -> Iterator[Rule]:
    """Yield rules for private classes: libraries build their own data parallelism on them."""
    for name in PARTS:
        yield Rule(f"torch.nn.parallel._functions.{name}", "adapted", _make_function, BY_MOVES)
    for name in ("Scatter", "Gather"):
        yield Rule(f"torch.nn.parallel.scatter_gather.{name}", "adapted", _make_function, BY_MOVES)


def _public() -> Iterator[Rule]:
    for name in ("replicate", "scatter", "gather"):
        yield Rule(f"torch.nn.parallel.{name}", "adapted", dressed(_make_mapped), BY_MOVES)
    for name in ("parallel_apply", "parallel_apply.parallel_apply"):  # as named in the package and in its module
        yield Rule(f"torch.nn.parallel.{name}", "adapted", dressed(_make_parallel_apply), IN_TURN, targets=HOST_MEMORY)


def _make_comm(rule: Rule, original: Any, session: Session) -> Any:
    """Replace the function for every caller: torch's own needs CUDA."""
    name = rule.name.rpartition(".")[2]
    function = getattr(DeviceComm(session), name)

    def wrapper(first: Any, *args: Any, **kwargs: Any) -> Any:
        if zones.zone() == zones.SCRIPT:
            record.hit(rule, (first, *args), kwargs)
        # As torch does: callers convert back to complex.
        if not name.startswith("reduce"):
            first = _handle_complex(first) if isinstance(first, Tensor) else [_handle_complex(each) for each in first]
        return function(first, *args, **kwargs)

    return wrapper


class DeviceComm:
    """torch.cuda.comm for a target's devices; differentiable, as torch's autograd functions need it."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def there(self, device: Any) -> Any:
        """Return the target's device for an index, a CUDA device or None (the current one)."""
        return self.session.devices.get(self.session.runtime.current_device() if device is None else device)

    def broadcast(self, tensor: Tensor, devices: Any = None, *, out: Any = None) -> tuple[Tensor, ...]:
        if (devices is None) == (out is None):
            raise RuntimeError(f"one of 'devices' and 'out' must be given, but got devices={devices} and out={out}")
        if out is not None:
            return tuple(each.copy_(tensor) for each in out)
        return tuple(self._copy(tensor, device, at) for at, device in enumerate(devices))

    def _copy(self, tensor: Tensor, device: Any, at: int) -> Tensor:
        """Copy to a device; as in CUDA the first result may be the tensor itself, others have their own memory."""
        moved = MOVE(tensor, self.there(device))
        return moved.clone() if moved is tensor and at else moved

    def broadcast_coalesced(self, tensors: Any, devices: Any, buffer_size: int = 0) -> list[list[Tensor]]:
        tensors = list(tensors)
        return [[self._copy(tensor, device, at) for tensor in tensors] for at, device in enumerate(devices)]

    def reduce_add(self, inputs: Sequence[Tensor], destination: Any = None) -> Tensor:
        sizes = {tuple(each.shape) for each in inputs}
        if len(sizes) > 1:
            raise ValueError(f"reduce_add takes tensors of one size, but got {sorted(sizes)}")
        place = self.there(destination)
        total = MOVE(inputs[0], place)
        for other in inputs[1:]:
            total = total + MOVE(other, place)
        return total

    def reduce_add_coalesced(self, inputs: Any, destination: Any = None, buffer_size: int = 0) -> tuple[Tensor, ...]:
        return tuple(self.reduce_add(group, destination) for group in zip(*inputs, strict=True))

    def scatter(
        self, tensor: Tensor, devices: Any = None, chunk_sizes: Any = None, dim: int = 0, streams: Any = None,
        *, out: Any = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if out is not None:
            if devices is not None or chunk_sizes is not None:
                raise RuntimeError(f"'out' cannot be combined with devices={devices} or chunk_sizes={chunk_sizes}")
            parts = tensor.split([each.shape[dim] for each in out], dim)
            return tuple(each.copy_(part) for each, part in zip(out, parts, strict=True))
        devices = list(devices)
        parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
        return tuple(MOVE(part, self.there(device)) for part, device in zip(parts, devices, strict=False))

    def gather(self, tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> Tensor:
        if out is not None:
            if destination is not None:
                raise RuntimeError(f"'out' cannot be combined with destination={destination!r}")
            place = out.device
            return out.copy_(torch.cat([MOVE(each, place) for each in tensors], dim))
        place = "cpu" if destination == -1 else self.there(destination)
        return torch.cat([MOVE(each, place) for each in tensors], dim)


def _make_function(rule: Rule, original: Any, session: Session) -> Any:
    """Replace an autograd class: scripts call only apply(), with the arguments of the original's forward()."""
    comm = DeviceComm(session)

    def broadcast(devices: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # A view instead of the tensor itself: a replica holds no parameters and no leaves.
        copies = comm.broadcast_coalesced([each.view_as(each) for each in tensors], devices)
        return tuple(each for copy in copies for each in copy)

    def reduce(destination: Any, count: int, *gradients: Tensor) -> tuple[Tensor, ...]:
        groups = [gradients[at : at + count] for at in range(0, len(gradients), count)]
        return comm.reduce_add_coalesced(groups, destination)

    def scatter(devices: Any, chunk_sizes: Any, dim: int, tensor: Tensor) -> tuple[Tensor, ...]:
        return comm.scatter(tensor, devices, chunk_sizes, dim)

    def gather(destination: Any, dim: int, *tensors: Tensor) -> Tensor:
        if dim == 0 and all(each.dim() == 0 for each in tensors):
            tensors = tuple(each.view(1) for each in tensors)  # losses, one per device
        return comm.gather(tensors, dim, destination)

    found: Any = dict(zip(PARTS, (broadcast, reduce, scatter, gather), strict=True))[original.__name__]

    def apply(*args: Any) -> Any:
        if zones.zone() == zones.SCRIPT:
            record.hit(rule, args)
        return found(*args)

    looks = {"__module__": original.__module__, "__doc__": original.__doc__, "apply": staticmethod(apply)}
    return type(original.__name__, (original,), looks)


def _make_mapped(rule: Rule, original: Any, session: Session) -> Any:
    """Map the second parameter, a device or a list of them, to indices: torch needs them, plain "cuda" has none."""
    signature = inspect.signature(original)
    name = list(signature.parameters)[1]

    def index(device: Any) -> Any:
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            return session.devices.index_of(device, session.runtime.current_device())
        return device

    def mapped(*args: Any, **kwargs: Any) -> Any:
        record.hit(rule, args, kwargs)
        given = signature.bind(*args, **kwargs)
        devices = given.arguments[name]
        is_one = devices is None or isinstance(devices, str | int | torch.device)
        given.arguments[name] = index(devices) if is_one else [index(each) for each in devices]
        return original(*given.args, **given.kwargs)

    return mapped


def _make_parallel_apply(rule: Rule, original: Any, session: Session) -> Any:
    def parallel_apply(modules: Any, inputs: Any, kwargs_tup: Any = None, devices: Any = None) -> list[Any]:
        record.hit(rule, (), {"devices": devices})
        more = [{}] * len(modules) if kwargs_tup is None else kwargs_tup
        given = [each if isinstance(each, list | tuple) else (each,) for each in inputs]
        return [module(*args, **kwargs) for module, args, kwargs in zip(modules, given, more, strict=True)]

    return parallel_apply
