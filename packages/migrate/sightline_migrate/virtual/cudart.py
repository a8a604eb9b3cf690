"""Small CUDA objects that only have to exist: functions of cudart, memory pools, the list of processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from sightline_migrate.virtual import runtime


class _Errors:
    """cudaError; scripts read only `success`."""

    success = 0


class Cudart:
    """The functions of torch.cuda.cudart() that scripts call; each returns success."""

    cudaError = _Errors

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0

    def cudaMemGetInfo(self, device: int = 0) -> tuple[int, int]:
        return runtime.available_memory(), runtime.total_memory()

    def cudaGetErrorString(self, code: int) -> str:
        return "no error"


def cudart() -> Cudart:
    return Cudart()


@contextlib.contextmanager
def no_op_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Do nothing, whatever the arguments."""
    yield


class MemPool:
    """A memory pool without memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.id = (0, 0)
        self.allocator = None

    def use_count(self) -> int:
        return 1

    def snapshot(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []


def list_processes(device: Any = None) -> str:
    memory = runtime.resident_bytes("VmRSS") / 2**20
    return f"GPU:0\nprocess {os.getpid():>10d} uses {memory:>12.3f} MB GPU memory"
