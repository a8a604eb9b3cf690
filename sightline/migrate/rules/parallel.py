"""Data parallelism by hand: copies, parts and sums of tensors among devices, which torch has for CUDA alone.

torch.nn.parallel.replicate, scatter and gather stay torch's own; what they are built of is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.cuda.comm  # else it would take over our functions when a script imports it, and keep them
from torch import Tensor
from torch._utils import _handle_complex

from sightline.migrate import zones
from sightline.migrate.reporting import record
from sightline.migrate.rules.table import Rule, dressed
from sightline.migrate.rules.tensors import MOVE
from sightline.migrate.targets import HOST_MEMORY

if TYPE_CHECKING:
    from sightline.migrate.session import Session

COMM = "broadcast broadcast_coalesced reduce_add reduce_add_coalesced scatter gather".split()
PARTS = "Broadcast ReduceAddCoalesced Scatter Gather".split()
BY_MOVES = "by moves between the devices of the target; on cpu they are one"
IN_TURN = "one module after the other: the target is one device"


def rules() -> list[Rule]:
    return [*_comm(), *_functions(), *_public()]


def _comm() -> Iterator[Rule]:
    for name in COMM:
        for owner in ("torch.nn.parallel.comm", "torch.cuda.comm"):
            yield Rule(f"{owner}.{name}", "adapted", dressed(_make_comm), BY_MOVES)


def _functions() -> Iterator[Rule]:
    """Private, but libraries derive their own data parallelism from them."""
    for name in PARTS:
        yield Rule(f"torch.nn.parallel._functions.{name}", "adapted", _make_function, BY_MOVES)
    for name in ("Scatter", "Gather"):
        yield Rule(f"torch.nn.parallel.scatter_gather.{name}", "adapted", _make_function, BY_MOVES)


def _public() -> Iterator[Rule]:
    for name in ("replicate", "scatter", "gather"):
        yield Rule(f"torch.nn.parallel.{name}", "adapted", dressed(_make_mapped), BY_MOVES)
    for name in ("parallel_apply", "parallel_apply.parallel_apply"):  # the package's name, and its module's
        yield Rule(f"torch.nn.parallel.{name}", "adapted", dressed(_make_parallel_apply), IN_TURN, targets=HOST_MEMORY)


def _make_comm(rule: Rule, original: Any, session: Session) -> Any:
    """For every caller: torch's own has no meaning without CUDA."""
    name = rule.name.rpartition(".")[2]
    function = getattr(Between(session), name)

    def wrapper(first: Any, *args: Any, **kwargs: Any) -> Any:
        if zones.zone() == zones.SCRIPT:
            record.hit(rule, (first, *args), kwargs)
        # As torch does: those who call it make them complex again.
        if not name.startswith("reduce"):
            first = _handle_complex(first) if isinstance(first, Tensor) else [_handle_complex(each) for each in first]
        return function(first, *args, **kwargs)

    return wrapper


class Between:
    """torch.cuda.comm for the devices of a target; all of it can be differentiated, which torch's functions need."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def there(self, device: Any) -> Any:
        """The target's device of an index, a CUDA device or None, the current one."""
        return self.session.devices.get(self.session.runtime.current_device() if device is None else device)

    def broadcast(self, tensor: Tensor, devices: Any = None, *, out: Any = None) -> tuple[Tensor, ...]:
        if (devices is None) == (out is None):
            raise RuntimeError(f"one of 'devices' and 'out' must be given, but got devices={devices} and out={out}")
        if out is not None:
            return tuple(each.copy_(tensor) for each in out)
        return tuple(self._copy(tensor, device, at) for at, device in enumerate(devices))

    def _copy(self, tensor: Tensor, device: Any, at: int) -> Tensor:
        """As in CUDA the first one is the tensor itself where it is there already; others have memory of their own."""
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
                raise RuntimeError(f"with 'out' neither devices={devices} nor chunk_sizes={chunk_sizes} may be given")
            parts = tensor.split([each.shape[dim] for each in out], dim)
            return tuple(each.copy_(part) for each, part in zip(out, parts, strict=True))
        devices = list(devices)
        parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
        return tuple(MOVE(part, self.there(device)) for part, device in zip(parts, devices, strict=False))

    def gather(self, tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> Tensor:
        if out is not None:
            if destination is not None:
                raise RuntimeError(f"with 'out' no destination may be given, but got {destination!r}")
            place = out.device
            return out.copy_(torch.cat([MOVE(each, place) for each in tensors], dim))
        place = "cpu" if destination == -1 else self.there(destination)
        return torch.cat([MOVE(each, place) for each in tensors], dim)


def _make_function(rule: Rule, original: Any, session: Session) -> Any:
    """A class in name: scripts call its apply(), with the arguments of the original's forward()."""
    between = Between(session)

    def broadcast(devices: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # A view where it is the tensor itself: what a replica holds is no parameter, and no leaf.
        copies = between.broadcast_coalesced([each.view_as(each) for each in tensors], devices)
        return tuple(each for copy in copies for each in copy)

    def reduce(destination: Any, count: int, *gradients: Tensor) -> tuple[Tensor, ...]:
        groups = [gradients[at : at + count] for at in range(0, len(gradients), count)]
        return between.reduce_add_coalesced(groups, destination)

    def scatter(devices: Any, chunk_sizes: Any, dim: int, tensor: Tensor) -> tuple[Tensor, ...]:
        return between.scatter(tensor, devices, chunk_sizes, dim)

    def gather(destination: Any, dim: int, *tensors: Tensor) -> Tensor:
        if dim == 0 and all(each.dim() == 0 for each in tensors):
            tensors = tuple(each.view(1) for each in tensors)  # losses, one per device
        return between.gather(tensors, dim, destination)

    found: Any = dict(zip(PARTS, (broadcast, reduce, scatter, gather), strict=True))[original.__name__]

    def apply(*args: Any) -> Any:
        if zones.zone() == zones.SCRIPT:
            record.hit(rule, args)
        return found(*args)

    looks = {"__module__": original.__module__, "__doc__": original.__doc__, "apply": staticmethod(apply)}
    return type(original.__name__, (original,), looks)


def _make_mapped(rule: Rule, original: Any, session: Session) -> Any:
    """torch asks for indices; a plain "cuda" has none. The second parameter is the device, or all of them."""
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
