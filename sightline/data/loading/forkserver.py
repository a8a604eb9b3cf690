"""The process that loader workers are forked from: it imports what they need, once. Nothing here imports torch.

`train` starts it before its own imports, so that both go on at the same time.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
from multiprocessing import forkserver, resource_tracker, util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sightline.recipe.recipe import Recipe, Run

START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOADED = "sightline.data.loading.workers"
SOCKET_FOLDER = "SIGHTLINE_FORKSERVER"  # the process that starts it, and pymp-* in the temporary folder: its socket


def start(*modules: str) -> None:
    """Start the forkserver, unless it runs, with SIGINT blocked: Ctrl-C reaches the whole process group, and would end
    it with a traceback while it imports torch; later it ignores SIGINT by itself."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED, *modules])
    resource_tracker.ensure_running()  # before: starting it unblocks SIGINT
    os.environ[SOCKET_FOLDER] = f"{os.getpid()} {util.get_temp_dir()}"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        del os.environ[SOCKET_FOLDER]


def remove_socket_folder() -> None:
    """Remove, at the end of the forkserver, the folder of the process that started it. That process does so itself,
    unless it was killed. Called where the forkserver imports what workers need."""
    starter, _, folder = os.environ.pop(SOCKET_FOLDER, "").partition(" ")
    if folder:  # not getppid(): who started this may be dead by now
        atexit.register(_remove_of_dead, folder, int(starter))


def _remove_of_dead(folder: str, starter: int) -> None:
    if os.getppid() != starter:
        shutil.rmtree(folder, ignore_errors=True)


def start_early(recipe: Recipe, run: Run) -> None:
    """Start the forkserver for a run. It imports what the data of the recipe need. What cannot be started is reported
    by who needs it."""
    start_for(run, *recipe.data.worker_modules)


def start_for(run: Run, *modules: str) -> None:
    """Start the forkserver for a run, to import these modules."""
    if START_METHOD != "forkserver" or not may_start_early(run):
        return
    with contextlib.suppress(OSError):
        start(*modules)


def may_start_early(run: Run) -> bool:
    """Return whether the run starts loader processes itself, on the CPUs that this process has now."""
    return run.workers != 0 and run.devices == 0 and not run.binds_cpus
