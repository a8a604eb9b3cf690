"""Operations that take mixed types under CUDA's autocast and raise under the CPU's: cast as CUDA's does.

Conv, linear, matmul and attention are on the CPU's own list; these are not. A call without mixed types is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sightline_migrate.session import Session

KEY = torch._C.DispatchKey.AutocastCPU
TO_WIDEST = (
    "mv addmv dot vdot chain_matmul linalg_multi_dot linalg_cross bilinear tensordot lerp.Scalar lerp.Tensor "
    "index_put index_add scatter.src scatter_add masked_scatter"
).split()
TO_FIRST = "index_put_ index_add_ index_copy_ scatter_.src scatter_add_ masked_scatter_".split()
"""these write into their first tensor"""
OF_REGIONS = "roi_align roi_pool ps_roi_align ps_roi_pool nms deform_conv2d".split()
"""torchvision's; computed in float32, returned in the type of the first tensor"""

Choose = Callable[[list[torch.dtype]], torch.dtype | None]
"""types of a call's tensors -> the type that all of them are cast to, or None to cast nothing"""


def register(session: Session) -> None:
    """Register the casts until undo; those of torchvision once a script imports it."""
    chosen: dict[str, Choose] = {
        **dict.fromkeys(TO_WIDEST, _widest),
        **dict.fromkeys(TO_FIRST, _first),
        "layer_norm": _widest_of_wide_input,
        "group_norm": _widest_of_wide_input,
        "batch_norm": _of_the_weights,
        "lstm.input": _of_autocast,
        "lstm.data": _of_autocast,
    }
    library = torch.library.Library("aten", "IMPL")
    session.undo.on_undo(library._destroy)
    for name, choose in chosen.items():
        _register(library, "aten", name, lambda op, choose=choose: _casting(op, choose))  # type: ignore[misc]
    session.imports.when_imported("torchvision", lambda module: _register_regions(session, module))


def _register_regions(session: Session, _: ModuleType) -> None:
    library = torch.library.Library("torchvision", "IMPL")
    session.undo.on_undo(library._destroy)
    for name in OF_REGIONS:
        _register(library, "torchvision", name, _in_float32)


def _register(library: Any, space: str, name: str, make: Callable[[Any], Any]) -> None:
    """Register a kernel for autocast where torch has none; a build of torchvision without operators has no names."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(getattr(torch.ops, space), packet, None), overload or "default", None)
    if op is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(f"{space}::{name}", KEY.name):
        library.impl(name, make(op), KEY.name, with_keyset=True)


def _casting(op: Any, choose: Choose) -> Any:
    def cast_mixed(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = [each.dtype for each in _floats((args, tuple(kwargs.values())))]
        dtype = choose(given)
        if dtype is not None:
            args, kwargs = _cast(args, dtype), {name: _cast(value, dtype) for name, value in kwargs.items()}
        # Operations that it consists of are still under autocast. Dynamo's dispatcher would start from the top again.
        return op.redispatch(keys.remove(KEY).remove(torch._C.DispatchKey.PythonDispatcher), *args, **kwargs)

    return cast_mixed


def _in_float32(op: Any) -> Any:
    def in_float32(keys: Any, *args: Any) -> Any:
        first = next(_floats(args)).dtype
        # The kernels call others, whose types autocast would change.
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(KEY)):
            return _cast(op(*_cast(args, torch.float32)), first)

    return in_float32


def _widest(given: list[torch.dtype]) -> torch.dtype | None:
    return torch.float32 if len(set(given)) > 1 else None


def _first(given: list[torch.dtype]) -> torch.dtype | None:
    return given[0] if len(set(given)) > 1 else None


def _widest_of_wide_input(given: list[torch.dtype]) -> torch.dtype | None:
    """For norms; the CPU's own take narrow input and wide weights."""
    return _widest(given) if given[0] is torch.float32 else None


def _of_the_weights(given: list[torch.dtype]) -> torch.dtype | None:
    """For batch norm, which updates its statistics."""
    return given[-1] if given[0] is torch.float32 and given[-1] is not torch.float32 else None


def _of_autocast(given: list[torch.dtype]) -> torch.dtype:
    """oneDNN's LSTM lacks the types that a CPU emulates; for tensors of such a type torch uses its own."""
    return torch.get_autocast_dtype("cpu")


def _floats(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that autocast may cast, also those in lists."""
    if isinstance(value, Tensor):
        if value.dtype in (torch.float16, torch.bfloat16, torch.float32):
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _floats(each)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if next(_floats(value), None) is not None else value
    return type(value)(_cast(each, dtype) for each in value) if isinstance(value, list | tuple) else value
