"""The position of a run: step, epoch, scores so far. Plain numbers, which a checkpoint holds as JSON."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from sightline.errors import UsageError
from sightline.files.typed_json import as_dataclass, typed
from sightline.runs.screen import as_score
from sightline.train.schedules import ScheduleConfig

VAL_LOSSES = ("val_loss", "loss")  # what tasks call the loss of an evaluation


@dataclass
class TrainProgress:
    """The position and the scores of a run; checkpoints hold them as JSON under `progress`."""

    step: int = 0  # optimizer updates asked for, skipped ones included; samples seen = step * global_batch
    epoch: int = 0  # epochs finished, evaluation included
    best_score: float | None = None
    best_step: int = -1  # -1: none is best
    bad_steps: int = 0  # steps that were not finite
    avoid: list[int] = field(default_factory=list)  # steps a rewind has decided to leave out
    scores: dict[str, Any] = field(default_factory=dict)  # of the last evaluation; numbers, or what a task gives
    scored_step: int = -1  # where the last evaluation was
    history: list[float] = field(default_factory=list)  # the headline score of every evaluation that was planned
    val_losses: list[float] = field(default_factory=list)  # the loss of each of these, where the task gives one
    base_lr: float | None = None  # resolved by the first start; another number of ranks must not change it

    @classmethod
    def from_json(cls, values: Any) -> TrainProgress:
        """Read a checkpoint's numbers; raise ValueError for impossible ones, UnknownField for a later version's."""
        found = as_dataclass(cls, values)
        typed(found.scores, dict[str, float | bool | None])
        if "step" not in values:
            raise ValueError("step is missing")
        for name, least, most in (
            ("step", 0, 2**48),
            ("epoch", 0, found.step),
            ("best_step", -1, found.step),
            ("scored_step", -1, found.step),
            ("bad_steps", 0, 2**48),
        ):
            if not least <= getattr(found, name) <= most:
                raise ValueError(f"{name} is {getattr(found, name)}, expected {least} to {most}")
        if found.base_lr is not None and not 0 <= found.base_lr < math.inf:
            raise ValueError(f"base_lr is {found.base_lr}, expected a learning rate")
        return found

    def note(self, scores: dict[str, float], headline: str, planned: bool) -> bool:
        """Note the scores of an evaluation; return whether it is the best, which NaN never is; of equal scores the one
        with the lower loss is. An evaluation that was not planned, but made because the run stops, must not move a
        schedule."""
        score, losses = scores[headline], [scores[name] for name in VAL_LOSSES if name in scores][:1]
        has_lower_loss = planned and score == self.best_score and any(loss < self._loss_of_best() for loss in losses)
        self.scores, self.scored_step = scores, self.step
        if planned:
            self.history.append(score)
            self.val_losses += losses
        if math.isnan(score):
            return False
        # The first is true also where an old checkpoint holds NaN.
        if self.best_score is None or not score <= self.best_score or has_lower_loss:
            self.best_score, self.best_step = score, self.step
        return self.best_step == self.step

    def _loss_of_best(self) -> float:
        """Return the lowest loss of the planned evaluations with the best score; -inf if that is not known."""
        if len(self.history) != len(self.val_losses):  # of an old checkpoint
            return -math.inf
        pairs = zip(self.history, self.val_losses, strict=True)
        return min((loss for score, loss in pairs if score == self.best_score), default=-math.inf)

    def watched(self, schedule: ScheduleConfig) -> list[float]:
        """Return what a schedule watches: the scores or the losses of the planned evaluations so far."""
        if schedule.plateau_on == "score":
            return self.history
        refuse_unwatchable(schedule, self.scores)
        return self.val_losses

    def evaluations_since_best(self) -> int:
        """Count planned evaluations since the first that scored best; equal is not better, and NaN never is."""
        waited, best = 0, -math.inf
        for score in self.history:
            waited, best = (0, score) if score > best else (waited + 1, best)
        return waited

    def standing(self, patience: int) -> str:
        """Compare the last score with those before, for people; with patience also how much of it is used up."""
        waited = self.evaluations_since_best()
        is_best = self.best_step == self.step
        has_lower_loss = is_best and waited > 0 and self.history[-1] == self.best_score
        if is_best and not has_lower_loss:
            return "best so far"
        words = ["equal to the best, lower loss"] if has_lower_loss else []
        if patience and waited:
            return ", ".join([*words, f"no better for {waited} of {patience}"])
        return words[0] if words else f"best {as_score(self.best_score)}"


def refuse_unwatchable(schedule: ScheduleConfig, names: Collection[str]) -> None:
    """Refuse a schedule that watches a loss which the evaluation does not return; no names: not known yet."""
    if schedule.plateau_on == "val_loss" and names and not any(name in names for name in VAL_LOSSES):
        raise UsageError(
            f"schedule.plateau_on=val_loss needs an evaluation that gives {' or '.join(VAL_LOSSES)}; this task's "
            f"gives {', '.join(names)}. Use --schedule.plateau-on score (with --run.override to resume)"
        )
