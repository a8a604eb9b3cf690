"""Run a trained network over files that are not a split of its data, and over images in memory.

One loop feeds a sink, which works behind it: `predict_files` writes, for the command line, and `predict_inputs`
returns objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sightline import kernels
from sightline.data.inputs import Files, list_files
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import PADDING, EvalOrder
from sightline.engine import checkpoint
from sightline.engine.signals import StopSignals
from sightline.errors import BadData, DiskError, Interrupted, UsageError, first_of
from sightline.files.checkpoint_folder import run_of
from sightline.files.sizes import loads_here, pays_compiling
from sightline.hardware.affinity import cpu_share
from sightline.hardware.devices import Device
from sightline.hardware.world import World, local_size
from sightline.inference.behind import Behind, Sink
from sightline.inference.by_task import reporter as reporter_of
from sightline.inference.by_task import results
from sightline.inference.checkpoints import Trained
from sightline.inference.label_formats import refuse_format, refuse_names, write_labels
from sightline.inference.predictions import DOCUMENT, TABLE, ResultFolder
from sightline.inference.reporter import PredictJob
from sightline.inference.shares import Share, shared
from sightline.parts import Batch, Bound, Dataset, DataSpec, Prediction, PredictOptions, Task
from sightline.recipe.flags import Given
from sightline.recipe.recipe import Recipe, Run
from sightline.results import Drawable, Origin, Predictions
from sightline.runs.log import RunLog
from sightline.runs.screen import Screen

# Folders stand for the files in them; docs/start/python.md describes arrays.
Input = str | Path | np.ndarray | Image.Image
SHOWN = 10  # names in a message
LOADING_THREADS = 8
CHOICE = "or add --data.on-bad-sample skip"


class Engine(Protocol):
    """A network to predict with, and how it is fed: a checkpoint (`Trained`), or whatever answers like one."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def run(self) -> Run: ...
    @property
    def spec(self) -> DataSpec: ...
    @property
    def world(self) -> World: ...
    @property
    def device(self) -> Device: ...
    def build(self) -> nn.Module:
        """Return a module that answers as the task expects of its network."""

    def showing(self, options: PredictOptions) -> Task:
        """Return the task whose predictions keep all that these options ask to see."""

    def predict(self, task: Task, model: nn.Module, bound: Bound, loaded: Batch) -> tuple[Mapping[str, Tensor], Batch]:
        """Return the predictions for a batch of the loader, and the batch as the network was fed."""

    def about(self) -> dict[str, Any]:
        """Say where the network comes from, for predictions.json."""


def open_trained(run_folder: Path, which: str, recipe_file: str, command: str, *given: Given) -> Trained:
    """Load the checkpoint of a run that `which` names, in one process; with "" as the command in any number."""
    trained = Trained.set_up(*checkpoint.read_of_run(run_folder, which), recipe_file, *given)
    if command and (ranks := trained.world.size) > 1:
        raise UsageError(
            f"{command} runs in one process and was started in {ranks}; leave --run.devices and the launcher out"
        )
    return trained


def predict_files(engine: Engine, files: Mapping[str, Path], folder: Path, options: PredictOptions) -> dict[str, Any]:
    """Write everything that the task's reporter makes of these files; return what predictions.json holds.

    Files that cannot be read are listed in it; they are an error at the end unless data.on_bad_sample is skip, and
    always if no file could be read. Several ranks share the files; rank 0 writes the table of all, and raises. One rank
    that is stopped, or meets a full disk, still writes the tables of what it has predicted.
    """
    if options.form:
        refuse_format(options.form, engine.recipe.task)
        refuse_names(options.form, files, engine.spec.classes)
    dataset = _open(engine, files)
    task = engine.showing(options)
    rank = engine.world.rank
    log = RunLog(folder, Screen(engine.run.progress, rank), rank, attempt=None)
    with contextlib.ExitStack() as stack:
        stack.callback(log.release)
        share = Share(engine.world, engine.run.timeout_s, log.say)
        reporter = share.checked(reporter_of(task, PredictJob(folder, files, engine.spec, options, share.say)))
        model = engine.build().eval()

        def watch(at: int, total: int) -> None:
            share.beat(at)
            log.evaluating(at, total, at, total)

        if isinstance(engine, Trained) and (doubt := engine.doubt()):
            log.warn(doubt)
        about = engine.about()
        about = {"recipe": about.pop("recipe"), "model": type(model).__name__, **about}
        tables = f"{folder / DOCUMENT} and {TABLE} list them"
        try:
            _predict(engine, task, model, dataset, files, reporter, watch, share.begin)
        except (Interrupted, DiskError):
            if engine.world.size == 1 and isinstance(reporter, ResultFolder) and reporter.found()["rows"]:
                done = len(reporter.write(about)["files"])
                log.say(f"stopped after {done} of {len(files)} files; {tables}")
            raise
        share.merge(reporter)
        document = reporter.write(about)
        written = write_labels(options.form, document, folder, engine.spec) if options.form and rank == 0 else ""
        engine.world.barrier()  # no rank returns before the table is written
        log.say(f"{len(document['files'])} of {len(files)} files predicted; {tables}")
        if written:
            log.say(f"{folder / written} can be imported as annotations ({options.form})")
        skips = engine.recipe.data.on_bad_sample == "skip"
        if document["unreadable"] and skips:
            log.say(f"skipped: {_told(document['unreadable'], files, folder)}")
    if not engine.world.is_main:
        return document
    if not document["files"]:
        raise BadData(
            f"none of the {len(files)} files could be predicted (they are listed above and in {folder / DOCUMENT}); "
            "give files that can be read"
        )
    if document["unreadable"] and not skips:
        raise BadData(f"{_told(document['unreadable'], files, folder)}; fix or remove them, {CHOICE}")
    return document


def _told(unreadable: Sequence[Mapping[str, str]], files: Mapping[str, Path], folder: Path) -> str:
    """Name files that cannot be read, at the end, where nobody has to search for them."""
    names = [each["file"] for each in unreadable]
    listed = first_of(names, SHOWN)
    return f"{len(names)} of {len(files)} files cannot be read: {listed} ({folder / DOCUMENT} has the reasons)"


def predict_inputs(engine: Engine, inputs: Input | Sequence[Input], options: PredictOptions) -> Predictions:
    """Return what was found in each input, in the order given; write nothing. What cannot be read is an error, or left
    out where data.on_bad_sample is skip."""
    is_one = isinstance(inputs, Input) or not isinstance(inputs, Iterable)
    given: list[Any] = [inputs] if is_one else list(inputs)  # type: ignore[arg-type]  # mypy does not follow is_one
    files: dict[str, Path | np.ndarray | Image.Image] = {}
    order: list[str] = []
    for number, each in enumerate(given):
        named = _named(engine, each, number)
        files |= named
        order += named
    paths = {name: each for name, each in files.items() if isinstance(each, Path)}
    further = paths.keys() - engine.recipe.data.first_files(paths, engine.spec).keys()
    found = predict_objects(engine, {name: each for name, each in files.items() if name not in further}, options)
    return Predictions((found[name] for name in order if name in found), given)


def _named(engine: Engine, given: Any, number: int) -> dict[str, Path | np.ndarray | Image.Image]:
    """Return the files or the image of one input, by the names that results carry."""
    if isinstance(given, np.ndarray | Image.Image):
        return {f"inputs[{number}]": given}
    if not isinstance(given, str | os.PathLike):
        raise UsageError(f"inputs[{number}] is a {type(given).__name__}; give paths, PIL images or NumPy arrays")
    path = Path(given)
    made_by_us = run_of(Path(engine.about()["checkpoint"]))
    files = list_files([path], engine.recipe.data.file_suffixes, made_by_us, lambda _: None)
    return {str(path / name) if path.is_dir() else str(given): file for name, file in files.items()}


def predict_objects(engine: Engine, files: Files, options: PredictOptions) -> dict[str, Prediction]:
    """Return what was found in each file and image, by name."""
    if not files:
        return {}
    dataset = _open(engine, files)
    task = engine.showing(options)
    found = _Objects(task, engine.spec, options)
    model = engine.build()
    was_training = model.training
    try:
        _predict(engine, task, model.eval(), dataset, files, found)
    finally:
        model.train(was_training)  # it may be the user's own
    if found.unreadable and engine.recipe.data.on_bad_sample == "fail":
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(found.unreadable.items())[:3])
        raise BadData(
            f"{len(found.unreadable)} of {len(files)} inputs cannot be read ({listed}); leave them out, {CHOICE}"
        )
    return {
        name: _with_origin(found.by_name[name], given, engine.spec)
        for name, given in files.items()
        if name in found.by_name
    }


def _with_origin(found: Prediction, given: Path | np.ndarray | Image.Image, spec: DataSpec) -> Prediction:
    return dataclasses.replace(found, origin=Origin(given, spec)) if isinstance(found, Drawable) else found


class _Objects:
    """A sink that keeps objects."""

    def __init__(self, task: Task, spec: DataSpec, options: PredictOptions):
        self.by_name: dict[str, Prediction] = {}
        self.unreadable: dict[str, str] = {}
        self._read = lambda names, outputs, batch: results(task, names, outputs, batch, spec, options)

    def add(self, names: Sequence[str | None], predictions: Mapping[str, Tensor], batch: Batch) -> None:
        self.by_name |= {each.file: each for each in self._read(names, predictions, batch)}

    def note_unreadable(self, name: str, reason: str) -> None:
        self.unreadable[name] = reason


def _open(engine: Engine, files: Files) -> Dataset:
    dataset = engine.recipe.data.open_files(files, engine.spec)
    if dataset.spec != engine.spec:
        raise UsageError(
            f"flags must not change what the network is fed: it knows {engine.spec}, they ask for {dataset.spec}"
        )
    return dataset


def _predict(
    engine: Engine,
    task: Task,
    model: nn.Module,
    dataset: Dataset,
    files: Files,
    sink: Sink,
    on_batch: Callable[[int, int], None] = lambda at, total: None,
    on_lines: Callable[[int], None] = lambda at: None,
) -> None:
    """Run the network over a dataset of `files`; stop signals are obeyed between batches. `on_batch` is called before
    the network gets a batch, `on_lines` before the sink gets what belongs to it. How many bytes the files have decides
    what is started for them: processes, and kernels that are compiled first."""
    run = engine.run
    if run.workers < 0 and loads_here(files.values()):
        run = dataclasses.replace(run, workers=0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(kernels.only_uncompiled(not pays_compiling(files.values())))
        alone = dataclasses.replace(engine.world, size=1)  # a rank waits for no other between batches
        signals = stack.enter_context(StopSignals(alone, saves=False))
        bound = dataset.bind(engine.device, engine.recipe.train.global_batch)
        behind = stack.enter_context(Behind(sink, engine.device))
        loader = _open_loader(engine, run, bound, behind, signals)
        stack.callback(loader.close)

        def between_batches(done: int, total: int) -> None:
            signals.check()
            on_batch(done, total)
            behind.call(partial(on_lines, done))

        _predict_all(engine, task, model, bound, loader, behind, between_batches)


@torch.inference_mode()
def _predict_all(
    engine: Engine,
    task: Task,
    model: nn.Module,
    bound: Bound,
    loader: Loader,
    behind: Behind,
    on_batch: Callable[[int, int], None],
) -> None:
    total = loader.feeds["files"].order.steps_per_epoch
    loader.seek("files", 0, total)
    for number in range(total):
        on_batch(number, total)
        loaded = loader.next("files")
        if not engine.device.has_streams:  # it is a slot of the loader, which fills it again
            loaded = {key: value.clone() for key, value in loaded.items()}
        names = _names(loaded, bound.dataset)
        if not any(names):
            continue
        predictions, batch = engine.predict(task, model, bound, loaded)
        behind.add(names, predictions, batch)


def _open_loader(engine: Engine, run: Run, bound: Bound, behind: Behind, signals: StopSignals) -> Loader:
    count = len(bound.dataset)
    order = shared(EvalOrder(count, min(count, engine.recipe.train.global_batch, bound.dataset.predict_batch)), engine)
    # One bad file does not keep the others from being predicted; data.on_bad_sample is obeyed at the end.
    bad_samples = BadSamples("skip", count, lambda bad: behind.note_unreadable(bad.name, bad.reason))
    feeds = {"files": (bound, order)}
    threads = min(LOADING_THREADS, cpu_share(local_size(engine.world)))  # where this process loads
    return Loader(feeds, run, engine.device, engine.world, bad_samples, signals.check, threads=threads)


def _names(batch: Batch, dataset: Dataset) -> list[str | None]:
    """Return the file of each row; None for padding and unreadable files."""
    rows = zip(batch["index"].tolist(), batch["valid"].tolist(), strict=True)
    return [dataset.name(index) if index != PADDING and is_valid else None for index, is_valid in rows]
