"""ssh: torchrun on every host, started from one; their output is shown here, and they end together."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import IO

from sightline.errors import Interrupted, RankFailed
from sightline.hardware.launch import torchrun
from sightline.hardware.launch.plan import SECONDS_TO_SAVE, Host, LaunchPlan, hangup, in_shell

CONNECT_TIMEOUT_S = 10
SECONDS_TO_FOLLOW = 30  # that other hosts get to end by themselves after one has failed
CTRL_C = b"\x03"


def login(plan: LaunchPlan, host: Host, words: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Return an ssh command that never asks nor waits long; the host comes after --, so that it cannot be an option."""
    settings = ["BatchMode=yes", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "ServerAliveInterval=30"]
    options = [part for setting in settings for part in ("-o", setting)]
    return ["ssh", *more, *options, "-p", str(plan.ssh_port), "--", host.name, *words]


def commands(plan: LaunchPlan) -> list[list[str]]:
    """Return one command per host. Its terminal (-tt) stops the ranks there, also when the connection is lost; nothing
    is drawn on it, since its lines are shown behind the name of the host."""
    ours = {"TERM": "dumb", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SECONDS_TO_SAVE)}
    plan = replace(plan, environ={**ours, **plan.environ})
    return [
        login(plan, host, [in_shell(plan, torchrun.command(plan, node))], ["-tt"])
        for node, host in enumerate(plan.hosts)
    ]


def run(plan: LaunchPlan) -> None:
    """Start all hosts and wait for them; a signal lets their ranks save, a second one ends them, and so does the
    first failure."""
    processes: list[subprocess.Popen[str]] = []
    told: list[subprocess.Popen[str]] = []
    stopped: list[int] = []

    def tell() -> None:
        for process in processes[len(told) :]:
            told.append(process)
            _interrupt(process)

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        if len(stopped) > 1:
            _end(processes)
        else:
            tell()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, *hangup())}
    readers = []
    try:
        for host, words in zip(plan.hosts, commands(plan), strict=True):
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # a Ctrl-C here would end ssh itself
            )
            processes.append(process)
            if stopped:  # the signal came while hosts were still being started
                tell()
            readers.append(threading.Thread(target=_show, args=(host.name, process.stdout), daemon=True))
            readers[-1].start()
        failed, code = _wait(plan, processes, stopped)
    finally:
        _end(processes)
        for process in processes:
            process.wait()
            if process.stdin:
                process.stdin.close()
        for reader in readers:
            reader.join(timeout=5)
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped:
        raise Interrupted(stopped[0], "the signal was passed on to all hosts")
    if code:
        hint = (
            f"; ssh itself failed, try `{shlex.join(['ssh', '-p', str(plan.ssh_port), failed])}`" if code == 255 else ""
        )
        raise RankFailed(code if code > 0 else 128 - code, f"{failed} ended with exit code {code}{hint}")


def _wait(plan: LaunchPlan, processes: list[subprocess.Popen[str]], stopped: list[int]) -> tuple[str, int]:
    """Return the host that failed first with its exit code; 0 if all ended well."""
    failed, deadline = ("", 0), float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        ended = [(host.name, process.poll()) for host, process in zip(plan.hosts, processes, strict=True)]
        if deadline == float("inf"):
            failed = next(((name, code) for name, code in ended if code), failed)
            seconds = SECONDS_TO_SAVE if stopped else SECONDS_TO_FOLLOW if failed[1] else deadline
            deadline = time.monotonic() + seconds
        time.sleep(0.1)
    codes = [(host.name, process.poll() or 0) for host, process in zip(plan.hosts, processes, strict=True)]
    return failed if failed[1] else next(((name, code) for name, code in codes if code), ("", 0))


def _interrupt(process: subprocess.Popen[str]) -> None:
    """Type Ctrl-C on the terminal there: ssh passes no signal on, and killing it would not let the ranks save."""
    with contextlib.suppress(OSError):  # it has just ended
        if process.stdin:
            os.write(process.stdin.fileno(), CTRL_C)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()


def _show(name: str, lines: IO[str] | None) -> None:
    for line in lines or ():
        sys.stdout.write(f"{name}: {line.rstrip()}\n")
        sys.stdout.flush()
