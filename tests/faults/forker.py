"""Starts `sightline` commands as processes of their own, without the seconds that importing torch takes.

A parent that has imported everything and computed nothing forks one child per request, which runs as
`python -m sightline` would. Requests and answers are JSON lines on stdin and stdout; conftest.py is the other side.
"""

import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn


@dataclass
class Child:
    """A process in progress. Its output comes through pipes, which no limit on file sizes touches."""

    pid: int
    readers: dict[str, int]
    texts: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})

    def read(self) -> None:
        """Whatever has come so far."""
        for name, reader in self.readers.items():
            with contextlib.suppress(BlockingIOError):
                while data := os.read(reader, 1 << 16):
                    self.texts[name] += data.decode(errors="replace")


def serve() -> list[str]:
    """Answers requests until the input ends. Returns in a child only: the command line it is to run."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    running: dict[int, Child] = {}
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        answer: Any
        if "argv" in request:
            pipes = {name: os.pipe() for name in ("stdout", "stderr")}
            answer = os.fork()
            if answer == 0:
                requests.close()
                answers.close()
                _become(request, {name: writer for name, (_, writer) in pipes.items()})
                return request["argv"]
            for reader, writer in pipes.values():
                os.set_blocking(reader, False)
                os.close(writer)
            running[answer] = Child(answer, {name: reader for name, (reader, _) in pipes.items()})
        else:
            child = running[request["wait"]]
            answer = {"code": _exit_code(child, request["seconds"]), **child.texts}
            if answer["code"] is not None:
                del running[child.pid]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _become(request: dict[str, Any], writers: dict[str, int]) -> None:
    os.setpgid(0, 0)
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request["closed_stdout"]:  # what is left of `| head -0`
        reader, writers["stdout"] = os.pipe()
        os.close(reader)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(writers[name], descriptor)
        os.close(writers[name])


def _exit_code(child: Child, seconds: float) -> int | None:
    """As subprocess says it (minus the signal); None while the process is still running after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child.pid, os.WNOHANG)
        child.read()
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def run(main: Callable[[list[str]], int], flags: list[str]) -> NoReturn:
    """Ends the process as the interpreter would, less the second it takes to put torch away piece by piece."""
    sys.argv = ["sightline", *flags]
    code: Any
    try:
        code = main(flags)
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001  # what nobody caught is shown, as always
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    os._exit(code or 0)


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  # what torch imports when its first optimizer is built

    import sightline.api  # noqa: F401  # what a command imports when it is called
    from sightline import cli, recipes

    for name in recipes.names():
        recipes.find(name)
    gc.freeze()  # children share these pages for as long as nobody counts them anew
    run(cli.main, serve())
