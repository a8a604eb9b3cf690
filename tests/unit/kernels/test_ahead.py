"""Kernels that are compiled ahead: each kind once, on threads; other threads' launches stay launches.

Triton compiles for a Hopper without a GPU; only the driver, which would launch, is replaced by a recorder.
"""

import contextlib
import threading

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402  Triton is not installed everywhere
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from sightline.kernels import ahead  # noqa: E402

CUDA = torch.device("cuda", 0)


@triton.jit
def scale(x, rows, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(x + at, tl.load(x + at, mask=at < rows) * 2, mask=at < rows)


@triton.jit
def broken(x, rows, TILE: tl.constexpr):
    tl.store(x + tl.arange(0, 3), 1.0)  # 3 is no power of two


class Utils:
    def load_binary(self, *given):
        return 1, 2, 3, 4, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}


class Hopper:
    """As much of a driver as Triton asks for; its launchers record the threads that launch."""

    utils = Utils()

    def __init__(self):
        self.launched = []

    def launcher_cls(self, *given):
        return lambda *arguments: self.launched.append(threading.current_thread().name)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Names of threads that launch, with nothing compiled yet."""
    hopper = Hopper()
    monkeypatch.setattr(driver, "_active", hopper)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ahead, "usable_cores", lambda: 4)
    yield hopper.launched
    for kernel in (scale, broken):  # compiled kernels are unloaded by the driver that loaded them
        kernel.device_caches.clear()


@pytest.fixture
def compiled(monkeypatch):
    """Names of threads that compile."""
    threads = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **of: threads.append(threading.current_thread().name))
    return threads


def test_each_kind_of_arguments_is_compiled_once_on_threads(launched, compiled):
    x = torch.zeros(64)

    def work():
        scale[(1,)](x, 32, TILE=8, num_warps=4)
        scale[(1,)](x, 48, TILE=8, num_warps=4)  # a multiple of 16 too
        scale[(1,)](x, 33, TILE=8, num_warps=4)
        scale[(1,)](x, 1, TILE=8, num_warps=4)
        scale[(1,)](x[1:], 32, TILE=8, num_warps=4)  # not aligned
        scale[(1,)](x.half(), 32, TILE=8, num_warps=4)
        scale[(1,)](x, 32, TILE=16, num_warps=4)
        scale[(1,)](x, 32, TILE=8, num_warps=8)

    ahead.compile_ahead([work], CUDA)
    assert len(compiled) == 7 and all(name.startswith("kernels") for name in compiled)
    assert knobs.runtime.jit_cache_hook is None
    launched.clear()
    work()
    assert len(compiled) == 7 and launched == ["MainThread"] * 8


def test_a_launch_of_another_thread_is_made(launched, compiled):
    x = torch.zeros(64)

    def launch():
        scale[(1,)](x, 32, TILE=8)

    def work():
        loader = threading.Thread(target=launch, name="loader")
        loader.start()
        loader.join()

    ahead.compile_ahead([work], CUDA)
    assert launched == compiled == ["loader"]


def test_a_hook_of_the_user_is_asked_by_other_threads_and_put_back(launched, monkeypatch):
    asked = []
    hook = lambda **of: asked.append(threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", hook)
    ahead.compile_ahead([lambda: scale[(1,)](torch.zeros(64), 32, TILE=8)], CUDA)
    assert len(asked) == 1 and asked[0].startswith("kernels")
    assert knobs.runtime.jit_cache_hook is hook


def test_a_kernel_that_does_not_compile_and_work_that_fails_are_left_to_the_work_itself(launched, compiled):
    def fail():
        raise torch.OutOfMemoryError("full")

    x = torch.zeros(64)
    ahead.compile_ahead([fail, lambda: broken[(1,)](x, 2, TILE=8), lambda: scale[(1,)](x, 32, TILE=8)], CUDA)
    assert len(compiled) == 1
    with pytest.raises(triton.CompilationError):
        broken[(1,)](x, 2, TILE=8)


def test_nothing_runs_ahead_on_a_cpu():
    ahead.compile_ahead([lambda: pytest.fail("it ran")], torch.device("cpu"))


def test_gradients_are_computed_by_the_thread_that_asks(launched):
    """Else kernels of a backward pass on CUDA would be taken for another thread's."""
    seen = []
    x = torch.zeros(3, requires_grad=True)
    x.register_hook(lambda grad: seen.append((threading.get_ident(), torch.autograd.is_multithreading_enabled())))
    ahead.compile_ahead([lambda: x.sum().backward()], CUDA)
    assert seen == [(threading.get_ident(), False)]
