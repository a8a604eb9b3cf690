"""Processes beside this one: one function over many jobs, and starts that do not need the user's script.

A new process imports the script of its parent again, which without `if __name__ == "__main__":` would start everything
once more. Ours do so only if the script defines a class that they are sent.
"""

from __future__ import annotations

import functools
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from sightline import terminal
from sightline.errors import PeerLost, UsageError

MAIN = "__main__"
GUARD = f'put what starts the run under `if __name__ == "{MAIN}":`'

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
    pool = ProcessPoolExecutor(count, mp_context=_Context(), initializer=_receive, initargs=(shared,))
    try:
        yield lambda function, jobs: pool.map(functools.partial(_call, function), jobs)
    except BrokenProcessPool as error:
        raise PeerLost(
            "a process died; look for the kernel's out-of-memory messages and start again with fewer --jobs"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Process(SpawnProcess):
    def start(self) -> None:
        with without_script():
            super().start()


class _Context(SpawnContext):
    Process = _Process


@contextmanager
def without_script() -> Iterator[None]:
    """Let processes that are started inside import no script."""
    script = sys.modules[MAIN]
    sys.modules[MAIN] = types.ModuleType(MAIN)
    try:
        yield
    finally:
        sys.modules[MAIN] = script


class _Names(ForkingPickler):
    """Pickles everything but large contents, which name no class of a script."""

    def __init__(self, file: io.BytesIO, skipped: tuple[type, ...]):
        super().__init__(file)
        self.skipped = skipped

    def persistent_id(self, value: Any) -> str | None:
        return "" if isinstance(value, self.skipped) else None


def needs_script(sent: Any, contents: tuple[type, ...]) -> bool:
    """Return whether a process that gets `sent` must import the user's script, for something defined there; `contents`
    are not looked into. Raises UsageError where there is no script to import."""
    text = io.BytesIO()
    try:
        _Names(text, contents).dump(sent)
    except Exception:  # noqa: BLE001  # what cannot be sent fails again, with its reason, where it is sent
        return False
    if MAIN.encode() not in text.getvalue():
        return False
    if not os.path.exists(getattr(sys.modules[MAIN], "__file__", None) or ""):
        raise UsageError(
            "the data use a class or function of this notebook or prompt, which loader workers cannot import; move it "
            "into a .py file and import it, or use --run.workers 0"
        )
    return True


def refuse_in_new_process() -> None:
    """Raise UsageError in a process that is just importing the script that started it."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(f"a loader worker imports this script again, for a class that the data use; {GUARD}")


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
