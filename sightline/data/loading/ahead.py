"""Batches that a thread makes ahead of the step: the trainer takes them, and waits only if none is ready.

Used where making one takes the host's time besides the workers', as decoding on the device does.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from sightline.parts import Batch

DEPTH = 2  # batches that are ready: the next one, and one for a batch that takes longer
POLL_S = 0.1  # longest time until a stop request is seen while waiting
CLOSE_S = 10.0  # longest wait for the thread at the end


class Closed(Exception):
    """Nobody takes batches any more."""


class Ahead:
    """Makes batches of one feed at a time, in order. Only one thread works at a time for `rest` has waited: the
    maker's, between `resume` and `rest`, or the caller's."""

    def __init__(self, make: Callable[[str], Batch], begin: Callable[[], None], check_stop: Callable[[], None]):
        self._make = make
        self._begin = begin  # called once, by the thread
        self._check_stop = check_stop
        self._changed = threading.Condition()
        self._ready: dict[str, collections.deque[Batch | BaseException]] = collections.defaultdict(collections.deque)
        self._left: dict[str, int] = {}  # batches of each feed that are still to be made
        self.active: str | None = None
        self._is_busy = self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="sightline-ahead")
        self._thread.start()

    def start(self, name: str, count: int) -> None:
        """Make `count` batches of a feed from its position on; forget those made before. Call it at rest."""
        self._ready[name].clear()
        self._left[name] = count
        self.resume(name)

    def resume(self, name: str) -> None:
        """Make what is left of a feed. Call it at rest."""
        with self._changed:
            self.active = name
            self._changed.notify_all()

    def rest(self) -> None:
        """Wait until the thread is idle, and keep it so until `resume`."""
        with self._changed:
            self.active = None
            self._wait_until(lambda: not self._is_busy)

    def take(self, name: str) -> Batch:
        """Return the next batch of the active feed, or raise what has kept it from being made."""
        with self._changed:
            ready = self._ready[name]
            assert ready or self._left[name] > 0, "asked for a batch past the end given to seek()"
            self._wait_until(lambda: bool(ready))
            made = ready.popleft()
            self._changed.notify_all()
        if isinstance(made, BaseException):
            raise made
        return made

    def check(self) -> None:
        """Raise Closed, in the thread, if it is to end."""
        if self._is_closed:
            raise Closed

    def is_here(self) -> bool:
        """Return whether this is the thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        while not self._changed.wait_for(is_so, POLL_S):
            self._check_stop()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._begin()
        except Exception as failure:  # noqa: BLE001  # the trainer raises it
            error = failure
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                if self._is_closed or (name := self._next()) is None:
                    return
                self._is_busy = True
            try:
                made: Batch | BaseException = error or self._make(name)
            except Exception as failure:  # noqa: BLE001  # the trainer raises it
                made = failure
            with self._changed:
                self._ready[name].append(made)
                self._left[name] = 0 if isinstance(made, BaseException) else self._left[name] - 1
                self._is_busy = False
                self._changed.notify_all()

    def _next(self) -> str | None:
        """Return the feed to make a batch of, if there is one."""
        name = self.active
        return name if name is not None and self._left[name] > 0 and len(self._ready[name]) < DEPTH else None
