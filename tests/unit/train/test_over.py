"""When a run is over, and when it counts as diverged: the borders of each rule, and which rule comes first."""

from dataclasses import replace

import pytest

from sightline import recipes
from sightline.engine.progress import TrainProgress
from sightline.errors import Diverged
from sightline.recipe.recipe import Recipe
from sightline.train.over import refuse_diverged, why_over
from sightline.train.schedules import RunLength

LENGTH = RunLength(epochs=10, steps_per_epoch=4)


def recipe(**fields: object) -> Recipe:
    """A recipe whose headline is top1, without any rule but the epochs."""
    made = recipes.find("demo_classification").recipe()
    plain = {"epochs": 10, "target_score": 0.0, "patience": 0, "min_epochs": 0, "max_steps": 0, "diverged_score": 0.0}
    return replace(made, train=replace(made.train, **{**plain, "eval_every_epochs": 1, **fields}))


def over(epochs_done: int, progress: TrainProgress, **fields: object) -> str:
    return why_over(recipe(**fields), progress, epochs_done, LENGTH)


@pytest.mark.parametrize(
    ("epochs", "done", "why"), [(10, 9, ""), (10, 10, "10 epochs are done"), (10, 11, "11 epochs are done"),
                                (1, 1, "1 epoch is done")],
)  # fmt: skip
def test_the_epochs(epochs: int, done: int, why: str):
    assert over(done, TrainProgress(step=4 * done), epochs=epochs) == why


@pytest.mark.parametrize(
    ("score", "target", "is_over"),
    [(0.75, 0.75, True), (0.74, 0.75, False), (0.9, 0.75, True), (0.9, 0.0, False), (None, 0.75, False)],
)
def test_the_target(score: float | None, target: float, is_over: bool):
    """It comes before the end of the epochs, which a score without a target leaves alone."""
    progress = TrainProgress(step=40, scored_step=36, scores={} if score is None else {"top1": score})
    said = f"top1 {score:.4f} has reached the target 0.75 at step 36" if is_over else ""
    assert over(5, progress, target_score=target) == said
    assert over(10, progress, target_score=target) == said or "10 epochs are done"


def with_history(*history: float) -> TrainProgress:
    """Progress after these scores, one for each epoch."""
    progress = TrainProgress()
    for epoch, score in enumerate(history, 1):
        progress.step, progress.epoch = 4 * epoch, epoch
        progress.note({"top1": score}, "top1", planned=True)
    return progress


@pytest.mark.parametrize(
    ("history", "patience", "least", "why"),
    [
        ((0.5, 0.4, 0.4), 2, 0, "2 evaluations brought no better top1 than 0.5000 at step 4 (train.patience=2)"),
        ((0.5, 0.4, 0.4), 2, 3, "2 evaluations brought no better top1 than 0.5000 at step 4 (train.patience=2)"),
        ((0.5, 0.4, 0.4), 2, 4, ""),
        ((0.5, 0.4, 0.4), 3, 0, ""),
        ((0.5, 0.4, 0.4), 0, 0, ""),
        ((0.5, 0.4, 0.6), 1, 0, ""),
        ((float("nan"),) * 3, 3, 0, "3 evaluations brought no top1 that is a number (train.patience=3)"),
    ],
)
def test_the_patience(history: tuple, patience: int, least: int, why: str):
    assert over(len(history), with_history(*history), patience=patience, min_epochs=least) == why


@pytest.mark.parametrize(
    ("step", "scored", "fields", "is_over"),
    [
        (5, -1, {}, False),  # of 6
        (6, 6, {}, True),
        (6, 4, {}, False),  # an evaluation at the end is due
        (7, 4, {}, True),  # it was stopped before that evaluation, and trained on
        (6, 4, {"eval_at_end": False}, True),  # in the middle of an epoch
        (8, 4, {"eval_at_end": False, "max_steps": 8}, False),  # at the end of one that is evaluated
        (8, 8, {"eval_at_end": False, "max_steps": 8}, True),
        (8, 4, {"eval_at_end": False, "max_steps": 8, "eval_every_epochs": 3}, True),
        (600, 600, {"max_steps": 0}, False),
    ],
)
def test_the_steps(step: int, scored: int, fields: dict, is_over: bool):
    most = fields.get("max_steps", 6)
    progress = TrainProgress(step=step, scored_step=scored)
    assert over(1, progress, **{"max_steps": 6, **fields}) == f"train.max_steps={most} steps are done" * is_over


@pytest.mark.parametrize(
    ("score", "least", "is_refused"),
    [(0.1, 0.1, True), (0.11, 0.1, False), (0.05, 0.1, True), (float("nan"), 0.1, True), (0.0, 0.0, False),
     (None, 0.1, False)],
)  # fmt: skip
def test_a_score_that_is_not_above_the_least_is_divergence(score: float | None, least: float, is_refused: bool):
    progress = TrainProgress(step=8, scored_step=4, scores={} if score is None else {"top1": score})
    if not is_refused:
        refuse_diverged(recipe(diverged_score=least), progress)
        return
    with pytest.raises(Diverged, match=f"diverged: top1 {score:.4f} at step 4 is not above train.diverged_score=0.1. "):
        refuse_diverged(recipe(diverged_score=least), progress)
