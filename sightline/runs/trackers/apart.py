"""The process of one tracker: takes what aside.py writes, line by line, and tries again while nobody answers.

Imports no torch. Ends when the training does, however that ended.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sightline.runs.loggers import RunStart
from sightline.runs.trackers.secrets import without_secrets
from sightline.runs.trackers.tracker import Tracker

MOST = 10_000  # calls that wait while nobody answers; the oldest go first, log.jsonl has them
FIRST_S, LONGEST_S = 1.0, 60.0  # between two tries
SAYS = 300  # letters of an error

Call = list[Any]


def main(name: str) -> None:
    """Serve the tracker of a name until standard input ends. What the tracker prints goes nowhere."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the training says when it is over
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)

    def say(problem: str) -> None:
        answers.write(json.dumps(without_secrets(" ".join(problem.split())[:SAYS])) + "\n")
        answers.flush()

    calls = Calls(sys.stdin.fileno())
    try:
        serve(importlib.import_module(f"sightline.runs.trackers.{name}").tracker(say), calls, say)
    except Exception as error:  # noqa: BLE001  # of the tracker's package; the training reports it
        say(_as_text(error))
    try:
        answers.write("done\n")
        answers.flush()
    except OSError:  # the training was killed
        pass
    os._exit(0)  # threads and exit handlers of the package may wait for a server


class Calls:
    """What the training has said and was not handled yet, read by a thread as it comes."""

    def __init__(self, descriptor: int):
        self._waiting: deque[Call] = deque(maxlen=MOST)
        self._changed = threading.Condition()
        self._has_ended = False
        threading.Thread(target=self._read, args=(descriptor,), daemon=True).start()

    def __iter__(self) -> Iterator[Call]:
        """Yield every call, until the training says no more."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._has_ended)
                if not self._waiting:
                    return
                call = self._waiting.popleft()
            yield call

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits now."""
        return not self._waiting

    def ended_within(self, seconds: float) -> bool:
        """Wait so long unless the training says that it is over; return whether it did."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_ended, seconds)

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8", closefd=False) as stream:
            for line in stream:
                if not line.endswith("\n"):  # the training was killed while it wrote
                    break
                with self._changed:
                    self._waiting.append(json.loads(line))
                    self._changed.notify()
        with self._changed:
            self._has_ended = True
            self._changed.notify()


def serve(tracker: Tracker, calls: Calls, say: Callable[[str], None]) -> None:
    """Carry out every call. While nobody answers, try again, and give up when the training has ended."""
    tries = Tries(tracker, calls, say)
    for call in calls:
        if not tries.has_done(lambda call=call: _carry_out(tracker, call)) and call[1] == "start":  # type: ignore[misc]
            return
        if calls.is_empty or tracker.waiting > Tracker.ENOUGH:
            tries.has_done(tracker.flush)
    tries.has_done(tracker.flush)
    tries.has_done(tracker.finish)


class Tries:
    """Tries things until they are done, reports the first that fails, and knows when to give up."""

    def __init__(self, tracker: Tracker, calls: Calls, say: Callable[[str], None]):
        self._tracker = tracker
        self._calls = calls
        self._say = say
        self._has_said = False
        self._has_given_up = False  # nobody answers, and the training has ended

    def has_done(self, work: Callable[[], None]) -> bool:
        """Do some work; return False where it fails."""
        wait = FIRST_S
        while not self._has_given_up:
            try:
                work()
                return True
            except Exception as error:  # noqa: BLE001  # of the tracker's package; the training reports it
                is_away = self._tracker.is_unreachable(error)
                if not self._has_said:
                    self._has_said = True
                    self._say(_as_text(error))
                if not is_away:
                    return False
            self._has_given_up = self._calls.ended_within(0)  # this was the last try
            self._calls.ended_within(wait)
            wait = min(2 * wait, LONGEST_S)
        return False


def _carry_out(tracker: Tracker, call: Call) -> None:
    tracker.now, method, *values = call
    if method == "start":
        (plain,) = values
        values = [RunStart(**{**plain, "folder": Path(plain["folder"]), "scores": tuple(plain["scores"])})]
    getattr(tracker, method)(*values)


def _as_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
