"""Host or device: on target cpu both are the same memory, but scripts rely on the copies that a GPU makes.

A storage remembers where the script put it. Results of operations are not marked, since operations are not replaced:
a script that names cuda or cpu gets a copy of them, `x.to(y.device)` returns `x`, as on a GPU and on a plain CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import parameter

DEVICE, HOST = "device", "host"
CPU = torch.device("cpu")
"""the one object that `x.device` returns: a script's own torch.device("cpu") is another"""
MARK = "_migrate_place"
_STORAGE: Any = torch._C.TensorBase.untyped_storage
_LAZY: Any = parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_claimed: dict[int, torch.device] = {}


def claimed(index: int) -> torch.device:
    """Return the one object that `x.device` returns with --claim."""
    return _claimed.setdefault(index, torch.device("cuda", index))


def is_of_a_tensor(device: Any) -> bool:
    """Return True if `device` was read from a tensor rather than named by the script."""
    return device is CPU or (bool(_claimed) and any(device is each for each in _claimed.values()))


def place_of(tensor: torch.Tensor) -> str | None:
    """Return DEVICE, HOST, or None if unknown."""
    return getattr(_storage_of(tensor), MARK, None)


def put(tensor: torch.Tensor, place: str | None) -> torch.Tensor:
    """Mark a tensor's storage, and with it all views."""
    storage = _storage_of(tensor)
    if storage is not None and place is not None:
        setattr(storage, MARK, place)
    return tensor


def to_device(tensor: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Return the result of a move to the device: `moved`, or a copy if it shares memory with a host tensor.

    A result that requires grad comes from the model, so it is on the device already.
    """
    is_marked = place_of(tensor) == DEVICE
    if is_marked and moved is tensor:
        return moved
    is_there = is_marked or (tensor.requires_grad and not tensor.is_leaf)
    return put(moved if is_there else _apart(tensor, moved), DEVICE)


def to_host(tensor: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Return the result of a move to the host: `moved`, or a copy if it shares memory with a device tensor.

    A tensor that requires grad and is not known to be on the device stays itself: it may be a leaf of the host.
    """
    place = place_of(tensor)
    if place == HOST or (place is None and tensor.requires_grad):
        return moved
    return put(_apart(tensor, moved), HOST)


def _apart(tensor: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    if not isinstance(moved, torch.Tensor) or isinstance(moved, _LAZY):
        return moved  # a node of a traced graph, a parameter of a lazy module
    if _storage_of(tensor) is not _storage_of(moved):
        return moved
    return moved.clone()


def _storage_of(tensor: torch.Tensor) -> Any:
    """Return the storage, or None for a tensor without one: sparse, uninitialized, inside a transform of functions."""
    try:
        with torch._C.DisableTorchFunction():  # a mode or a subclass of the script must not see it
            return _STORAGE(tensor)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
