"""Host or device: on target cpu both are the same memory, but scripts rely on the copies that a GPU makes.

A storage remembers its place, and move() copies if it is on the other side, for tensors and modules alike. Results of
operations are not marked: `.to("cuda")` and `.to("cpu")` copy them. The object that `x.device` returns tells the place
of `x`: `y.to(x.device)` copies a `y` that is known to be elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.nn import parameter

from sightline_migrate import zones

DEVICE, HOST = "device", "host"
CPU = torch.device("cpu")
MARK = "_migrate_place"
_PLAIN = (torch.Tensor, parameter.Parameter)
_STORAGE: Any = torch._C.TensorBase.untyped_storage
_LAZY: Any = parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_objects: dict[tuple[int | None, str | None], torch.device] = {}
_places: dict[int, str | None] = {}
"""id of each object in _objects, which live for ever -> the place that it tells"""


def device_of(tensor: torch.Tensor, index: int | None = None) -> torch.device:
    """Return what `tensor.device` returns: cpu, or cuda:index with --claim; one object for each place."""
    key = index, place_of(tensor)
    return _objects.get(key) or _add(*key)


def _add(index: int | None, place: str | None) -> torch.device:
    made = torch.device("cpu") if index is None else torch.device("cuda", index)
    found = _objects.setdefault((index, place), made)
    _places[id(found)] = place
    return found


ANYWHERE = _add(None, None)
"""the memory of both, for a call of torch that decides nothing: a function mode hands it on to a replaced function"""


def is_of_a_tensor(device: Any) -> bool:
    """Return True if `device` was read from a tensor rather than named by the script."""
    return id(device) in _places


def asked(device: Any, is_cuda: bool) -> tuple[str | None, bool]:
    """Return (the place that a caller's `device` means, True if the script names it).

    In torch itself "cpu" may also be the target, so that a tensor of which nothing is known is left alone.
    """
    if is_of_a_tensor(device):
        return _places[id(device)], False
    if is_cuda:
        return DEVICE, True
    zone = zones.zone(2) if device in ("cpu", CPU) else zones.MACHINERY
    return (None, False) if zone == zones.MACHINERY else (HOST, zone == zones.SCRIPT)


def place_of(tensor: torch.Tensor) -> str | None:
    """Return DEVICE, HOST, or None if unknown. Memory that torch cannot resize is NumPy's, a file's or a process's."""
    storage = _storage_of(tensor)
    if storage is None:
        return None
    place = getattr(storage, MARK, None)
    return HOST if place is None and not storage.resizable() else place


def put(tensor: torch.Tensor, place: str | None) -> torch.Tensor:
    """Mark a tensor's storage, and with it all views."""
    storage = _storage_of(tensor)
    if storage is not None and place is not None:
        setattr(storage, MARK, place)
    return tensor


def move(tensor: torch.Tensor, moved: torch.Tensor, place: str | None, is_named: bool = True) -> torch.Tensor:
    """Return the result of a move to `place`: `moved`, or a copy if it shares memory with a tensor of the other side.

    `is_named`: the script names the place, so that a tensor of which nothing is known is copied and marked.
    """
    if place is None:
        return moved
    here = place_of(tensor)
    if here == place and moved is tensor:
        return moved
    if here is None:
        here = _guess(tensor, place)
        if here is None and not is_named:
            return moved
    return put(moved if here == place else _apart(tensor, moved), place)


def _guess(tensor: torch.Tensor, place: str) -> str | None:
    """Return the probable place of a tensor that is not marked, from what scripts do that run on a GPU.

    A result that requires grad comes from the model. A Parameter is made on the host, since the GPU's copy of one is
    none. Any other leaf stays a leaf: `Variable(x.data + eta, requires_grad=True).cuda()` is asked for its grad.
    """
    if not tensor.requires_grad:
        return None
    if not tensor.is_leaf:
        return DEVICE
    return HOST if isinstance(tensor, parameter.Parameter) else place


def _apart(tensor: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    if not isinstance(moved, torch.Tensor) or isinstance(moved, _LAZY):
        return moved  # a node of a traced graph, a parameter of a lazy module
    if _storage_of(tensor) is not _storage_of(moved):
        return moved
    return moved.clone()


def _storage_of(tensor: torch.Tensor) -> Any:
    """Return the storage, or None for a tensor without one: sparse, uninitialized, inside a transform of functions."""
    try:
        if type(tensor) in _PLAIN and not _len_torch_function_stack():
            return _STORAGE(tensor)
        with torch._C.DisableTorchFunction():  # a mode or a subclass of the script must not see it
            return _STORAGE(tensor)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
