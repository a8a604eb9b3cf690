"""The process that loader workers are forked from: it imports what they need, once. Nothing here imports torch.

`train` starts it before its own imports, so that both go on at the same time.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOADED = "sightline.data.loading.workers"
SOCKET_FOLDER = "SIGHTLINE_FORKSERVER"  # pymp-* in the temporary folder, where the forkserver listens
# What binds this process to CPUs, and with it those started later. A config file may hold it too.
BINDING = ("--run.max-cpus", "--run.affinity", "--run.max_cpus", "--config")


def start(*modules: str) -> None:
    """Start the forkserver, unless it runs, with SIGINT blocked: Ctrl-C reaches the whole process group, and would end
    it with a traceback while it imports torch; later it ignores SIGINT by itself."""
    context: Any = multiprocessing.get_context("forkserver")
    # Where simplejpeg is missing, workers decode with torchvision.
    decoder = () if importlib.util.find_spec("simplejpeg") else ("torchvision.io",)
    context.set_forkserver_preload([PRELOADED, *decoder, *modules])
    resource_tracker.ensure_running()  # before: starting it unblocks SIGINT
    os.environ[SOCKET_FOLDER] = util.get_temp_dir()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        del os.environ[SOCKET_FOLDER]


def remove_socket_folder() -> None:
    """Remove, at the end of the forkserver, the folder of the process that started it. That process does so itself,
    unless it was killed. Called where the forkserver imports what workers need."""
    if folder := os.environ.pop(SOCKET_FOLDER, ""):
        atexit.register(_remove_of_dead, folder, os.getppid())


def _remove_of_dead(folder: str, starter: int) -> None:
    if os.getppid() != starter:
        shutil.rmtree(folder, ignore_errors=True)


def start_early(recipe: str, flags: Sequence[str]) -> None:
    """Start the forkserver for a run with these flags. It imports a recipe of ours, and with it its data. What cannot
    be started is reported by who needs it."""
    if START_METHOD != "forkserver" or not may_start_early(flags):
        return
    with contextlib.suppress(OSError):
        start(*([] if recipe.endswith(".py") else [f"sightline.recipes.{recipe}"]))


def may_start_early(flags: Sequence[str]) -> bool:
    """Return whether the run starts loader processes itself, on the CPUs that this process has now."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    return ("--run.workers", "0") not in itertools.pairwise(words) and not {*BINDING, "--run.devices"} & {*words}
