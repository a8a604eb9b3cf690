"""Whether a run is over, and whether it may be trained on. Functions of progress, so that a restart decides alike."""

from __future__ import annotations

from sightline.engine.progress import TrainProgress
from sightline.errors import Diverged
from sightline.recipe.recipe import Recipe
from sightline.train.schedules import RunLength


def why_over(recipe: Recipe, progress: TrainProgress, epochs_done: int, length: RunLength) -> str:
    """Return why the run is over, "" while it is not. A function of progress, so that a restart decides alike."""
    cfg, headline = recipe.train, recipe.task.headline
    score = progress.scores.get(headline)
    if cfg.target_score and score is not None and score >= cfg.target_score:
        return f"{headline} {score:.4f} has reached the target {cfg.target_score:g} at step {progress.scored_step}"
    if epochs_done >= cfg.epochs:
        return f"{epochs_done} epochs are done" if epochs_done > 1 else "1 epoch is done"
    waited = progress.evaluations_since_best()
    if cfg.patience and waited >= cfg.patience and epochs_done >= cfg.min_epochs:
        best = f"{headline} that is a number"
        if progress.best_score is not None:
            best = f"better {headline} than {progress.best_score:.4f} at step {progress.best_step}"
        return f"{waited} evaluations brought no {best} (train.patience={cfg.patience})"
    epochs, steps_left = divmod(progress.step, length.steps_per_epoch)
    is_due = cfg.eval_at_end or (not steps_left and cfg.evaluates_after(epochs))  # a stop may have come before it
    is_done = progress.scored_step == progress.step or not is_due
    is_past = progress.step > cfg.max_steps or (progress.step == cfg.max_steps and is_done)
    return f"train.max_steps={cfg.max_steps} steps are done" if cfg.max_steps and is_past else ""


def refuse_diverged(recipe: Recipe, progress: TrainProgress) -> None:
    """Raise Diverged where the last score is not above train.diverged_score."""
    cfg, headline = recipe.train, recipe.task.headline
    score = progress.scores.get(headline)
    if cfg.diverged_score and score is not None and not score > cfg.diverged_score:
        raise Diverged(
            f"diverged: {headline} {score:.4f} at step {progress.scored_step} is not above "
            f"train.diverged_score={cfg.diverged_score:g}. Start again with another --run.out and a lower "
            f"--optimizer.lr or a longer warm-up; to continue all the same, add --train.diverged-score 0"
        )
