"""Let a kernel compute once what plain torch computes before a run uses it, and remember that it was right.

A result holds for the process; a pass is kept in the user's cache folder, so that a later start does not check again.
Users: batch_norm_check.py, data/gpu/squares.py, and bottleneck_cudnn.py, whose engines are checked shape by shape.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from sightline.files.typed_json import read_json
from sightline.files.whole import cache_folder, replace_text

FORMAT = 1
MOST_BYTES = 1 << 16
_reasons: dict[str, str] = {}  # of this process, by key; "" is a pass
_checking = threading.Lock()  # threads of a loader may ask at the same time


def say_plain(what: str, why: str) -> str:
    """Return the line for the user about kernels that are not used; `what` is a subject with its verb."""
    return f"kernels: {what} as plain torch: {why}"


def warn_plain(what: str, why: str) -> None:
    """Warn with that line, where a run has already started."""
    warnings.warn(say_plain(what, why), RuntimeWarning, stacklevel=3)


def why_not(what: str, device: torch.device, check: Callable[[], str]) -> str:
    """Return why kernels must not be used; "" if `check` passed, in this process or in an earlier one.

    `check` returns what is wrong, "" if nothing. What it raises counts as wrong, whatever it is.
    """
    key = _key(what, device)
    with _checking:
        if key not in _reasons:
            _reasons[key] = "" if _has_passed(key) else _run(key, check)
        return _reasons[key]


def _run(key: str, check: Callable[[], str]) -> str:
    try:
        reason = check()
    except Exception as error:  # noqa: BLE001  a compiler, a driver or memory: plain torch may still run
        reason = f"{type(error).__name__}: {str(error).strip()[:200] or 'no message'}".replace("\n", " ")
    if not reason:
        _keep_pass(key)
    return reason


def relative_error(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the error of a whole tensor as a vector, relative to its length, or to `least` where that is larger."""
    return float((found - expected).norm() / expected.norm().clamp(min=least))


def why_wrong(errors: Iterable[tuple[str, float, float]]) -> str:
    """Return which of (name, error, limit) is beyond its limit first, NaN included; "" if none."""
    for name, error, limit in errors:
        if not error < limit:
            return f"{name} has a relative error of {error:.1e}, expected less than {limit:.0e}"
    return ""


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let torch fill new memory with NaN, so that what a kernel does not write is seen."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # fills memory; use_deterministic_algorithms would import the compiler
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _key(what: str, device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{what} on {name} with torch {torch.__version__}, Triton {_triton()}, kernels {_sources()}"


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:  # built from source, or another name of the package
        return "of unknown version"


@functools.cache
def _sources() -> str:
    """Return a hash of all files of kernels: a pass holds for these alone."""
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def _file_of(key: str) -> Path | None:
    folder = cache_folder("kernels")
    return folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json" if folder else None


def _has_passed(key: str) -> bool:
    path = _file_of(key)
    if path is None or not path.exists():
        return False
    try:
        return bool(read_json(path, MOST_BYTES) == {"format": FORMAT, "passed": key})
    except (OSError, ValueError):
        return False  # damaged: checked again, and replaced


def _keep_pass(key: str) -> None:
    path = _file_of(key)
    if path is None:
        return
    with contextlib.suppress(OSError):  # a full disk: the next start checks again
        replace_text(path, json.dumps({"format": FORMAT, "passed": key}) + "\n")
