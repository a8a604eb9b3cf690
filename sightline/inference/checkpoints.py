"""Load checkpoints to evaluate them: a network on its device, the scores of one, the scores of all of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sightline import config, kernels, plugins, terminal
from sightline.data.contents import Contents
from sightline.data.gpu import nvjpeg
from sightline.data.loading.cache import read_once
from sightline.data.loading.loader import BadSamples, Feeds, Loader
from sightline.engine import checkpoint
from sightline.engine.checkpoint import Tensors
from sightline.engine.evaluate import evaluate
from sightline.engine.model import build_model
from sightline.engine.orders import eval_order
from sightline.engine.setup import set_up
from sightline.engine.signals import StopSignals
from sightline.errors import BadCheckpoint, BadData, SightlineError, UsageError, first_of
from sightline.files.checkpoint_folder import run_of
from sightline.files.sizes import MANY_BYTES
from sightline.files.typed_json import read_json, typed
from sightline.hardware import devices, early_cuda, world
from sightline.hardware.devices import Device
from sightline.hardware.precision import DTYPES, autocast
from sightline.hardware.world import World
from sightline.parts import (
    Batch,
    Bound,
    DataConfig,
    Dataset,
    DataSpec,
    ModelConfig,
    PredictOptions,
    Scores,
    Split,
    Task,
)
from sightline.recipe import store
from sightline.recipe.flags import Given
from sightline.recipe.recipe import Recipe, Run
from sightline.runs.log import RunLog
from sightline.runs.screen import Screen

TABLE = "evaluation.json"
MAX_TABLE_BYTES = 2**22  # a row takes 500 bytes
SMALL_BYTES = 2**28  # what any network may take besides its weights: anchors, a first image
MAKERS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}
DRAWN = ("uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_")  # of nn.init
BUILD_ERRORS = (RuntimeError, ValueError, ArithmeticError, MemoryError)  # of numbers that cannot be sizes


class _Budget(TorchFunctionMode):
    """Refuse a new tensor, before it is allocated, where all of them would take more than these bytes."""

    def __init__(self, path: Path, most_bytes: int):
        super().__init__()
        self.path = path
        self.most_bytes = self.left = most_bytes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MAKERS:
            given = (kwargs or {}).get("size", args)
            sides = given[0] if given and isinstance(given[0], list | tuple) else given
            self.left -= 4 * math.prod(side for side in sides if isinstance(side, int))
            if self.left < 0:
                raise BadCheckpoint(
                    f"{self.path}: its recipe asks for a network of more than {self.most_bytes >> 20} MB, which its "
                    f"weights do not fill; it is damaged, take another"
                )
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Trained:
    """A checkpoint, its recipe as changed by flags, and the device it is to run on."""

    path: Path
    tensors: Tensors
    stored: dict[str, Any]
    recipe: Recipe
    run: Run
    spec: DataSpec
    world: World
    device: Device

    @classmethod
    def set_up(cls, path: Path, tensors: Tensors, stored: dict[str, Any], recipe_file: str, *given: Given) -> Self:
        """Read the recipe of a checkpoint that was loaded, and find this process's place and device."""
        recipe, run, spec = recipe_of(path, stored, recipe_file, *given)
        here, device, recipe = set_up(recipe, run)
        devices.follow_rules()
        early_cuda.load_libraries(device, recipe.train.eval_precision, trains=False)
        if device.kind == "cuda" and getattr(recipe.data, "decoder", "cpu") != "cpu":
            nvjpeg.begin(device.torch_device)
        recipe = dataclasses.replace(recipe, task=recipe.task.for_data(spec))
        return cls(path, tensors, stored, recipe, run, spec, here, device)

    def about(self) -> dict[str, Any]:
        """Say where the network comes from."""
        step = self.stored["progress"]["step"]
        return {"recipe": self.recipe.name, "checkpoint": str(self.path), "step": step}

    @property
    def packages(self) -> dict[str, str]:
        """Return the packages of the parts that were imported for the training."""
        return self.stored.get("environment", {}).get("plugins") or {}

    def doubt(self) -> str:
        """Say that nobody knows how good these weights are; "" where their run was evaluated before they were saved."""
        progress, epochs = self.stored.get("progress", {}), self.recipe.train.epochs  # none of an ensemble
        if progress.get("scored_step", 0) >= 0 or not progress.get("step"):
            return ""
        done = f"after {progress.get('epoch', 0)} of {epochs} epochs"
        return f"{self.path.name} was never evaluated: it was saved at step {progress['step']}, {done}"

    def build(self) -> nn.Module:
        """Build the network that the checkpoint describes, not much larger than its weights, and load these."""
        with contextlib.ExitStack() as within:
            within.enter_context(_sized_by(self.path, self.tensors))
            within.enter_context(_undrawn(self.recipe.model))
            model = build_model(self.recipe, self.run, self.spec, self.device, within=within.pop_all()).model
        load_weights(model, self.tensors)
        return model

    def showing(self, options: PredictOptions) -> Task:
        """Return the task whose `predict` keeps all that these options ask to see."""
        return self.recipe.task.build().showing(options)

    def predict(self, task: Task, model: nn.Module, bound: Bound, loaded: Batch) -> tuple[dict[str, Tensor], Batch]:
        """Return the predictions for a batch of the loader, and the batch as the network was fed."""
        precision = self.recipe.train.eval_precision
        batch = bound.finish(loaded, DTYPES[precision])
        with autocast(self.device, precision):
            return task.predict(model, batch), batch


@contextlib.contextmanager
def _sized_by(path: Path, tensors: Tensors) -> Iterator[None]:
    """Raise BadCheckpoint where a network cannot be built, or is much larger than the weights of its checkpoint."""
    bytes_of_weights = sum(tensor.nbytes for tensor in tensors[stem_of(tensors)].values())
    try:
        with _Budget(path, 4 * bytes_of_weights + SMALL_BYTES), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # of a spec without classes
            yield
    except BUILD_ERRORS as error:
        raise BadCheckpoint(f"{path}: no network can be built as its recipe says ({error}); take another") from error


@contextlib.contextmanager
def _undrawn(config: ModelConfig) -> Iterator[None]:
    """Leave the weights of our own networks as memory had them: those of a checkpoint replace all of them, and to draw
    those of an SSD takes seconds. In commands only: another thread of a script may build a network meanwhile."""
    if not (terminal.is_command() and type(config).__module__.startswith("sightline.")):
        yield
        return
    before = {name: getattr(nn.init, name) for name in DRAWN}
    try:
        for name in DRAWN:
            setattr(nn.init, name, lambda tensor, *given, **more: tensor)
        yield
    finally:
        for name, function in before.items():
            setattr(nn.init, name, function)


def stem_of(tensors: Tensors) -> str:
    """Name the average where the checkpoint has one: it is evaluated, called best, and shown."""
    return "ema" if "ema" in tensors else "model"


def load_weights(model: nn.Module, tensors: Tensors) -> None:
    """Copy a checkpoint's weights; raise BadCheckpoint where they do not fit."""
    stem = stem_of(tensors)
    checkpoint.check_fit(stem, model.state_dict(), tensors[stem])
    model.load_state_dict(tensors[stem])


def recipe_of(path: Path, stored: dict[str, Any], recipe_file: str, *given: Given) -> tuple[Recipe, Run, DataSpec]:
    """Return what a checkpoint was made with, changed by flags; raise BadCheckpoint where it does not say."""
    try:
        checkpoint.require(stored, "progress", "recipe", "spec")
        origins = store.origins_of(stored.get(store.ORIGINS))
        settings = config.of_stored(stored["recipe"], recipe_file, *given, origins=origins)
        recipe, run = settings.build()
        recipe.train.require_batch("this command")
        typed = settings.typed_in("data")
        data = _own_or_whole(recipe.data.in_run(run_of(path), typed), typed, recipe.train.seed, stored)
        return dataclasses.replace(recipe, data=data), run, DataSpec.from_json(stored["spec"])
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{path}: {error}") from error


def _own_or_whole(data: DataConfig, typed: Collection[str], seed: int, stored: dict[str, Any]) -> DataConfig:
    """Return the data with the val split of the run; with all samples in it if they are other data without one."""
    here, there = getattr(data, "path", ""), stored["recipe"].get("data", {}).get("path", "")
    whole = data.whole(typed)
    if whole == data or here == there or _is_one_place(here, there):
        return data
    with contextlib.suppress(SightlineError):  # what is wrong is said when they are opened again
        val = data.open("val", seed)
        has_names = val.fingerprint == stored.get("fingerprints", {}).get("val")
        # Files without compression have one size, so that other data may have the same names and sizes.
        if has_names and not Contents({"val": val}, data.fingerprint).changed(stored.get("contents", {}), lambda: None):
            return data  # those of the run, in another place
    return whole


def _is_one_place(here: str, there: Any) -> bool:
    try:
        return os.path.realpath(here) == os.path.realpath(there)
    except (TypeError, ValueError):  # damaged: a number, or a text with a NUL
        return False


@dataclass(frozen=True)
class Evaluation:
    """A split of a recipe's data with its loader and a network, ready for the weights of any checkpoint of a run."""

    recipe: Recipe
    model: nn.Module
    device: Device
    world: World
    bound: Bound
    loader: Loader
    log: RunLog
    split: Split

    def score(self, path: Path, stored: dict[str, Any]) -> Scores:
        """Score the weights in the network; report and write them as scores-CHECKPOINT.json of the run, of the test
        split scores-CHECKPOINT-test.json."""
        where = {"checkpoint": path.name, "step": stored["progress"]["step"]}
        if self.split == "val":
            return self.score_as(f"scores-{path.name}.json", **where)
        return self.score_as(f"scores-{path.name}-{self.split}.json", **where, split=self.split)

    def score_as(self, file: str, **where: Any) -> Scores:
        """Score the weights in the network; report them, with where they come from, and write them into a file."""
        scores = evaluate(
            self.model,
            self.recipe,
            self.bound,
            self.loader,
            self.device,
            self.world,
            lambda done, total: self.log.evaluating(done, total, done, total),
            self.split,
        )
        self.log.scores(scores, file, **where, data=getattr(self.recipe.data, "path", ""))
        self.log.tell_scores(scores, **where)
        return scores


@contextlib.contextmanager
def opened(
    trained: Trained, folder: Path, is_once: bool = True, writes_scores: bool = True, split: Split = "val"
) -> Iterator[Evaluation]:
    """Open the val or test split of a checkpoint's recipe, to score one checkpoint or several; results go into `folder`
    unless run.out is given."""
    recipe, run = trained.recipe, trained.run
    path = getattr(recipe.data, "path", "")
    if os.path.isabs(path) and not os.path.exists(path):
        raise UsageError(f"the data of {trained.path} were in {path}, which does not exist; add --data.path DIR")
    with plugins.naming_absent_sources(trained.path, trained.packages):
        dataset = open_split(read_once(recipe.data) if is_once else recipe.data, split, recipe.train.seed)
    if dataset.spec != trained.spec:
        differences = _differences(trained.spec, dataset.spec)
        raise BadData(f"the data do not fit {trained.path}: it was trained on {differences}")
    folder = Path(run.out) if run.out else folder
    is_val = trained.stored.get("fingerprints", {}).get("val", dataset.fingerprint) == dataset.fingerprint
    of = "" if is_val else path
    with loading(recipe, run, trained.device, trained.world, dataset, folder, split, of) as (here, bound, loader, log):
        if split == "test" and is_val:
            log.warn("the test split is what validated this run: its best checkpoint was chosen by these images")
        elif split == "val" and not is_val:
            # Allowed, with a warning: another fold's validation split was trained on.
            log.warn("these are not the run's validation images; if it was trained on them, the score is too high")
        yield Evaluation(recipe, trained.build(), trained.device, here, bound, loader, log, split)
        if run.out and writes_scores:
            log.say(f"scores are in {folder}, {run_of(trained.path)} is as it was")


def open_split(data: DataConfig, split: Split, seed: int) -> Dataset:
    """Open the split that is scored: never val in place of a test split."""
    if split not in ("val", "test"):
        raise UsageError(f"split is {split!r}, expected val or test")
    return data.open_test(seed) if split == "test" else data.open("val", seed)


@contextlib.contextmanager
def loading(
    recipe: Recipe,
    run: Run,
    device: Device,
    here: World,
    dataset: Dataset,
    folder: Path,
    split: Split = "val",
    other_data: str = "",
) -> Iterator[tuple[World, Bound, Loader, RunLog]]:
    """Join the other ranks and start to load a split; the log writes into `folder`. `other_data` is the path of data
    that the run in that folder did not use."""
    here = world.connect(here, device)
    log = RunLog(folder, Screen(run.progress, here.rank), here.rank, attempt=None)
    with log.folder.must_be_writable():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    if note := device.sharing_note():
        log.say(note)
    with contextlib.ExitStack() as stack:
        stack.callback(log.release)
        stack.callback(here.close)
        signals = stack.enter_context(StopSignals(here, saves=False))
        bound = dataset.bind(device, recipe.train.global_batch)
        stack.enter_context(kernels.only_uncompiled(_bytes_of(bound) <= MANY_BYTES))
        note_bad = partial(log.bad_sample, other_data=other_data)
        bad_samples = BadSamples(recipe.data.on_bad_sample, recipe.data.max_bad_samples, note_bad)
        feeds: Feeds = {split: (bound, eval_order(recipe.train, len(dataset), here, dataset.eval_batch))}
        loader = Loader(feeds, run, device, here, bad_samples, signals.check, log.warn)
        stack.callback(loader.close)
        for note in loader.notes:
            log.say(note)
        if most := recipe.train.eval_max_steps:
            log.warn(f"train.eval_max_steps={most} scores a part; --train.eval-max-steps 0 scores all")
        yield here, bound, loader, log


def _bytes_of(bound: Bound) -> int:
    """Return how much the samples of a split are, as the loader hands them over."""
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in bound.layout.values()]
    return len(bound.dataset) * sum(sizes)


def evaluate_all(run: Path, given: Given, recipe_file: str) -> list[dict[str, Any]]:
    """Return a row of scores for every checkpoint after a step, sorted by step.

    All are evaluated with the recipe of the newest, so that the numbers compare. The table is written after each one,
    and a row of the same checkpoint, data and fields is reused, so an interrupted call resumes.
    """
    if (run / checkpoint.MANIFEST).is_file():
        raise UsageError(f"{run} is a checkpoint and --all needs a run folder; leave out --all")
    paths = [path for path in checkpoint.all_of(run) if int(path.name.removeprefix("ckpt-")) > 0]
    newest, tensors, stored = _newest(run, paths)
    with opened(Trained.set_up(newest, tensors, stored, recipe_file, given), run, is_once=False) as evaluation:
        log = evaluation.log
        made_with = {
            "data": evaluation.bound.dataset.fingerprint,
            "changes": store.diff(stored["recipe"], evaluation.recipe),
        }
        table = {row["checkpoint"]: row for row in _rows(log.folder.path / TABLE) if _has(row, made_with)}
        evaluation.world.barrier()  # no rank may write before all have read
        for path in paths:
            try:
                key = {**made_with, "manifest": _sha256(path / checkpoint.MANIFEST)}
                if _has(table.get(path.name, {}), key):
                    log.say(f"{path.name} is in {log.folder.path / TABLE} already")
                    continue
                tensors, its = checkpoint.read(path)
                checkpoint.require(its, "progress")
                load_weights(evaluation.model, tensors)
            except (BadCheckpoint, FileNotFoundError) as error:  # a run at work may remove one meanwhile
                log.warn(f"{path.name} is skipped: {error}")
                continue
            scores = evaluation.score(path, its)
            table[path.name] = {
                "checkpoint": path.name,
                "step": its["progress"]["step"],
                "values": scores.values,
                **key,
            }
            rows = sorted(table.values(), key=lambda row: row["step"])
            log.folder.write_json(TABLE, {"checkpoints": rows})
        return sorted(table.values(), key=lambda row: row["step"])


def _newest(run: Path, paths: Sequence[Path]) -> tuple[Path, Tensors, dict[str, Any]]:
    """Return the newest checkpoint that verifies, its tensors and its state."""
    for path in reversed(paths):
        with contextlib.suppress(BadCheckpoint, FileNotFoundError):  # reported when its turn comes
            return path, *checkpoint.read(path)
    raise BadCheckpoint(f"{run} holds no checkpoint that verifies and has made a step; there is nothing to evaluate")


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier call; [] where they cannot be read: they can be made again."""
    try:
        rows = typed(read_json(path, MAX_TABLE_BYTES)["checkpoints"], list[dict[str, Any]])
        hints = {"checkpoint": str, "step": int, "values": dict[str, float | None]}
        return [row for row in rows if all(typed(row[key], hint) is not None for key, hint in hints.items())]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _has(row: dict[str, Any], values: dict[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in values.items())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _differences(trained: DataSpec, found: DataSpec) -> str:
    if trained.classes != found.classes:
        old, new = ((len(spec.classes), first_of(spec.classes)) for spec in (trained, found))
        return f"{old[0]} classes ({old[1]}), found {new[0]} ({new[1]})"
    fields = [field.name for field in dataclasses.fields(DataSpec)]
    pairs = {name: (getattr(trained, name), getattr(found, name)) for name in fields}
    return "; ".join(f"{name} {old}, found {new}" for name, (old, new) in pairs.items() if old != new)
