"""The files of a run that programs read: log.jsonl, bad_samples.jsonl, rank_N.log, TensorBoard, the benchmark log.

log.jsonl is one JSON object per line; every line has `event` and `time`, the first one `schema`. Rank 0 writes it;
rank N has rank_N.log, plain text, for its lines, its warnings and, where ranks hang, its stacks.
TensorBoard and the benchmark log (benchmark_log.py) get the same numbers as train/NAME, epoch/NAME, evaluate/NAME.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from sightline import __version__
from sightline.data.loading.workers import Bad
from sightline.errors import UsageError
from sightline.files.whole import open_text
from sightline.runs.benchmark_log import BenchmarkLog
from sightline.runs.folder import BAD_SAMPLES, RunFolder, finite
from sightline.terminal import visible

SCHEMA = 1


class EventLog:
    """Lines and curves of one rank; files are opened when the first line comes."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.has_rank_log = folder.attempt is not None and not folder.is_main
        self._file: IO[str] | None = None
        self._rank_file: IO[str] | None = None
        self._board: Any = None
        self._benchmark: BenchmarkLog | None = None

    def open_board(self) -> None:
        """Write every number to TensorBoard too."""
        self._board = _open_board(self.folder.path)

    def feed(self, benchmark: BenchmarkLog) -> None:
        """Write every number to the benchmark log too."""
        self._benchmark = benchmark

    def write(self, kind: str, **values: Any) -> None:
        """Append a line to log.jsonl and flush it, so that a killed run has lost none."""
        if not self.folder.is_main:
            return
        if self._file is None:
            path = self.folder.path / "log.jsonl"
            is_new = not path.exists()
            self._file = open_text(path, "a")
            if is_new:
                self.write("log", schema=SCHEMA, sightline=__version__)
        line = {"event": kind, "time": round(time.time(), 3), **values}
        with self.folder.may_lack_room():
            self._file.write(json.dumps(finite(line)) + "\n")
            self._file.flush()

    def note(self, text: str) -> None:
        """Append a line to rank_N.log."""
        with self.folder.may_lack_room():
            file = self._open_rank_file()
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {visible(text)}\n")
            file.flush()

    def dump_stacks(self, why: str) -> None:
        """Write the stacks of all threads to rank_N.log; rank 0 has such a file for this only."""
        self.note(f"{why}; the stacks of rank {self.folder.rank}, pid {os.getpid()} on {platform.node()}:")
        with self.folder.may_lack_room():
            faulthandler.dump_traceback(self._open_rank_file(), all_threads=True)

    def _open_rank_file(self) -> IO[str]:
        if self._rank_file is None:
            self.folder.path.mkdir(parents=True, exist_ok=True)  # rank 0 may be on another host
            self._rank_file = open_text(self.folder.path / f"rank_{self.folder.rank}.log", "a")
        return self._rank_file

    def bad_sample(self, bad: Bad) -> None:
        """Append to bad_samples.jsonl. Every rank adds its own: one short appended line each, so they do not mix."""
        with self.folder.may_lack_room(), open_text(self.folder.path / BAD_SAMPLES, "a") as file:
            file.write(json.dumps(asdict(bad)) + "\n")

    def curves(self, prefix: str, values: dict[str, float], step: int) -> None:
        """Add a point to the curve of each value on TensorBoard and in the benchmark log."""
        # The original scripts' names: learning_rate is train/lr, accuracy train/top1, global_step/sec and
        # steps_per_second train/steps_per_s, global_examples/sec train/images_per_s, examples/sec (of one worker)
        # train/images_per_s_per_rank where there are several; test_loss, test_accuracy and accuracy_top_5 are
        # evaluate/loss, top1 and top5; ttt/eval/begin and end are evaluate/begin and end.
        for name, value in values.items():
            if self._board:
                self._board.add_scalar(f"{prefix}/{name}", value, step)
            if self._benchmark:
                with self.folder.may_lack_room():
                    self._benchmark.metric(f"{prefix}/{name}", value, step)

    def hyperparameters(self, fields: dict[str, Any], values: dict[str, float]) -> None:
        """Add a row to TensorBoard's table of runs: every field beside the final scores."""
        if self._board:
            from torch.utils.tensorboard.summary import hparams

            plain = {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in fields.items()}
            for part in hparams(plain, {f"evaluate/{name}": value for name, value in values.items()}):
                self._board.file_writer.add_summary(part)

    def end(self, code: int, reason: str) -> None:
        """Log the exit code and finish the benchmark log."""
        if self.has_rank_log:
            self.note(f"ends with exit {code}: {reason}")
        self.write("exit", code=code, reason=reason)
        if self._benchmark:
            with self.folder.may_lack_room():
                self._benchmark.close(code)

    def close(self) -> None:
        """Close all files."""
        if self._board:
            self._board.close()
        for file in (self._file, self._rank_file):
            if file:
                with self.folder.may_lack_room():
                    file.close()
        self._rank_file = None  # a line after the end opens it again


def _open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "--run.tensorboard needs the package tensorboard: `pip install sightline[tensorboard]`, or leave it out"
        ) from None
    return SummaryWriter(str(folder / "tensorboard"))
