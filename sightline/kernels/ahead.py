"""Compile the Triton kernels of some work side by side, before the work launches them one after another.

A kernel takes 0.2 to 1.3 s to compile, and as long again for the C code that launches it where its arguments are new;
a first start needs fifty. Nearly all of that runs outside of Python's lock, so threads share it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from sightline.hardware.limits import usable_cores

MOST_THREADS = 16
ALIGNED = 16  # Triton compiles code of its own for addresses and numbers that are multiples of it


def compile_ahead(works: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Run pieces of work without launching their kernels, and return when all of these are compiled and loaded.

    What they compute meanwhile is nonsense, so nothing in them may depend on values of tensors, and what they change
    must not be used. Errors are left to the work itself, which meets them again.
    """
    threads = min(MOST_THREADS, usable_cores())
    if device.type != "cuda" or threads < 2:
        return
    from triton.runtime.jit import JITFunction

    launch, here = JITFunction.run, threading.get_ident()
    pending: dict[Any, Future[None]] = {}

    def compile_one(kernel: Any, args: Any, grid: Any, given: dict[str, Any]) -> None:
        with torch.cuda.device(device):
            compiled = launch(kernel, *args, grid=grid, warmup=True, **given)
            _ = compiled.run  # a property: it compiles the launcher and loads the kernel

    def request(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        if warmup or threading.get_ident() != here:  # a loader's thread means its launch
            return launch(kernel, *args, grid=grid, warmup=warmup, **given)
        key = kernel, *_kinds(kernel, args, given)
        if key not in pending:
            _ = kernel.device_caches[torch.cuda.current_device()], kernel.cache_key  # made once, by this thread
            pending[key] = pool.submit(compile_one, kernel, args, grid, given)
        return None

    with ThreadPoolExecutor(threads, "kernels") as pool, torch.autograd.set_multithreading_enabled(False):
        JITFunction.run = request
        try:
            for work in works:
                with contextlib.suppress(Exception), torch.cuda.device(device):
                    work()
        finally:
            JITFunction.run = launch


def _kinds(kernel: Any, args: tuple[Any, ...], given: dict[str, Any]) -> list[Any]:
    """Return what Triton compiles separately for: the kinds of arguments, and values of constants and options."""
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    names = {parameter.name for parameter in kernel.params}
    named = [*zip(kernel.arg_names, args, strict=False), *sorted(given.items())]
    return [(name, value if name in constants or name not in names else _kind(value)) for name, value in named]


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNED == 0
    if isinstance(value, int):
        return value == 1, value % ALIGNED == 0, value.bit_length() > 31
    return type(value)
