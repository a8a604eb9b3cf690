"""For Python users, and what the command line calls: load a recipe, train it, evaluate a run, predict with it.

`api.train(*api.load("demo_classification", ["--data.path", DIR]))`, in a script under `if __name__ == "__main__":`,
because loader workers import the script again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sightline import config
from sightline.benchmark_log import BenchmarkLog
from sightline.config import Recipe, Run, load
from sightline.data.files import list_files
from sightline.data.loader import Loader, worker_count
from sightline.data.order import PADDING, EvalOrder
from sightline.errors import BadData, OutOfMemory, SightlineError, UsageError
from sightline.evaluate import checkpoints, folds
from sightline.hardware import world
from sightline.hardware.precision import DTYPES, autocast
from sightline.hardware.setup import set_up
from sightline.log import RunLog
from sightline.parts import DataSpec, Scores
from sightline.report.predictions import DOCUMENT, Predictions
from sightline.train import checkpoint, loop
from sightline.train.signals import StopSignals

__all__ = ["evaluate", "evaluate_all", "load", "predict", "train", "train_folds"]

PREDICT_BATCH = 64  # most pictures at once: a training batch may be too much for the machine that predicts


def train(recipe: Recipe, run: Run) -> Scores:
    """Trains on this process's device, together with the other ranks if a launcher started several."""
    here, device, recipe = set_up(recipe, run)
    folder = Path(run.out or f"runs/{recipe.name}")
    log = RunLog(folder, run.progress, here.is_main, tensorboard=run.tensorboard)
    code, reason = 1, "crashed"
    try:
        if run.benchmark_log and here.is_main:  # now that the folder is ours
            log.feed(BenchmarkLog(Path(run.benchmark_log), recipe.name, config.leaves(recipe, run), run.test_id))
        here = world.connect(here, device)
        scores = loop.train(recipe, run, device, here, log)
        log.hyperparameters(config.leaves(recipe, run), scores.values)
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
        raise
    finally:
        log.close(code, reason)
        here.close()


def train_folds(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Trains every fold of the data into fold-0, fold-1 and so on below the run folder, each an ordinary run that goes
    on where it stands, and brings their best scores together; returns what folds.json there holds."""
    data: Any = recipe.data
    if not (hasattr(data, "fold") and hasattr(data, "folds")):
        raise UsageError(f"--data.fold all: {type(data).__name__} of {recipe.name} has no folds; leave it out")
    if run.resume not in ("auto", "never"):
        raise UsageError(f"--run.resume {run.resume} cannot be where all folds begin; leave it or --data.fold all out")
    folder = Path(run.out or f"runs/{recipe.name}")
    log = RunLog(folder, run.progress, world.detect().is_main, claims=False)
    rows = []
    for fold in range(data.folds):
        name = f"fold-{fold}"
        log.say(f"fold {fold}, {fold + 1} of {data.folds}: {folder / name}")
        benchmark_log = run.benchmark_log and str(Path(run.benchmark_log) / name)
        one = dataclasses.replace(recipe, data=dataclasses.replace(data, fold=fold))
        train(one, dataclasses.replace(run, out=str(folder / name), benchmark_log=benchmark_log))
        rows.append(folds.read_fold(folder / name, fold, recipe.task.headline))
        gc.collect()  # captured graphs and the last network hold memory that the next one needs
        torch.compiler.reset()  # else the next network counts as one recompilation too many of the last
    document = folds.summary(recipe.name, recipe.task.headline, rows)
    log.write_json(folds.DOCUMENT, document)
    return document


def evaluate(run_folder: str, flags: list[str], which: str = "best", recipe_file: str = "") -> Scores:
    """Scores of a checkpoint on its recipe's val split; flags may change data.path and run fields."""
    path = checkpoint.find(Path(run_folder), which)
    tensors, stored = checkpoint.read(path)
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    with checkpoints.opened(path, stored, flags, recipe_file, folder) as evaluation:
        return evaluation.score(path, tensors, stored)


def evaluate_all(run_folder: str, flags: list[str], recipe_file: str = "") -> list[dict[str, Any]]:
    """Scores of every checkpoint of a run, by step; they stand in its evaluation.json."""
    return checkpoints.evaluate_all(Path(run_folder), flags, recipe_file)


def predict(
    run_folder: str,
    inputs: Sequence[str],
    out: str,
    flags: Sequence[str] = (),
    which: str = "best",
    recipe_file: str = "",
    *,
    top: int | None = None,
    threshold: float | None = None,
    draws: bool = True,
) -> dict[str, Any]:
    """What a run says of pictures, or of all in folders: writes predictions.json and drawn pictures into `out`.

    Returns what predictions.json holds. Files that cannot be read are listed in it; they are an error at the end unless
    data.on_bad_sample is skip.
    """
    path = checkpoint.find(Path(run_folder), which)
    tensors, stored = checkpoint.read(path)
    recipe, run = config.from_json(stored["recipe"], recipe_file, flags)
    here, device, recipe = set_up(recipe, run)
    if here.size > 1:
        raise UsageError(f"predict runs in one process and was started in {here.size}; start it without a launcher")
    spec = DataSpec.from_json(stored["spec"])
    files = list_files([Path(each) for each in inputs], recipe.data.file_suffixes, Path(out))
    names = list(files)
    dataset = recipe.data.open_files(files, spec)
    if dataset.spec != spec:
        raise UsageError(f"flags must not change what the network is fed: it knows {spec}, they ask for {dataset.spec}")
    log = RunLog(Path(out), run.progress, claims=False)
    report = Predictions(Path(out), files, draws, log.say)
    model = checkpoints.build(recipe, run, spec, device)
    checkpoints.load_weights(model, tensors)
    model.eval()
    order = EvalOrder(len(files), min(len(files), recipe.train.global_batch, PREDICT_BATCH))
    # One bad picture among many is no reason to keep the others back; what the user wants of it is asked at the end.
    lenient: Any = dataclasses.replace(  # type: ignore[type-var]
        recipe.data, on_bad_sample="skip", max_bad_samples=len(files)
    )
    with contextlib.ExitStack() as stack:
        stack.callback(log.release)
        signals = stack.enter_context(StopSignals(here))
        loader = Loader(
            {"files": dataset},
            {"files": order},
            lenient,
            device,
            workers=min(worker_count(run.workers, device, here), len(files)),
            prefetch=run.prefetch,
            overlap=run.device_prefetch,
            on_bad=lambda bad: report.note_unreadable(bad.name, bad.reason),
            check_stop=signals.check,
        )
        stack.callback(loader.close)
        stack.enter_context(torch.inference_mode())
        loader.seek("files", 0, order.steps_per_epoch)
        for number in range(order.steps_per_epoch):
            signals.check()
            log.evaluating(number, order.steps_per_epoch, number, order.steps_per_epoch)
            batch = dataset.finish(loader.next("files"), DTYPES[recipe.train.eval_precision])
            with autocast(device, recipe.train.eval_precision):
                predictions = recipe.task.predict(model, batch)
            found = recipe.task.findings(predictions, spec, top, threshold)
            for index, is_valid, findings in zip(batch["index"].tolist(), batch["valid"].tolist(), found, strict=True):
                if index != PADDING and is_valid:
                    report.add(names[index], findings)
        about = {"recipe": recipe.name, "model": type(model).__name__, "checkpoint": str(path)}
        document = report.write({**about, "step": stored["progress"]["step"]})
        log.say(f"{len(document['files'])} of {len(files)} files predicted; {Path(out) / DOCUMENT} lists them")
    if report.unreadable and recipe.data.on_bad_sample == "fail":
        raise BadData(
            f"{len(report.unreadable)} of {len(files)} files cannot be read (they are listed above and in "
            f"{Path(out) / DOCUMENT}); mend or remove them, or add --data.on-bad-sample skip"
        )
    return document
