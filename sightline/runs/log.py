"""RunLog: what the loops report, passed on to the run folder, the event log and the terminal."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from sightline.data.loading.workers import Bad
from sightline.parts import Scores
from sightline.runs.attempts import ALONE, Attempt
from sightline.runs.events import EventLog
from sightline.runs.folder import BEST_SCORES, RunFolder
from sightline.runs.screen import Screen, as_hours, as_line, as_score

ROW = 6  # scores in a line; COCO has twelve


class RunLog:
    """Opened once per process. A training run claims its folder; with `attempt` None an evaluation only adds to it."""

    def __init__(
        self, folder: Path, screen: Screen | None = None, rank: int = 0, attempt: Attempt | None = ALONE
    ) -> None:
        self.screen = screen or Screen(rank=rank)
        self.folder = RunFolder(folder, rank, attempt, self.say)
        self.events = EventLog(self.folder)
        self._time_to_train: dict[str, float] = {}
        if attempt is None:
            return
        if self.folder.is_main:
            self.folder.claim()
        else:
            with self.folder.must_be_writable():
                start = f"rank {rank}, pid {os.getpid()} on {platform.node()}, restart {attempt.restarts}"
                self.events.note(start)

    def say(self, text: str) -> None:
        """Print a line for the person at the terminal; other ranks keep it in rank_N.log too."""
        if self.events.has_rank_log:
            self.events.note(text)
        self.screen.say(text)

    def event(self, kind: str, **values: Any) -> None:
        """Append a line to log.jsonl; rank 0 only."""
        self.events.write(kind, **values)

    def warn(self, text: str) -> None:
        """Print a warning and log it."""
        self.events.write("warning", text=text)
        self.say(f"warning: {text}")

    def bad_sample(self, bad: Bad) -> None:
        """Append to bad_samples.jsonl and warn."""
        self.events.bad_sample(bad)
        self.warn(f"sample skipped: {bad.name}: {bad.reason}")

    def training(self, epoch: int, epochs: int, done: int, total: int, line: dict[str, float]) -> None:
        """Report a log interval of training; `done` of `total` steps of the run."""
        self.events.write("train", epoch=epoch, step=done, **line)
        self.events.curves("train", line, done)
        if self.screen.has_bar:
            self.screen.show(f"epoch {epoch + 1}/{epochs}", done, total, as_line(line))
        else:
            self.say(f"epoch {epoch + 1}/{epochs}  step {done}/{total}  {as_line(line)}")

    def epoch(self, epoch: int, epochs: int, step: int, line: dict[str, float]) -> None:
        """Report how long the training part of an epoch took, or of what was left of it after a stop."""
        rounded = {name: round(value, 3) for name, value in line.items()}
        self.events.write("epoch", epoch=epoch + 1, step=step, **rounded)
        self.events.curves("epoch", line, step)
        self.say(f"epoch {epoch + 1}/{epochs}  took {as_hours(line['seconds'])}  {line['images_per_s']:,.2f} img/s")

    def evaluating(self, done: int, total: int, run_done: int, run_total: int) -> None:
        """Show the progress of an evaluation; training meanwhile stands at `run_done` of `run_total`."""
        self.folder.beat()
        if self.screen.has_bar:
            self.screen.show(f"evaluating {done}/{total}", run_done, run_total)

    def evaluation(self, at: Literal["begin", "end"], step: int, **times: float) -> None:
        """Mark begin and end of an evaluation in the log and on TensorBoard; at the end with the times so far."""
        self.events.write(f"evaluate_{at}", step=step, **{name: round(value, 3) for name, value in times.items()})
        self.events.curves("evaluate", {at: 0.0}, step)

    def scores(
        self, scores: Scores, file: str, times: dict[str, float] | None = None, is_best: bool = False, **where: Any
    ) -> None:
        """Report an evaluation: an event, a line, and a file with its tables and how long it took; a second file keeps
        the best of the run."""
        self.events.write("evaluate", **where, **scores.values)
        self.events.curves("evaluate", scores.values, where.get("step", 0))
        whole = {**where, **({"time_to_train": times} if times else {}), **asdict(scores)}
        for name in (file, BEST_SCORES) if is_best else (file,):
            self.folder.write_json(name, whole)
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
        """Report the end of a run and its time to train: from the first step to the evaluation that decided."""
        self.events.write("time_to_train", step=step, **{name: round(value, 3) for name, value in times.items()})
        self.events.curves("time_to_train", times, step)
        self._time_to_train = times
        wall, running = (as_hours(times[name]) for name in ("wall_s", "running_s"))
        self.say(f"{why}; time to train {wall} on the wall, {running} running, to the evaluation at step {step}")

    def close(self, code: int, reason: str) -> None:
        """Tell how the run ended and release the folder."""
        self.tell_exit(code, reason)
        self.release()

    def tell_exit(self, code: int, reason: str, speaks_for_all: bool = False) -> None:
        """Tell how the run ended, to the log and in exit.json."""
        self.events.end(code, reason)
        more = {"time_to_train": self._time_to_train} if self._time_to_train and self.folder.is_main else {}
        self.folder.write_exit(code, reason, speaks_for_all, **more)

    def release(self) -> None:
        """Release the folder without a word about how the run ended."""
        self.screen.close()
        self.events.close()
        self.folder.release()
