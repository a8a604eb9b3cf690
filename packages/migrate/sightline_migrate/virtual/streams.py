"""Streams, events and graphs for a target without them: work is done when a call returns, so order is given."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from sightline_migrate import zones
from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import record

if TYPE_CHECKING:
    from sightline_migrate.rules.table import Rule
    from sightline_migrate.session import Session

LEAST_PRIORITY, GREATEST_PRIORITY = 0, -5  # of a recent GPU
_numbers = itertools.count(1)


class Stream:
    """A stream without effect."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = _cuda_device(device)
        self.device_index = self.device.index
        self.priority = priority
        self.stream_id = kwargs.get("stream_id", next(_numbers))
        self.cuda_stream = self.stream_id
        self.native_handle = self.stream_id

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return (least, greatest) priority, as CUDA does; priorities have no effect."""
        return LEAST_PRIORITY, GREATEST_PRIORITY

    def wait_event(self, event: Any) -> None:
        """Do nothing: recorded work is already done."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: queued work is already done."""

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _synchronize()

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        self._before = _chosen_stream()
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        _local.stream = self._before

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event:
    """A point in time; elapsed_time is wall time, since work is done when a call returns."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self.enable_timing = enable_timing
        self.device = _cuda_device(kwargs.get("device"))
        self._at: int | None = None

    def record(self, stream: Any = None) -> None:
        _synchronize()
        self._at = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: recorded work is already done."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return milliseconds."""
        if not self.enable_timing or not end_event.enable_timing:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end_event._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at - self._at) / 1e6

    def synchronize(self) -> None:
        _synchronize()

    def __repr__(self) -> str:
        return "<torch.cuda.Event uninitialized>" if self._at is None else f"<torch.cuda.Event {self._at} ns>"


class StreamContext:
    """`with torch.cuda.stream(s):`; None is allowed, as in CUDA."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._before = _chosen_stream()
        if self.stream is not None:
            set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        _local.stream = self._before


_local = threading.local()


def current_stream(device: Any = None) -> Any:
    found = _chosen_stream()
    return default_stream(device) if found is None else found


def default_stream(device: Any = None) -> Stream:
    return Stream(device, stream_id=0)


def _chosen_stream() -> Any:
    """Return the stream that was set in this thread; None: the default one of whichever device."""
    return getattr(_local, "stream", None)


def set_stream(stream: Any) -> None:
    if stream is not None:
        _local.stream = stream


def stream(stream: Any) -> StreamContext:
    return StreamContext(stream)


class CUDAGraph:
    """Can be created and reset; capture and replay raise."""

    rule: Rule
    """names the refusal in the report; set by the rule that installs the class"""

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        refuse_capture(self.rule)

    def capture_end(self) -> None:
        refuse_capture(self.rule)

    def replay(self) -> None:
        refuse_capture(self.rule)

    def reset(self) -> None:
        """Do nothing: nothing was captured."""

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def enable_debug_mode(self) -> None:
        """Do nothing: nothing can be captured."""


class graph:
    """`with torch.cuda.graph(g):` raises before any work is lost."""

    rule: Rule
    """names the refusal in the report; set by the rule that installs the class"""

    def __init__(self, cuda_graph: Any, *args: Any, **kwargs: Any) -> None:
        refuse_capture(self.rule)

    def __enter__(self) -> None:
        """Never reached: the constructor raises."""

    def __exit__(self, *_: object) -> None:
        """Never reached."""


def refuse_capture(rule: Rule) -> None:
    """Raise always: without a graph the captured work would run once and never again, silently wrong."""
    text = "CUDA graphs cannot be captured or replayed on this target; run the step directly, or use torch.compile"
    record.hit(rule, (), {}, text)
    raise MigrateError(f"{zones.user_site(zones.caller())}: {text}")


def make_graphed_callables(callables: Any, sample_args: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return the callables unchanged: they compute the same without a graph."""
    return callables


def _synchronize() -> None:
    session = _session()
    if session is not None and not session.target.is_cpu:
        session.runtime.synchronize()


def _session() -> Session | None:
    from sightline_migrate import session

    return session.active()


def _cuda_device(device: Any) -> torch.device:
    session = _session()
    current = session.runtime.current_device() if session is not None else 0
    index = session.devices.index_of(device, current) if session is not None else 0
    return torch.device("cuda", index)
