"""The CUDA runtime by ctypes: `ctypes.CDLL("libcudart.so")`, as NVIDIA's examples raise the limit of L2 fetches."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sightline_migrate import zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.makers import refuse
from sightline_migrate.rules.table import Rule, dressed
from sightline_migrate.stand_ins.rules import as_it_is, counted_rules
from sightline_migrate.virtual.cudart import Cudart

if TYPE_CHECKING:
    from sightline_migrate.session import Session

FILE = re.compile(r"(lib)?cudart(64_\d+)?(\.so[.\d]*|\.dll|\.dylib)?", re.IGNORECASE)
SUCCESS, INSUFFICIENT_DRIVER, UNSUPPORTED_LIMIT = 0, 35, 215
ERRORS = {
    SUCCESS: b"no error",
    INSUFFICIENT_DRIVER: b"CUDA driver version is insufficient for CUDA runtime version",
    UNSUPPORTED_LIMIT: b"limit is not supported on this architecture",
}
L2_FETCH_GRANULARITY = 5
REFUSED = "it needs a driver of CUDA; without the library it returns 35, cudaErrorInsufficientDriver"
NOTHING = "no effect, returns success"
FUNCTIONS = counted_rules(
    "libcudart",
    {
        "cudaDeviceGetLimit": "what was set; 64 bytes for an L2 fetch",
        "cudaDeviceSetLimit": "remembered, without effect",
        "cudaDeviceSynchronize": NOTHING,
        "cudaGetErrorString": "the text of a code",
        "cudaHostRegister": NOTHING,
        "cudaHostUnregister": NOTHING,
        "cudaProfilerStart": NOTHING,
        "cudaProfilerStop": NOTHING,
    },
)


def rules() -> list[Rule]:
    opened = "a stand-in for libcudart: limits, profiler and the like; other functions are the library's, or return 35"
    return [Rule("ctypes.CDLL.__init__", "adapted", dressed(_make_open), opened), *FUNCTIONS.values()]


def is_cudart(name: Any) -> bool:
    """Return True for "libcudart.so.12" and the like, in any folder."""
    return isinstance(name, str | os.PathLike) and FILE.fullmatch(os.path.basename(os.fspath(name))) is not None


def _make_open(rule: Rule, original: Any, session: Session) -> Any:
    def __init__(self: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not ctypes.CDLL or not is_cudart(name) or zones.zone() != zones.SCRIPT:
            original(self, name, *args, **kwargs)
            return
        record.hit(rule, (name,))
        try:
            original(self, name, *args, **kwargs)  # a library that is loaded next may need its symbols
        except OSError:
            self._name = name
        self.__class__ = Libcudart
        vars(self)["_session"], vars(self)["_answers"] = session, _answers(session)

    return __init__


class Libcudart(ctypes.CDLL):
    """A ctypes library: some functions run in Python, others are the real library's, or fail if it is not there."""

    _session: Session
    _answers: dict[str, Callable[..., Any]]

    def __getattr__(self, name: str) -> Any:
        answer = self._answers.get(name) if name.startswith("cuda") else None
        if answer is None and self._handle:
            return super().__getattr__(name)
        if not name.startswith("cuda"):
            raise AttributeError(f"libcudart has no function {name!r}")
        function = _Function(name, self._session, answer)
        setattr(self, name, function)
        return function

    def __getitem__(self, name: Any) -> Any:
        is_real = self._handle and name not in self._answers
        return super().__getitem__(name) if is_real else getattr(self, name)


class _Function:
    """Looks like a function of ctypes: scripts assign `argtypes` and `restype`, also of functions never called."""

    def __init__(self, name: str, session: Session, answer: Callable[..., Any] | None) -> None:
        self.__name__ = name
        self._session, self._answer = session, answer

    def __call__(self, *args: Any) -> Any:
        if self._answer is None:
            refuse(_refused(self.__name__), self._session, REFUSED, args)
            return INSUFFICIENT_DRIVER
        record.hit(FUNCTIONS[self.__name__], args)
        return self._answer(*args)


def _refused(name: str) -> Rule:
    if name not in _others:
        _others[name] = Rule(f"libcudart.{name}", "refused", as_it_is, REFUSED)
    return _others[name]


_others: dict[str, Rule] = {}


def _answers(session: Session) -> dict[str, Callable[..., Any]]:
    limits = {L2_FETCH_GRANULARITY: 64}
    runtime = Cudart()

    def get_limit(pointer: Any, limit: Any) -> int:
        value = limits.get(_number(limit))
        if value is None:
            return UNSUPPORTED_LIMIT
        _write(pointer, value)
        return SUCCESS

    def set_limit(limit: Any, value: Any) -> int:
        limits[_number(limit)] = _number(value)
        return SUCCESS

    def synchronize() -> int:
        session.runtime.synchronize()
        return SUCCESS

    return {
        "cudaDeviceGetLimit": get_limit,
        "cudaDeviceSetLimit": set_limit,
        "cudaDeviceSynchronize": synchronize,
        "cudaGetErrorString": lambda code: ERRORS.get(_number(code), b"unrecognized error code"),
        "cudaHostRegister": runtime.cudaHostRegister,
        "cudaHostUnregister": runtime.cudaHostUnregister,
        "cudaProfilerStart": runtime.cudaProfilerStart,
        "cudaProfilerStop": runtime.cudaProfilerStop,
    }


def _number(value: Any) -> int:
    """Return the number in a ctypes.c_int, or the number itself."""
    return int(getattr(value, "value", value))


def _write(pointer: Any, value: int) -> None:
    """Write to what byref(x), a pointer, an array, or the address of a size_t points to."""
    if hasattr(pointer, "_obj"):
        target = pointer._obj
    elif isinstance(pointer, ctypes.Array):
        target = pointer
    else:
        typed = pointer if hasattr(pointer, "contents") else ctypes.cast(pointer, ctypes.POINTER(ctypes.c_size_t))
        target = typed.contents
    if isinstance(target, ctypes.Array):
        target[0] = value
    else:
        target.value = value
