"""Loader workers that stand still: the loader reports the worker, its file and its stack, and gives up at last."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
from collections.abc import Callable

import psutil

from sightline.data.loading.workers import SHOW_STACKS, Workers
from sightline.errors import PeerLost
from sightline.hardware.world import CONNECT_TIMEOUT

REPORT_S = 60.0  # a stall of this length is reported, or of half the limit if that is less
ANSWER_S = 3.0  # how long a worker has to send its stack
STATES = {
    psutil.STATUS_STOPPED: "; it is stopped (SIGSTOP): `kill -CONT {pid}` continues it",
    psutil.STATUS_DISK_SLEEP: "; it waits for a disk or a file server",
}


class StallWatch:
    """Counts the time in which the loader waits and no worker begins a sample."""

    def __init__(self, workers: Workers, timeout_s: float, warn: Callable[[str], None]):
        self._workers = workers
        self._timeout_s = timeout_s
        self._warn = warn
        self._begun = 0
        self._still_s = 0.0
        self._is_told = False

    def note(self, waited_s: float, is_answered: bool) -> None:
        """Count a wait; warn once per stall, then raise PeerLost. Until the first sample workers import and index."""
        begun = self._workers.samples_begun()
        if is_answered or begun != self._begun:
            self._begun, self._still_s, self._is_told = begun, 0.0, False
            return
        self._still_s += min(waited_s, 1.0)  # if it was more, this process was stopped too
        limit = self._timeout_s if begun else max(CONNECT_TIMEOUT.total_seconds(), self._timeout_s)
        if self._still_s > limit:
            raise PeerLost(self._described(wakes=True))
        if self._still_s > min(REPORT_S, limit / 2) and not self._is_told:
            self._is_told = True
            self._warn(self._described(wakes=False))

    def _described(self, wakes: bool) -> str:
        """Describe the first worker that owes an answer. `wakes`: continue a stopped one, which must run to answer."""
        pid, place, pipe = self._workers.late()
        status = ""
        with contextlib.suppress(psutil.NoSuchProcess):
            status = psutil.Process(pid).status()
        state = STATES.get(status, "").format(pid=pid)
        text = (
            f"loader worker {pid} has begun no sample for {self._still_s:.0f} s, it is at {place}{state}; look at the "
            f"disk or server that holds it, and if it is only slow, raise --run.timeout-s"
        )
        if status == psutil.STATUS_STOPPED and not wakes:
            return text
        return f"{text}. Its stack:\n{_stack(pid, pipe)}"


def _stack(pid: int, pipe: multiprocessing.connection.Connection) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SHOW_STACKS)
        os.kill(pid, signal.SIGCONT)
    parts, patience = [], ANSWER_S
    while multiprocessing.connection.wait([pipe], patience) and (part := os.read(pipe.fileno(), 2**16)):
        parts.append(part)
        patience = 0.2
    return b"".join(parts).decode("utf-8", "replace").rstrip() or "(it does not answer)"
