"""Run a trained network over files that are not a split of its data, for `predict` and `evaluate --labels`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import PADDING, EvalOrder
from sightline.errors import BadData, UsageError
from sightline.evaluate.checkpoints import Trained
from sightline.parts import Batch, Bound, PredictJob, PredictOptions, Reporter, Task
from sightline.report.predictions import DOCUMENT, TABLE
from sightline.runs.log import RunLog
from sightline.runs.screen import Screen
from sightline.train import checkpoint
from sightline.train.signals import StopSignals


def open_trained(run_folder: Path, which: str, flags: Sequence[str], recipe_file: str, command: str) -> Trained:
    """Load the checkpoint of a run that `which` names, in one process."""
    path = checkpoint.find(run_folder, which)
    trained = Trained.set_up(path, *checkpoint.read(path), recipe_file, flags)
    if (ranks := trained.world.size) > 1:
        raise UsageError(f"{command} runs in one process and was started in {ranks}; start it without a launcher")
    return trained


def predict_files(trained: Trained, files: Mapping[str, Path], folder: Path, options: PredictOptions) -> dict[str, Any]:
    """Write everything that the task's reporter makes of these files; return what predictions.json holds.

    Files that cannot be read are listed in it; they are an error at the end unless data.on_bad_sample is skip, and
    always if no file could be read.
    """
    recipe, spec = trained.recipe, trained.spec
    dataset = recipe.data.open_files(files, spec)
    if dataset.spec != spec:
        raise UsageError(f"flags must not change what the network is fed: it knows {spec}, they ask for {dataset.spec}")
    task = trained.showing(options)
    log = RunLog(folder, Screen(trained.run.progress), attempt=None)
    with contextlib.ExitStack() as stack:
        stack.callback(log.release)
        reporter = task.reporter(PredictJob(folder, files, spec, options, log.say))
        model = trained.build().eval()
        signals = stack.enter_context(StopSignals(trained.world, saves=False))
        bound = dataset.bind(trained.device, recipe.train.global_batch)
        loader = _open_loader(trained, bound, reporter, signals)
        stack.callback(loader.close)

        def between_batches(done: int, total: int) -> None:
            signals.check()
            log.evaluating(done, total, done, total)

        _predict_all(trained, task, model, bound, list(files), loader, reporter, between_batches)
        kind = trained.stored.get("model", type(model).__name__)  # an exported file names its network
        about = {"recipe": recipe.name, "model": kind, "checkpoint": str(trained.path)}
        document = reporter.write({**about, "step": trained.stored["progress"]["step"]})
        log.say(f"{len(document['files'])} of {len(files)} files predicted; {folder / DOCUMENT} and {TABLE} list them")
    if not document["files"]:
        raise BadData(
            f"none of the {len(files)} files could be predicted (they are listed above and in {folder / DOCUMENT}); "
            "give files that can be read"
        )
    if reporter.unreadable and recipe.data.on_bad_sample == "fail":
        raise BadData(
            f"{len(reporter.unreadable)} of {len(files)} files cannot be read (they are listed above and in "
            f"{folder / DOCUMENT}); fix or remove them, or add --data.on-bad-sample skip"
        )
    return document


@torch.inference_mode()
def _predict_all(
    trained: Trained,
    task: Task,
    model: torch.nn.Module,
    bound: Bound,
    names: Sequence[str],
    loader: Loader,
    reporter: Reporter,
    on_batch: Callable[[int, int], None],
) -> None:
    total = loader.feeds["files"].order.steps_per_epoch
    loader.seek("files", 0, total)
    for number in range(total):
        on_batch(number, total)
        loaded = loader.next("files")
        names_here = _names(loaded, names)
        if not any(names_here):
            continue
        predictions, batch = trained.predict(task, model, bound, loaded)
        reporter.add(names_here, predictions, batch)


def _open_loader(trained: Trained, bound: Bound, reporter: Reporter, signals: StopSignals) -> Loader:
    count = len(bound.dataset)
    order = EvalOrder(count, min(count, trained.recipe.train.global_batch, bound.dataset.predict_batch))
    # One bad file does not keep the others from being predicted; data.on_bad_sample is obeyed at the end.
    bad_samples = BadSamples("skip", count, lambda bad: reporter.note_unreadable(bad.name, bad.reason))
    return Loader({"files": (bound, order)}, trained.run, trained.device, trained.world, bad_samples, signals.check)


def _names(batch: Batch, names: Sequence[str]) -> list[str | None]:
    """Return the file of each row; None for padding and unreadable files."""
    rows = zip(batch["index"].tolist(), batch["valid"].tolist(), strict=True)
    return [names[index] if index != PADDING and is_valid else None for index, is_valid in rows]
