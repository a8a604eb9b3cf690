"""Kernels that are compiled ahead: each kind once, on threads; other threads' launches stay launches.

Triton needs a GPU to launch, so its launch is replaced by a recorder; tests/device has the true one.
"""

import contextlib
import threading

import pytest
import torch

triton_jit = pytest.importorskip("triton.runtime.jit")

from sightline.kernels import ahead  # noqa: E402  Triton is not installed everywhere

CUDA = torch.device("cuda", 0)


class Parameter:
    def __init__(self, name: str, is_constexpr: bool = False):
        self.name, self.is_constexpr = name, is_constexpr


class Kernel:
    """As much of a JITFunction as a request asks for."""

    params = (Parameter("x"), Parameter("rows"), Parameter("TILE", True))
    arg_names = ("x", "rows", "TILE")
    device_caches = (None,)
    cache_key = ""

    def __call__(self, *args, **given):
        return triton_jit.JITFunction.run(self, *args, grid=(1,), warmup=False, **given)


class Launches(list):
    run = None  # of what a compilation returns

    def launch(self, kernel, *args, grid, warmup, **given):
        self.append((warmup, args, given, threading.current_thread().name))
        return self


@pytest.fixture
def launches(monkeypatch):
    found = Launches()
    launch = lambda kernel, *args, **given: found.launch(kernel, *args, **given)  # noqa: E731
    monkeypatch.setattr(triton_jit.JITFunction, "run", launch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ahead, "usable_cores", lambda: 4)
    return found


def test_each_kind_of_arguments_is_compiled_once_on_threads(launches):
    kernel, x = Kernel(), torch.zeros(64)

    def work():
        kernel(x, 32, TILE=8, num_warps=4)
        kernel(x, 48, TILE=8, num_warps=4)  # a multiple of 16 too
        kernel(x, 33, TILE=8, num_warps=4)
        kernel(x, 1, TILE=8, num_warps=4)
        kernel(x[1:], 32, TILE=8, num_warps=4)  # not aligned
        kernel(x.half(), 32, TILE=8, num_warps=4)
        kernel(x, 32, TILE=16, num_warps=4)
        kernel(x, 32, TILE=8, num_warps=8)

    before = triton_jit.JITFunction.run
    ahead.compile_ahead([work], CUDA)
    assert len(launches) == 7
    assert all(warmup and name.startswith("kernels") for warmup, _, _, name in launches)
    assert triton_jit.JITFunction.run is before
    kernel(x, 32, TILE=8, num_warps=4)
    assert launches[-1][0] is False


def test_a_launch_of_another_thread_is_made(launches):
    kernel, x = Kernel(), torch.zeros(64)

    def work():
        loader = threading.Thread(target=kernel, args=(x, 32, 8), name="loader")
        loader.start()
        loader.join()
        kernel(x, 32, 8)

    ahead.compile_ahead([work], CUDA)
    assert sorted((warmup, name.split("_")[0]) for warmup, _, _, name in launches) == [
        (False, "loader"),
        (True, "kernels"),
    ]


def test_a_kernel_that_does_not_compile_and_work_that_fails_are_left_to_the_work_itself(launches, monkeypatch):
    kernel = Kernel()

    def refuse(kernel, *args, grid, warmup, **given):
        launches.append(args)
        raise RuntimeError("ptxas")

    def fail():
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(triton_jit.JITFunction, "run", refuse)
    ahead.compile_ahead([fail, lambda: kernel(torch.zeros(4), 2, 8)], CUDA)
    assert len(launches) == 1 and triton_jit.JITFunction.run is refuse


def test_nothing_runs_ahead_on_a_cpu():
    ahead.compile_ahead([lambda: pytest.fail("it ran")], torch.device("cpu"))


def test_gradients_are_computed_by_the_thread_that_asks(launches):
    """Else kernels of a backward pass on CUDA would be taken for another thread's."""
    seen = []
    x = torch.zeros(3, requires_grad=True)
    x.register_hook(lambda grad: seen.append((threading.get_ident(), torch.autograd.is_multithreading_enabled())))
    ahead.compile_ahead([lambda: x.sum().backward()], CUDA)
    assert seen == [(threading.get_ident(), False)]
