"""SIGTERM, SIGINT, SIGHUP and SIGUSR1: note it, let all ranks agree at the end of a step, then save and leave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor

from sightline import terminal
from sightline.errors import Interrupted, cause_of
from sightline.hardware.launch.plan import hangup
from sightline.hardware.world import World

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
OF_LAUNCHERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
OUTPUTS = (1, 2)
END = b"\0"  # no signal has this number
ERASE_LINE, SHOW_CURSOR = b"\r\x1b[K", b"\x1b[?25h"  # the bar, below which the answer stands; rich hides the cursor
ONE_KEYSTROKE_S = 0.3  # a process that is just being started has our pipe, and gets the same Ctrl-C


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Raise Interrupted as soon as a launcher asks to stop: before the first step there is nothing to save. Ctrl-C is a
    KeyboardInterrupt already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise Interrupted(number, "before the first step; nothing was trained")

    numbers = [number for number in OF_LAUNCHERS if number != signal.SIGHUP or hangup()]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """Use as a context manager. A second SIGINT leaves at once: it ends the process of a command, and is a
    KeyboardInterrupt in a user's own. Checkpoints are whole or absent, so nothing is lost.

    Handlers are those from before afterwards. Outside of the main thread, where Python allows none, there are none.
    A thread answers a signal at once: Python runs handlers only between two steps of its own, and a single call into
    torch, such as backward(), can take minutes. It writes with os.write(), past all buffers that may be half filled.
    """

    def __init__(self, world: World, saves: bool = True):
        self.world = world
        self.saves = saves
        self.has_begun = False
        """Whether there is a step to finish and to save: a start may be refused before its first."""
        self._ends_process = terminal.is_command()
        self._pending = 0
        self._previous: dict[int, Any] = {}
        self._terminals: list[int] = []
        self._flag: tuple[Tensor, Any] | None = None
        self._agreed_at: float | None = None
        self._has_timed_step = False
        self._leaving, self._saying = threading.Lock(), threading.Lock()
        self._wakeup_before = -1
        self._pipe = (-1, -1)
        self._thread: threading.Thread | None = None
        self.interval_s = 0.0
        """The longest time from one agree() to the next so far: the first step, which compiles, ends with the first."""

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._terminals = [output for output in OUTPUTS if os.isatty(output)]
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)  # as set_wakeup_fd demands
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._answer_signals, name="stop signals", daemon=True)
        self._thread.start()
        for number in HANDLED:
            if number == signal.SIGHUP and not hangup():
                continue
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_ending = kind is not None and self.world.size > 1
        if is_ending:
            ignore_stops()  # first: with the handlers from before, a launcher's SIGTERM would end the process here
        if self._thread is None:
            return
        for number, handler in self._previous.items():
            if not (is_ending and number in OF_LAUNCHERS):
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.set_blocking(self._pipe[1], True)
        os.write(self._pipe[1], END)  # the end of the file would not do: a forked process may hold the pipe open
        self._thread.join()  # what it says comes before what is said of the end
        for end in self._pipe:
            os.close(end)

    def check(self) -> None:
        """Raise at once where there is one rank; several ranks must leave together, see agree()."""
        if self._pending and self.world.size == 1:
            raise Interrupted(self._pending)

    def agree(self, is_step: bool = True) -> None:
        """Call at the end of a step, or between two batches of an evaluation: raise on all ranks in the same step, one
        step after any of them got a signal."""
        self._measure(is_step)
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

    def restart(self) -> None:
        """Leave the time since the last agree() out of `interval_s`: it was none of a step."""
        self._agreed_at = None

    @property
    def answer_s(self) -> float:
        """Return how long a signal may wait before the run saves: its step and, if ranks must agree, one more. 0 while
        no step was timed: batches of an evaluation may be much shorter."""
        return self.interval_s * (1 if self.world.size == 1 else 2) if self._has_timed_step else 0.0

    def _measure(self, is_step: bool) -> None:
        now = time.perf_counter()
        if self._agreed_at is not None:
            self.interval_s = max(self.interval_s, now - self._agreed_at)
            self._has_timed_step |= is_step
        self._agreed_at = now

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending and number == signal.SIGINT:
            if not self._ends_process:
                raise KeyboardInterrupt("stopped by a second Ctrl-C")
            self._leave(number)
        self._pending = number
        if number == signal.SIGHUP:
            self._leave_terminals()

    def _answer_signals(self) -> None:
        """Say what a signal does as soon as it comes, and leave at a second SIGINT, also while a step runs."""
        first_at = None
        while True:
            numbers = os.read(self._pipe[0], 64)
            for number in numbers:
                if first_at is None and number in HANDLED:
                    first_at = time.monotonic()
                    with self._saying:
                        if not self._leaving.locked():  # else a second signal was faster
                            self._say(self._answer(number))
                elif number == signal.SIGINT and first_at and time.monotonic() - first_at > ONE_KEYSTROKE_S:
                    self._leave(number)
            if END[0] in numbers:
                return

    def _answer(self, number: int) -> str:
        step = "saving after this step" if self.has_begun else "stopping; no step was made yet"
        does = step if self.saves else "stopping after this batch"
        again = f"; again: leave {'without saving' if self.saves else 'at once'}" if number == signal.SIGINT else ""
        return f"{cause_of(number)}: {does}{again}"

    def _leave(self, number: int) -> None:
        """End the process, if it is ours and unless the other thread is just doing it."""
        if self._ends_process and self._leaving.acquire(blocking=False):
            resumes = "left without saving; the same command resumes from the last checkpoint, if there is one"
            with self._saying:
                self._say(resumes if self.saves else "left at once", SHOW_CURSOR)
            os._exit(128 + number)

    def _say(self, text: str, to_terminal: bytes = b"") -> None:
        if not self.world.is_main or sys.__stderr__ is None:  # closed: its number may be that of another file
            return
        is_drawn_on = 2 in self._terminals and os.environ.get("TERM", "dumb") != "dumb"
        line = text.encode("ascii") + b"\n"
        with contextlib.suppress(OSError):  # a terminal that was closed
            os.write(2, ERASE_LINE + line + to_terminal if is_drawn_on else line)

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
