"""Starts ranks that run a function of a test file, as torchrun would: forked, so that torch is imported only once.

A test calls run(), which starts `python tests/distributed/forked.py FILE FUNCTION OUT RANKS RANKS_PER_HOST`.
"""

import fcntl
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
LIMIT_S = 300  # after which a start counts as hung


def run(file: str, out: Path, ranks: int, per_host: int | None = None, function: str = "main") -> str:
    """`function(out)` of a file on that many ranks, all of which must end well; returns what they said."""
    words = [sys.executable, __file__, file, function, out, ranks, per_host or ranks]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(map(str, words), env=environment, timeout=LIMIT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder that `make` fills: for the first of several test processes that asks, while the others wait."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


def start(file: str, function: str, out: Path, ranks: int, per_host: int) -> int:
    """Whether all of them ended well, as an exit code."""
    called = runpy.run_path(file)[function]
    importlib.import_module("torch._dynamo")  # the first step of an optimizer would
    port = runpy.run_path(str(HERE / "conftest.py"))["free_port"]()
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": per_host, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = set()
    for rank in range(ranks):
        if child := os.fork():
            children.add(child)
            continue
        names = {**common, "RANK": rank, "LOCAL_RANK": rank % per_host}
        os.environ.update({name: str(value) for name, value in names.items()})
        code = 1
        try:
            called(out)
            leave()
            sys.stdout.flush()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:  # the others would wait for it
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def leave() -> None:
    """The group, if there is one: DDP keeps it alive, and threads of gloo that outlive it abort the process."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(start(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:])))
