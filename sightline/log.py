"""The run folder and the terminal: config.yaml, environment.json, log.jsonl, bad_samples.jsonl, exit.json, progress.

log.jsonl is one JSON object per line; every line has `event` and `time`, the first one `schema`. Rank 0 writes it all;
rank N has rank_N.log, plain text, for what it says, its warnings and, where ranks hang, its stacks.
TensorBoard and the benchmark log (benchmark_log.py) get the same numbers as train/NAME, epoch/NAME, evaluate/NAME.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import math
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal

import torch
from rich.progress import BarColumn

from sightline import __version__, attempts
from sightline.attempts import Attempt
from sightline.benchmark_log import BenchmarkLog
from sightline.data.loading.workers import Bad
from sightline.errors import DISK_FULL, PeerLost, UsageError
from sightline.files.whole import open_text, replace_text
from sightline.hardware.devices import Device
from sightline.parts import Scores
from sightline.terminal import visible
from sightline.terminal.console import Bars, Terminal, Words

SCHEMA = 1
BEST_SCORES = "scores-best.json"
ROW = 6  # scores in a line; COCO has twelve
TAKE_OVER_S = 10.0  # without a sign of life from an earlier attempt of the same command, its folder is taken over
PACKAGES = ("torch", "torchvision", "numpy", "pillow", "safetensors", "tyro")


class RunLog:
    """Opened once per process; other ranks than the first are silent, unless asked for, but for a log of their own.

    A training run claims its folder; an evaluation only adds to it, also while the run is at work.
    """

    def __init__(
        self,
        folder: Path,
        progress: str = "auto",
        is_main: bool = True,
        *,
        claims: bool = True,
        tensorboard: bool = False,
        rank: int = 0,
        output: Literal["main", "all"] = "main",
        attempt: Attempt | None = None,
    ):
        self.folder = folder
        self.is_main = is_main
        self.rank = rank
        self.attempt = attempt or Attempt()
        is_shown = progress != "off" and (is_main or output == "all")
        self.console = Terminal(quiet=not is_shown)
        self._tag = f"[rank {rank}] " if output == "all" else ""
        self._file: IO[str] | None = None
        self._own_file: IO[str] | None = None
        self._has_own_file = claims and rank > 0
        self._lock: IO[str] | None = None
        self._signed_at = 0.0
        self._told_full = False
        self._bar: Bars | None = None
        can_draw = self.console.is_terminal and not self.console.is_dumb_terminal
        live = progress == "live" or (progress == "auto" and can_draw)
        self._wants_bar = live and is_main and output == "main"
        if is_main and claims:
            self._claim_folder()
        elif self._has_own_file:
            with self._must_be_writable():
                self._note(f"rank {rank}, pid {os.getpid()} on {platform.node()}, restart {self.attempt.restarts}")
        self._board = _open_board(folder) if tensorboard and is_main else None
        self._benchmark: BenchmarkLog | None = None
        self._time_to_train: dict[str, float] = {}

    def feed(self, benchmark: BenchmarkLog) -> None:
        """From now on every number also goes there."""
        self._benchmark = benchmark

    def _claim_folder(self) -> None:
        """Creates the folder, proves that it can be written, and refuses a second run in it."""
        with self._must_be_writable():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            (self.folder / attempts.EXIT).unlink(missing_ok=True)  # how an earlier start ended; this one is at work

    @contextlib.contextmanager
    def _must_be_writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"run folder {self.folder} cannot be written: {error.strerror}; give another one with --run.out DIR"
            ) from error

    def _take_lock(self) -> IO[str]:
        """The kernel frees a lock when its process dies. One of a host that was cut off may live on: it is passed over
        where it belongs to an earlier attempt of the same command that no longer comes on."""
        path = self.folder / ".lock"
        deadline = time.monotonic() + TAKE_OVER_S
        lock = open_text(path, "a+")
        sign = os.fstat(lock.fileno()).st_mtime_ns
        while not _locked(lock):
            lock.seek(0)
            holder, _, command = lock.read().partition("\n")
            at_work = f"is at work in {self.folder} ({holder.strip() or 'unknown process'})"
            if not self.attempt.command or command.strip() != self.attempt.command:
                lock.close()
                raise UsageError(f"another run {at_work}; wait for it, or give another folder with --run.out DIR")
            if time.monotonic() > deadline:
                has_come_on = os.fstat(lock.fileno()).st_mtime_ns != sign
                lock.close()
                if has_come_on:  # two groups of hosts that do not see each other: the first goes on
                    raise PeerLost(f"another attempt of this command {at_work}; this one leaves it alone")
                fresh = self.folder / f".lock.{secrets.token_hex(8)}"
                lock = fresh.open("x+")
                assert _locked(lock), "nobody else knows this file"
                os.replace(fresh, path)
                self.say(f"warning: {self.folder} is taken over from {holder}, an earlier attempt of this command")
                break
            time.sleep(0.05)
        if not os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):  # somebody else was faster
            lock.close()
            return self._take_lock()
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {platform.node()}\n{self.attempt.command}\n")
        lock.flush()
        return lock

    def give_sign(self) -> None:
        """That this attempt comes on, once a second at most; what a later one looks at before it takes the folder."""
        if self._lock is not None and time.monotonic() - self._signed_at > 1:
            self._signed_at = time.monotonic()
            with self._may_lack_room():
                os.utime(self._lock.fileno())

    def still_holds_folder(self) -> bool:
        """False where a later attempt of the same command has taken the folder over from this one."""
        if self._lock is None or self._lock.closed:
            return True
        with contextlib.suppress(FileNotFoundError):  # deleted by a person, not taken over
            return os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.folder / ".lock"))
        return True

    def prove_folder_is_ours(self) -> None:
        """Before anything is written that a later attempt would trip over."""
        if not self.still_holds_folder():
            raise PeerLost(f"a later attempt of this command has taken {self.folder} over; this one leaves it alone")

    @contextlib.contextmanager
    def _may_lack_room(self) -> Iterator[None]:
        """A full disk costs lines of the log, not the run; the terminal is told once."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            if not self._told_full:
                self._told_full = True
                self.say(f"warning: {self.folder} cannot be written: {error.strerror}; the log may lack lines")

    def write_file(self, name: str, text: str) -> None:
        """A file of the run folder, replaced as a whole."""
        if self.is_main:
            self._replace_file(name, text)

    def _replace_file(self, name: str, text: str) -> None:
        with self._may_lack_room():
            replace_text(self.folder / name, text)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """The same, of plain values; what is not finite becomes null."""
        self.write_file(name, json.dumps(_strict(value), indent=1) + "\n")

    def event(self, kind: str, **values: Any) -> None:
        """One line of log.jsonl, flushed, so that a killed run has lost none."""
        if not self.is_main:
            return
        if self._file is None:
            path = self.folder / "log.jsonl"
            is_new = not path.exists()
            self._file = open_text(path, "a")
            if is_new:
                self.event("log", schema=SCHEMA, sightline=__version__)
        line = {"event": kind, "time": round(time.time(), 3), **values}
        with self._may_lack_room():
            self._file.write(json.dumps(_strict(line)) + "\n")
            self._file.flush()

    def say(self, text: str) -> None:
        """A line for the person at the terminal."""
        if self._has_own_file:
            self._note(text)
        if self._tag:
            text = "\n".join(self._tag + line for line in text.split("\n"))
        self.console.print(visible(text, self.console.encoding))

    def _note(self, text: str) -> None:
        """A line of rank_N.log."""
        with self._may_lack_room():
            file = self._open_own_file()
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {visible(text)}\n")
            file.flush()

    def _open_own_file(self) -> IO[str]:
        if self._own_file is None:
            self.folder.mkdir(parents=True, exist_ok=True)  # rank 0 may be on another host
            path = self.folder / f"rank_{self.rank}.log"
            self._own_file = open_text(path, "a")
        return self._own_file

    def dump_stacks(self, why: str) -> None:
        """Where every thread of this process is, into rank_N.log; rank 0 has such a file for this only."""
        self._note(f"{why}; the stacks of rank {self.rank}, pid {os.getpid()} on {platform.node()}:")
        with self._may_lack_room():
            faulthandler.dump_traceback(self._open_own_file(), all_threads=True)

    def warn(self, text: str) -> None:
        """A line that should not be overlooked; it stands in log.jsonl too."""
        self.event("warning", text=text)
        self.say(f"warning: {text}")

    def bad_sample(self, bad: Bad) -> None:
        """Counted, listed in bad_samples.jsonl, told once."""
        # Every rank adds its own: one short appended line each, so they do not mix.
        with self._may_lack_room(), open_text(self.folder / "bad_samples.jsonl", "a") as file:
            file.write(json.dumps(asdict(bad)) + "\n")
        self.warn(f"sample skipped: {bad.name}: {bad.reason}")

    def training(self, epoch: int, epochs: int, done: int, total: int, line: dict[str, float]) -> None:
        """The state of training at a log interval; `done` of `total` steps of the run."""
        self.event("train", epoch=epoch, step=done, **line)
        self._draw_curves("train", line, done)
        if self._wants_bar:
            self._show_bar(f"epoch {epoch + 1}/{epochs}", done, total, _short(line))
        else:
            self.say(f"epoch {epoch + 1}/{epochs}  step {done}/{total}  {_short(line)}")

    def epoch(self, epoch: int, epochs: int, step: int, line: dict[str, float]) -> None:
        """How long the training part of an epoch, or of what a stop had left of it, has taken."""
        self.event("epoch", epoch=epoch + 1, step=step, **{name: round(value, 3) for name, value in line.items()})
        self._draw_curves("epoch", line, step)
        self.say(f"epoch {epoch + 1}/{epochs}  took {_hours(line['seconds'])}  {line['images_per_s']:,.2f} img/s")

    def evaluating(self, done: int, total: int, run_done: int, run_total: int) -> None:
        """Progress of an evaluation; `run_done` of `run_total` is where training stands meanwhile."""
        self.give_sign()
        if self._wants_bar:
            self._show_bar(f"evaluating {done}/{total}", run_done, run_total, "")

    def evaluation(self, at: Literal["begin", "end"], step: int, **times: float) -> None:
        """Marks in the log and on the board, whose wall times are what they tell; at the end also the times so far."""
        self.event(f"evaluate_{at}", step=step, **{name: round(value, 3) for name, value in times.items()})
        self._draw_curves("evaluate", {at: 0.0}, step)

    def scores(
        self, scores: Scores, file: str, times: dict[str, float] | None = None, is_best: bool = False, **where: Any
    ) -> None:
        """The result of an evaluation: a line, an event, and a file with its tables and how long it took; another file
        keeps it while it is the best of the run."""
        self.event("evaluate", **where, **scores.values)
        self._draw_curves("evaluate", scores.values, where.get("step", 0))
        whole = {**where, **({"time_to_train": times} if times else {}), **asdict(scores)}
        for name in (file, BEST_SCORES) if is_best else (file,):
            self.write_json(name, whole)
        values = [f"{name} {as_score(value)}" for name, value in scores.values.items() if name != "samples"]
        place = "evaluated " + "  ".join(f"{name} {value}" for name, value in where.items())
        told = f"on {scores.values['samples']:.0f} samples"
        if len(values) <= ROW:
            self.say("  ".join([place, *values, told]))
            return
        self.say(f"{place}  {told}")
        for start in range(0, len(values), ROW):
            self.say("  " + "  ".join(values[start : start + ROW]))

    def finished(self, why: str, step: int, times: dict[str, float]) -> None:
        """The end of a run and the time from its first step to the end of the evaluation that decided, at `step`."""
        self.event("time_to_train", step=step, **{name: round(value, 3) for name, value in times.items()})
        self._draw_curves("time_to_train", times, step)
        self._time_to_train = times
        wall, running = (_hours(times[name]) for name in ("wall_s", "running_s"))
        self.say(f"{why}; time to train {wall} on the wall, {running} running, to the evaluation at step {step}")

    def hyperparameters(self, fields: dict[str, Any], values: dict[str, float]) -> None:
        """TensorBoard's table of runs: every field beside the final scores."""
        if self._board:
            from torch.utils.tensorboard.summary import hparams

            plain = {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in fields.items()}
            for part in hparams(plain, {f"evaluate/{name}": value for name, value in values.items()}):
                self._board.file_writer.add_summary(part)

    def _draw_curves(self, prefix: str, values: dict[str, float], step: int) -> None:
        # The original scripts' names: learning_rate is train/lr, accuracy train/top1, global_step/sec and
        # steps_per_second train/steps_per_s, global_examples/sec train/images_per_s, examples/sec (of one worker)
        # train/images_per_s_per_rank where there are several; test_loss, test_accuracy and accuracy_top_5 are
        # evaluate/loss, top1 and top5; ttt/eval/begin and end are evaluate/begin and end.
        for name, value in values.items():
            if self._board:
                self._board.add_scalar(f"{prefix}/{name}", value, step)
            if self._benchmark:
                with self._may_lack_room():
                    self._benchmark.metric(f"{prefix}/{name}", value, step)

    def close(self, code: int, reason: str) -> None:
        """Tells how the run ended and lets go of the folder."""
        self.tell_exit(code, reason)
        self.release()

    def tell_exit(self, code: int, reason: str, speaks_for_all: bool = False) -> None:
        """exit.json says how the run ended, also where a launcher turns every exit code into 1. It is rank 0's, but for
        an end that a next attempt must not repeat, and for one in which rank 0 no longer answers."""
        told: dict[str, Any] = {"code": code, "reason": reason, "time": time.time(), **self.attempt.facts()}
        if self._has_own_file:
            self._note(f"ends with exit {code}: {reason}")
        if self.is_main:
            self.event("exit", code=code, reason=reason)
            if self._time_to_train:
                told["time_to_train"] = self._time_to_train
            # Another rank knows better than the one that has lost it.
            if code == PeerLost.exit_code and attempts.is_in_vain(attempts.read_exit(self.folder).get("code", 0)):
                told = {}
            if self._benchmark:
                with self._may_lack_room():
                    self._benchmark.close(code)
        elif not (self._has_own_file and (attempts.is_in_vain(code) or speaks_for_all)):
            told = {}
        if told and self.still_holds_folder():
            self._replace_file(attempts.EXIT, json.dumps(told) + "\n")

    def release(self) -> None:
        """Lets go of the folder without a word about how the run ended."""
        if self._bar:
            self._bar.stop()
            self._bar = None
        if self._board:
            self._board.close()
        if self._file:
            with self._may_lack_room():
                self._file.close()
        if self._own_file:
            with self._may_lack_room():
                self._own_file.close()
            self._own_file = None
        if self._lock:
            self._lock.close()

    def _show_bar(self, title: str, done: int, total: int, numbers: str) -> None:
        if self._bar is None:
            columns = (
                Words("{task.description}"),
                BarColumn(bar_width=24),
                Words("{task.completed:.0f}/{task.total:.0f}"),
                Words("{task.fields[numbers]}"),
            )
            self._bar = Bars(*columns, console=self.console, transient=True)
            self._bar.start()
            self._bar.add_task(title, total=total, numbers=numbers)
        task = self._bar.tasks[0]
        kept = numbers or task.fields["numbers"]
        self._bar.update(task.id, completed=done, total=total, description=title, numbers=kept)


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "--run.tensorboard needs the package tensorboard: `pip install sightline[tensorboard]`, or leave it out"
        ) from None
    return SummaryWriter(str(folder / "tensorboard"))


def as_score(value: float | None) -> str:
    """For a person; a dash where there is none, and for COCO's -1, which says that there was nothing to measure."""
    if value is None or value == -1:
        return "-"
    return f"{value:.0f}" if value > 1 and float(value).is_integer() else f"{value:.4f}"  # a count


def _short(line: dict[str, float]) -> str:
    """The numbers of a training line as a person reads them."""
    shown = []
    for name, value in line.items():
        if name == "images_per_s":
            shown.append(f"{value:,.0f} img/s")
        elif name == "data_wait":
            shown.append(f"wait {value:.0%}")
        elif name == "memory_gb":
            shown.append(f"{value:.1f} GB")
        elif name == "eta_s":
            shown.append(f"eta {_hours(value)}")
        elif name not in ("grad_norm", "steps_per_s", "images_per_s_per_rank"):
            shown.append(f"{name} {value:.4g}")
    return "  ".join(shown)


def _hours(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


@cache  # importlib reads and parses a file for each
def _versions() -> dict[str, str]:
    """Of the packages that a result depends on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def environment(device: Device, ranks: int) -> dict[str, Any]:
    """What a result depends on besides the recipe."""
    return {
        "sightline": __version__,
        "python": platform.python_version(),
        "packages": dict(_versions()),
        "device": device.name(),
        "device_kind": device.kind,
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "command": sys.argv,
    }
