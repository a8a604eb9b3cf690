"""The API for Python users and for the command line: load a recipe, train it, evaluate a run, predict with it.

`api.train(*api.load("demo_classification", ["--data.path", DIR]))`, in a script under `if __name__ == "__main__":`,
because loader workers import the script again.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sightline import config, terminal
from sightline.config import Recipe, Run, load
from sightline.data.inputs import list_files
from sightline.errors import OutOfMemory, PeerLost, SightlineError, UsageError
from sightline.evaluate import checkpoints, folds, label_files
from sightline.evaluate.checkpoints import Trained
from sightline.evaluate.given_weights import evaluate_weights
from sightline.evaluate.predict import open_trained, predict_files
from sightline.export.exported import open_exported
from sightline.files.checkpoint_folder import run_of
from sightline.hardware import world
from sightline.hardware.setup import set_up
from sightline.hardware.watchdog import Watchdog
from sightline.parts import PredictOptions, Scores
from sightline.runs import attempts
from sightline.runs.benchmark_log import BenchmarkLog
from sightline.runs.log import RunLog
from sightline.runs.screen import Screen
from sightline.train import checkpoint, loop, start
from sightline.train.signals import ignore_stops

__all__ = [
    "evaluate",
    "evaluate_all",
    "evaluate_labels",
    "evaluate_weights",
    "load",
    "predict",
    "train",
    "train_folds",
]


def train(recipe: Recipe, run: Run) -> Scores:
    """Train on this process's device, together with the other ranks if a launcher started several."""
    folder = Path(run.out or f"runs/{recipe.name}")
    recipe, run = config.at_absolute_paths(recipe, run)  # `folder` is shown as it was typed
    attempt = attempts.detect()
    attempt.obey(folder)
    here, device, _ = set_up(recipe, run)
    log = RunLog(folder, Screen(run.progress, here.rank, run.rank_output), here.rank, attempt)
    if run.tensorboard and here.is_main:
        log.events.open_board()
    code, reason = 1, "crashed"
    watchdog: Watchdog | None = None

    def on_lost(message: str, speaks_for_all: bool) -> None:
        if speaks_for_all:
            terminal.say(f"error: {message}", "stderr")
        log.tell_exit(PeerLost.exit_code, message, speaks_for_all)  # the process ends now

    try:
        here = world.connect(here, device)
        if here.is_main and (place := world.meeting_place(here)):
            log.say(place)
        watchdog = Watchdog(here, run.timeout_s, log.events.dump_stacks, on_lost, str(folder / "rank_*.log"))
        here = dataclasses.replace(here, beat=watchdog.beat)
        with watchdog:
            recipe = start.settle(recipe, run, device, here, log)
            if run.benchmark_log and here.is_main:
                values = config.leaves(recipe, run)
                log.events.feed(BenchmarkLog(Path(run.benchmark_log), recipe.name, values, run.test_id))
            scores = loop.train(recipe, run, device, here, log)
        log.events.hyperparameters(config.leaves(recipe, run), scores.values)
        code, reason = 0, "finished"
        return scores
    except torch.OutOfMemoryError as error:
        peak = device.peak_memory_bytes() / 1e9
        samples = recipe.train.global_batch // here.size // recipe.train.accumulation
        reason = (
            f"{device.name()} ran out of memory (peak {peak:.1f} GB) with {samples} samples at once per device; "
            f"cut them with --train.accumulation {recipe.train.accumulation * 2} --run.override ({error})"
        )
        code = OutOfMemory.exit_code
        raise OutOfMemory(reason) from error
    except SightlineError as error:
        code, reason = error.exit_code, str(error)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            code, reason = 128 + signal.SIGINT, "stopped by Ctrl-C before the first step"
        if not world.is_loss(error):
            raise
        ignore_stops()  # also where ranks have not met yet
        code, reason = PeerLost.exit_code, watchdog.explain(error) if watchdog else f"no rank could be met: {error}"
        raise PeerLost(reason) from error
    finally:
        log.close(code, reason)  # before other ranks hear of it: they leave what it writes alone
        if watchdog:
            watchdog.tell_end(code, reason)
        here.close(is_lost=code == PeerLost.exit_code)


def train_folds(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Train every fold of the data into fold-0, fold-1 and so on below the run folder, each an ordinary run that
    resumes, and combine their best scores; return what folds.json there holds."""
    data: Any = recipe.data
    if not (hasattr(data, "fold") and hasattr(data, "folds")):
        raise UsageError(f"--data.fold all: {type(data).__name__} of {recipe.name} has no folds; leave it out")
    if run.resume not in ("auto", "never"):
        raise UsageError(f"--run.resume {run.resume} cannot be combined with --data.fold all; leave one of them out")
    folder = Path(run.out or f"runs/{recipe.name}")
    rank = world.detect().rank
    log = RunLog(folder, Screen(run.progress, rank), rank, attempt=None)
    rows = []
    for fold in range(data.folds):
        name = f"fold-{fold}"
        log.say(f"fold {fold}, {fold + 1} of {data.folds}: {folder / name}")
        benchmark_log = run.benchmark_log and str(Path(run.benchmark_log) / name)
        recipe = start.with_batch_of(recipe, dataclasses.replace(run, out=str(folder / "fold-0")))
        one = dataclasses.replace(recipe, data=dataclasses.replace(data, fold=fold))
        train(one, dataclasses.replace(run, out=str(folder / name), benchmark_log=benchmark_log))
        rows.append(folds.read_fold(folder / name, fold, recipe.task.headline))
        gc.collect()  # captured graphs and the last network hold memory that the next one needs
        torch.compiler.reset()  # else the next network counts as one recompilation too many of the last
    document = folds.summary(recipe.name, recipe.task.headline, rows)
    log.folder.write_json(folds.DOCUMENT, document)
    return document


def evaluate(run_folder: str, flags: list[str], which: str = "best", recipe_file: str = "") -> Scores:
    """Score a checkpoint on its recipe's val split; flags may change data.path and run fields."""
    path = checkpoint.find(Path(run_folder), which)
    tensors, stored = checkpoint.read(path)
    with checkpoints.opened(Trained.set_up(path, tensors, stored, recipe_file, flags), run_of(path)) as evaluation:
        return evaluation.score(path, stored)


def evaluate_all(run_folder: str, flags: list[str], recipe_file: str = "") -> list[dict[str, Any]]:
    """Score every checkpoint of a run; return rows by step, as evaluation.json holds them."""
    return checkpoints.evaluate_all(Path(run_folder), flags, recipe_file)


def evaluate_labels(
    target: str, labels: str, flags: Sequence[str] = (), which: str = "best", recipe_file: str = ""
) -> Scores:
    """Compute Dice against label files, in their own geometry: of a folder of masks, or of a run's predictions for the
    raw files of its val split; those masks stay in predictions-CHECKPOINT of the run, or below run.out."""
    folder = Path(target)
    if folder.is_dir() and not (folder / "checkpoints").is_dir() and not (folder / checkpoint.MANIFEST).is_file():
        if flags:
            raise UsageError(
                f"{target} is not a run, so there is no recipe for {' '.join(flags)} to change; leave it out"
            )
        return label_files.evaluate_folder(folder, Path(labels))
    trained = open_trained(folder, which, flags, recipe_file, "evaluate --labels")
    out = Path(trained.run.out or run_of(trained.path)) / f"predictions-{trained.path.name}"
    return label_files.evaluate_run(trained, Path(labels), out)


def predict(
    run_folder: str,
    inputs: Sequence[str],
    out: str = "",
    flags: Sequence[str] = (),
    which: str = "best",
    recipe_file: str = "",
    *,
    top: int | None = None,
    threshold: float | None = None,
    draws: bool = True,
    probabilities: bool = False,
) -> dict[str, Any]:
    """Predict images or volumes, or all in folders, with a run or an exported file: write predictions.json,
    predictions.csv, masks of volumes and drawings into `out`; without it into `predictions` of the run, or the next of
    predictions-2, predictions-3, ... that does not exist yet.

    Return what predictions.json holds. Unreadable files are listed in it; they are an error at the end unless
    data.on_bad_sample is skip, and always if no file could be read.
    """
    if Path(run_folder).is_file():
        trained: Trained = open_exported(Path(run_folder), which, flags, recipe_file)
    else:
        trained = open_trained(Path(run_folder), which, flags, recipe_file, "predict")
    say = (lambda _: None) if trained.run.progress == "off" else terminal.say
    run = Path(trained.run.out or run_of(trained.path))
    folder = Path(out) if out else _free_folder(run)
    if folder.resolve() in {Path(each).resolve() for each in inputs}:
        raise UsageError(f"--out {folder} is also an input, and results would mix with it; give another folder")
    results = folder if out else run  # where drawings of earlier calls may lie
    data = trained.recipe.data
    files = list_files([Path(each) for each in inputs], data.file_suffixes, results, say)
    files = data.first_files(files, trained.spec)
    return predict_files(trained, files, folder, PredictOptions(top, threshold, draws, probabilities))


def _free_folder(run: Path) -> Path:
    """Return the first of predictions, predictions-2, ... below `run` that is not taken: results are never mixed."""
    names = itertools.chain(["predictions"], (f"predictions-{number}" for number in itertools.count(2)))
    return next(run / name for name in names if not os.path.lexists(run / name))
