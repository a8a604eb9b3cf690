"""Starts processes without the seconds that importing torch takes; tests/warm.py is the other side.

A parent that has imported everything forks one server for every test process, which forks one child per request. This
runs `sightline`, as `python -m sightline` would, torchrun, a function of a test file, or a script, which alone ends as
the interpreter ends. Requests and answers are JSON lines.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

SIGHTLINE = Path(__file__).resolve().parents[1] / "sightline" / "__main__.py"


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


def serve(connection: int) -> dict[str, Any]:
    """Answers requests until the input ends. Returns in a child only: the request it is to carry out."""
    requests, answers = os.fdopen(connection), os.fdopen(os.dup(connection), "w")
    running: dict[int, Child] = {}
    for line in requests:
        request: dict[str, Any] = json.loads(line)
        answer: Any
        if "words" in request:
            pipes = {name: os.pipe() for name in ("stdout", "stderr")}
            answer = os.fork()
            if answer == 0:
                requests.close()
                answers.close()
                _become(request, {name: writer for name, (_, writer) in pipes.items()})
                return request
            for reader, writer in pipes.values():
                os.set_blocking(reader, False)
                os.close(writer)
            running[answer] = Child(answer, {name: reader for name, (reader, _) in pipes.items()})
        else:
            child = running[request["wait"]]
            answer = {"code": _exit_code(child, request["seconds"]), **child.texts}
            if answer["code"] is not None:
                del running[child.pid]
                for reader in child.readers.values():
                    os.close(reader)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _become(request: dict[str, Any], writers: dict[str, int]) -> None:
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # chosen by the environment of whoever asked first
    if request["terminal"]:
        os.login_tty(os.open(request["terminal"], os.O_RDWR))
        return
    os.setpgid(0, 0)
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
    poll = select.poll()
    for reader in child.readers.values():
        poll.register(reader, select.POLLIN)
    with contextlib.ExitStack() as stack:
        longest = 0.002
        with contextlib.suppress(OSError):  # kernels before 5.3 have none
            poll.register(ended := os.pidfd_open(child.pid), select.POLLIN)
            stack.callback(os.close, ended)
            longest = seconds
        while True:
            found, status = os.waitpid(child.pid, os.WNOHANG)
            child.read()
            if found:
                return os.waitstatus_to_exitcode(status)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            for descriptor, event in poll.poll(1000 * min(left, longest)):
                if event & select.POLLHUP and descriptor in child.readers.values():
                    poll.unregister(descriptor)  # closed for good, which would end every wait at once


def torchrun(words: list[str]) -> None:
    """torchrun itself with `sightline WORDS` on its ranks, which it forks."""
    from torch.distributed import run

    at = words.index("sightline")
    run.main([*words[:at], "--start-method=fork", "--run-path", str(SIGHTLINE), *words[at + 1 :]])


def function(words: list[str]) -> None:
    """FILE FUNCTION OUT: a rank of a test."""
    from warm import leave

    file, name, out = words
    runpy.run_path(file)[name](Path(out))
    leave()


def run(main: Callable[[list[str]], Any], words: list[str]) -> NoReturn:
    """Ends the process as the interpreter would, less the second it takes to put torch away piece by piece."""
    sys.argv = ["sightline", *words]
    code: Any
    try:
        code = main(words)
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
    gc.disable()  # until all is imported: as Python's documentation advises before forks
    warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # of Python 3.12, wherever a thread is left

    import numpy.ma  # noqa: F401  # what np.unique imports when it is called
    import pytest  # noqa: F401  # as test files do
    import torch._dynamo  # what torch imports when its first optimizer is built
    import torch.distributed.run  # noqa: F401
    import torchvision  # noqa: F401  # what looking for the name of a network imports
    import warm

    import sightline.api  # what a command imports when it is called
    import sightline.overview.last_screen
    import sightline.report.page
    import sightline.report.samples  # noqa: F401
    from sightline import cli, config, data, metrics, models, recipes, tasks
    from sightline.hardware import devices
    from sightline.runs.environment import environment

    for part in (data, metrics, models, tasks):  # what a run imports when it needs it
        for module in pkgutil.walk_packages(part.__path__, f"{part.__name__}."):
            importlib.import_module(module.name)
    for recipe in recipes.names():
        recipes.find(recipe)
    config.load("demo_classification", ["--data.path=synthetic:samples=8"])  # imports all sources
    environment(devices.select("cpu"), 1)  # looks for the versions of packages
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have ignored them
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    warm.share()
    gc.enable()
    asked = serve(warm.accept())
    if "MUTANTS_TEST" in os.environ:
        importlib.import_module("traced").trace()
    if asked["program"] == "script":
        runpy.run_path(*asked["words"], run_name="__main__")
        sys.exit()
    run({"sightline": cli.main, "torchrun": torchrun, "function": function}[asked["program"]], asked["words"])
