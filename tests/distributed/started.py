"""Commands that start ranks, as users type them: run to their end, or watched and stopped on the way."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import warm

LIMIT_S = 200  # after which a start counts as hung
BESIDE_PYTHON = Path(sys.executable).parent  # mpirun of the wheel


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    """The whole lines of this kind in log.jsonl."""
    path = out / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in lines if line["event"] == kind]


def kill_with_children(pid: int) -> None:
    """As when a host loses its power."""
    found = []
    with contextlib.suppress(OSError):  # as Linux lists them
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for each in [*map(int, found), pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


@contextlib.contextmanager
def started(words: list[str], **environ: str) -> Iterator[subprocess.Popen]:
    """In a process group of its own. What is left of it at the end is killed; torchrun's ranks and ssh have sessions of
    their own, but the ranks die with it."""
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
        kill_with_children(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def finished(words: list[str], **environ: str) -> str:
    """Return its output; it must end well."""
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


class Seen(NamedTuple):
    """Observations of a command's processes while it ran."""

    listening: set[tuple[str, str]]
    """(RANK or "", address) of every TCP socket that listens."""
    store: str
    """The file in which its ranks meet."""
    store_mode: int
    """Mode of the folder of that file."""


def processes(pid: int) -> Iterator[psutil.Process]:
    """It and all below it, as Linux lists them: psutil would read every process of the machine."""
    yield psutil.Process(pid)
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listed.read_text().split():
            yield from processes(int(child))


def watched(command: warm.Started) -> tuple[str, Seen]:
    """Return its output, and what was seen of it; it must end well."""
    listening: set[tuple[str, str]] = set()
    store, mode = "", 0
    while not (ended := command.poll(0.05)):
        with contextlib.suppress(psutil.Error, OSError):  # one of them has just ended
            for each in processes(command.pid):
                environ = each.environ()
                found = {link.laddr.ip for link in each.net_connections("tcp") if link.status == "LISTEN"}
                listening |= {(environ.get("RANK", ""), address) for address in found}
                store = environ.get("SIGHTLINE_STORE", store)
                mode = Path(store).parent.stat().st_mode
    assert ended.code == 0, ended
    return ended.stdout, Seen(listening, store, mode)
