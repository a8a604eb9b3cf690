"""One function over many jobs, in this process or in several, with what all jobs share sent to each only once."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from sightline import terminal
from sightline.errors import PeerLost

# map(function, jobs) -> function(shared, job) of each, in the order of the jobs
Map = Callable[[Callable[[Any, Any], Any], Iterable[Any]], Iterator[Any]]

_shared: Any = None


@contextmanager
def over_processes(count: int, shared: Any) -> Iterator[Map]:
    """Yield a map over `count` processes; `shared` is pickled to each of them once."""
    if count <= 1:
        yield lambda function, jobs: map(functools.partial(function, shared), jobs)
        return
    # Spawned, not forked: the caller may hold threads and a GPU by now.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_receive, initargs=(shared,))
    try:
        yield lambda function, jobs: pool.map(functools.partial(_call, function), jobs)
    except BrokenProcessPool as error:
        raise PeerLost(
            "a process died; look for the kernel's out-of-memory messages and start again with fewer --jobs "
            "(a script that calls this must do so under `if __name__ == '__main__':`)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _receive(shared: Any) -> None:
    global _shared
    _shared = shared
    terminal.guard()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent alone answers it
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """Exit when the parent was killed, which a pool's process does not notice: it would wait, or write, for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _call(function: Callable[[Any, Any], Any], job: Any) -> Any:
    return function(_shared, job)
