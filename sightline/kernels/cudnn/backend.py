"""cuDNN's backend graph API by ctypes, in the libcudnn that torch has loaded: descriptors with typed attributes.

Numbers are those of cudnn_graph.h, which cuDNN 9 keeps. Used by graphs.py and plans.py.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

MAPS = Path("/proc/self/maps")  # where a process finds the files it has loaded
DEVICE_PROPERTIES = 38


class CudnnError(RuntimeError):
    """A call that cuDNN refused, with its own words."""


class DataType(IntEnum):
    """Element types of tensors."""

    FLOAT = 0
    HALF = 2


class Type(IntEnum):
    """Types of attributes."""

    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    VOID_PTR = 6
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    KNOB_TYPE = 9
    POINTWISE_MODE = 14
    DESCRIPTOR = 15
    GENSTATS_MODE = 16
    BEHAVIOR_NOTE = 19
    CHAR = 24


C_TYPES: dict[Type, Any] = {
    Type.HANDLE: ctypes.c_void_p,
    Type.BOOLEAN: ctypes.c_bool,
    Type.INT64: ctypes.c_int64,
    Type.FLOAT: ctypes.c_float,
    Type.VOID_PTR: ctypes.c_void_p,
    Type.DESCRIPTOR: ctypes.c_void_p,
    Type.CHAR: ctypes.c_char,
}


class Kind(IntEnum):
    """Kinds of descriptors."""

    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIG = 3
    HEURISTICS = 4
    PLAN = 5
    KNOB_CHOICE = 7
    CONVOLUTION_FORWARD = 10
    CONVOLUTION_WGRAD = 11
    CONVOLUTION_DGRAD = 12
    POINTWISE_OPERATION = 13
    STATISTICS = 14
    GRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17
    NORM_BACKWARD = 23


class Attribute(NamedTuple):
    """An attribute of a descriptor: its number and the type of its values."""

    number: int
    type: Type


class Library:
    """The loaded library. `handle` belongs to the device that is current when it is opened.

    `device_json` describes a device that is not there: plans can then be built, but not run.
    """

    def __init__(self, path: str, device_json: str = ""):
        self.calls = ctypes.CDLL(path)
        self.handle: int | None = None
        self.device: Descriptor | None = None
        _declare(self.calls)
        self.version = int(self.calls.cudnnGetVersion())
        if device_json:
            self.device = Descriptor(self, DEVICE_PROPERTIES)
            self.device.set(Attribute(2702, Type.CHAR), device_json.encode()).finalize("device properties")
        else:
            handle = ctypes.c_void_p()
            self.check(self.calls.cudnnCreate(ctypes.byref(handle)), "cudnnCreate")
            self.handle = handle.value

    def check(self, status: int, what: str) -> None:
        """Raise CudnnError unless the status is 0."""
        if status:
            text = ctypes.create_string_buffer(4096)
            self.calls.cudnnGetLastErrorString(text, len(text))
            raise CudnnError(f"{what}: status {status} {text.value.decode(errors='replace')[:200]}".rstrip())

    def use_stream(self, stream: int) -> None:
        """Run what is executed next on this CUDA stream."""
        self.check(self.calls.cudnnSetStream(self.handle, stream), "cudnnSetStream")


def _declare(calls: Any) -> None:
    pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    signatures: dict[str, list[Any]] = {
        "Create": [pointer],
        "SetStream": [pointer, pointer],
        "BackendCreateDescriptor": [number, pointer],
        "BackendSetAttribute": [pointer, number, number, count, pointer],
        "BackendGetAttribute": [pointer, number, number, count, pointer, pointer],
        "BackendFinalize": [pointer],
        "BackendExecute": [pointer, pointer, pointer],
        "BackendDestroyDescriptor": [pointer],
    }
    for name, arguments in signatures.items():
        call = getattr(calls, f"cudnn{name}")
        call.restype, call.argtypes = number, arguments
    calls.cudnnGetLastErrorString.restype, calls.cudnnGetLastErrorString.argtypes = None, [pointer, ctypes.c_size_t]
    calls.cudnnGetVersion.restype = ctypes.c_size_t


def find_library() -> str:
    """Return the path of the libcudnn that this process has loaded, "" if none."""
    try:
        lines = MAPS.read_text("utf-8").splitlines()
    except OSError:
        return ""
    paths = (line.split(maxsplit=5)[-1] for line in lines if "libcudnn.so" in line)
    return next(paths, "")


class Descriptor:
    """One descriptor; it keeps those that its attributes name, and is destroyed with its last user."""

    def __init__(self, library: Library, kind: int):
        self.library = library
        self.kept: list[Descriptor] = []
        pointer = ctypes.c_void_p()
        library.check(library.calls.cudnnBackendCreateDescriptor(int(kind), ctypes.byref(pointer)), f"create {kind!r}")
        self.pointer = pointer.value

    def __del__(self) -> None:
        pointer = getattr(self, "pointer", None)  # None: cuDNN refused to make it
        if pointer and not sys.is_finalizing():
            self.library.calls.cudnnBackendDestroyDescriptor(pointer)

    def set(self, attribute: Attribute, value: Any) -> Descriptor:
        """Set an attribute to a value, a sequence of them, or text."""
        array: Any
        if isinstance(value, bytes):
            array, count = (ctypes.c_char * len(value)).from_buffer_copy(value), len(value)
        else:
            values: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
            self.kept += [each for each in values if isinstance(each, Descriptor)]
            plain = [each.pointer if isinstance(each, Descriptor) else each for each in values]
            array, count = (C_TYPES.get(attribute.type, ctypes.c_int) * len(plain))(*plain), len(plain)
        calls, place = self.library.calls, ctypes.cast(array, ctypes.c_void_p)
        status = calls.cudnnBackendSetAttribute(self.pointer, attribute.number, attribute.type, count, place)
        self.library.check(status, f"set {attribute.number}")
        return self

    def finalize(self, what: str) -> Descriptor:
        """Close the descriptor: cuDNN checks it, and a plan is built."""
        self.library.check(self.library.calls.cudnnBackendFinalize(self.pointer), what)
        return self

    def get(self, attribute: Attribute, most: int = 1) -> list[Any]:
        """Return at most `most` values of an attribute."""
        array = (C_TYPES.get(attribute.type, ctypes.c_int) * most)()
        count = self._read(attribute, most, array)
        return list(array)[:count]

    def get_descriptors(self, attribute: Attribute, kind: Kind, most: int = 0) -> list[Descriptor]:
        """Return all descriptors that an attribute holds; `most` where cuDNN does not count them by itself."""
        most = most or self._read(attribute, 0, None)
        made = [Descriptor(self.library, kind) for _ in range(most)]
        array = (ctypes.c_void_p * max(most, 1))(*(each.pointer for each in made))
        return made[: self._read(attribute, most, array)] if most else []

    def _read(self, attribute: Attribute, most: int, array: Any) -> int:
        count = ctypes.c_int64()
        place = ctypes.cast(array, ctypes.c_void_p) if array is not None else None
        status = self.library.calls.cudnnBackendGetAttribute(
            self.pointer, attribute.number, attribute.type, most, ctypes.byref(count), place
        )
        self.library.check(status, f"get {attribute.number}")
        return count.value
