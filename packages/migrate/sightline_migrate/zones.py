"""Who calls a replaced function: the script, torch on its behalf, or machinery that must see the real device.

A zone is decided by file name, once per file; after that a frame costs about 0.1 us.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType
from typing import NamedTuple

import torch

from sightline_migrate import FOLDERS

SCRIPT = 0  # user files and libraries: they see virtual CUDA
TORCH = 1  # torch's Python layers above the compilers: real answers, requests are mapped
MACHINERY = 2  # compilers, device runtimes, kernels: real answers, no dtype is converted
THROUGH = 3  # decorators and context managers: their caller decides

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = tuple(folder + os.sep for folder in FOLDERS)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_PASSED_THROUGH = (*_OWN, "<frozen")
_NOT_OUTSIDE = (_TORCH, *_PASSED_THROUGH, "<eval_with_key>")
_NOT_THE_USERS = (*_NOT_OUTSIDE, _STDLIB)

# Below torch/.
_MACHINERY_OF_TORCH = (
    "_C", "_decomp", "_dynamo", "_export", "_functorch", "_guards.py", "_higher_order_ops", "_inductor", "_library",
    "_meta_registrations.py", "_native", "_ops.py", "_prims", "_prims_common", "_refs", "_subclasses", "accelerator",
    "ao", "cpu", "cuda", "export", "fx", "jit", "mps", "mtia", "onnx", "testing", "utils/_triton.py", "xpu",
)  # fmt: skip
# The first two evaluate the user's own calls while tracing; torchrun counts devices to start a rank on each.
_SCRIPT_OF_TORCH = ("_dynamo/variables", "_dynamo/polyfills", "distributed/run.py")
# These run the nodes of a user's graph, so their requests are the user's.
_RUNNERS_OF_TORCH = ("_dynamo/utils.py", "_subclasses/functional_tensor.py", "fx/interpreter.py")
# Libraries that compile or load their own CUDA kernels; add a library here if it must see the real device.
MACHINERY_LIBRARIES = ["triton", "bitsandbytes", "flash_attn", "xformers", "deepspeed/ops/op_builder", "apex/contrib"]
_THROUGH_OF_STDLIB = (
    "contextlib.py", "ctypes", "functools.py", "importlib", "subprocess.py", "typing.py", "warnings.py"
)  # fmt: skip

_getframe = sys._getframe
_zones: dict[str, int] = {}


def zone_of(filename: str) -> int:
    """Return the zone of a source file; decided once."""
    zone = _zones.get(filename)
    if zone is None:
        zone = _zones[filename] = _decide(filename)
    return zone


def _is_below(path: str, names: tuple[str, ...] | list[str]) -> bool:
    return any(path == name or path.startswith(name + "/") for name in names)


def _decide(filename: str) -> int:
    if filename.startswith(_PASSED_THROUGH):
        return THROUGH
    if filename.startswith(_TORCH):
        below = filename[len(_TORCH) :].replace(os.sep, "/")
        if _is_below(below, _SCRIPT_OF_TORCH):
            return SCRIPT
        is_machinery = _is_below(below, _MACHINERY_OF_TORCH) and not _is_below(below, _RUNNERS_OF_TORCH)
        return MACHINERY if is_machinery else TORCH
    if filename.startswith("<eval_with_key>"):
        return TORCH  # the user's graph, as code
    if "torchinductor_" in filename:
        return MACHINERY
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if cache and filename.startswith(os.path.abspath(cache) + os.sep):
        return MACHINERY
    for folder in _INSTALLED:
        if folder in filename:
            below = filename.rsplit(folder, 1)[1].replace(os.sep, "/")
            if below == "typing_extensions.py":
                return THROUGH
            return MACHINERY if _is_below(below, MACHINERY_LIBRARIES) else SCRIPT
    if filename.startswith(_STDLIB) and _is_below(filename[len(_STDLIB) :].replace(os.sep, "/"), _THROUGH_OF_STDLIB):
        return THROUGH
    return SCRIPT


def caller(depth: int = 1) -> FrameType:
    """Return the frame that called a replaced function: the first one outside this package and outside decorators.

    `depth` is the number of frames of this package in between: 1 from a wrapper's own body.
    """
    frame = _getframe(depth + 1)
    while True:
        filename = frame.f_code.co_filename
        zone = _zones.get(filename)
        if zone is None:
            zone = zone_of(filename)
        if zone != THROUGH or frame.f_back is None:
            return frame
        frame = frame.f_back


def zone(depth: int = 1) -> int:
    """Return the zone of the code that called the current wrapper."""
    found = _zones.get(_getframe(depth + 1).f_code.co_filename, THROUGH)
    return found if found != THROUGH else _zones[caller(depth + 1).f_code.co_filename]


class Site(NamedTuple):
    """A line in a source file."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def site_of(frame: FrameType) -> Site:
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def is_users(filename: str) -> bool:
    """Return True for the user's own files: not torch, not installed, not standard library, not generated."""
    if filename.startswith(_NOT_THE_USERS):
        return False
    return not any(folder in filename for folder in _INSTALLED)


def is_a_library(filename: str) -> bool:
    """Return True for files of the user and of libraries that see virtual CUDA."""
    return zone_of(filename) == SCRIPT and not filename.startswith((_TORCH, _STDLIB))


def user_site(frame: FrameType | None = None) -> Site:
    """Return the user's own line: the nearest one outside torch, installed packages and the standard library.

    If there is none (a library run by itself), return the nearest line outside torch, else the caller itself.
    """
    frame = caller() if frame is None else frame
    nearest, outside = frame, None
    here: FrameType | None = frame
    while here is not None:
        filename = here.f_code.co_filename
        if not filename.startswith(_NOT_OUTSIDE) and zone_of(filename) != THROUGH:
            outside = outside or here
            if is_users(filename):
                return site_of(here)
        here = here.f_back
    return site_of(outside or nearest)
