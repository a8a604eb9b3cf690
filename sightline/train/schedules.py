"""Learning rates as pure functions of the step: nothing to save, nothing to get out of step on resume."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sightline.errors import UsageError
from sightline.recipe.part import AtLeast, AtMost, Part, foreign_defaults, refuse_foreign_fields

if TYPE_CHECKING:
    from sightline.data.loading.order import TrainOrder
    from sightline.train.config import TrainConfig

FIELDS_OF_KIND: dict[str, set[str]] = {
    "constant": set(),
    "cosine": {"final_lr", "cosine_from", "hold_epochs", "decay_epochs", "floor"},
    "step": {"drop_epochs", "drop_after", "factor"},
    "exponential": {"factor"},
    "table": {"table_epochs", "table_rates"},
    "plateau": {"factor", "patience", "plateau_on"},
    "polynomial": {"final_lr", "power", "decay_epochs"},
}

LOSS_THRESHOLD, LEAST_DROP = 1e-4, 1e-8  # defaults of torch's ReduceLROnPlateau


@dataclass(frozen=True)
class RunLength:
    """The length of a run in epochs, steps and samples."""

    epochs: int
    steps_per_epoch: int
    samples: int = 0  # in an epoch; 0 is unknown
    global_batch: int = 0  # 0 is unknown

    @property
    def steps(self) -> int:
        """Return the optimizer updates of all epochs."""
        return self.epochs * self.steps_per_epoch


def length_of(config: TrainConfig, order: TrainOrder) -> RunLength:
    """Return how long a run over this order is."""
    return RunLength(config.epochs, order.steps_per_epoch, order.samples_per_epoch, config.global_batch)


@dataclass(frozen=True)
class ScheduleConfig(Part):
    """The course of the learning rate, from optimizer.lr over the run."""

    kind: Literal["constant", "cosine", "step", "exponential", "table", "plateau", "polynomial"] = "cosine"
    """cosine: to final_lr; step: times factor at drop_epochs; exponential: times factor per epoch; table: absolute
    rates from given epochs on; plateau: times factor when the score does not rise any more (see patience);
    polynomial: to final_lr as the share of the way left to the given power."""
    unit: Literal["step", "epoch"] = "step"
    """Cosine, exponential, polynomial and warm-up move with every step, or only with every epoch."""
    epoch_steps: Literal["whole", "exact", "less_one"] = "whole"
    """Steps that an epoch of this schedule has. whole: those of the run; exact: samples / global_batch as a fraction,
    sums of epochs are cut down; less_one: one fewer than the run's, as one of the originals counts."""
    warmup_epochs: Annotated[float, AtLeast(0)] = 0.0
    """Warm-up before the schedule begins; may be a fraction where unit is step."""
    warmup: Literal["linear", "constant"] = "linear"
    """linear: from warmup_factor * lr up to lr; constant: warmup_factor * lr throughout."""
    warmup_factor: Annotated[float, AtLeast(0), AtMost(1)] = 0.0
    """Start of warm-up, as a share of lr. With unit step and 0, the first step has lr / (warm-up steps)."""
    warmup_from: Literal["next", "zero"] = "next"
    """Unit step: the first step of W is 1 / W up the ramp (next), or at its foot (zero), as TensorFlow counts;
    polynomial counts in the same way."""
    final_lr: Annotated[float, AtLeast(0)] = 0.0
    """cosine, polynomial: the rate after the last step."""
    cosine_from: Literal["warmup", "start"] = "warmup"
    """cosine: begins when warm-up ends, or at step 0, so that the rate jumps down a little when warm-up ends."""
    hold_epochs: Annotated[float, AtLeast(0)] = 0.0
    """cosine: epochs, warm-up included, for which the rate stays up before the cosine begins; 0: as cosine_from."""
    floor: Annotated[float, AtLeast(0)] = 0.0
    """cosine: this share of lr is added to every rate after warm-up, so that it ends there and begins above lr."""
    drop_epochs: tuple[int, ...] = ()
    """step: epochs at whose start the rate drops."""
    drop_after: bool = False
    """step: the first step of such an epoch still has the rate before, as TensorFlow's piecewise constants."""
    factor: Annotated[float, AtLeast(0)] = 0.1
    """step, exponential, plateau: what the rate is multiplied with."""
    power: Annotated[float, AtLeast(0)] = 2.0
    """polynomial: 1 is a straight line, 2 a parabola that ends flat."""
    decay_epochs: Annotated[float, AtLeast(0)] = 0.0
    """cosine, polynomial: epochs, warm-up included, after which the rate is down; 0: those of the run."""
    patience: Annotated[int, AtLeast(0)] = 10
    """plateau: evaluations without a better score that are tolerated; the next one drops the rate."""
    plateau_on: Literal["score", "val_loss"] = "score"
    """plateau: what has to get better. score: the headline score must rise; val_loss: the loss of the evaluation must
    fall by a share of 1e-4, and drops of less than 1e-8 are left out, as torch's ReduceLROnPlateau(mode=min) does."""
    table_epochs: tuple[int, ...] = ()
    """table: epochs from which on table_rates hold; before the first it is optimizer.lr."""
    table_rates: tuple[float, ...] = ()
    """table: absolute rates, not scaled by batch or world size."""

    part = "schedule"

    def check(self) -> None:
        super().check()
        refuse_foreign_fields(self.part, self, FIELDS_OF_KIND)
        if self.warmup == "constant" and self.warmup_epochs and not self.warmup_factor:
            raise UsageError(
                "schedule.warmup=constant with warmup_factor=0 learns nothing; add --schedule.warmup-factor 0.01"
            )
        if self.unit == "epoch" and (self.epoch_steps, self.warmup_from) != ("whole", "next"):
            raise UsageError(
                f"schedule.epoch_steps={self.epoch_steps} and warmup_from={self.warmup_from} count steps, and "
                f"schedule.unit=epoch moves by the epoch; leave them out or add --schedule.unit step"
            )
        if 0 < self.decay_epochs <= self.warmup_epochs:
            raise UsageError(
                f"schedule.decay_epochs={self.decay_epochs} must be more than the {self.warmup_epochs} epochs of "
                f"warm-up that it includes; 0 means: those of the run"
            )
        if self.hold_epochs and (self.hold_epochs < self.warmup_epochs or self.cosine_from == "start"):
            raise UsageError(
                f"schedule.hold_epochs={self.hold_epochs} must be at least the {self.warmup_epochs} epochs of warm-up "
                f"that it includes, with cosine_from=warmup; 0 means: no hold"
            )
        if 0 < self.decay_epochs <= self.hold_epochs:
            raise UsageError(
                f"schedule.decay_epochs={self.decay_epochs} must be more than hold_epochs={self.hold_epochs}, where "
                f"the cosine begins; 0 means: the epochs of the run"
            )
        if self.kind == "step" and not self.drop_epochs:
            raise UsageError("schedule.kind=step needs --schedule.drop-epochs, e.g. --schedule.drop-epochs 30 60 80")
        rows = len(self.table_epochs)
        if self.kind == "table" and (
            not rows or rows != len(self.table_rates) or list(self.table_epochs) != sorted(self.table_epochs)
        ):
            raise UsageError(
                f"schedule.kind=table needs as many table_epochs, rising, as table_rates; got {self.table_epochs} and "
                f"{self.table_rates}"
            )

    def implied(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of other kinds to their defaults where a kind is named."""
        return foreign_defaults(self, named, FIELDS_OF_KIND)

    def rate(self, step: int, lr: float, length: RunLength, history: Sequence[float] = ()) -> float:
        """Return the learning rate of optimizer update `step`, counted from 0 over the whole run.

        `history` holds what plateau_on names of every planned evaluation so far; only plateau looks at it.
        """
        by_step = self.unit == "step"
        at = step if by_step else step // length.steps_per_epoch  # now, the warm-up and the whole run, in units
        warmup, total = self._units(self.warmup_epochs, length), self._units(length.epochs, length)
        # By the step the ramp usually ends at lr, so that its first rate is not 0; by the epoch as torch's LinearLR.
        counted = at + 1 if by_step and self.warmup_from == "next" else at
        if at < warmup:
            risen = counted / warmup if self.warmup == "linear" else 0.0
            return lr * (self.warmup_factor + (1 - self.warmup_factor) * risen)
        horizon = self._units(self.decay_epochs, length) if self.decay_epochs else total
        if self.kind == "cosine":
            begun = max(warmup, self._units(self.hold_epochs, length)) if self.cosine_from == "warmup" else 0
            done = min(1.0, max(0, at - begun) / max(1, horizon - begun))
            return self.floor * lr + self.final_lr + (lr - self.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
        if self.kind == "polynomial":
            left = 1 - min(1.0, (counted - warmup) / max(1, horizon - warmup + 1))
            return self.final_lr + (lr - self.final_lr) * left**self.power
        if self.kind == "exponential":
            return lr * self.factor ** ((at - warmup) / (self._epoch_length(length) if by_step else 1))
        if self.kind == "step":
            now = step - 1 if self.drop_after else step
            return lr * self.factor ** sum(now >= self._steps(drop, length) for drop in self.drop_epochs)
        if self.kind == "table":
            reached = sum(step >= self._steps(start, length) for start in self.table_epochs)
            return self.table_rates[reached - 1] if reached else lr
        if self.kind == "plateau":
            if self.plateau_on == "val_loss":
                return _after_plateaus(lr, self.factor, _plateaus_of_loss(history, self.patience))
            return lr * self.factor ** _plateaus(history, self.patience)
        return lr

    def warnings(self, epochs: int) -> list[str]:
        """Return a line about drops that come after the last epoch, and one about a warm-up longer than the run."""
        found = []
        drops = self._drop_epochs()
        never = [epoch for epoch in drops if epoch >= epochs]
        if never and (never == drops or never[-1] > epochs):  # a drop right at the end may be meant
            which = "never drops" if never == drops else "does not drop as often as planned"
            field = "drop-epochs" if self.kind == "step" else "table-epochs"
            found.append(
                f"the rate {which}: drops at epochs {', '.join(map(str, drops))}, the run ends after {epochs}; scale "
                f"them with --schedule.{field}, or use --schedule.kind cosine"
            )
        if self.warmup_epochs > epochs:
            found.append(
                f"the rate only rises: warm-up takes {self.warmup_epochs:g} epochs, the run ends after {epochs}; "
                f"shorten it with --schedule.warmup-epochs"
            )
        return found

    def _drop_epochs(self) -> list[int]:
        """Return the epochs at whose start the rate drops."""
        if self.kind == "step":
            return sorted(self.drop_epochs)
        rates = zip(self.table_epochs[1:], self.table_rates, self.table_rates[1:], strict=False)
        return [epoch for epoch, before, after in rates if after < before]

    def _epoch_length(self, length: RunLength) -> float:
        """Return the steps of an epoch, as epoch_steps says."""
        if self.epoch_steps == "exact":
            if not (length.samples and length.global_batch):
                raise UsageError("schedule.epoch_steps=exact needs a RunLength with samples and global_batch")
            return length.samples / length.global_batch
        return max(1, length.steps_per_epoch - (self.epoch_steps == "less_one"))

    def _steps(self, epochs: float, length: RunLength) -> int:
        """Convert epochs to steps: the one place that does."""
        steps = epochs * self._epoch_length(length)
        return int(steps) if self.epoch_steps == "exact" else round(steps)

    def _units(self, epochs: float, length: RunLength) -> int:
        return self._steps(epochs, length) if self.unit == "step" else math.ceil(epochs)


def _plateaus(history: Sequence[float], patience: int) -> int:
    """Count how often more than `patience` evaluations in a row brought no better score; restart after each."""
    drops, waited, best = 0, 0, -math.inf
    for score in history:
        waited = 0 if score > best else waited + 1
        best = max(best, score)
        if waited > patience:
            drops, waited = drops + 1, 0
    return drops


def _plateaus_of_loss(history: Sequence[float], patience: int) -> int:
    """Count plateaus of losses, with the threshold of torch's ReduceLROnPlateau."""
    drops, waited, best = 0, 0, math.inf
    for loss in history:
        waited, best = (0, loss) if loss < best * (1 - LOSS_THRESHOLD) else (waited + 1, best)
        if waited > patience:
            drops, waited = drops + 1, 0
    return drops


def _after_plateaus(lr: float, factor: float, drops: int) -> float:
    """Multiply once per drop, as torch does, for equal bits."""
    for _ in range(drops):
        lr = lr * factor if lr - lr * factor > LEAST_DROP else lr
    return lr
