"""Compile the Triton kernels of some work side by side, before the work launches them one after another.

A kernel takes 0.2 to 1.3 s to compile, and as long again for the C code that launches it where its arguments are new;
a first start needs fifty. Nearly all of that runs outside of Python's lock, so threads share it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sightline.hardware.limits import usable_cores

MOST_THREADS = 16


def compile_ahead(works: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Run pieces of work without launching kernels that are not compiled yet, and return when all of these are compiled
    and loaded.

    What they compute meanwhile is nonsense, so nothing in them may depend on values of tensors, no address of a kernel
    either, and what they change must not be used. Errors are left to the work itself, which meets them again.
    """
    threads = min(MOST_THREADS, usable_cores())
    if device.type != "cuda" or threads < 2:
        return
    from triton import knobs
    from triton.runtime.cache import triton_key

    triton_key()  # reads all of Triton, and remembers: else each thread would do it for its first kernel
    here, before = threading.get_ident(), knobs.runtime.jit_cache_hook
    asked: set[tuple[Any, str]] = set()

    def compile_one(kernel: Any, kind: str) -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):
            _ = kernel.preload(kind).run  # a property: it compiles the launcher and loads the kernel

    def postpone(*, key: str, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        """Answer Triton, which asks before it compiles a kernel for a launch: True leaves out both."""
        if threading.get_ident() != here:  # a thread of ours, or a loader's, which means its launch
            return bool(before and before(key=key, fn=fn, compile=compile, **others))
        if (fn.jit_function, key) not in asked:
            asked.add((fn.jit_function, key))
            _ = fn.jit_function.cache_key  # made once, by this thread
            pool.submit(compile_one, fn.jit_function, compile["specialization_data"])
        return True

    with ThreadPoolExecutor(threads, "kernels") as pool, torch.autograd.set_multithreading_enabled(False):
        knobs.runtime.jit_cache_hook = postpone
        try:
            for work in works:
                with contextlib.suppress(Exception), torch.cuda.device(device):
                    work()
            pool.shutdown()  # while the hook lets these threads compile
        finally:
            knobs.runtime.jit_cache_hook = before
