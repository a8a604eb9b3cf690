"""Learning rates as pure functions of the step: nothing to save, nothing to get out of step on resume."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sightline.errors import UsageError
from sightline.parts import refuse_foreign_fields

FIELDS_OF_KIND: dict[str, set[str]] = {
    "constant": set(),
    "cosine": {"final_lr"},
    "step": {"drop_epochs", "factor"},
    "exponential": {"factor"},
    "table": {"table_epochs", "table_rates"},
    "plateau": {"factor", "patience"},
}


@dataclass(frozen=True)
class Plan:
    """How long a run is."""

    epochs: int
    steps_per_epoch: int


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves from optimizer.lr over the run."""

    kind: Literal["constant", "cosine", "step", "exponential", "table", "plateau"] = "cosine"
    """cosine: to final_lr; step: times factor at drop_epochs; exponential: times factor per epoch; table: absolute
    rates from given epochs on; plateau: times factor when the score does not rise any more (see patience)."""
    unit: Literal["step", "epoch"] = "step"
    """How often cosine, exponential and warm-up move: with every step, or only with every epoch."""
    warmup_epochs: float = 0.0
    """Warm-up before the schedule begins; may be a fraction where unit is step."""
    warmup: Literal["linear", "constant"] = "linear"
    """linear: from warmup_factor * lr up to lr; constant: warmup_factor * lr throughout."""
    warmup_factor: float = 0.0
    """Where warm-up starts, as a share of lr. With unit step and 0, the first step has lr / (warm-up steps)."""
    final_lr: float = 0.0
    """cosine: the rate after the last step."""
    drop_epochs: tuple[int, ...] = ()
    """step: epochs at whose start the rate drops."""
    factor: float = 0.1
    """step, exponential, plateau: what the rate is multiplied with."""
    patience: int = 10
    """plateau: evaluations without a better score that are tolerated; the next one drops the rate."""
    table_epochs: tuple[int, ...] = ()
    """table: epochs from which on table_rates hold; before the first it is optimizer.lr."""
    table_rates: tuple[float, ...] = ()
    """table: absolute rates, not scaled by batch or world size."""

    def __post_init__(self) -> None:
        refuse_foreign_fields("schedule", self, FIELDS_OF_KIND)
        # Every test is written so that NaN fails it.
        for name in ("warmup_epochs", "final_lr", "factor", "patience"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"schedule.{name}={getattr(self, name)} must not be negative")
        if not 0 <= self.warmup_factor <= 1:
            raise UsageError(f"schedule.warmup_factor={self.warmup_factor} must be in [0, 1]")
        if self.warmup == "constant" and self.warmup_epochs and not self.warmup_factor:
            raise UsageError(
                "schedule.warmup=constant with warmup_factor=0 learns nothing; add --schedule.warmup-factor 0.01"
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

    def rate(self, step: int, lr: float, plan: Plan, history: Sequence[float] = ()) -> float:
        """The learning rate of optimizer update `step`, counted from 0 over the whole run.

        `history` holds the headline score of every evaluation so far; only plateau looks at it.
        """
        per_epoch = plan.steps_per_epoch
        epoch = step // per_epoch
        at = step if self.unit == "step" else epoch  # now, the warm-up and the whole run, in units
        warmup = round(self.warmup_epochs * per_epoch) if self.unit == "step" else math.ceil(self.warmup_epochs)
        total = plan.epochs * (per_epoch if self.unit == "step" else 1)
        if at < warmup:
            # By the step the ramp ends at lr, so that its first rate is not 0; by the epoch as torch's LinearLR.
            risen = (at + 1) / warmup if self.unit == "step" else at / warmup
            return lr * (self.warmup_factor + (1 - self.warmup_factor) * (risen if self.warmup == "linear" else 0.0))
        if self.kind == "cosine":
            done = (at - warmup) / max(1, total - warmup)
            return self.final_lr + (lr - self.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if self.kind == "exponential":
            return lr * self.factor ** ((at - warmup) / (per_epoch if self.unit == "step" else 1))
        if self.kind == "step":
            return lr * self.factor ** sum(epoch >= drop for drop in self.drop_epochs)
        if self.kind == "table":
            reached = sum(epoch >= start for start in self.table_epochs)
            return self.table_rates[reached - 1] if reached else lr
        if self.kind == "plateau":
            return lr * self.factor ** _plateaus(history, self.patience)
        return lr


def _plateaus(history: Sequence[float], patience: int) -> int:
    """How often more than `patience` evaluations in a row brought no better score; counted anew after each."""
    drops, waited, best = 0, 0, -math.inf
    for score in history:
        waited = 0 if score > best else waited + 1
        best = max(best, score)
        if waited > patience:
            drops, waited = drops + 1, 0
    return drops
