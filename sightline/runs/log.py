"""RunLog: what the loops report, passed on to the run folder, the event log and the terminal."""

from __future__ import annotations

import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sightline.data.loading.workers import Bad
from sightline.parts import Scores
from sightline.runs.attempts import ALONE, Attempt
from sightline.runs.events import EventLog
from sightline.runs.folder import BEST_SCORES, DRAWINGS, RunFolder
from sightline.runs.loggers import Harmless, Logger
from sightline.runs.page import EVERY_S, Page, Shown
from sightline.runs.score_names import shown
from sightline.runs.screen import RunSize, Screen, as_hours, as_score, as_speed, as_words

WIDTH = 80
FIRST_STEP_S = 5.0  # of silence, before a line says what the first step waits for
AGAIN_S = 30.0  # before it is said again


class RunLog:
    """Opened once per process. A training run claims its folder; with `attempt` None an evaluation only adds to it."""

    def __init__(
        self,
        folder: Path,
        screen: Screen | None = None,
        rank: int = 0,
        attempt: Attempt | None = ALONE,
        *,
        page: Callable[[Path], Page] | None = None,
        rank_logs: Path | None = None,
    ) -> None:
        self.screen = screen or Screen(rank=rank)
        self.folder = RunFolder(folder, rank, attempt, self.warn)
        self.events = EventLog(self.folder, rank_logs)
        self.has_started = False  # a start that was refused has nothing to show
        self._start_step = 0
        self._drawn_at = time.monotonic()
        self._first_step: threading.Event | None = None
        self._time_to_train: dict[str, float] = {}
        self._total: dict[str, float] = {}  # of a training that came to its end
        self.page = page(folder) if page and self.folder.is_main else None
        self._shown: Shown | None = None
        if attempt is None:
            return
        if self.events.has_rank_log:
            with self.folder.must_be_writable(rank_logs):
                self.events.open_rank_file()
            self.events.note(f"rank {rank}, pid {os.getpid()} on {platform.node()}, restart {attempt.restarts}")
        if self.folder.is_main:
            self.folder.claim()

    def say(self, text: str) -> None:
        """Print a line for the person at the terminal; ranks that have a rank_N.log keep it there too."""
        if self.events.has_rank_log:
            self.events.note(text)
        self.screen.say(text)

    def event(self, kind: str, **values: Any) -> None:
        """Append a line to log.jsonl; rank 0 only."""
        self.events.write(kind, **values)

    def add_logger(self, logger: Logger) -> None:
        """Report to this logger too. What it raises is a warning, once."""
        self.events.add(Harmless(logger, self.warn))

    def started(
        self,
        fields: Mapping[str, Any],
        scores: Sequence[str],
        step: int,
        origins: Mapping[str, str] = MappingProxyType({}),
        **facts: Any,
    ) -> None:
        """Report a start of the run: its settings with their origins, its position and how it is carried out."""
        self.has_started, self._start_step = True, step
        self.events.start(fields, tuple(scores), step, origins)
        self.events.write("start", step=step, **facts)

    def warn(self, text: str) -> None:
        """Print a warning and log it."""
        self.events.write("warning", text=text)
        self.say(f"warning: {text}")

    @contextmanager
    def taking_warnings(self) -> Iterator[None]:
        """Log warnings of Python's own kind too, those of kernels and libraries; they are printed as always."""
        show = warnings.showwarning

        def show_and_log(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            show(message, category, *where, **more)
            self.events.write("warning", text=f"{category.__name__}: {message}")

        warnings.showwarning = show_and_log
        try:
            yield
        finally:
            warnings.showwarning = show

    def bad_sample(self, bad: Bad, other_data: str = "") -> None:
        """Append to bad_samples.jsonl and warn; `other_data` is where it lies if the run did not use it."""
        self.events.bad_sample(bad, other_data)
        self.warn(f"sample skipped: {bad.name}: {bad.reason}")

    def await_first_step(self, waits_for: Callable[[], str]) -> None:
        """Say `waits_for()` if the first step takes long, and again while it does; from a thread, so that no step asks
        the time."""
        self._first_step, started = threading.Event(), time.monotonic()

        def tell(is_done: threading.Event) -> None:
            if is_done.wait(FIRST_STEP_S):
                return
            self.screen.say(waits_for())
            while not is_done.wait(AGAIN_S):
                self.screen.say(f"{waits_for()}, {time.monotonic() - started:.0f} s so far")

        # A run that was stopped does not wait for it.
        threading.Thread(target=tell, args=(self._first_step,), name="first step", daemon=True).start()

    def first_step(self, seconds: float, waited_s: float, loss: float) -> None:
        """Report the first step of a start, which may take minutes: it compiles, and waits for the first images."""
        self._stop_awaiting()
        waited = f", {waited_s:.1f} s of it for data" if waited_s >= 0.05 else ""
        self.say(f"first step after {seconds:.1f} s{waited}: loss {loss:.4g}")

    def _stop_awaiting(self) -> None:
        if self._first_step:
            self._first_step.set()

    def stepped(self, epoch: int, step: int, size: RunSize) -> None:
        """Move the bar, where there is one, after every step: an interval of slow steps may take minutes."""
        if self.screen.has_bar:
            self.screen.show(size.title(epoch), *size.place(epoch, step))

    def training(self, epoch: int, step: int, size: RunSize, line: dict[str, float]) -> None:
        """Report a log interval of training that ends after `step` steps of the run."""
        self.events.write("train", epoch=epoch, step=step, **line)
        self.events.scalars("train", line, step)
        if self.page:
            self.page.look()
        done, total = size.place(epoch, step)
        if size.is_limit and "eta_s" in line:  # to the end of the epoch
            line = {**line, "eta_s": line["eta_s"] * (total - done) / max(1, size.steps - step)}
        if self.screen.has_bar:
            self.screen.show(size.title(epoch), done, total, line)
        if not size.ends_epoch(step):  # the line of the epoch follows
            text = "  ".join([size.title(epoch), f"step {done}/{total}", *as_words(line).values()])
            if not self.screen.has_bar:
                self.say(text)
            elif self.events.has_rank_log:
                self.events.note(text)

    def epoch(self, epoch: int, step: int, line: dict[str, float]) -> None:
        """Log the loss of an epoch's training, or of what a stop has left of it, and how long it took."""
        rounded = {name: value if name == "loss" else round(value, 3) for name, value in line.items()}
        self.events.write("epoch", epoch=epoch + 1, step=step, **rounded)
        self.events.scalars("epoch", line, step)

    def epoch_end(
        self, epoch: int, size: RunSize, line: dict[str, float], scores: Scores | None, headline: str, standing: str
    ) -> None:
        """Print the line of an epoch: training loss and time, unless only its evaluation was left to do, and the scores
        where it was evaluated; `standing` compares the headline score with those before."""
        begin = epoch * size.steps_per_epoch
        is_resumed = begin < self._start_step < begin + size.steps_per_epoch
        since = f" (since step {self._start_step}, where it resumed)" if is_resumed else ""
        words = [f"loss {line['loss']:.4g}{since}"] if line else []
        if scores:
            words.append(f"{headline} {as_score(scores.values[headline])} ({standing})")
        if line:
            words.append(f"{as_hours(line['seconds'])} at {as_speed(line['images_per_s'])}")
        if words:
            self.say("  ".join([size.title(epoch), *words]))
        self.screen.rename(size.title(min(epoch + 1, size.epochs - 1)))  # no longer "evaluating"
        if scores:
            others = [f"{name} {as_score(v)}" for name, v in shown(scores.values).items() if name != headline]
            self._say_packed("  val", others)

    def _say_packed(self, start: str, words: Sequence[str]) -> None:
        """Print words in lines as long as a terminal is wide."""
        line = start
        for word in words:
            if len(line) + 2 + len(word) > WIDTH:
                self.say(line)
                line = " " * len(start)
            line += f"  {word}"
        if words:
            self.say(line)

    def evaluating(self, done: int, total: int, run_done: int, run_total: int) -> None:
        """Show the progress of an evaluation; training meanwhile stands at `run_done` of `run_total`."""
        self.folder.beat()
        if self.screen.has_bar:
            self.screen.show(f"evaluating {done}/{total}", run_done, run_total)

    def evaluation(self, at: Literal["begin", "end"], step: int, **times: float) -> None:
        """Mark begin and end of an evaluation in the log and on TensorBoard; at the end with the times so far."""
        self.events.write(f"evaluate_{at}", step=step, **{name: round(value, 3) for name, value in times.items()})
        self.events.scalars("evaluate", {at: 0.0}, step)

    def scores(
        self, scores: Scores, file: str, times: dict[str, float] | None = None, is_best: bool = False, **where: Any
    ) -> None:
        """Log an evaluation, and write a file with its tables and how long it took; a second file keeps the best of the
        run, a third drawings of its worst samples."""
        kind = "evaluate_test" if where.get("split") == "test" else "evaluate"  # no point of the curves of val
        self.events.write(kind, **where, **scores.values)
        whole = {**where, **({"time_to_train": times} if times else {}), **asdict(scores)}
        for name in (file, BEST_SCORES) if is_best else (file,):
            self.folder.write_json(name, whole)
        self.events.scalars(kind, scores.values, where.get("step", 0))  # trackers read the file for more
        if self.page:
            if is_best and time.monotonic() - self._drawn_at >= EVERY_S:
                self._draw(scores, where)
            self.page.look()

    def _draw(self, scores: Scores, where: Mapping[str, Any]) -> None:
        """Draw the worst samples of the best evaluation so far. Short epochs need not wait for it: at most once a
        minute, and at the end of the run."""
        if not self.page or not self._shown:
            return
        try:
            self.folder.write_json(DRAWINGS, {**where, **self.page.evaluated(self._shown, scores)})
        except Exception as error:  # noqa: BLE001  # of a task of one's own: no reason to end a run
            self.warn(f"the worst samples were not drawn: {error}")
        self._drawn_at = time.monotonic()

    def _draw_best(self) -> None:
        """Draw the worst samples of the best evaluation, also that of an earlier start, unless that was done."""
        best, drawn = (self.folder.read_scores(name) for name in (BEST_SCORES, DRAWINGS))
        if "worst" in best and best.get("step") != drawn.get("step"):
            where: dict[str, Any] = {name: best[name] for name in ("epoch", "step") if name in best}
            self._draw(Scores(best.get("values", {}), best.get("tables", {}), best["worst"]), where)

    def show(self, shown: Shown) -> None:
        """Let the page look at this training, from its first evaluation on."""
        self._shown = shown

    def keep_facts(self, is_over: bool) -> None:
        """Let the page count and draw the data: at the end, or once it shows the run at work."""
        if not (self.page and self._shown and (is_over or self.page.has_begun)):
            return
        if why := self.page.keep_facts(self._shown):
            self.warn(why)

    def tell_scores(self, scores: Scores, **where: Any) -> None:
        """Print the scores of an evaluation that is not part of a training."""
        values = [f"{name} {as_score(value)}" for name, value in shown(scores.values).items()]
        place = "evaluated " + "  ".join(f"{name} {value}" for name, value in where.items())
        told = f"on {scores.values['samples']:.0f} samples"
        if len(line := "  ".join([place, *values, told])) <= WIDTH:
            self.say(line)
            return
        self.say("  ".join([place, *values[:1], told]))
        self._say_packed("", values[1:])

    def finished(self, why: str, step: int, scored_step: int, times: dict[str, float], total: dict[str, float]) -> None:
        """Report the end of a run after `step` steps, its time to train, from the first step to the evaluation that
        decided, at `scored_step` (-1 where there was none), and the times and the speed of the whole training."""
        self._total = {name: round(value, 3) for name, value in total.items()}
        words = [why] if scored_step >= 0 else [why, "nothing was evaluated"]
        if scored_step >= 0:
            self.events.write(
                "time_to_train", step=scored_step, **{name: round(value, 3) for name, value in times.items()}
            )
            self.events.scalars("time_to_train", times, scored_step)
            self._time_to_train = times
            words.append(f"time to train {_as_time(times)}")
        if scored_step == step:  # nothing came after that evaluation
            words[-1] += _as_rate(total)
        else:
            words.append(f"total training time {_as_time(total)}{_as_rate(total)}")
        self.say("; ".join(words))
        if self.page and scored_step >= 0:
            self._draw_best()

    def close(self, code: int, reason: str) -> None:
        """Tell how the run ended and release the folder."""
        try:
            self.tell_exit(code, reason)
        finally:
            self.release()

    def tell_exit(self, code: int, reason: str, speaks_for_all: bool = False) -> None:
        """Tell how the run ended, to the log and in exit.json."""
        more = {"time_to_train": self._time_to_train} if self._time_to_train and self.folder.is_main else {}
        try:
            self.events.end(code, reason, self.has_started, **self._total)
        finally:
            self.folder.write_exit(code, reason, speaks_for_all, **more)

    def release(self) -> None:
        """Release the folder without a word about how the run ended."""
        self._stop_awaiting()
        self.screen.close()
        try:
            self.events.close()
        finally:
            self.folder.release()
            if self.page:
                self.page.close()


def _as_time(times: Mapping[str, float]) -> str:
    has_paused = times["wall_s"] - times["running_s"] >= 1
    pauses = f" ({as_hours(times['wall_s'])} with the pauses between starts)" if has_paused else ""
    return as_hours(times["running_s"]) + pauses


def _as_rate(total: Mapping[str, float]) -> str:
    return f" at {as_speed(total['images_per_s'])}" if "images_per_s" in total else ""
