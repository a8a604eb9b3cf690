"""Watch a run on several ranks: when one stops responding, all report where they are and leave with exit 8.

A thread on every rank looks at the time since the last step, so it also wakes those that wait in a collective; ranks
leave their words in the store, which needs no collective. A rank that is gone is one that leaves none.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from sightline.errors import PeerLost, first_of
from sightline.hardware.world import CONNECT_TIMEOUT, World, set_timeout

MARGIN_S = 60  # the backend's own limit comes after ours, which can say more
ANSWER_S = 3.0  # how long the others have to say where they are: several times the interval in which they look
FAREWELL_S = 1.0  # rank 0 may hold the store, so it leaves last
STOPPED_S = 2.0  # a look that comes this much late: the process was stopped (SIGSTOP, a frozen container or machine)
LEAVE_S = 20.0  # a dead file server must not keep a rank from leaving

Words = dict[str, Any]


class Watchdog:
    """Use as a context manager around training; `beat` at the end of every step and evaluation batch."""

    def __init__(
        self,
        world: World,
        timeout_s: float,
        dump_stacks: Callable[[str], None],
        on_lost: Callable[[str, bool], None],
        stacks_at: str,
    ):
        self.world = world
        self.timeout_s = timeout_s
        self._dump_stacks = dump_stacks
        self._on_lost = on_lost  # (what happened, whether this rank reports it)
        self._stacks_at = stacks_at
        self._store = world.store.clone() if world.size > 1 else None  # one that the main thread does not wait in
        if self._store is not None:
            self._store.set_timeout(timedelta(seconds=LEAVE_S / 2))
        self._interval_s = min(1.0, timeout_s / 5)
        self._limit_s = CONNECT_TIMEOUT.total_seconds()
        self._has_stepped = False
        self._last = time.monotonic()
        self._ending = threading.Lock()  # taken by the first to report the end of this rank, and kept
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._alarmed = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="watchdog listener", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._store is not None:
            self._thread.start()
            self._listener.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._closed.set()
        if self._store is not None and not self._ending.locked():
            self._thread.join()

    def beat(self, is_long: bool = False) -> None:
        """Note that a step is done; the first one ends the longer limit, in which ranks compile and index.
        `is_long` allows more time for what comes next: rank 0 writes and the others wait for it."""
        self._last = time.monotonic()
        self._limit_s = max(CONNECT_TIMEOUT.total_seconds(), self.timeout_s) if is_long else self.timeout_s
        if not (is_long or self._has_stepped) and self._store is not None:
            self._has_stepped = True
            set_timeout(timedelta(seconds=self.timeout_s + MARGIN_S))

    def tell_end(self, code: int, reason: str) -> None:
        """Leave a message for ranks that will miss this one."""
        if self._store is not None and code and not self._ending.locked():  # else it has only lost another
            self._leave_word({"end": code, "reason": reason})

    def explain(self, error: BaseException) -> str:
        """Say which rank was lost, for one whose collective has failed, as far as the others answer."""
        self._ending.acquire()  # for good; where the thread is telling it already, that ends the process
        if self._store is None:
            return str(error)
        return self._verdict(self._consult(), "", _short(error))

    def _watch(self) -> None:
        has_answered = False
        looked = time.monotonic()
        while not self._closed.wait(self._interval_s):
            looked, before = time.monotonic(), looked
            self._forgive(looked - before - self._interval_s)
            # For the case that something holds the interpreter, so that this loop stands still too.
            faulthandler.dump_traceback_later(self._limit_s + 2 * self._interval_s, file=sys.__stderr__ or 2)
            waited, limit = time.monotonic() - self._last, self._limit_s
            if waited > limit:
                if not self._ending.acquire(blocking=False):
                    break
                self._end(f"no step was done in {waited:.0f} s", has_answered)
            if not has_answered and self._alarmed.is_set():
                # The main thread, which may be saving, will raise its own error; if not, this loop ends the process.
                has_answered = True
                self._dump_stacks("another rank has given up")
                self._limit_s = min(limit, waited + LEAVE_S) if limit == self.timeout_s else limit
        faulthandler.cancel_dump_traceback_later()

    def _forgive(self, stood_still: float) -> None:
        """Do not count time in which this thread stood still too. Subtract it, do not reset to zero: on a machine that
        stalls again and again a hung rank must still be found."""
        if stood_still > STOPPED_S:
            self._last = min(time.monotonic(), self._last + stood_still)

    def _end(self, why: str, has_answered: bool) -> None:
        """Report and end the process: the main thread may be in a call that never returns."""
        last_resort = threading.Timer(LEAVE_S, os._exit, (PeerLost.exit_code,))
        last_resort.daemon = True
        last_resort.start()
        if not has_answered:
            self._dump_stacks(why)
        words = self._consult()
        is_first = min(words) == self.world.rank
        remedy = f"the stacks of all ranks are in {self._stacks_at}; if the step is only slow, raise --run.timeout-s"
        self._on_lost(f"{self._verdict(words, f'{why}: ', '')}; {remedy}", is_first)
        if is_first:
            time.sleep(FAREWELL_S)
        os._exit(PeerLost.exit_code)

    def _listen(self) -> None:
        """Listen for alarms beside the watch: a store on a host that was cut off never answers, not even an error."""
        while not self._closed.wait(self._interval_s):
            if self._alarm_is_raised():
                self._leave_word(self._place())
                self._alarmed.set()
                return

    def _consult(self) -> dict[int, Words]:
        """Report where this rank is and read the others' reports; only its own where the store does not answer."""
        heard: list[dict[int, Words]] = []

        def ask() -> None:
            self._leave_word(self._place())
            self._raise_alarm()
            heard.append(self._hear(ANSWER_S))

        asking = threading.Thread(target=ask, name="watchdog's question", daemon=True)
        asking.start()
        asking.join(2 * ANSWER_S)
        return heard[0] if heard else {self.world.rank: self._place()}

    def _verdict(self, words: dict[int, Words], why: str, error: str) -> str:
        """Name the lost rank: one that ended, else one that does not answer, else that with the fewest collectives."""
        own = {rank: each for rank, each in words.items() if each.get("end", PeerLost.exit_code) != PeerLost.exit_code}
        if own:
            return "; ".join(
                f"rank {rank} ended with exit {w['end']}: {w['reason']}" for rank, w in sorted(own.items())
            )
        text = f" ({error})" if error else ""
        gone = [rank for rank in range(self.world.size) if rank not in words]
        if gone:
            return f"{why}{_named(gone)} lost: killed, out of memory, stopped or cut off; the launcher may know{text}"
        begun = {rank: each["collectives"] for rank, each in words.items() if "collectives" in each}
        late = [rank for rank, number in sorted(begun.items()) if number < max(begun.values())]
        if not late:
            return f"{why}nobody knows which rank the others wait for{text}"
        where = ", ".join(f"{words[rank]['place']}" for rank in late[:4])
        return f"{why}{_named(late)} late, in {where}, and the others wait{text}"

    def _place(self) -> Words:
        """Return where the main thread is."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = f"{frame.f_code.co_name}() of {Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "?"
        try:
            groups = [dist.group.WORLD, self.world.side_group]
            begun = sum(group._get_sequence_number_for_group() for group in groups if group is not None)
        except RuntimeError:  # not every backend counts
            return {"place": place}
        return {"place": place, "collectives": begun}

    def _leave_word(self, words: Words) -> None:
        assert self._store is not None
        try:
            self._store.set(f"words/{self.world.rank}", json.dumps(words))
        except RuntimeError:  # who held the store is gone
            return

    def _raise_alarm(self) -> None:
        assert self._store is not None
        try:
            self._store.set("alarm", "")
        except RuntimeError:
            return

    def _alarm_is_raised(self) -> bool:
        assert self._store is not None
        try:
            return self._store.check(["alarm"])
        except RuntimeError:  # then there is only the time to go by
            return False

    def _hear(self, seconds: float) -> dict[int, Words]:
        """Return the messages of all ranks, once all have come, or after `seconds`."""
        assert self._store is not None
        deadline = time.monotonic() + seconds
        words: dict[int, Words] = {}
        try:
            while len(words) < self.world.size and time.monotonic() < deadline:
                for rank in set(range(self.world.size)) - set(words):
                    if self._store.check([f"words/{rank}"]):
                        words[rank] = json.loads(self._store.get(f"words/{rank}"))
                time.sleep(0.02)
        except RuntimeError:  # rank 0 held the store
            words.pop(0, None)
            words[self.world.rank] = self._place()
        return words


def _short(error: BaseException) -> str:
    """Return gloo's message without its source file and its advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).partition("\n")[0].partition(". This is typically")[0]


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {first_of(ranks, 8)} are"
