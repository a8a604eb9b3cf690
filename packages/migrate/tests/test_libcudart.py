"""The CUDA runtime that scripts open by ctypes: lines of public examples run, what needs CUDA names the line."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
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


WAYS: dict[str, Callable[[ctypes.c_size_t], Any]] = {
    "byref": ctypes.byref,
    "pointer": ctypes.pointer,
    "void pointer": lambda size: ctypes.c_void_p(ctypes.addressof(size)),
    "number": ctypes.addressof,
    "array": lambda size: (ctypes.c_size_t * 1).from_buffer(size),
    "pointer to an array": lambda size: ctypes.pointer((ctypes.c_size_t * 1).from_buffer(size)),
    "byref of an array": lambda size: ctypes.byref((ctypes.c_size_t * 1).from_buffer(size)),
}


def test_a_limit_is_written_to_all_that_is_an_address(on_cpu: Callable[..., Any]):
    on_cpu()
    library = ctypes.CDLL("libcudart.so")
    for name, way in WAYS.items():
        size = ctypes.c_size_t()
        assert library.cudaDeviceGetLimit(way(size), 5) == 0 and size.value == 64, name


def test_what_needs_cuda_fails_as_without_a_driver(on_cpu: Callable[..., Any], capsys: pytest.CaptureFixture[str]):
    on_cpu()
    library = ctypes.CDLL("/no/such/folder/libcudart.so")
    library.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]  # declared, perhaps never called
    count = ctypes.c_int(-1)
    codes = [library.cudaGetDeviceCount(ctypes.byref(count)) for _ in range(2)]
    assert codes == [35, 35] and count.value == -1 and library["cudaDeviceReset"]() == 35
    assert library.cudaGetErrorString(35) == b"CUDA driver version is insufficient for CUDA runtime version"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(__file__ in line and line.endswith(libcudart.REFUSED) for line in said)
    assert [each.kind for each in record.records.values()].count("refused") == 2
    with pytest.raises(AttributeError, match="libcudart has no function 'wonder'"):
        library.wonder()


def test_what_needs_cuda_raises_with_strict(on_cpu: Callable[..., Any]):
    on_cpu(strict=True)
    with pytest.raises(MigrateError, match=r"test_libcudart.py:\d+: libcudart.cudaMalloc cannot run on cpu; it needs"):
        ctypes.CDLL("/no/such/folder/libcudart.so").cudaMalloc(ctypes.byref(ctypes.c_void_p()), 4)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_library_that_is_there_answers_what_the_stand_in_does_not(tmp_path: Path, on_cpu: Callable[..., Any]):
    source, built = tmp_path / "runtime.c", tmp_path / "libcudart.so"
    source.write_text("long cudaTwice(long x) { return 2 * x; }\nint cudaProfilerStart() { return 7; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", built], check=True)
    on_cpu(strict=True)
    library = ctypes.CDLL(str(built))
    library.cudaTwice.restype, library.cudaTwice.argtypes = ctypes.c_long, [ctypes.c_long]
    assert library.cudaTwice(1 << 40) == 1 << 41 and library["cudaTwice"](4) == 8
    assert library.cudaProfilerStart() == library["cudaProfilerStart"]() == 0
    with pytest.raises(AttributeError, match="cudaMalloc"):
        library.cudaMalloc()


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
