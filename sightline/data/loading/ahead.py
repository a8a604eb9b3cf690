"""Batches that threads make ahead of the step: the trainer takes them, and waits only if none is ready.

Used where making one takes the host's time besides the workers', as decoding on the device does.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future

from sightline.parts import Batch

THREADS = 3  # one collects the next batch, or waits for the device, while others decode
DEPTH = THREADS + 2  # batches that are being made or are ready
POLL_S = 0.1  # longest time until a stop request is seen while waiting
CLOSE_S = 10.0  # longest wait for a thread at the end

Rest = Callable[[], Batch]


class Closed(Exception):
    """Nobody takes batches any more."""


class Ahead:
    """Makes batches of one feed at a time; they are taken in order.

    `collect(feed)` is called in order, by one thread at a time, and returns the rest of the work, which threads do side
    by side. Between `rest` and `resume` they are idle, and what they share belongs to the caller.
    """

    def __init__(
        self, threads: int, collect: Callable[[str], Rest], begin: Callable[[], None], check_stop: Callable[[], None]
    ):
        self._collect = collect
        self._begin = begin  # called once by each thread
        self._check_stop = check_stop
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # whose turn it is to collect
        self._made: dict[str, collections.deque[Future[Batch]]] = collections.defaultdict(collections.deque)
        self._left: dict[str, int] = {}  # batches of each feed that are still to be collected
        self.active: str | None = None
        self._busy = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, daemon=True, name=f"sightline-ahead-{number}")
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, name: str, count: int) -> None:
        """Make `count` batches of a feed from its position on; forget those made before. Call it at rest."""
        self._made[name].clear()
        self._left[name] = count
        self.resume(name)

    def resume(self, name: str) -> None:
        """Make what is left of a feed. Call it at rest."""
        with self._changed:
            self.active = name
            self._changed.notify_all()

    def rest(self) -> None:
        """Wait until the threads are idle, and keep them so until `resume`."""
        with self._changed:
            self.active = None
            self._wait_until(lambda: self._busy == 0)

    def take(self, name: str) -> Batch:
        """Return the next batch of the active feed, or raise what has kept it from being made."""
        with self._changed:
            made = self._made[name]
            assert made or self._left[name] > 0, "asked for a batch past the end given to seek()"
            self._wait_until(lambda: bool(made) and made[0].done())
            first = made.popleft()
            self._changed.notify_all()
        return first.result()

    def check(self) -> None:
        """Raise Closed, in a thread, if it is to end."""
        if self._is_closed:
            raise Closed

    def is_here(self) -> bool:
        """Return whether this is one of the threads."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        while not self._changed.wait_for(is_so, POLL_S):
            self._check_stop()

    def _run(self) -> None:
        failed: Exception | None = None
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001  # the trainer raises it
            failed = error
        while True:
            batch: Future[Batch] = Future()
            name = None
            try:
                with self._turn:
                    name = self._take_place(batch)
                    if name is None:
                        return
                    if failed:
                        raise failed
                    rest = self._collect(name)
                batch.set_result(rest())
            except Exception as error:  # noqa: BLE001  # the trainer raises it
                batch.set_exception(error)
            with self._changed:
                if batch.exception() and name is not None:
                    self._left[name] = 0
                self._busy -= 1
                self._changed.notify_all()

    def _take_place(self, batch: Future[Batch]) -> str | None:
        """Wait until a batch is wanted, put it in its place in the order, and return its feed; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._wanted() is not None)
            name = None if self._is_closed else self._wanted()
            if name is not None:
                self._busy += 1
                self._left[name] -= 1
                self._made[name].append(batch)
            return name

    def _wanted(self) -> str | None:
        name = self.active
        return name if name is not None and self._left[name] > 0 and len(self._made[name]) < DEPTH else None
