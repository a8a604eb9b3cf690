"""A tracker in a process of its own, so that no step waits for a network, a database or a large import.

The training puts lines of JSON into a queue; a thread writes them to the process (apart.py), which sends. The process
outlives a training that is killed, and sends what it had been told. What it cannot send is one warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sightline.errors import SightlineError
from sightline.runs.loggers import Logger, RunStart
from sightline.runs.trackers.tracker import MARKS, scores_of_classes

MOST = 10_000  # lines that wait; an hour at three a second
LEAVES_S = 30.0  # at the end of a run, for what was not sent yet
ENDS_S = 5.0  # for the pipe of a process that was killed
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from sightline.runs.trackers import apart; "
START += "apart.main(sys.argv[2])"


class NotSent(SightlineError):
    """A tracker did not take what it was told. Always a warning, see Harmless."""


class Aside(Logger):
    """Passes everything on to the tracker of a name, in another process."""

    def __init__(self, name: str):
        self.name = name
        self._lines: queue.Queue[str | None] = queue.Queue(MOST)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._problem = ""  # to be reported
        self._is_done = False  # the process has said so

    def start(self, run: RunStart) -> None:
        """Start the process; it imports the tracker while the training begins."""
        self._folder = run.folder
        command = [sys.executable, "-c", START, json.dumps(sys.path), self.name]
        # A session of its own: Ctrl-C at the terminal is for the training, which tells the process how it ended.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            encoding="utf-8", errors="backslashreplace", start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._write, daemon=True).start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        plain = {each.name: getattr(run, each.name) for each in dataclasses.fields(run)}
        self._put("start", {**plain, "folder": str(run.folder.absolute()), "origins": dict(run.origins)})

    def event(self, name: str, values: Mapping[str, Any]) -> None:
        """Pass an event on."""
        self._put("event", name, values)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Pass points on; of an evaluation also those of its classes, which its file has until the next one."""
        more = scores_of_classes(self._folder) if group == "evaluate" and not set(values) <= MARKS else {}
        self._put("scalars", group, {**values, **more}, step)

    def close(self, code: int, reason: str) -> None:
        """Say how the run ended; `leave` waits until that is sent."""
        self._put("close", code, reason)

    def end(self, page: Path) -> None:
        """Hand over the page of the run that has ended, the last thing to send."""
        if page.is_file():
            self._add(json.dumps([time.time(), "page", str(page.absolute())]))
        self._add(None)

    def wait(self, until: float) -> str:
        """Wait until everything is sent, at most to this time. Return what went wrong and was not reported; "" if
        nothing did."""
        if self._process is None or self._reader is None:  # the run was refused
            return ""
        self._reader.join(max(0.0, until - time.monotonic()))
        if not self._is_done:
            self._process.kill()
            self._problem = self._problem or f"{self.name} takes too long and may lack the end of the run"
        self._reader.join(ENDS_S)  # a process that the tracker left behind may keep the pipe open
        self._process.wait()
        problem, self._problem = self._problem, ""
        return f"{problem}; log.jsonl has everything" if problem else ""

    def _put(self, *call: Any) -> None:
        self._add(json.dumps([time.time(), *call], default=str))
        if self._problem:
            problem, self._problem = self._problem, ""
            raise NotSent(problem)

    def _add(self, line: str | None) -> None:
        with contextlib.suppress(queue.Full):  # log.jsonl has it
            self._lines.put_nowait(line)

    def _write(self) -> None:
        assert self._process and self._process.stdin
        try:
            with self._process.stdin as stream:
                while (line := self._lines.get()) is not None:
                    stream.write(line + "\n")
                    if self._lines.empty():
                        stream.flush()
        except OSError:  # it has ended, which `_read` reports
            pass

    def _read(self) -> None:
        """Take what the process says: problems, one to a line, and "done" at its end."""
        assert self._process and self._process.stdout
        with self._process.stdout as stream:
            for line in stream:
                if line == "done\n":
                    self._is_done = True
                    break
                with contextlib.suppress(ValueError):  # something that the tracker's package wrote there
                    self._problem = f"{self.name}: {json.loads(line)}"
        if not self._is_done and not self._problem:
            self._is_done, code = True, self._process.wait()
            self._problem = f"the process of {self.name} ended with code {code}"
