"""What a recipe decides from the data at hand, each value with its reason.

A recipe for anybody's data has a function `plan(known)`, called once the data have been looked at. It asks what is
known and calls `known.decide(field, value, because)`; a value that the user typed stays. A run stores what was decided,
and takes it again when it resumes.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sightline.parts import DataFacts, SplitFacts
from sightline.recipe.settings import Origin, Settings

# The standard error of a share that is measured on n samples is at most 0.5 / sqrt(n): 5 points at 100.
ENOUGH_TO_JUDGE = 100
WARMUP = 0.05  # of the steps
Purpose = Literal["train", "look", "score"]
"""train: what is missing may be fetched. look: show what a training would do. score: given weights as they are."""


class Known:
    """The settings so far and the data, for a plan; `lines` are what it says to the user."""

    def __init__(self, settings: Settings, facts: DataFacts, purpose: Purpose):
        self.settings, self.facts, self.lines = settings, facts, list[str]()
        self.purpose = purpose

    @cached_property
    def train(self) -> SplitFacts:
        """Numbers of the training samples; some are of a part of them."""
        assert self.facts.count is not None, "a plan is asked where the data can be counted"
        return self.facts.count()

    @property
    def side(self) -> int:
        """The shorter side of the usual image, in pixels; 0 where no size is known."""
        return round(statistics.median(min(size) for size in self.train.sizes)) if self.train.sizes else 0

    def __getitem__(self, name: str) -> Any:
        """Return the value of "part.field" so far, as its part has it; None if a part of one's own has none."""
        part, _, key = name.partition(".")
        return getattr(self.settings.part(part), key, None)

    def is_typed(self, *names: str) -> bool:
        """Return whether the user set one of these fields."""
        return any(self.settings.is_typed(name) for name in names)

    def decide(self, name: str, value: Any, because: str) -> None:
        """Set a field, unless the user or the network has, or the part is one of one's own without it."""
        if name in self.settings.hints():
            self.settings = self.settings.put(Origin.DECIDED, {name: value}, because)

    def reopen(self, *names: str) -> None:
        """Decide fields after all that the network has values for."""
        self.settings = reopened(self.settings, names)

    def decide_length(self, epochs: int, because: str, head_epochs: int) -> None:
        """Set the epochs, how many of them train the head alone, and what is counted in epochs or steps: the warm-up,
        at most a twentieth of the steps; the average of weights, over a tenth of them; the patience, two fifths of the
        evaluations, where there are enough validation samples to tell one score from another."""
        self.decide("train.epochs", epochs, because)
        epochs, batch = self["train.epochs"], self["train.global_batch"]  # what was typed may be shorter
        if isinstance(batch, int):  # else it is still to be measured
            steps = epochs * max(self["train.min_epoch_steps"], self.train.items // batch)
            decay = round(1 - 1 / max(2, min(steps // 10, 1000)), 4)
            self.decide("train.ema", decay, f"averages about a tenth of {steps} steps")
        if 0 < head_epochs < epochs:
            self.decide("train.head_epochs", head_epochs, "the gradients of a random head would damage the weights")
        warmup = min(self["schedule.warmup_epochs"] or 0, round(epochs * WARMUP, 4))
        self.decide("schedule.warmup_epochs", warmup, f"at most a twentieth of {epochs} epoch{'s' * (epochs > 1)}")
        if 0 < self.facts.val_items < ENOUGH_TO_JUDGE:
            few = f"{self.facts.val_items} validation images are too few to tell when the score has stopped rising"
            self.decide("train.patience", 0, few)
            return
        evaluations = epochs // self["train.eval_every_epochs"]
        at_least = ", at least 3" * (evaluations * 2 // 5 < 3)
        patience = max(3, evaluations * 2 // 5)
        over = f"{evaluations} evaluation{'s' * (evaluations > 1)}"
        self.decide("train.patience", patience, f"two fifths of {over}{at_least}")

    def because(self, name: str) -> str:
        """Return why a field was decided, now or at the first start of the run; "" for one that was not."""
        value = self.settings[name]
        kind, _, stored = value.because.partition(": ")
        if value.origin is Origin.STORED and kind == Origin.DECIDED.name.lower():
            return stored
        return value.because if value.origin is Origin.DECIDED else ""

    def line(self, network: str, images: str) -> str:
        """Return a line about what was decided."""
        given, run = Path(self["model.weights"] or ""), self["run.out"] or f"runs/{self.settings.recipe.name}"
        weights = f"weights {given.name if given.suffix else given}" if self["model.weights"] else "random weights"
        why = f"; `sightline inspect {run}` says why" if self.purpose == "train" else ""
        return f"chosen: {network}, {weights}, {images}{why}"

    def ask_model(self) -> None:
        """Take what the network says of its images, once it is decided."""
        self.settings = with_model(self.settings)


def with_model(settings: Settings) -> Settings:
    """Return settings with the fields of the data that the network was made for. UsageError for an unknown network."""
    model = settings.part("model")
    model.refuse_unknown()
    return settings.put(Origin.MODEL, {f"data.{name}": value for name, value in model.data_fields().items()})


def reopened(settings: Settings, names: Collection[str]) -> Settings:
    """Return settings without what the network says of these fields."""
    of_model = {name for name in names if settings[name].origin is Origin.MODEL}
    return replace(settings, values={name: each for name, each in settings.values.items() if name not in of_model})
