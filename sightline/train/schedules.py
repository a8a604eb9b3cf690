"""Learning rates as pure functions of the step: nothing to save, nothing to get out of step on resume."""

import math
from dataclasses import dataclass
from typing import Literal

from sightline.errors import UsageError
from sightline.parts import refuse_foreign_fields

FIELDS_OF_KIND = {
    "constant": set[str](),
    "cosine": {"final_lr"},
    "step": {"drop_epochs", "drop_factor"},
}


@dataclass(frozen=True)
class Plan:
    """How long a run is."""

    epochs: int
    steps_per_epoch: int


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves from optimizer.lr over the run."""

    kind: Literal["constant", "cosine", "step"] = "cosine"
    """constant; cosine: half a cosine from lr to final_lr; step: times drop_factor at each of drop_epochs."""
    warmup_epochs: float = 0.0
    """Linear rise from lr / (warm-up steps) to lr over this many epochs; may be a fraction."""
    final_lr: float = 0.0
    """cosine: the rate after the last step."""
    drop_epochs: tuple[int, ...] = ()
    """step: epochs at whose start the rate drops."""
    drop_factor: float = 0.1
    """step: what the rate is multiplied with at each drop."""

    def __post_init__(self) -> None:
        refuse_foreign_fields("schedule", self, FIELDS_OF_KIND)
        if self.warmup_epochs < 0:
            raise UsageError(f"schedule.warmup_epochs={self.warmup_epochs} must not be negative")
        if self.kind == "step" and not self.drop_epochs:
            raise UsageError("schedule.kind=step needs --schedule.drop-epochs, e.g. --schedule.drop-epochs 30 60 80")

    def rate(self, step: int, lr: float, plan: Plan) -> float:
        """The learning rate of optimizer update `step`, counted from 0 over the whole run."""
        warmup_steps = round(self.warmup_epochs * plan.steps_per_epoch)
        if step < warmup_steps:
            return lr * (step + 1) / warmup_steps
        if self.kind == "cosine":
            total = plan.epochs * plan.steps_per_epoch
            done = (step - warmup_steps) / max(1, total - warmup_steps)
            return self.final_lr + (lr - self.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if self.kind == "step":
            epoch = step // plan.steps_per_epoch
            return lr * self.drop_factor ** sum(epoch >= drop for drop in self.drop_epochs)
        return lr
