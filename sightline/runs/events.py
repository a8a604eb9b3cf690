"""The files of a run that programs read: log.jsonl, bad_samples.jsonl, rank_N.log; and the numbers for its loggers.

log.jsonl is one JSON object per line; every line has `event` and `time`, the first one `schema`. Rank 0 writes it; rank
N, and with --run.rank-logs rank 0, has rank_N.log, plain text, for its lines, warnings and, where ranks hang, stacks.
Loggers (loggers.py) get the same numbers as train/NAME, epoch/NAME, evaluate/NAME.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from sightline import __version__
from sightline.data.loading.workers import Bad
from sightline.files.regular import regular
from sightline.files.whole import open_text
from sightline.runs.folder import BAD_SAMPLES, LOG, RunFolder, finite
from sightline.runs.loggers import Logger, RunStart
from sightline.terminal import visible

SCHEMA = 1


class JsonLines(Logger):
    """log.jsonl, opened when the first line comes."""

    def __init__(self, path: Path):
        self._path = path
        self._file: IO[str] | None = None

    def event(self, name: str, values: Mapping[str, Any]) -> None:
        """Append a line and flush it, so that a killed run has lost none."""
        if self._file is None:
            is_new = not self._path.exists()
            self._file = open_text(self._path, "a")
            if is_new:
                self.event("log", {"schema": SCHEMA, "sightline": __version__})
        line = {"event": name, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(finite(line)) + "\n")
        self._file.flush()

    def count(self, name: str) -> int:
        """Count the events of this name so far."""
        try:
            with open(self._path, "rb", opener=regular) as file:
                return sum(f'"event": "{name}"'.encode() in line for line in file)
        except OSError:  # none yet
            return 0

    def release(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


class EventLog:
    """Passes events and numbers of one rank on to its loggers: log.jsonl and others, on rank 0 only."""

    def __init__(self, folder: RunFolder, rank_logs: Path | None = None):
        self.folder = folder
        self.has_rank_log = folder.attempt is not None and (not folder.is_main or rank_logs is not None)
        self._rank_log = (rank_logs or folder.path) / f"rank_{folder.rank}.log"
        self._lines = JsonLines(folder.path / LOG)
        self._loggers: list[Logger] = [self._lines] if folder.is_main else []
        self._rank_file: IO[str] | None = None

    def add(self, logger: Logger) -> None:
        """Report to this logger too."""
        if self.folder.is_main:
            self._loggers.append(logger)

    def start(self, fields: Mapping[str, Any], scores: tuple[str, ...], step: int, origins: Mapping[str, str]) -> None:
        """Report the settings of the run to all loggers."""
        run = RunStart(self.folder.path, fields, scores, step, self._lines.count("start"), origins)
        for logger in self._loggers:
            logger.start(run)

    def write(self, kind: str, **values: Any) -> None:
        """Report an event."""
        for logger in self._loggers:
            with self.folder.may_lack_room(LOG):
                logger.event(kind, values)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each value."""
        # The original scripts' names: learning_rate is train/lr, accuracy train/top1, global_step/sec and
        # steps_per_second train/steps_per_s, global_examples/sec train/images_per_s, examples/sec (of one worker)
        # train/images_per_s_per_rank where there are several; test_loss, test_accuracy and accuracy_top_5 are
        # evaluate/loss, top1 and top5; ttt/eval/begin and end are evaluate/begin and end.
        for logger in self._loggers:
            with self.folder.may_lack_room(LOG):
                logger.scalars(group, values, step)

    def note(self, text: str) -> None:
        """Append a line to rank_N.log."""
        with self.folder.may_lack_room(self._rank_log):
            file = self.open_rank_file()
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {visible(text)}\n")
            file.flush()

    def dump_stacks(self, why: str) -> None:
        """Write the stacks of all threads to rank_N.log; rank 0 has such a file for this only."""
        self.note(f"{why}; the stacks of rank {self.folder.rank}, pid {os.getpid()} on {platform.node()}:")
        with self.folder.may_lack_room(self._rank_log):
            faulthandler.dump_traceback(self.open_rank_file(), all_threads=True)

    def open_rank_file(self) -> IO[str]:
        """Return rank_N.log, opened once; raise OSError where it cannot be written."""
        if self._rank_file is None:
            self._rank_log.parent.mkdir(parents=True, exist_ok=True)  # rank 0 may be on another host
            self._rank_file = open_text(self._rank_log, "a")
        return self._rank_file

    def bad_sample(self, bad: Bad, other_data: str = "") -> None:
        """Append to bad_samples.jsonl. Every rank adds its own: one short appended line each, so they do not mix. A
        line of data that the run did not use names them as `data`: it does not count as the run's."""
        with self.folder.may_lack_room(BAD_SAMPLES), open_text(self.folder.path / BAD_SAMPLES, "a") as file:
            file.write(json.dumps(asdict(bad) | ({"data": other_data} if other_data else {})) + "\n")

    def end(self, code: int, reason: str, has_started: bool, **total: float) -> None:
        """Log the exit code and close the loggers. A training that came to its end has times and speed; a start that
        was refused, or had nothing to do, is marked."""
        if self.has_rank_log:
            self.note(f"ends with exit {code}: {reason}")
        self.write("exit", code=code, reason=reason, **total, **({} if has_started else {"started": False}))
        for logger in self._loggers:
            with self.folder.may_lack_room(LOG):
                logger.close(code, reason)

    def close(self) -> None:
        """Close all files."""
        with self.folder.may_lack_room(LOG):
            self._lines.release()
        if self._rank_file:
            with self.folder.may_lack_room(self._rank_log):
                self._rank_file.close()
        self._rank_file = None  # a line after the end opens it again
