"""Every field of every recipe is changed by its flag, and something must come of it: a field nothing reads is a stub.

The table is keyed by the class of the part, so a recipe made of known parts needs no new rows; a new field, or a part
of a new class, fails here until a row says how its effect is seen. Most effects show without a run: in the batches of
an epoch, the network, the loss, one update, the learning rates. Only what takes a run to show makes one.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import runpy
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sightline import config, kernels, recipes
from sightline.config import Recipe, Run
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.masks import MaskData
from sightline.data.prepare import shapes as drawings
from sightline.data.segmentation import SegmentationData
from sightline.engine.model import build_model
from sightline.engine.orders import eval_order, train_order_of
from sightline.engine.progress import TrainProgress
from sightline.engine.setup import set_up
from sightline.errors import SightlineError, UsageError
from sightline.hardware import affinity, devices
from sightline.hardware.watchdog import Watchdog
from sightline.hardware.world import World
from sightline.parts import Batch, Bound, DataSpec, ModelConfig
from sightline.recipe import store
from sightline.runs.environment import environment
from sightline.runs.log import RunLog
from sightline.train import loop
from sightline.train.saver import Saver
from sightline.train.schedules import RunLength
from sightline.train.session import Session
from sightline.train.state import TrainState
from sightline.train.step import Step
from sightline.train.torch_optimizer import set_rate

PARTS = ("model", "data", "task", "optimizer", "schedule", "train", "run")
TESTS = Path(__file__).resolve().parents[1]
COVER = runpy.run_path(str(Path(__file__).with_name("cover.py")))
CPU = devices.select("cpu")


# What is looked at after a run. Each look is of one kind, and equal after equal runs.


def weights(result) -> Any:
    return result.bits()["model.safetensors"]


def files(result) -> Any:
    return sorted(result.bits())


def scores(result) -> Any:
    return result.scores.values


def steps(result) -> Any:
    return [event["steps"] for event in result.events("start")]


def evaluations(result) -> Any:
    return [event["epoch"] for event in result.events("evaluate")]


def event_files(result) -> Any:
    return len(list((result.folder / "tensorboard").glob("events.*")))


def board_steps(result) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not event_files(result):
        return []
    board = EventAccumulator(str(result.folder / "tensorboard"))
    board.Reload()
    return [event.step for event in board.Scalars("train/loss")]


def pages(result) -> Any:
    return sorted(path.name for path in result.folder.iterdir() if path.suffix in (".html", ".jpg"))


def traces(result) -> Any:
    return sorted(path.name for path in (result.folder / "profile").glob("*"))


def log_lines(result) -> Any:
    return [event["step"] for event in result.events("train")]


def saves(result) -> Any:
    return [event["step"] for event in result.events("checkpoint")]


def kept(result) -> Any:
    return [path.name for path in result.checkpoints]


def error(result) -> Any:
    return None if result.error is None else (type(result.error).__name__, str(result.error))


def bad_steps(result) -> Any:
    return [event["step"] for event in result.events("bad_step")]


def place(_) -> Any:
    return Path("somewhere/else/config.yaml").is_file()


def shown(result) -> Any:
    return "epoch 1/2  step 1/6" in result.shown


def ranks_shown(result) -> Any:
    return {line.partition("]")[0] for line in result.shown.splitlines() if line.startswith("[rank ")}


def rank_logs(_) -> Any:
    return sorted(path.name for path in Path("logs").glob("*"))


def workers(result) -> Any:
    return [len(event["workers"]) for event in result.events("start")]


def measured(_) -> Any:
    """Return the name of the last run in benchmark_run.log, and the names in metric.log."""
    folder = Path("measured")
    if not folder.is_dir():
        return None
    names = {json.loads(line)["name"] for line in (folder / "metric.log").read_text().splitlines()}
    return json.loads((folder / "benchmark_run.log").read_text())["test_id"], sorted(names)


# What was called since the last run began, and what there is to say of each call.
CALLED: dict[str, list[Any]] = {"compile": [], "update": [], "save": [], "watch": [], "load": []}


def compilations(_) -> Any:
    return len(CALLED["compile"])


def updates_made(_) -> Any:
    return len(CALLED["update"])


def determinism(_) -> Any:
    """Return whether updates were made under it; afterwards torch is as before."""
    return set(CALLED["update"])


def waited_for_saves(_) -> Any:
    """Return whether each save was waited for, without the last, which always is."""
    return CALLED["save"][:-1]


def watched_for_s(_) -> Any:
    return list(CALLED["watch"])


def loads_ahead(_) -> Any:
    return list(CALLED["load"])


# What is looked at without a run: what flags have made, given to the parts that a run would give it to.

WITHOUT_RUN: list[Callable[..., Any]] = []


def without_run(look: Callable[[Recipe, Run], Any]) -> Callable[[Recipe, Run], Any]:
    WITHOUT_RUN.append(look)
    return look


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def bound_data(recipe: Recipe) -> dict[str, Bound]:
    cfg = recipe.train
    return {split: recipe.data.open(split, cfg.seed).bind(CPU, cfg.global_batch) for split in ("train", "val")}


def loader_of(recipe: Recipe, run: Run, bound: dict[str, Bound], on_bad: Callable[..., None] = print) -> Loader:
    order, evaluated = (
        train_order_of(recipe.train, bound["train"], World()),
        eval_order(recipe.train, len(bound["val"].dataset), World()),
    )
    feeds = {"train": (bound["train"], order), "val": (bound["val"], evaluated)}
    bad_samples = BadSamples(recipe.data.on_bad_sample, recipe.data.max_bad_samples, on_bad)
    return Loader(feeds, run, CPU, World(), bad_samples, check_stop=lambda: None)


def batches(recipe: Recipe, run: Run, split: str, on_bad: Callable[..., None] = print) -> Iterator[Batch]:
    """Those of the first epoch, as a step or an evaluation gets them."""
    bound = bound_data(recipe)
    with contextlib.closing(loader_of(recipe, run, bound, on_bad)) as loader:
        count = loader.feeds[split].order.steps_per_epoch
        loader.seek(split, 0, count)
        for _ in range(count):
            yield bound[split].finish(loader.next(split), torch.float32)


def built(recipe: Recipe, run: Run) -> TrainState:
    spec = recipe.data.open("train", recipe.train.seed).spec
    state = TrainState(recipe, build_model(recipe, run, spec, CPU, World()), CPU, RunLength(recipe.train.epochs, 3))
    recipe.model.start_from(state.model)
    return state


@without_run
def samples(recipe: Recipe, run: Run) -> Any:
    return [(sorted(batch), digest(map(torch.as_tensor, batch.values()))) for batch in batches(recipe, run, "train")]


@without_run
def held_out(recipe: Recipe, run: Run) -> Any:
    return [(sorted(batch), digest(map(torch.as_tensor, batch.values()))) for batch in batches(recipe, run, "val")]


@without_run
def unread(recipe: Recipe, run: Run) -> Any:
    """Return the samples that were skipped, and what ended the run."""
    bad: list[str] = []
    try:
        for _ in batches(recipe, run, "train", lambda record: bad.append(record.name)):
            pass
    except SightlineError as error:
        return bad, str(error)
    return bad, ""


@without_run
def told(recipe: Recipe, run: Run) -> Any:
    """Return notes without their numbers: free memory differs every time."""
    with contextlib.closing(loader_of(recipe, run, bound_data(recipe))) as loader:
        return [note.partition(":")[0] for note in (*loader.notes, *built(recipe, run).notes)]


@without_run
def declared(recipe: Recipe, run: Run) -> Any:
    return recipe.data.declared()


@without_run
def refusal(recipe: Recipe, run: Run) -> Any:
    try:
        bound_data(recipe)
        built(recipe, run)
    except SightlineError as error:
        return type(error).__name__, str(error)
    return None


@without_run
def shapes(recipe: Recipe, run: Run) -> Any:
    return {name: tuple(tensor.shape) for name, tensor in built(recipe, run).model.state_dict().items()}


@without_run
def network(recipe: Recipe, run: Run) -> Any:
    """Return its weights, and its outputs for a batch in training, which also moves its statistics."""
    state, spec = built(recipe, run), recipe.data.open("train", recipe.train.seed).spec
    image = torch.randn(4, spec.channels, *spec.size, generator=torch.Generator().manual_seed(0))
    answer = state.model.train()(image)
    return digest([*state.model.state_dict().values(), *(answer if isinstance(answer, tuple) else (answer,))])


@without_run
def layout(recipe: Recipe, run: Run) -> Any:
    return [parameter.stride() for parameter in built(recipe, run).model.parameters()]


@without_run
def optimized(recipe: Recipe, run: Run) -> Any:
    return sorted(built(recipe, run).tensors()["optimizer"])


@without_run
def losses(recipe: Recipe, run: Run) -> Any:
    model = built(recipe, run).model
    return [recipe.task.build().loss(model, batch).total.item() for batch in batches(recipe, run, "train")]


@without_run
@torch.inference_mode()
def predictions(recipe: Recipe, run: Run) -> Any:
    """Also the shapes that went through the network for them."""
    model, passed = built(recipe, run).model.eval(), []
    model.register_forward_pre_hook(lambda _, inputs: passed.append(tuple(inputs[0].shape)))
    found = [digest(recipe.task.build().predict(model, batch).values()) for batch in batches(recipe, run, "val")]
    return passed, found


@without_run
def score_names(recipe: Recipe, run: Run) -> Any:
    return recipe.task.build().metric(bound_data(recipe)["val"].dataset.spec, CPU.torch_device).names()


@without_run
def updates(recipe: Recipe, run: Run) -> Any:
    """Three of a convolution, a norm and a bias, by gradients that grow while the rate falls."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Linear(2, 2))
    optimizer = recipe.optimizer.build(module, CPU.torch_device)
    for step in range(3):
        set_rate(optimizer, recipe.optimizer.base_lr(recipe.train.global_batch, 1) * (1 - step / 4))
        for parameter in module.parameters():
            parameter.grad = (step + 1) * torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
        optimizer.step()
    return digest(module.state_dict().values())


@without_run
def rates(recipe: Recipe, run: Run) -> Any:
    """Return rates of all steps, on one rank and on two, after evaluations whose score stays while their loss falls."""
    cfg, schedule = recipe.train, recipe.schedule
    plan = RunLength(cfg.epochs, 3, 28, 8)
    history = TrainProgress(history=[0.5] * 3, val_losses=[3.0, 2.0, 1.0], scores={"loss": 1.0}).watched(schedule)
    bases = [recipe.optimizer.base_lr(cfg.global_batch, ranks) for ranks in (1, 2)]
    return [[schedule.rate(step, base, plan, history) for step in range(cfg.epochs * 3)] for base in bases]


@without_run
def evaluated_by_second_rank(recipe: Recipe, run: Run) -> Any:
    return eval_order(recipe.train, 13, World(rank=1, size=2)).batch(0)[1].tolist()


@without_run
def process(recipe: Recipe, run: Run) -> Any:
    """Return the settings of this process: its CPUs, threads as environment.json has them, and kernels."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(2)  # so that there are threads to lose, also on one CPU
    try:
        set_up(recipe, run)
        return os.sched_getaffinity(0), environment(CPU, 1)["threads"], kernels.are_allowed()
    finally:
        affinity._given.cache_clear()
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)
        kernels.use("auto")


@without_run
def shared_statistics(recipe: Recipe, run: Run) -> Any:
    """Return weights of a run as the first of two ranks, the other of which adds nothing to any sum."""
    whole = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, eval_shards="full"))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    folder = Path("first of two").absolute()
    try:
        log = RunLog(folder)
        loop.train(Session(whole, run, CPU, World(size=2), log))
        log.close(0, "finished")
        saved = sorted((folder / "checkpoints").glob("ckpt-????????"))
        return digest(load_file(saved[-1] / "model.safetensors").values())
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Thin(ModelConfig):
    """A few layers, for runs: their looks are of the engine, and a ResNet's twenty convolutions take half of a run."""

    def build(self, spec: DataSpec) -> nn.Module:
        layers = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(128, len(spec.classes)))


def thin(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, model=Thin()) if recipe.task.headline == "top1" else recipe


@dataclass(frozen=True)
class Flip:
    """One change of a field: the first of `values` that is not the value it has; `look` must then see another thing."""

    values: tuple[str, ...]
    look: Callable[..., Any]
    base: tuple[str, ...] = ()
    """Flags that both sides need for the field to matter."""
    same: Callable[..., Any] | None = None
    """Must not change: evaluation does not affect training."""
    before: tuple[str, ...] | None = None
    """Flags of a run made in the folder beforehand."""
    home: bool = False
    """True if the run gets no folder of its own."""


@dataclass(frozen=True)
class ShownBy:
    """For what one process cannot show: a test marked `shows("part.field")`, in this file below tests/."""

    file: str
    on_device: bool = False
    """True if it needs an accelerator. All others must be in the default set."""


DIVERGING = ("--optimizer.lr=1e30", "--schedule.kind=constant", "--schedule.warmup-epochs=0")
ADAMW = ("--optimizer.kind=adamw", "--optimizer.no-nesterov", "--optimizer.momentum=0.9", "--optimizer.lr=0.01")
RMSPROP = ("--optimizer.kind=rmsprop", "--optimizer.no-nesterov", "--optimizer.lr=0.001")
LARS = ("--optimizer.kind=lars", "--optimizer.lr=2")
DECAYING = ("--optimizer.kind=sgd", "--optimizer.weight-decay=0.1")
COSINE = ("--schedule.kind=cosine", "--schedule.warmup-epochs=1")
POLYNOMIAL = ("--schedule.kind=polynomial",)
PLATEAU = ("--schedule.kind=plateau", "--schedule.warmup-epochs=0")
WARMUP = ("--schedule.warmup-epochs=1", "--schedule.warmup-factor=0.2")
TABLE_RATES = ("--schedule.kind=table", "--schedule.table-epochs", "1", "--schedule.table-rates", "0.01")
STEP = ("--schedule.kind=step", "--schedule.drop-epochs", "1", "--schedule.warmup-epochs=0")
DAMAGED = ("--data.path=DAMAGED",)
SKIPPING = (*DAMAGED, "--data.on-bad-sample=skip")
RECORDS = ("--data.path=RECORDS", "--data.classes=0", "--train.global-batch=2")
ONE_CLASS = ("--data.path=synthetic:classes=1,samples=24,size=28", "--data.classes=1")  # which nobody gets wrong
BOTTLENECKS = ("--model.depth=50", "--model.width=8")
UNEVEN = ("--data.path=synthetic:classes=10,samples=28,size=28",)
DRAWN = ("--data.path=synthetic:samples=2", "--data.task=04", "--data.nvol=1", "--train.global-batch=2")
VOLUMES = (
    "--data.path=PATCHES",
    "--data.dim=3",
    "--data.nvol=1",
    "--model.no-deep-supervision",
    "--train.global-batch=2",
)
NORMALISED = ("--data.mean", "0.5", "0.5", "0.5", "--data.std", "0.2", "0.2", "0.2")
DEEP = ("--model.deep-supervision",)
FOUR_EPOCHS = (*ONE_CLASS, "--train.epochs=4")
TABLE: dict[str, dict[str, list[Flip | ShownBy]]] = {
    "ResNetConfig": {
        "depth": [Flip(("18", "34"), shapes)],
        "width": [Flip(("6",), shapes)],
        "stem": [Flip(("3x3", "7x7"), shapes)],
        "version": [Flip(("v2",), shapes, base=("--model.no-bias",)), Flip(("v1",), network, base=BOTTLENECKS)],
        "groups": [Flip(("2",), shapes, base=BOTTLENECKS)],
        "group_width": [Flip(("32",), shapes, base=BOTTLENECKS)],
        "padding": [Flip(("same",), network), Flip(("same_but_stem",), network)],
        "project_every_stage": [Flip(("True",), shapes)],
        "bias": [Flip(("True",), shapes)],
        "bn_momentum": [Flip(("0.01",), network)],
        "bn_eps": [Flip(("0.1",), network)],
        "init": [Flip((name,), network) for name in ("he_truncated", "variance_scaling", "glorot")],
        "head_init": [Flip(("normal",), network), Flip(("glorot",), network)],
        "zero_init_residual": [Flip(("True", "False"), network)],
        "weights": [Flip(("WEIGHTS",), network), Flip(("missing.pth",), refusal)],
    },
    "SsdConfig": {
        "depth": [Flip(("18", "34"), shapes, base=("--model.depth=34",))],
        "width": [Flip(("6",), shapes)],
        "padding": [Flip(("same", "torch"), network)],
        "steps": [Flip(("4 16 32 64 100 300",), network)],
        "scales": [Flip(("30 60 99 153 207 261 315",), network)],
        "ratios": [Flip(("2 2 2 2 2 2",), shapes)],
        "init": [Flip(("torch", "tf"), network)],
        "bn_momentum": [Flip(("0.01",), network)],
        "freeze": [Flip(("first_block", "none"), optimized)],
        "weights": [Flip(("WEIGHTS",), network), Flip(("missing.pth",), refusal)],
    },
    "DetectionConfig": {
        "lineage": [Flip(("mlperf", "tf"), losses, same=samples)],
        "score_threshold": [Flip(("0.12",), predictions, same=losses)],
        "nms_iou": [Flip(("0.2",), predictions, same=losses)],
        "candidates": [Flip(("2",), predictions, same=losses)],
        "per_image": [Flip(("3",), predictions, same=losses)],
    },
    "DetectionData": {
        "val_fraction": [ShownBy("cli/test_any_folder.py")],
        "split": [ShownBy("cli/test_any_folder.py")],
        "augment": [Flip(("off", "on"), samples, same=held_out)],
        "size": [Flip(("56",), samples)],
        "crop": [Flip((kind,), samples, base=("--data.crop=tf",), same=held_out) for kind in ("mlperf", "off")],
        "crop_tries": [Flip(("1", "50"), samples, base=("--data.crop=tf",), same=held_out)],
        "flip": [Flip(("1.0",), samples, same=held_out)],
        "jitter": [Flip((kind, "tf"), samples, same=held_out) for kind in ("mlperf", "off")],
        "brightness": [Flip(("0.3",), samples, base=("--data.jitter=tf",), same=held_out)],
        "contrast": [Flip(("0.2",), samples, base=("--data.jitter=tf",), same=held_out)],
        "saturation": [Flip(("0.2",), samples, base=("--data.jitter=tf",), same=held_out)],
        "hue": [Flip(("0.2",), samples, base=("--data.jitter=tf",), same=held_out)],
        "resize": [Flip(("antialias", "tf"), samples)],
        "mean": [Flip(("0.1 0.2 0.3",), samples)],
        "std": [Flip(("0.1 0.2 0.3",), samples)],
        "path": [Flip(("synthetic:classes=10,samples=24,size=50",), samples), Flip(("",), refusal)],
        "source": [Flip(("coco",), refusal)],
        "classes": [Flip(("7",), refusal)],
        "max_boxes": [Flip(("1",), refusal)],
        "samples": [Flip(("77",), declared, base=("--data.path=",))],
        "decoder": [Flip(("gpu",), unread)],
        "cache": [
            Flip(("off",), told, base=("--data.path=DRAWN", "--data.cache=ram", "--data.max-boxes=20"), same=samples)
        ],
        "static": [Flip(("nowhere",), refusal)],
        "fake": [Flip(("True",), samples, same=held_out)],
        "on_bad_sample": [Flip(("skip",), unread, base=DAMAGED)],
        "max_bad_samples": [Flip(("0",), unread, base=SKIPPING)],
        "fingerprint": [ShownBy("faults/test_changes.py")],
    },
    "UnetConfig": {
        # Of 4 or 8 channels every one would be a group of its own, which is what instance norm does.
        "norm": [Flip(("batch",), shapes), Flip(("group",), network, base=("--model.width=6",))],
        "negative_slope": [Flip(("0.2",), network)],
        "residual": [Flip(("True",), shapes)],
        "attention": [Flip(("True",), shapes)],
        "drop_block": [Flip(("True",), shapes)],
        "deep_supervision": [Flip(("False", "True"), shapes)],
        "aux_heads": [Flip(("1",), shapes, base=DEEP)],
        "width": [Flip(("6",), shapes)],
        "max_filters": [Flip(("12",), shapes)],
        "weights": [Flip(("WEIGHTS",), network), Flip(("missing.pth",), refusal)],
    },
    "EncoderUnetConfig": {
        "arch": [Flip(("resnet34",), shapes)],
        "width": [Flip(("8",), shapes)],
        "weights": [Flip(("WEIGHTS",), network), Flip(("missing.pth",), refusal)],
    },
    "MaskConfig": {
        "dice_weight": [Flip(("0.5",), losses, same=samples)],
        "whole_pixels": [Flip(("0",), predictions, same=losses)],
        "overlap": [Flip(("0.875",), predictions, base=("--task.whole-pixels=0",), same=losses)],
        "blend": [Flip(("constant",), predictions, base=("--task.whole-pixels=0",), same=losses)],
        "window_batch": [Flip(("1",), predictions, same=losses)],
    },
    "MaskData": {
        "val_fraction": [ShownBy("cli/test_any_folder.py")],
        "split": [ShownBy("cli/test_any_folder.py")],
        "augment": [Flip(("off", "on"), samples, same=held_out)],
        "size": [Flip(("48",), samples, same=held_out)],
        "scale": [Flip(("1.0 1.0",), samples, same=held_out)],
        "oversampling": [Flip(("1.0",), samples, same=held_out)],
        "flip": [Flip(("1.0",), samples, same=held_out)],
        "flip_rows": [Flip(("1.0",), samples, same=held_out)],
        "brightness": [Flip(("0.5",), samples, same=held_out)],
        "contrast": [Flip(("0.5",), samples, same=held_out)],
        "saturation": [Flip(("0.5",), samples, same=held_out)],
        "mean": [Flip(("0.1 0.2 0.3",), samples, base=NORMALISED)],
        "std": [Flip(("0.1 0.2 0.3",), samples, base=NORMALISED)],
        "path": [Flip(("synthetic:classes=4,samples=24,size=50",), samples), Flip(("",), refusal)],
        "source": [Flip(("coco",), refusal)],
        "mask_pattern": [Flip(("{}_label",), refusal, base=("--data.path=MASKED",))],
        "ignore": [Flip(("5",), samples, base=("--data.path=MASKED",))],
        "classes": [Flip(("7",), refusal)],
        "samples": [Flip(("77",), declared, base=("--data.path=", "--data.classes=4"))],
        "cache": [Flip(("off",), told, base=("--data.cache=ram",), same=samples)],
        "on_bad_sample": [Flip(("skip",), unread, base=DAMAGED)],
        "max_bad_samples": [Flip(("0",), unread, base=SKIPPING)],
        "fingerprint": [ShownBy("faults/test_changes.py")],
    },
    "SegmentationConfig": {
        "voxel_loss": [Flip(("focal",), losses, same=samples)],
        "supervision": [Flip(("exact",), losses, base=DEEP, same=network)],
        "dice_over": [ShownBy("distributed/test_dice_world.py")],
        "tta": [Flip(("True",), predictions, same=losses)],
        "overlap": [Flip(("0.0",), predictions, base=VOLUMES, same=losses)],
        "blend": [Flip(("constant",), predictions, base=VOLUMES, same=losses)],
        "window_batch": [Flip(("2",), predictions, base=VOLUMES, same=losses)],
        "regions": [
            Flip(("brats",), score_names, base=("--data.path=synthetic:samples=8", "--data.task=01")),
            Flip(("brats",), error),  # other classes are refused
        ],
    },
    "SegmentationData": {
        "augment": [Flip(("off",), samples, same=held_out)],
        "augment_on": [Flip(("device",), told, same=held_out)],
        "oversampling": [Flip(("1.0",), samples, base=("--data.augment=off",), same=held_out)],
        "zoom": [Flip(("1.0",), samples, same=held_out)],
        "zoom_range": [Flip(("0.3 0.4",), samples, base=("--data.zoom=1",), same=held_out)],
        "zoom_depth": [Flip(("False", "True"), samples, base=("--data.zoom=1",), same=held_out)],
        "flip": [Flip(("1.0",), samples, same=held_out)],
        "noise": [Flip(("1.0",), samples, same=held_out)],
        "noise_std": [Flip(("0.5 0.6",), samples, base=("--data.noise=1",), same=held_out)],
        "blur": [Flip(("1.0",), samples, same=held_out)],
        "blur_sigma": [Flip(("2.0 3.0",), samples, base=("--data.blur=1",), same=held_out)],
        "rotation": [Flip(("1.0",), samples, same=held_out)],
        "rotation_range": [Flip(("20 40",), samples, base=("--data.rotation=1",), same=held_out)],
        "gamma": [Flip(("1.0",), samples, same=held_out)],
        "gamma_inverted": [Flip(("1.0",), samples, same=held_out)],
        "gamma_range": [Flip(("2.0 3.0",), samples, base=("--data.gamma=1",), same=held_out)],
        "brightness": [Flip(("1.0",), samples, same=held_out)],
        "brightness_range": [Flip(("2.0 3.0",), samples, base=("--data.brightness=1",), same=held_out)],
        "contrast": [Flip(("1.0",), samples, same=held_out)],
        "contrast_range": [Flip(("2.0 3.0",), samples, base=("--data.contrast=1",), same=held_out)],
        "path": [Flip(("synthetic:samples=3",), samples, base=DRAWN), Flip(("",), refusal)],
        "task": [Flip(("04",), refusal)],
        "dim": [Flip(("3",), shapes, base=DRAWN)],
        "fold": [Flip(("1",), held_out)],
        "folds": [Flip(("3",), held_out)],
        "nvol": [Flip(("4",), samples, same=held_out)],
        "cache": [Flip(("off",), told, base=("--data.cache=ram",), same=samples)],
        "on_bad_sample": [Flip(("skip",), unread, base=DAMAGED)],
        "max_bad_samples": [Flip(("0",), unread, base=SKIPPING)],
        "fingerprint": [ShownBy("faults/test_changes.py")],
    },
    "ClassificationData": {
        "val_fraction": [ShownBy("cli/test_any_folder.py")],
        "split": [ShownBy("cli/test_any_folder.py")],
        "augment": [Flip(("off", "on"), samples, same=held_out)],
        "crop": [Flip(("tf", "area"), samples), Flip(("shift",), samples, same=held_out)],
        "crop_padding": [Flip(("3",), samples, base=("--data.crop=shift",), same=held_out)],
        "crop_scale": [Flip(("0.2 0.3",), samples, same=held_out)],
        "crop_ratio": [Flip(("2.0 3.0",), samples, same=held_out)],
        "flip": [Flip(("1.0",), samples, same=held_out)],
        "policy": [Flip((name,), samples, same=held_out) for name in ("randaugment", "autoaugment", "augmix")],
        "policy_magnitude": [Flip(("25",), samples, base=("--data.policy=randaugment",), same=held_out)],
        "augmix_severity": [Flip(("9",), samples, base=("--data.policy=augmix",), same=held_out)],
        "random_erase": [Flip(("1.0",), samples, same=held_out)],
        "mixup": [Flip(("0.7",), samples, same=held_out)],
        "mixup_per": [Flip(("sample", "batch"), samples, base=("--data.mixup=0.7",), same=held_out)],
        "mixup_partner": [
            Flip((name,), samples, base=("--data.mixup=0.7",), same=held_out) for name in ("reversed", "random")
        ],
        "cutmix": [Flip(("0.7",), samples, same=held_out)],
        "size": [Flip(("32",), samples, same=held_out)],
        "eval_resize": [Flip(("40",), held_out, same=samples)],
        "eval_geometry": [Flip(("stretch",), held_out, base=RECORDS, same=samples)],  # the others are square
        "eval_size": [Flip(("16",), held_out, same=samples)],
        "interpolation": [Flip((kind, "bilinear"), samples) for kind in ("bicubic", "legacy")],
        "mean": [Flip(("0.1 0.2 0.3",), samples)],
        "std": [Flip(("0.1 0.2 0.3",), samples)],
        "image_type": [Flip(("bf16", "uint8"), samples)],
        "path": [Flip(("synthetic:classes=10,samples=24,size=30",), samples), Flip(("",), refusal)],
        "source": [Flip(("folder",), refusal)],
        "classes": [Flip(("7",), refusal)],
        "background": [Flip(("first",), held_out), Flip(("last",), shapes)],
        "sampling": [Flip(("balanced",), samples, same=held_out)],
        "class_weights": [Flip(("balanced",), losses, same=held_out)],
        "first_label": [Flip(("0",), refusal, base=RECORDS)],
        "file_column": [ShownBy("cli/test_tables.py")],
        "label_column": [ShownBy("cli/test_tables.py")],
        "decoder": [Flip(("gpu",), unread)],
        "downscale": [ShownBy("unit/data/test_downscale.py")],
        "cache": [Flip(("off",), told, base=(*RECORDS, "--data.cache=ram"), same=samples)],
        "samples": [Flip(("77",), declared, base=("--data.path=",))],
        "on_bad_sample": [Flip(("skip", "fail"), unread, base=DAMAGED)],
        "max_bad_samples": [Flip(("0",), unread, base=SKIPPING)],
        "fingerprint": [ShownBy("faults/test_changes.py")],
    },
    "ArchConfig": {
        "arch": [Flip(("squeezenet1_1",), shapes)],
        "zero_init_residual": [Flip(("True",), network, base=("--model.arch=resnet18",))],
        "weights": [Flip(("WEIGHTS",), network)],
    },
    "ClassificationConfig": {
        "label_smoothing": [Flip(("0.3",), losses, same=samples)],
        "tta": [Flip(("True",), predictions, same=losses)],
    },
    "OptimizerConfig": {
        "kind": [
            Flip((kind, "sgd"), updates, base=("--optimizer.no-nesterov", "--optimizer.momentum=0.9"))
            for kind in ("rmsprop", "adam", "adamw", "radam", "sgd_keras", "lars")
        ],
        "lr_for_batch": [Flip(("32",), rates)],
        "lr_many": [Flip(("0.5",), rates, same=updates)],
        "lr": [Flip(("0.07",), rates)],
        "trunk_lr_scale": [Flip(("0.5",), weights, same=steps)],
        "weight_decay": [Flip(("0.03",), updates)],
        "norm_weight_decay": [Flip(("0.2",), updates)],
        "bias_weight_decay": [Flip(("0.2",), updates)],
        "decay_form": [Flip((form,), updates, base=DECAYING) for form in ("keras_l2", "decoupled")],
        "momentum": [Flip(("0.4",), updates), Flip(("0.4",), updates, base=LARS)],
        "nesterov": [Flip(("True", "False"), updates)],
        "alpha": [Flip(("0.5",), updates, base=RMSPROP)],
        "beta1": [Flip(("0.5",), updates, base=ADAMW)],
        "beta2": [Flip(("0.5",), updates, base=ADAMW)],
        "eta": [Flip(("0.1",), updates, base=LARS)],
        "eps": [Flip(("0.1",), updates, base=ADAMW), Flip(("0.1",), updates, base=LARS)],
    },
    "ScheduleConfig": {
        "kind": [Flip(("constant", "cosine"), rates), Flip(("polynomial",), rates), Flip(("exponential",), rates)],
        "epoch_steps": [Flip((name,), rates, base=POLYNOMIAL) for name in ("exact", "less_one")],
        "warmup_from": [Flip(("zero",), rates, base=COSINE), Flip(("zero",), rates, base=POLYNOMIAL)],
        "cosine_from": [Flip(("start",), rates, base=COSINE)],
        "power": [Flip(("1.0",), rates, base=POLYNOMIAL)],
        "hold_epochs": [Flip(("1.5",), rates, base=COSINE)],
        "decay_epochs": [
            Flip(("1.5",), rates, base=(kind, "--schedule.warmup-epochs=0"))
            for kind in ("--schedule.kind=cosine", *POLYNOMIAL)
        ],
        "floor": [Flip(("0.1",), rates, base=COSINE)],
        "drop_after": [Flip(("True",), rates, base=STEP)],
        "warmup_epochs": [Flip(("0.7",), rates)],
        "final_lr": [Flip(("0.05",), rates, base=(kind,)) for kind in ("--schedule.kind=cosine", *POLYNOMIAL)],
        "drop_epochs": [Flip(("5",), rates, base=STEP)],
        "factor": [Flip(("0.5",), rates, base=STEP)],
        "unit": [Flip(("epoch", "step"), rates, base=("--schedule.kind=cosine",))],
        "warmup": [Flip(("constant",), rates, base=WARMUP)],
        "warmup_factor": [Flip(("0.9",), rates, base=WARMUP)],
        "patience": [Flip(("1",), rates, base=PLATEAU)],
        "plateau_on": [Flip(("val_loss",), rates, base=(*PLATEAU, "--schedule.patience=1"))],
        "table_epochs": [Flip(("5",), rates, base=TABLE_RATES)],
        "table_rates": [Flip(("0.03",), rates, base=TABLE_RATES)],
    },
    "TrainConfig": {
        "epochs": [Flip(("3",), steps)],
        "global_batch": [Flip(("4",), steps)],
        "precision": [Flip(("bf16",), weights), Flip(("fp16",), files)],
        "accumulation": [Flip(("2",), weights, same=steps), Flip(("3",), error)],
        "ema_every_steps": [Flip(("2",), scores, base=("--train.ema=0.5",), same=weights)],
        "ema_rule": [Flip(("torchvision", "plain"), scores, base=("--train.ema=0.9",), same=weights)],
        "eval_autocast": [Flip(("True", "False"), scores, base=("--train.precision=bf16",), same=weights)],
        "repeats": [Flip(("2",), samples, same=held_out)],
        "ema": [Flip(("0.5",), scores, same=weights), Flip(("0.5",), files)],
        "clip": [Flip(("0.01",), weights)],
        "eval_every_epochs": [Flip(("2",), evaluations, same=weights)],
        "last_batch": [
            Flip(("pad",), steps, base=(*UNEVEN, "--train.last-batch=drop")),
            Flip(("wrap",), weights, base=(*UNEVEN, "--train.last-batch=drop"), same=steps),
        ],
        "eval_from_epoch": [Flip(("2",), evaluations, same=weights)],
        "eval_at_end": [Flip(("False",), evaluations, base=("--train.eval-every-epochs=9",), same=weights)],
        "eval_max_steps": [Flip(("1",), scores, base=("--data.path=synthetic:classes=10,samples=96,size=28",))],
        "eval_shards": [Flip(("full",), evaluated_by_second_rank)],
        "target_score": [Flip(("0.01",), evaluations, base=ONE_CLASS)],
        "diverged_score": [Flip(("0.99",), error)],
        "patience": [Flip(("1",), evaluations, base=FOUR_EPOCHS)],
        "min_epochs": [Flip(("3",), evaluations, base=(*FOUR_EPOCHS, "--train.patience=1"))],
        "steps_per_epoch": [Flip(("2",), steps)],
        "max_steps": [Flip(("4",), steps)],
        "min_epoch_steps": [Flip(("5",), steps, base=("--train.last-batch=wrap",))],
        "head_epochs": [Flip(("1",), weights, same=optimized)],
        "trainable": [Flip(("head",), optimized)],
        "fp32_ops": [
            Flip(("BatchNorm2d Linear",), weights, base=("--train.precision=bf16",)),
            Flip(("relu mean",), told, same=network),
        ],
        "bn_eval": [Flip(("local",), shared_statistics)],
        "bn_group": [Flip(("2",), refusal), ShownBy("distributed/test_norm.py")],  # here is one process
        "seed": [Flip(("1",), network), Flip(("1",), samples, same=held_out)],
        "deterministic": [Flip(("True", "False"), determinism, same=weights)],
    },
    "Run": {
        "out": [Flip(("somewhere/else",), place, home=True)],
        "device": [Flip(("abacus",), error)],
        "threads": [Flip(("3",), process)],
        "max_cpus": [Flip(("1",), process)],
        "affinity": [Flip(("single",), process)],
        "bucket_mb": [ShownBy("distributed/test_ddp.py")],
        "reduce": [ShownBy("distributed/test_ddp.py")],
        "save_in_background": [Flip(("False",), waited_for_saves, same=weights)],
        "rank_output": [Flip(("all",), ranks_shown, same=weights)],
        "rank_logs": [Flip(("logs",), rank_logs, same=weights)],
        "timeout_s": [Flip(("7",), watched_for_s, same=weights)],
        "devices": [Flip(("2",), error)],
        "workers": [Flip(("1",), workers, same=weights)],
        "device_prefetch": [
            Flip(("False",), loads_ahead, same=weights),
            ShownBy("device/test_decode_on_device.py", on_device=True),  # without streams there is nothing to see
        ],
        "prefetch": [Flip(("1000000000",), error, base=("--run.workers=1",))],
        "compile": [Flip(("on",), compilations)],
        "kernels": [Flip(("off",), process)],
        "graph": [Flip(("on",), error, base=("--run.device=cpu",))],
        "warmup_steps": [Flip(("2",), updates_made, same=weights)],
        "channels_last": [Flip(("False",), layout, same=shapes)],
        "log_every_steps": [Flip(("3",), log_lines, same=weights)],
        "checkpoint_initial": [Flip(("True",), saves, same=weights)],
        "checkpoint_every_epochs": [Flip(("2",), saves, base=("--train.eval-every-epochs=2",), same=weights)],
        "checkpoint_every_steps": [Flip(("1",), saves, same=weights)],
        "keep": [Flip(("1",), kept, base=("--train.epochs=4", "--train.eval-every-epochs=4"), same=weights)],
        "resume": [
            Flip(("never",), error, before=()),
            Flip(("DONOR",), weights, base=("--run.override",), same=steps),
        ],
        "override": [Flip(("True",), error, base=("--train.clip=1",), before=())],
        "on_nan": [
            Flip(("skip",), error, base=DIVERGING),
            Flip(("rewind",), bad_steps, base=(*DIVERGING, "--run.max-bad-steps=3")),
        ],
        "max_bad_steps": [Flip(("1",), error, base=(*DIVERGING, "--run.on-nan=skip"))],
        "track": [Flip(("tensorboard",), event_files, same=weights)],
        "tensorboard": [Flip(("True",), event_files, same=weights)],
        "tensorboard_every_steps": [Flip(("2",), board_steps, base=("--run.tensorboard",), same=weights)],
        "benchmark_log": [Flip(("measured",), measured, same=weights)],
        "test_id": [Flip(("nightly",), measured, base=("--run.benchmark-log=measured",), same=weights)],
        "report": [Flip(("off",), pages, base=("--run.report=auto",), same=weights)],
        "profile": [Flip(("1,2",), traces, same=weights), Flip(("4,2",), error)],
        "progress": [Flip(("off", "plain"), shown, same=weights)],
    },
}


@functools.cache
def parts_of(name: str) -> dict[str, object]:
    recipe = recipes.find(name).recipe()
    return {part: Run() if part == "run" else getattr(recipe, part) for part in PARTS}


def flips_of(value: object, field: str) -> list[Flip | ShownBy]:
    return TABLE.get(type(value).__name__, {}).get(field, [])


@functools.cache
def rows() -> list[tuple[str, str, str, int]]:
    """(recipe, part, field, number of the flip); a field without a row in the table has number -1."""
    found = []
    seen = set()  # a field of a class that several recipes use is looked at once
    for name in COVER["names"]():
        for part, value in parts_of(name).items():
            for each in dataclasses.fields(value):
                if (type(value), each.name) in seen:
                    continue
                seen.add((type(value), each.name))
                count = len(flips_of(value, each.name))
                found += [(name, part, each.name, number) for number in range(count)] or [(name, part, each.name, -1)]
    return found


def as_flags(part: str, name: str, value: str, default: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(default, bool):
        return [f"--{part}.{flag}" if value == "True" else f"--{part}.no-{flag}"]
    return [f"--{part}.{flag}", *value.split()] if isinstance(default, tuple) else [f"--{part}.{flag}={value}"]


def load_together(name: str, changes: dict[tuple[str, str], list[str]]) -> tuple[Recipe, Run]:
    """Load flags by (part, field), without those that others exclude; these leave `changes`."""
    while True:
        try:
            return config.load(name, [flag for flags in changes.values() for flag in flags])
        except UsageError as error:  # it names both, and the later one goes
            named = [(part, field) for part, field in changes if re.search(rf"\b{field}\b", str(error))]
            del changes[named[-1]]


# Words of the table that stand for files.


@pytest.fixture(scope="module")
def named(shapes: Path, volumes: Path, blobs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the word, and where it depends on the data, by their class."""
    root = tmp_path_factory.mktemp("named")
    images = Path(shutil.copytree(shapes, root / "images"))
    damage(min(path for path in (images / "train").rglob("*") if path.is_file()))
    options = drawings.ShapesOptions(root, only=("detection",), train_pictures=8, val_pictures=3)
    drawings.prepare(options, lambda what, done, total: None)
    boxes = Path(shutil.copytree(root / "detection", root / "damaged boxes"))
    damage(min((boxes / "train2017").iterdir()))
    torn = Path(shutil.copytree(volumes, root / "volumes"))
    held_out = {case.name for case in SegmentationData(path=str(torn), task="own").source("val").cases}
    damage(min(path for path in torn.glob("*_x.npy") if path.name.removesuffix("_x.npy") not in held_out))
    masked = write_masks(root / "masked")
    torn_masks = write_masks(root / "torn masks")
    held_back = set(MaskData(path=str(torn_masks)).open("val", 0).source.names.all())
    damage(min(path for path in (torn_masks / "images").iterdir() if path.name.encode() not in held_back))
    return {
        "DAMAGED ClassificationData": images,
        "DAMAGED MaskData": torn_masks,
        "MASKED": masked,
        "DAMAGED DetectionData": boxes,
        "DAMAGED SegmentationData": torn,
        "DRAWN": root / "detection",
        "PATCHES": blobs(root / "patches", range(5), patch=(8, 16, 16)),
        "RECORDS": Path(shutil.copytree(TESTS / "golden" / "tfrecord", root / "records")),
    }


def write_masks(folder: Path) -> Path:
    """Write images with masks of 0, 1 and 5."""
    random = np.random.default_rng(0)
    for number in range(20):
        for kind, pixels in (
            ("images", random.integers(0, 256, (40, 40, 3)).astype(np.uint8)),
            ("masks", np.array([0, 1, 5], np.uint8)[random.integers(0, 3, (40, 40))]),
        ):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / kind / f"{number:02}.png")
    return folder


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-300])


@pytest.fixture(scope="module")
def known() -> dict[tuple, dict]:
    """Observations by flags: many flips share one baseline."""
    return {}


@pytest.fixture
def called(monkeypatch) -> None:
    """Record calls in CALLED and make them, except compilations."""

    def spy(owner: type, name: str, key: str, note: Callable[..., Any]) -> None:
        call = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            CALLED[key].append(note(*args, **options))
            return result

        monkeypatch.setattr(owner, name, noted)

    def compile(function, **_):
        CALLED["compile"].append(None)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    spy(Step, "_update", "update", lambda *_: torch.are_deterministic_algorithms_enabled())
    spy(Saver, "save", "save", lambda saver, **_: saver._pending is None)
    spy(Watchdog, "__init__", "watch", lambda watchdog, *_: watchdog.timeout_s)
    spy(Loader, "__init__", "load", lambda loader, feeds, run, *_, **__: run.device_prefetch)


@pytest.fixture
def seen(known: dict[tuple, dict], load, train_made, named, called: None, tmp_path: Path, monkeypatch):
    """seen(recipe, flip, change): what the flip looks at with these flags."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # --train.deterministic sets it in this process

    def spelt(name: str, flag: str) -> str:
        if "WEIGHTS" in flag:
            donor = tmp_path / "donor.safetensors"
            tensors = built(*load(name, "--train.seed=77")).model.state_dict()
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, donor)
            return flag.replace("WEIGHTS", str(donor))
        if "DONOR" in flag:
            donor = run_of(name, tmp_path / "donor", "--train.seed=77", "--train.epochs=1").folder
            return flag.replace("DONOR", str(donor))
        for word, path in named.items():
            word, _, data = word.partition(" ")
            if data in ("", type(parts_of(name)["data"]).__name__):
                flag = flag.replace(word, str(path))
        return flag

    def run_of(name: str, out: Path, *flags: str) -> Any:
        recipe, run = load(name, *flags)
        return train_made(thin(recipe), dataclasses.replace(run, out=str(out)))

    def ran(recipe: Recipe, run: Run, flip: Flip) -> Any:
        if not flip.home:
            run = dataclasses.replace(run, out=str(tmp_path / f"run {len(list(tmp_path.iterdir()))}"))
        if flip.before is not None:
            assert run_of(recipe.name, Path(run.out), *flip.before).error is None
        for calls in CALLED.values():
            calls.clear()
        return train_made(thin(recipe), run)

    def see(name: str, flip: Flip, change: list[str]) -> list[Any]:
        looks = [flip.look, *([flip.same] if flip.same else [])]
        found = known.setdefault((name, flip.before, flip.home, *flip.base, *change), {})
        if missing := [look for look in looks if look not in found]:
            recipe, run = load(name, *(spelt(name, flag) for flag in (*flip.base, *change)))
            found.update({look: look(recipe, run) for look in missing if look in WITHOUT_RUN})
        if missing := [look for look in missing if look not in WITHOUT_RUN]:
            result = ran(recipe, run, flip)
            found.update({look: look(result) for look in missing})
        return [found[look] for look in looks]

    return see


class Collected:
    """A plugin that keeps what pytest has chosen to run."""

    items: list[pytest.Item]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


@pytest.fixture(scope="module")
def shown_by() -> dict[tuple[str, str], bool]:
    """(field, file) -> whether the test that shows it needs an accelerator, of all in the default set."""
    chosen = Collected()
    rows = [row for fields in TABLE.values() for rows in fields.values() for row in rows if isinstance(row, ShownBy)]
    named = sorted({str(TESTS / row.file) for row in rows})
    assert pytest.main([*named, "--collect-only", "-q", "-s", "-p", "no:cacheprovider"], [chosen]) == 0
    return {
        (mark.args[0], item.path.relative_to(TESTS).as_posix()): item.get_closest_marker("device") is not None
        for item in chosen.items
        for mark in item.iter_markers("shows")
    }


@pytest.mark.parametrize(
    ("name", "part", "field_name", "number"), rows(), ids=lambda value: str(value) if not isinstance(value, int) else ""
)
def test_a_field_does_something(name: str, part: str, field_name: str, number: int, load, seen, request):
    value = parts_of(name)[part]
    kind = type(value).__name__
    assert number >= 0, (
        f"{part}.{field_name} of {name} ({kind}) has no row in the table of {Path(__file__).name}; "
        f"say which change of it shows, and how"
    )
    flip = flips_of(value, field_name)[number]
    if isinstance(flip, ShownBy):
        shown = request.getfixturevalue("shown_by").get((f"{part}.{field_name}", flip.file))
        where = "on a device" if flip.on_device else "in the default set"
        assert shown is flip.on_device, f'no test in {flip.file} is marked shows("{part}.{field_name}") and run {where}'
        return
    text = flip.values[0]
    if len(flip.values) > 1:
        recipe, run = load(name, *flip.base)
        now = getattr(run if part == "run" else getattr(recipe, part), field_name)
        text = next(each for each in flip.values if each != str(now))
    change = as_flags(part, field_name, text, getattr(value, field_name))
    before, after = (seen(name, flip, flags) for flags in ([], change))
    assert after[0] != before[0], f"{' '.join(change)} changes nothing: {flip.look.__name__} stays {before[0]}"
    assert after[1:] == before[1:], f"{' '.join(change)} changes {flip.same.__name__} too"


@COVER["recipe_of_each"](COVER["richest"])
def test_steps_before_the_run_are_made_and_undone(name: str, tmp_path: Path, train, finished, monkeypatch):
    """Two updates more, on the first batch, and not one bit of difference."""
    updates = []
    update = Step._update
    monkeypatch.setattr(
        Step, "_update", lambda self, batch: (updates.append(batch["index"].tolist()), update(self, batch))
    )
    warm = train(name, tmp_path / "warm", "--run.warmup-steps=2")
    assert updates[:2] == [updates[2]] * 2 and len(updates) == 2 + 6
    assert warm.bits() == finished(name).bits() and warm.scores == finished(name).scores


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "demo_classification" else pytest.mark.slow)
        for name in sorted({name for name, *_ in rows()})
    ],
)
def test_looking_twice_at_the_same_run_sees_no_change(name: str, load, train, called, tmp_path: Path, monkeypatch):
    """Else a difference would prove nothing."""
    monkeypatch.chdir(tmp_path)
    flips = [flips_of(parts_of(name)[part], field) for by, part, field, _ in rows() if by == name]
    looks = {flip.look for flip in itertools.chain(*flips) if isinstance(flip, Flip)}

    def looked_at(folder: str) -> dict[str, Any]:
        seen = {look.__name__: look(*load(name)) for look in looks & set(WITHOUT_RUN)}
        if after_run := looks - set(WITHOUT_RUN):
            for calls in CALLED.values():
                calls.clear()
            result = train(name, tmp_path / folder)
            seen |= {look.__name__: look(result) for look in after_run}
        return seen

    assert looked_at("first") == looked_at("second")


@COVER["recipe_of_each"](COVER["classes"])
def test_all_changes_together_survive_config_yaml(name: str, tmp_path: Path):
    changes = {}
    for part, value in parts_of(name).items():
        for field_name in (each.name for each in dataclasses.fields(value)):
            alone = [flip for flip in flips_of(value, field_name) if isinstance(flip, Flip) and not flip.base]
            if alone:
                changes[part, field_name] = as_flags(part, field_name, alone[0].values[0], getattr(value, field_name))
    made = load_together(name, changes)
    assert len(changes) > 60
    path = tmp_path / "config.yaml"
    path.write_text("# read, not remembered\n" + store.dump(*made))
    assert config.load(name, [], path) == made != config.load(name)


def test_the_table_has_no_rows_of_fields_that_are_gone():
    known: dict[str, set[str]] = {}
    for name in recipes.names():
        for value in parts_of(name).values():
            known.setdefault(type(value).__name__, set()).update(each.name for each in dataclasses.fields(value))
    assert {kind: set(fields) for kind, fields in TABLE.items()} == known
