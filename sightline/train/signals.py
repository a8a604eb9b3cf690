"""SIGTERM, SIGINT, SIGHUP and SIGUSR1: note it, let all ranks agree at the end of a step, then save and leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from torch import Tensor

from sightline.errors import Interrupted
from sightline.hardware.launch.plan import hangup
from sightline.hardware.world import World

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
OF_LAUNCHERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
OUTPUTS = (1, 2)


class StopSignals:
    """Use as a context manager. A second SIGINT leaves at once; checkpoints are whole or absent, so nothing is lost."""

    def __init__(self, world: World):
        self.world = world
        self._pending = 0
        self._previous: dict[int, Any] = {}
        self._terminals: list[int] = []
        self._flag: tuple[Tensor, Any] | None = None
        self._agreed_at: float | None = None
        self.interval_s = 0.0
        """The longest time from one agree() to the next so far: the first step, which compiles, ends with the first."""

    def __enter__(self) -> StopSignals:
        self._terminals = [output for output in OUTPUTS if os.isatty(output)]
        for number in HANDLED:
            if number == signal.SIGHUP and not hangup():
                continue
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_ending = kind is not None and self.world.size > 1
        if is_ending:
            ignore_stops()  # first: with the handlers from before, a launcher's SIGTERM would end the process here
        for number, handler in self._previous.items():
            if not (is_ending and number in OF_LAUNCHERS):
                signal.signal(number, handler)

    def check(self) -> None:
        """Raise at once where there is one rank; several ranks must leave together, see agree()."""
        if self._pending and self.world.size == 1:
            raise Interrupted(self._pending)

    def agree(self) -> None:
        """Call at the end of a step: raise on all ranks in the same step, one step after any of them got a signal."""
        self._measure()
        if self.world.size == 1:
            self.check()
            return
        self.world.beat()
        if self._flag is not None:
            flag, work = self._flag
            work.wait()
            if int(flag):
                raise Interrupted(int(flag))
        self._flag = self.world.start_max(self._pending)

    @property
    def answer_s(self) -> float:
        """Return how long a signal may wait before the run saves: its step and, if ranks must agree, one more."""
        return self.interval_s * (1 if self.world.size == 1 else 2)

    def _measure(self) -> None:
        now = time.perf_counter()
        if self._agreed_at is not None:
            self.interval_s = max(self.interval_s, now - self._agreed_at)
        self._agreed_at = now

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending and number == signal.SIGINT:
            os._exit(128 + number)
        self._pending = number
        if number == signal.SIGHUP:
            self._leave_terminals()

    def _leave_terminals(self) -> None:
        """Redirect closed terminals: the first line printed there would end the run before its last save."""
        for output in self._terminals:
            if not os.isatty(output):
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)


def ignore_stops() -> None:
    """Ignore stop signals, for a rank that is ending with an error. When one rank has ended, the launcher stops the
    others, which must first report the lost rank and write the exit.json that a next attempt obeys."""
    if threading.current_thread() is threading.main_thread():  # elsewhere Python handles no signals
        for number in OF_LAUNCHERS:
            signal.signal(number, signal.SIG_IGN)
