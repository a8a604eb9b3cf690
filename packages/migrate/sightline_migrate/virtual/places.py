"""Host or device: on target cpu both are the same memory, but scripts rely on the copies that a GPU makes.

A storage remembers its place, and move() copies if it is on the other side. Results of operations are not marked. The
graph of one that requires grad leads to marked tensors; any other is copied by `.to("cuda")` and `.to("cpu")`, and the
log says so. What `x.device` returns tells the place of `x`: `y.to(x.device)` copies a `y` known to be elsewhere.
"""

from __future__ import annotations

import itertools
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
"""id of each object in _objects, and of ANYWHERE, which live for ever -> the place that it tells"""
ANYWHERE = torch.device("cpu")
"""the memory of both, for a call of torch that decides nothing: a function mode hands it on to a replaced function"""
_places[id(ANYWHERE)] = None
COPIED_IN_DOUBT = "copied; a GPU copies a result only if it was computed on the other side"
SHARED_IN_DOUBT = "not copied; a GPU copies a result that was computed on the other side"
_GRAPH_SEARCHED = 32
_INPUTS_SEARCHED = 4  # of a node: a GPU takes no others than those of one place
_MOVES = ("CloneBackward0", "ToCopyBackward0")
_WRITES = ("CopyBackwards", "CopySlices")
"""these write into memory whose place the written values do not tell"""


def device_of(tensor: torch.Tensor, index: int | None = None) -> torch.device:
    """Return what `tensor.device` returns: cpu, or cuda:index with --claim; one object for each place."""
    key = index, find_place(tensor)
    return _objects.get(key) or _add(*key)


def _add(index: int | None, place: str | None) -> torch.device:
    made = torch.device("cpu") if index is None else torch.device("cuda", index)
    found = _objects.setdefault((index, place), made)
    _places[id(found)] = place
    return found


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


def move(
    tensor: torch.Tensor, moved: torch.Tensor, place: str | None, is_named: bool = True
) -> tuple[torch.Tensor, str]:
    """Return (the result of a move to `place`, "" or what is in doubt about it).

    The result is `moved`, or a copy if it shares memory with a tensor of the other side. `is_named`: the script names
    the place, so that a tensor of which nothing is known is copied and marked.
    """
    if place is None:
        return moved, ""
    here, doubt = find_place(tensor), ""
    if here == place and moved is tensor:
        return put(moved, place), ""
    if here is None:
        here = _guess(tensor, place)
        if shares(tensor, moved):
            doubt = COPIED_IN_DOUBT if here != place and (here or is_named) else SHARED_IN_DOUBT
        if here is None and not is_named:
            return moved, doubt
    apart = put(moved if here == place else _apart(tensor, moved), place)
    if apart is not tensor and type(apart) is torch.Tensor:
        _, node = _graph_of(apart)
        if node is not None:
            _metadata_of(node)[MARK] = place
    return apart, doubt


def find_place(tensor: torch.Tensor) -> str | None:
    """Return the place of a tensor: its own, or that of what a result that requires grad was computed from."""
    return place_of(tensor) or _place_in_graph(tensor)


def _place_in_graph(tensor: torch.Tensor) -> str | None:
    """Return the place of a result that requires grad: that of the nearest leaf or move that it was computed from.

    Mark the result, so that it is searched once: asking a node for its inputs takes as long as it has many.
    """
    last = _graph_of(tensor)[1] if type(tensor) is torch.Tensor else None
    if last is None:
        return None
    nodes: list[Any] = [last]
    for node in nodes:  # grows: breadth first
        name = type(node).__name__
        place = None
        if name == "AccumulateGrad":
            place = place_of(node.variable)
        elif name in _MOVES:
            place = _metadata_of(node).get(MARK)
        if place is not None:
            put(tensor, place)
            return place
        if name not in _WRITES and len(nodes) < _GRAPH_SEARCHED:
            inputs = (each for each, _ in node.next_functions if each is not None)
            nodes += itertools.islice(inputs, _INPUTS_SEARCHED)
    return None


def _graph_of(tensor: torch.Tensor) -> tuple[bool, Any]:
    """Return (requires_grad, grad_fn); a mode or a subclass of the script must not see it."""
    if type(tensor) in _PLAIN and not _len_torch_function_stack():
        return tensor.requires_grad, tensor.grad_fn
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad, tensor.grad_fn


def _metadata_of(node: Any) -> dict[str, Any]:
    """Return the dict that a node of the graph carries; torch declares a method, but it is a property."""
    return node.metadata


def _guess(tensor: torch.Tensor, place: str) -> str | None:
    """Return the probable place of a tensor of which nothing is known, from what scripts do that run on a GPU.

    A result that requires grad comes from the model. A Parameter is made on the host, since the GPU's copy of one is
    none. Any other leaf stays a leaf: `Variable(x.data + eta, requires_grad=True).cuda()` is asked for its grad.
    """
    requires_grad, node = _graph_of(tensor)
    if not requires_grad:
        return None
    if node is not None:
        return DEVICE
    return HOST if isinstance(tensor, parameter.Parameter) else place


def _apart(tensor: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    if not shares(tensor, moved):
        return moved
    if type(moved) in _PLAIN and _len_torch_function_stack():
        with torch._C.DisableTorchFunction():  # a mode of the script must not see it
            return moved.clone()
    return moved.clone()


def shares(tensor: torch.Tensor, moved: torch.Tensor) -> bool:
    """Return True if both have one memory; not for a node of a traced graph or a parameter of a lazy module."""
    if not isinstance(moved, torch.Tensor) or isinstance(moved, _LAZY):
        return False
    return _storage_of(tensor) is _storage_of(moved)


def _storage_of(tensor: torch.Tensor) -> Any:
    """Return the storage, or None for a tensor without one: sparse, uninitialized, inside a transform of functions."""
    try:
        if type(tensor) in _PLAIN and not _len_torch_function_stack():
            return _STORAGE(tensor)
        with torch._C.DisableTorchFunction():  # a mode or a subclass of the script must not see it
            return _STORAGE(tensor)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
