"""Processes that have imported torch before they start: `sightline` commands, torchrun, and the ranks of a test.

Each test process has a server, a fork of tests/forker.py, from its first request on. What tests the start of a process
itself uses subprocess instead.
"""

import atexit
import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).resolve().parent
GUEST = HERE.parent / "packages" / "migrate"
LIMIT_S = 300  # after which a process counts as hung; two busy cores make a run of half a second last some
ENVIRON = dict(os.environ)  # before any test changes it


@cache
def server() -> tuple[TextIO, TextIO]:
    """Where this test process asks, and where it is answered."""
    path = os.pathsep.join([str(HERE.parent), str(GUEST), *filter(None, [ENVIRON.get("PYTHONPATH")])])
    # As in most locales; where there is none Python's encoding is lax.
    environ = ENVIRON | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:strict"}
    environ["CUDA_VISIBLE_DEVICES"] = "none"  # CUDA does not survive a fork
    environ.pop("PYTHONUNBUFFERED", None)
    return served_by(HERE / "forker.py", environ)


def served_by(script: Path, environ: Mapping[str, str]) -> tuple[TextIO, TextIO]:
    """Return streams to and from a fork of `script`, which the first of several test processes starts."""
    run = ENVIRON.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    place = Path(tempfile.gettempdir(), f"{script.parent.name}-{run}")
    link = socket.socket(socket.AF_UNIX)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            link.connect(str(place))
        except OSError:  # nobody listens
            _start_listening(script, environ, place)
            link.connect(str(place))
    streams = link.makefile("w"), link.makefile("r")
    link.close()  # once both are
    for stream in streams:
        atexit.register(stream.close)
    return streams


def _start_listening(script: Path, environ: Mapping[str, str], place: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    place.unlink(missing_ok=True)
    listener.bind(str(place))
    listener.listen()
    command = [sys.executable, str(script), str(listener.fileno())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environ, pass_fds=[listener.fileno()], **pipes)
    listener.close()

    def end() -> None:
        for path in (place, place.with_suffix(".lock")):
            path.unlink(missing_ok=True)
        process.communicate()

    atexit.register(end)


def accept() -> int:
    """Fork for every test process that connects, and return its connection in the fork. The original ends after the
    test process that started it and all forks."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    while listener in select.select([listener, 0], [], [])[0]:
        connection = listener.accept()[0]
        if not os.fork():
            listener.close()
            return connection.detach()
        connection.close()
    listener.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def share() -> None:
    """Keep forks from copying what they have of this process: collections leave it alone, and so does a fork's end,
    where torch would take back its operators one by one, 8,000 pages in 30 ms."""
    gc.freeze()
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False


def ask(request: dict[str, Any]) -> Any:
    """One line there, one line back."""
    requests, answers = server()
    requests.write(json.dumps(request) + "\n")
    requests.flush()
    return json.loads(answers.readline())


class Ended(NamedTuple):
    """How a process ended, and what it said."""

    code: int
    stdout: str
    stderr: str

    def __repr__(self) -> str:  # pytest shows it where an assertion fails
        return f"exit {self.code}\n{self.stdout}{self.stderr}"


class Started:
    """A process in progress, the first of a process group."""

    def __init__(self, pid: int):
        self.pid = pid
        self._ended: Ended | None = None

    def poll(self, seconds: float = 0) -> Ended | None:
        """None while it is still running after `seconds`."""
        if self._ended is None:
            answer = ask({"wait": self.pid, "seconds": seconds})
            self._ended = Ended(**answer) if answer["code"] is not None else None
        return self._ended

    def wait(self, seconds: float = LIMIT_S) -> Ended:
        """Until it has ended; one that does not end is killed and fails the test."""
        if ended := self.poll(seconds):
            return ended
        self.kill()
        raise AssertionError(f"hung: {self.poll(LIMIT_S)}")

    def until(self, fact: Callable[[], Any]) -> Any:
        """Waits for something to become true while the process runs; returns it."""
        deadline = time.monotonic() + LIMIT_S
        while not (found := fact()):
            assert time.monotonic() < deadline, "nothing came of it"
            assert not self.poll(0.01), self._ended
        return found

    def kill(self) -> None:
        """With all of its group."""
        if not self.poll():
            os.killpg(self.pid, signal.SIGKILL)


def start(
    program: str,
    *words: object,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    closed_stdout: bool = False,
    terminal: str = "",
) -> Started:
    """`sightline WORDS`, `torchrun OPTIONS sightline WORDS`, `function FILE NAME OUT`, or `script FILE`.

    Processes that it starts itself import torch as any user's do. What it says comes back, unless it has a terminal.
    """
    request = {"program": program, "words": [str(word) for word in words], "environ": dict(environ or {})}
    request |= {"cwd": str(cwd or Path.cwd()), "closed_stdout": closed_stdout, "terminal": terminal}
    return Started(ask(request))


@cache
def _pythons() -> tuple[TextIO, TextIO]:
    return served_by(HERE / "migrate" / "fixtures" / "forker.py", ENVIRON | {"CUDA_VISIBLE_DEVICES": "none"})


def python(
    folder: Path, *words: object, environ: Mapping[str, str], warm: bool = False
) -> "subprocess.CompletedProcess[str]":
    """`python WORDS` in this folder, in a process that has torch, and with `warm` torch._dynamo, but nothing else."""
    files = {"out": folder / "out.txt", "err": folder / "err.txt"}
    for path in files.values():
        path.unlink(missing_ok=True)
    job = {"folder": folder, "environment": dict(environ), "words": [*map(str, words)], "warm": warm} | files
    jobs, answers = _pythons()
    print(json.dumps(job, default=str), file=jobs, flush=True)
    return subprocess.CompletedProcess(words, int(answers.readline()), *(path.read_text() for path in files.values()))


# Ranks


def run(file: str, out: Path, ranks: int, per_host: int | None = None, function: str = "main", **how: bool) -> str:
    """`function(out)` of a test file on that many ranks, all of which must end well; returns what they said."""
    return run_words(["function", file, function, out], ranks, per_host, **how)


def run_words(words: list[object], ranks: int, per_host: int | None = None, **how: bool) -> str:
    """The same with the words of `start`."""
    size = per_host or ranks
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    places = [{**common, "RANK": rank, "LOCAL_RANK": rank % size} for rank in range(ranks)]
    left = [start(*words, environ={k: str(v) for k, v in place.items()}, **how) for place in places]
    said, deadline = "", time.monotonic() + LIMIT_S
    try:
        while left:
            assert time.monotonic() < deadline, "hung"
            for rank in list(left):
                if ended := rank.poll(0.01):
                    assert ended.code == 0, f"{ended.stdout[-4000:]}{ended.stderr[-4000:]}"
                    said += ended.stdout
                    left.remove(rank)
    finally:
        for rank in left:  # they would wait for the one that failed
            rank.kill()
    return said


def leave() -> None:
    """The group, if there is one: DDP keeps it alive, and threads of gloo that outlive it abort the process."""
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def once(factory: "pytest.TempPathFactory", name: str, make: Callable[[Path], object]) -> Path:
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
