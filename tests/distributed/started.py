"""Commands that start ranks, as users type them: run to their end, or watched and stopped on the way."""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT_S = 200  # after which a start counts as hung
BESIDE_PYTHON = Path(sys.executable).parent  # mpirun of the wheel
events = runpy.run_path(str(Path(__file__).with_name("conftest.py")))["Ranks"].events


@contextlib.contextmanager
def started(words: list[str], **environ: str) -> Iterator[subprocess.Popen]:
    """In a process group of its own, so that nothing of it outlives the test."""
    path = f"{BESIDE_PYTHON}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        words,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def finished(words: list[str], **environ: str) -> str:
    """What it said; it must end well."""
    with started(words, **environ) as process:
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    return out


def sightline(*words: object) -> list[str]:
    """One of its commands."""
    return [sys.executable, "-m", "sightline", *map(str, words)]


def torchrun(ranks: int, *words: object) -> list[str]:
    """One of its commands on several ranks, at a port that torchrun finds."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *launcher, *sightline(*words)[1:]]


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Until the log tells of it."""
    deadline = time.monotonic() + LIMIT_S
    while not any(e["step"] >= step for e in events(run, "train")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "the run does not come on"
        time.sleep(0.05)
