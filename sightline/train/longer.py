"""A run that resumes with more epochs than it was started with: the one field of a recipe that may grow without
--run.override. Its schedule is recomputed for the new length from the next step on.

An interrupted run may grow too: its rates change from there on as those of a finished run do, and the line says so.
Fewer epochs than planned stay a refusal: --train.max-steps ends a run early and keeps its schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sightline.engine.progress import TrainProgress
from sightline.errors import UsageError
from sightline.recipe.recipe import Recipe
from sightline.train.schedules import RunLength


def epochs_of(stored: Mapping[str, Any]) -> int:
    """Return the epochs of a recipe out of a checkpoint; 0 if it does not say."""
    train = stored.get("train")
    epochs = train.get("epochs") if isinstance(train, Mapping) else None
    return epochs if isinstance(epochs, int) else 0


def without_growth(changes: Sequence[str], stored: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Return changes of a recipe without the line about epochs, where there are more of them now."""
    grows = 0 < epochs_of(stored) < recipe.train.epochs
    return [change for change in changes if not (grows and change.startswith("train.epochs:"))]


def refuse_fewer(path: Path, progress: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise UsageError where more epochs are done than the recipe has."""
    done, epochs = progress.get("epoch", 0), recipe.train.epochs
    if done > epochs:
        raise UsageError(
            f"train.epochs={epochs}, but {done} are done in {path}; give --train.epochs {done} or more, or choose "
            f"another --run.out to train {epochs}"
        )


def notes(recipe: Recipe, progress: TrainProgress, before: int, length: RunLength, over: str) -> list[str]:
    """Return a line for the user if the run is now longer than `before` epochs. Raise UsageError where it is over for
    another reason, so that more epochs would change nothing."""
    if not 0 < before < length.epochs:
        return []
    if over:
        raise UsageError(
            f"train.epochs={length.epochs} instead of {before} does not continue this run: {over}. Change that too "
            f"(--train.patience, --train.target-score, --train.max-steps), or choose another --run.out"
        )
    rates = ""
    if progress.base_lr is not None:
        watched = progress.watched(recipe.schedule)
        then, now = (
            recipe.schedule.rate(step, progress.base_lr, replace(length, epochs=epochs), watched)
            for step, epochs in ((max(0, progress.step - 1), before), (progress.step, length.epochs))
        )
        rates = f": the last rate was {then:.3g}, the next is {now:.3g}"
    return [f"{length.epochs} epochs instead of {before}; the schedule is recomputed for them{rates}"]
