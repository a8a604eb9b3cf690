"""The CUDA runtime that scripts open by ctypes: lines of public examples run, what needs CUDA names the line."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import record
from sightline_migrate.stand_ins import libcudart

OPEN: dict[str, Callable[[], Any]] = {
    "CDLL": lambda: ctypes.CDLL("libcudart.so"),
    "with a version": lambda: ctypes.CDLL("/no/such/folder/libcudart.so.11.0", ctypes.RTLD_GLOBAL),
    "LoadLibrary": lambda: ctypes.cdll.LoadLibrary("libcudart.so.12"),
}


@pytest.mark.parametrize("way", OPEN)
def test_a_limit_is_what_was_set(way: str, on_cpu: Callable[..., Any]):
    on_cpu()
    library = OPEN[way]()
    array = ctypes.cast((ctypes.c_int * 1)(), ctypes.POINTER(ctypes.c_int))
    assert library.cudaDeviceGetLimit(array, ctypes.c_int(0x05)) == 0 and array.contents.value == 64
    assert library.cudaDeviceSetLimit(ctypes.c_int(0x05), ctypes.c_int(128)) == 0
    assert library.cudaDeviceGetLimit(array, 5) == 0 and array.contents.value == array[0] == 128
    size = ctypes.c_size_t()
    assert library.cudaDeviceGetLimit(ctypes.byref(size), 5) == 0 and size.value == 128
    assert library.cudaDeviceGetLimit(ctypes.byref(size), 77) == libcudart.UNSUPPORTED_LIMIT and size.value == 128
    sites = {each.rule.name: (each.kind, each.user.file) for each in record.records.values()}
    assert sites == {
        "ctypes.CDLL.__init__": ("adapted", __file__),
        "libcudart.cudaDeviceGetLimit": ("adapted", __file__),
        "libcudart.cudaDeviceSetLimit": ("adapted", __file__),
    }


def test_functions_without_effect_succeed(on_cpu: Callable[..., Any]):
    on_cpu()
    library = ctypes.CDLL("libcudart.so")
    library.cudaProfilerStart.restype = ctypes.c_int
    assert library.cudaProfilerStart.restype is ctypes.c_int, "one object for each function"
    assert library.cudaProfilerStart() == library["cudaProfilerStop"]() == library.cudaDeviceSynchronize() == 0
    pinned = torch.ones(2)
    assert library.cudaHostRegister(ctypes.c_void_p(pinned.data_ptr()), ctypes.c_size_t(8), 1) == 0
    assert library.cudaHostUnregister(ctypes.c_void_p(pinned.data_ptr())) == 0
    assert library.cudaGetErrorString(0) == b"no error"


def test_what_needs_cuda_is_refused_when_it_is_called(on_cpu: Callable[..., Any]):
    on_cpu()
    library = ctypes.CDLL("libcudart.so")
    library.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]  # declared, perhaps never called
    with pytest.raises(MigrateError, match=r"test_libcudart.py:\d+: libcudart.cudaMalloc is not in the stand-in; it "):
        library.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 4)
    assert "refused" in {each.kind for each in record.records.values()}
    with pytest.raises(AttributeError, match="libcudart has no function 'wonder'"):
        library.wonder()


def test_other_libraries_and_a_scripts_own_class_are_left_alone(on_cpu: Callable[..., Any]):
    plain, original = ctypes.CDLL(None), ctypes.CDLL.__init__
    on_cpu()

    class Own(ctypes.CDLL):
        pass

    assert type(ctypes.CDLL(None)) is ctypes.CDLL and ctypes.CDLL(None).getpid() == plain.getpid()
    assert type(ctypes.CDLL(None, use_errno=True)) is ctypes.CDLL
    with contextlib.suppress(OSError):  # not installed
        assert type(Own("libcudart.so")) is Own
    assert not record.records and ctypes.CDLL.__init__ is not original


@pytest.mark.parametrize(
    ("name", "is_it"),
    [
        ("libcudart.so", True),
        ("libcudart.so.12", True),
        ("/usr/local/cuda/lib64/libcudart.so.11.0", True),
        ("cudart64_110.dll", True),
        ("libcudart.dylib", True),
        ("libcudart_static.a", False),
        ("libcuda.so.1", False),
        ("mylibcudart.so", False),
        (None, False),
        (3, False),
    ],
)
def test_names_of_the_library(name: Any, is_it: bool):
    assert libcudart.is_cudart(name) is is_it
