"""Every field of every recipe is changed, and something must come of it: a field that nothing reads is a stub.

The table is keyed by the class of the part, so a recipe made of known parts needs no new rows; a new field, or a part
of a new class, fails here until a row says how its effect is seen.
"""

import ast
import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sightline import config, recipes
from sightline.data.segmentation import SegmentationData
from sightline.errors import UsageError
from sightline.train.step import Step

PARTS = ("model", "data", "task", "optimizer", "schedule", "train", "run")
TESTS = Path(__file__).resolve().parents[1]


# What is looked at after a run. Each look is of one kind, and equal after equal runs.


def weights(result) -> Any:
    return result.bits()["model.safetensors"]


def files(result) -> Any:
    return sorted(result.bits())


def shapes(result) -> Any:
    return {name: tuple(t.shape) for name, t in load_file(result.checkpoints[-1] / "model.safetensors").items()}


def scores(result) -> Any:
    return result.scores.values


def steps(result) -> Any:
    return [event["steps"] for event in result.events("start")]


def evaluations(result) -> Any:
    return [event["epoch"] for event in result.events("evaluate")]


def event_files(result) -> Any:
    return len(list((result.folder / "tensorboard").glob("events.*")))


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


def workers(result) -> Any:
    return [len(event["workers"]) for event in result.events("start")]


def threads(result) -> Any:
    return json.loads((result.folder / "environment.json").read_text())["threads"]


def optimized(result) -> Any:
    return sorted(load_file(result.checkpoints[-1] / "optimizer.safetensors"))


def told_of_fp32(result) -> Any:
    return [line for line in result.shown.splitlines() if line.startswith("train.fp32_ops: ")]


def told_of_crops(result) -> Any:
    return [line for line in result.shown.splitlines() if "crops are augmented on " in line]


def told_of_cache(result) -> Any:
    """Without the numbers, of which the memory that is free is another every time."""
    return [line.partition(":")[0] for line in result.shown.splitlines() if "cache O" in line]


def measured(_) -> Any:
    """What benchmark_run.log calls the last run, and the names in metric.log."""
    folder = Path("measured")
    if not folder.is_dir():
        return None
    names = {json.loads(line)["name"] for line in (folder / "metric.log").read_text().splitlines()}
    return json.loads((folder / "benchmark_run.log").read_text())["test_id"], sorted(names)


def determinism(_) -> Any:
    return torch.are_deterministic_algorithms_enabled()


def compilations(_) -> Any:
    return len(COMPILED)


COMPILED: list[object] = []  # what was given to torch.compile since the last run began


@dataclass(frozen=True)
class Flip:
    """One change of a field: the first of `values` that is not the value it has; `look` must then see another thing."""

    values: tuple[str, ...]
    look: Callable[..., Any]
    base: tuple[str, ...] = ()
    """Flags that both runs need for the field to matter."""
    same: Callable[..., Any] | None = None
    """What must not change: evaluation does not reach into training."""
    before: tuple[str, ...] | None = None
    """Flags of a run made in the folder beforehand."""
    home: bool = False
    """Whether the run gets no folder of its own."""


@dataclass(frozen=True)
class SeenIn:
    """For what one process cannot show: the test that does."""

    test: str


DIVERGING = ("--optimizer.lr=1e30", "--schedule.kind=constant", "--schedule.warmup-epochs=0")
ADAMW = ("--optimizer.kind=adamw", "--optimizer.no-nesterov", "--optimizer.momentum=0.9", "--optimizer.lr=0.01")
RMSPROP = ("--optimizer.kind=rmsprop", "--optimizer.no-nesterov", "--optimizer.lr=0.001")
LARS = ("--optimizer.kind=lars", "--optimizer.lr=2")
DECAYING = ("--optimizer.kind=sgd", "--optimizer.weight-decay=0.1")
COSINE = ("--schedule.kind=cosine", "--schedule.warmup-epochs=1")
POLYNOMIAL = ("--schedule.kind=polynomial",)
WARMUP = ("--schedule.warmup-epochs=1", "--schedule.warmup-factor=0.2")
TABLE_RATES = ("--schedule.kind=table", "--schedule.table-epochs", "1", "--schedule.table-rates", "0.01")
STEP = ("--schedule.kind=step", "--schedule.drop-epochs", "1", "--schedule.warmup-epochs=0")
SKIPPING = ("--data.path=DAMAGED", "--data.on-bad-sample=skip")
ONE_CLASS = ("--data.path=synthetic:classes=1,samples=24,size=28", "--data.classes=1")  # which nobody gets wrong
BOTTLENECKS = ("--model.depth=50", "--model.width=8", "--train.epochs=1")
UNEVEN = ("--data.path=synthetic:classes=10,samples=28,size=28",)
DRAWN = ("--data.path=synthetic:samples=2", "--data.task=04", "--data.nvol=1", "--train.global-batch=2")
SHORT = ("--train.epochs=1", "--model.width=2")

COUNTS = SeenIn("unit/tasks/test_detection_task.py::test_each_field_of_prediction_counts")
PATIENCE = SeenIn("unit/train/test_stops.py::test_patience_ends_a_run_after_its_least_epochs_and_a_larger_one_goes_on")
WINDOWS = SeenIn("unit/tasks/test_segmentation.py::test_whole_volumes_go_through_windows")
TABLE: dict[str, dict[str, list[Flip | SeenIn]]] = {
    "ResNetConfig": {
        "depth": [Flip(("18", "34"), shapes)],
        "width": [Flip(("6",), shapes)],
        "stem": [Flip(("3x3", "7x7"), shapes)],
        "version": [Flip(("v2",), shapes, base=("--model.no-bias",)), Flip(("v1",), weights, base=BOTTLENECKS)],
        "groups": [Flip(("2",), shapes, base=BOTTLENECKS)],
        "group_width": [Flip(("32",), shapes, base=BOTTLENECKS)],
        "padding": [Flip(("same",), weights), Flip(("same_but_stem",), weights)],
        "project_every_stage": [Flip(("True",), shapes)],
        "bias": [Flip(("True",), shapes)],
        "bn_momentum": [Flip(("0.01",), weights)],
        "bn_eps": [Flip(("0.1",), weights)],
        "init": [Flip((name,), weights) for name in ("he_truncated", "variance_scaling", "glorot")],
        "head_init": [Flip(("normal",), weights), Flip(("glorot",), weights)],
        "zero_init_residual": [Flip(("True", "False"), weights)],
        "weights": [Flip(("WEIGHTS",), weights), Flip(("missing.pth",), error)],
    },
    "SsdConfig": {
        "depth": [Flip(("18", "34"), shapes, base=("--model.depth=34",))],
        "width": [Flip(("6",), shapes)],
        "padding": [Flip(("same", "torch"), weights)],
        "steps": [Flip(("4 16 32 64 100 300",), weights)],
        "scales": [Flip(("30 60 99 153 207 261 315",), weights)],
        "ratios": [Flip(("2 2 2 2 2 2",), shapes)],
        "init": [Flip(("torch", "tf"), weights)],
        "bn_momentum": [Flip(("0.01",), weights)],
        "freeze": [Flip(("first_block", "none"), optimized)],
        "weights": [
            Flip(("missing.pth",), error),
            SeenIn("unit/models/test_ssd.py::test_a_whole_detector_loads_and_heads_of_other_classes_stay_fresh"),
        ],
    },
    "Detection": {
        "lineage": [SeenIn("unit/tasks/test_matching.py::test_two_boxes_that_claim_one_anchor")],
        "score_threshold": [COUNTS],
        "nms_iou": [COUNTS],
        "candidates": [COUNTS],
        "per_image": [COUNTS],
    },
    "DetectionData": {
        "augment": [Flip(("off", "on"), weights)],
        "size": [Flip(("56",), weights)],
        "crop": [Flip((kind,), weights, base=("--data.crop=tf",)) for kind in ("mlperf", "off")],
        "crop_tries": [Flip(("1", "50"), weights, base=("--data.crop=tf",))],
        "flip": [Flip(("1.0",), weights)],
        "jitter": [Flip(("mlperf", "tf"), weights), Flip(("off", "tf"), weights)],
        "brightness": [Flip(("0.3",), weights, base=("--data.jitter=tf",))],
        "contrast": [Flip(("0.2",), weights, base=("--data.jitter=tf",))],
        "saturation": [Flip(("0.2",), weights, base=("--data.jitter=tf",))],
        "hue": [Flip(("0.2",), weights, base=("--data.jitter=tf",))],
        "resize": [Flip(("antialias", "tf"), weights)],
        "mean": [Flip(("0.1 0.2 0.3",), weights)],
        "std": [Flip(("0.1 0.2 0.3",), weights)],
        "path": [Flip(("synthetic:classes=10,samples=24,size=50",), weights), Flip(("",), error)],
        "source": [Flip(("coco",), error)],
        "classes": [Flip(("7",), error)],
        "max_boxes": [Flip(("1",), error)],
        "samples": [SeenIn("unit/data/test_detection.py::test_what_is_declared_stands_in_for_a_path")],
        "cache": [SeenIn("unit/data/test_detection.py::test_the_cache_is_filled_once_and_then_read")],
        "static": [Flip(("nowhere",), error)],
        "fake": [Flip(("True",), weights, same=steps)],
        "on_bad_sample": [
            SeenIn("unit/data/test_detection.py::test_damaged_pictures_are_bad_samples_and_may_be_skipped")
        ],
        "max_bad_samples": [
            SeenIn("unit/data/test_detection.py::test_damaged_pictures_are_bad_samples_and_may_be_skipped")
        ],
    },
    "UnetConfig": {
        # Of 4 or 8 channels every one would be a group of its own, which is what instance norm does.
        "norm": [Flip(("batch",), shapes), Flip(("group",), weights, base=("--model.width=6",))],
        "negative_slope": [Flip(("0.2",), weights)],
        "residual": [Flip(("True",), shapes)],
        "attention": [Flip(("True",), shapes)],
        "drop_block": [Flip(("True",), shapes)],
        "deep_supervision": [Flip(("False", "True"), shapes)],
        "aux_heads": [Flip(("1",), shapes, base=("--model.deep-supervision",))],
        "width": [Flip(("6",), shapes)],
        "max_filters": [Flip(("12",), shapes)],
    },
    "Segmentation": {
        "voxel_loss": [Flip(("focal",), weights)],
        "supervision": [Flip(("exact",), weights, base=("--model.deep-supervision",))],
        "dice_over": [SeenIn("distributed/test_dice_world.py::test_ranks_give_the_gradients_and_scores_of_one")],
        "tta": [Flip(("True",), scores, same=weights)],
        "overlap": [WINDOWS],
        "blend": [WINDOWS],
        "window_batch": [WINDOWS],
        "regions": [
            Flip(("brats",), error),  # other classes are refused
            SeenIn("unit/evaluate/test_dice.py::test_regions_of_brain_tumours"),
        ],
    },
    "SegmentationData": {
        "augment": [Flip(("off",), weights)],
        "augment_on": [Flip(("device",), told_of_crops, same=steps)],
        "oversampling": [Flip(("1.0",), weights, base=("--data.augment=off",))],
        "zoom": [Flip(("1.0",), weights)],
        "zoom_range": [Flip(("0.3 0.4",), weights, base=("--data.zoom=1",))],
        "zoom_depth": [Flip(("False", "True"), weights, base=("--data.zoom=1",))],
        "flip": [Flip(("1.0",), weights)],
        "noise": [Flip(("1.0",), weights)],
        "noise_std": [Flip(("0.5 0.6",), weights, base=("--data.noise=1",))],
        "blur": [Flip(("1.0",), weights)],
        "blur_sigma": [Flip(("2.0 3.0",), weights, base=("--data.blur=1",))],
        "brightness": [Flip(("1.0",), weights)],
        "brightness_range": [Flip(("2.0 3.0",), weights, base=("--data.brightness=1",))],
        "contrast": [Flip(("1.0",), weights)],
        "contrast_range": [Flip(("2.0 3.0",), weights, base=("--data.contrast=1",))],
        "path": [Flip(("synthetic:samples=3",), steps, base=(*DRAWN, *SHORT)), Flip(("",), error)],
        "task": [Flip(("04",), error)],
        "dim": [Flip(("3",), shapes, base=(*DRAWN, *SHORT, "--train.max-steps=1"))],
        "fold": [Flip(("1",), weights, same=steps)],
        "folds": [Flip(("3",), steps, base=("--train.last-batch=drop",))],
        "nvol": [Flip(("4",), steps, base=("--train.last-batch=drop",))],
        "cache": [Flip(("off",), told_of_cache, base=("--data.cache=ram",), same=weights)],
        "on_bad_sample": [Flip(("skip",), error, base=("--data.path=DAMAGED",))],
        "max_bad_samples": [Flip(("0",), error, base=SKIPPING)],
    },
    "ClassificationData": {
        "augment": [Flip(("off", "on"), weights)],
        "crop": [Flip(("tf", "area"), weights)],
        "crop_scale": [Flip(("0.2 0.3",), weights, same=steps)],
        "crop_ratio": [Flip(("2.0 3.0",), weights)],
        "flip": [Flip(("1.0",), weights)],
        "policy": [Flip((name,), weights) for name in ("randaugment", "autoaugment", "augmix")],
        "policy_magnitude": [Flip(("25",), weights, base=("--data.policy=randaugment",))],
        "augmix_severity": [Flip(("9",), weights, base=("--data.policy=augmix",))],
        "random_erase": [Flip(("1.0",), weights)],
        "mixup": [Flip(("0.7",), weights)],
        "mixup_per": [Flip(("sample", "batch"), weights, base=("--data.mixup=0.7",))],
        "mixup_partner": [Flip((name,), weights, base=("--data.mixup=0.7",)) for name in ("reversed", "random")],
        "cutmix": [Flip(("0.7",), weights)],
        "size": [Flip(("32",), weights)],
        "eval_resize": [Flip(("40",), scores, same=weights)],
        # The pictures here are square.
        "eval_geometry": [SeenIn("unit/data/augment/test_tensorflow.py::test_stretching_does_not_keep_the_shape")],
        "eval_size": [Flip(("16",), scores, same=weights)],
        "interpolation": [Flip(("bicubic", "bilinear"), weights), Flip(("legacy", "bilinear"), weights)],
        "mean": [Flip(("0.1 0.2 0.3",), weights)],
        "std": [Flip(("0.1 0.2 0.3",), weights)],
        "image_type": [Flip(("bf16", "uint8"), weights)],
        "path": [Flip(("synthetic:classes=10,samples=24,size=30",), weights), Flip(("",), error)],
        "source": [Flip(("folder",), error)],
        "classes": [Flip(("7",), error)],
        "background": [Flip(("first",), shapes), Flip(("last",), shapes)],
        "first_label": [SeenIn("unit/data/test_tfrecord.py::test_first_label_is_taken_from_the_labels")],
        "decoder": [Flip(("gpu",), error)],
        "samples": [SeenIn("unit/measure/test_inspect.py::test_steps_are_counted_from_what_the_recipe_declares")],
        "on_bad_sample": [Flip(("skip", "fail"), error, base=("--data.path=DAMAGED",))],
        "max_bad_samples": [Flip(("0",), error, base=SKIPPING)],
    },
    "ArchConfig": {
        "arch": [Flip(("resnet18",), shapes)],
        "zero_init_residual": [Flip(("True",), weights, base=("--model.arch=resnet18", "--train.epochs=1"))],
        "weights": [Flip(("WEIGHTS",), weights)],
    },
    "Classification": {
        "label_smoothing": [Flip(("0.3",), weights)],
    },
    "OptimizerConfig": {
        "kind": [
            Flip((kind, "sgd"), weights, base=("--optimizer.no-nesterov", "--optimizer.momentum=0.9"))
            for kind in ("adamw", "sgd_keras", "lars")
        ],
        "lr_for_batch": [Flip(("32",), weights)],
        "lr_many": [SeenIn("unit/train/test_optimizers.py::test_the_base_rate_follows_batch_and_ranks")],
        "lr": [Flip(("0.07",), weights)],
        "weight_decay": [Flip(("0.03",), weights)],
        "norm_weight_decay": [Flip(("0.2",), weights)],
        "bias_weight_decay": [Flip(("0.2",), weights)],
        "decay_form": [Flip((form,), weights, base=DECAYING) for form in ("keras_l2", "decoupled")],
        "momentum": [Flip(("0.4",), weights), Flip(("0.4",), weights, base=LARS)],
        "nesterov": [Flip(("True", "False"), weights)],
        "alpha": [Flip(("0.5",), weights, base=RMSPROP)],
        "beta1": [Flip(("0.5",), weights, base=ADAMW)],
        "beta2": [Flip(("0.5",), weights, base=ADAMW)],
        "eta": [Flip(("0.1",), weights, base=LARS)],
        "eps": [Flip(("0.1",), weights, base=ADAMW), Flip(("0.1",), weights, base=LARS)],
    },
    "ScheduleConfig": {
        "kind": [Flip(("constant", "cosine"), weights), Flip(("polynomial",), weights)],
        "epoch_steps": [
            Flip(("exact",), weights, base=(*POLYNOMIAL, *UNEVEN)),
            Flip(("less_one",), weights, base=POLYNOMIAL),
        ],
        "warmup_from": [Flip(("zero",), weights, base=COSINE), Flip(("zero",), weights, base=POLYNOMIAL)],
        "cosine_from": [Flip(("start",), weights, base=COSINE)],
        "power": [Flip(("1.0",), weights, base=POLYNOMIAL)],
        "hold_epochs": [Flip(("1.5",), weights, base=COSINE)],
        "decay_epochs": [
            Flip(("1.5",), weights, base=(kind, "--schedule.warmup-epochs=0"))
            for kind in ("--schedule.kind=cosine", *POLYNOMIAL)
        ],
        "floor": [Flip(("0.1",), weights, base=COSINE)],
        "drop_after": [Flip(("True",), weights, base=STEP)],
        "warmup_epochs": [Flip(("0.7",), weights)],
        "final_lr": [Flip(("0.05",), weights, base=(kind,)) for kind in ("--schedule.kind=cosine", *POLYNOMIAL)],
        "drop_epochs": [Flip(("5",), weights, base=STEP)],
        "factor": [Flip(("0.5",), weights, base=STEP)],
        "unit": [Flip(("epoch", "step"), weights, base=("--schedule.kind=cosine",))],
        "warmup": [Flip(("constant",), weights, base=WARMUP)],
        "warmup_factor": [Flip(("0.9",), weights, base=WARMUP)],
        "patience": [
            Flip(("0",), weights, base=("--schedule.kind=plateau", "--train.epochs=5", "--optimizer.lr=1e-5"))
        ],
        "plateau_on": [
            SeenIn("unit/train/test_stops.py::test_a_plateau_of_the_loss_drops_the_rate_and_resumes_to_the_same_bits")
        ],
        "table_epochs": [Flip(("5",), weights, base=TABLE_RATES)],
        "table_rates": [Flip(("0.03",), weights, base=TABLE_RATES)],
    },
    "TrainConfig": {
        "epochs": [Flip(("3",), steps)],
        "global_batch": [Flip(("4",), steps)],
        "precision": [Flip(("bf16",), weights), Flip(("fp16",), files)],
        "accumulation": [Flip(("2",), weights, same=steps), Flip(("3",), error)],
        "ema_every_steps": [Flip(("2",), scores, base=("--train.ema=0.5",), same=weights)],
        "ema_rule": [Flip(("torchvision", "plain"), scores, base=("--train.ema=0.9",), same=weights)],
        "eval_autocast": [Flip(("True", "False"), scores, base=("--train.precision=bf16",), same=weights)],
        "repeats": [Flip(("2",), weights, same=steps)],
        "ema": [Flip(("0.5",), scores, same=weights), Flip(("0.5",), files)],
        "clip": [Flip(("0.01",), weights)],
        "eval_every_epochs": [Flip(("2",), evaluations, same=weights)],
        "last_batch": [
            Flip(("pad",), steps, base=(*UNEVEN, "--train.last-batch=drop")),
            Flip(("wrap",), weights, base=(*UNEVEN, "--train.last-batch=drop"), same=steps),
        ],
        "eval_from_epoch": [Flip(("2",), evaluations, same=weights)],
        "eval_shards": [
            SeenIn("distributed/test_ranks.py::test_every_rank_evaluates_everything_and_rank_0_is_reported")
        ],
        "target_score": [Flip(("0.01",), evaluations, base=ONE_CLASS)],
        "diverged_score": [Flip(("0.99",), error)],
        "patience": [PATIENCE],
        "min_epochs": [PATIENCE],
        "steps_per_epoch": [Flip(("2",), steps)],
        "max_steps": [Flip(("4",), steps)],
        "trainable": [Flip(("head",), optimized)],
        "fp32_ops": [
            Flip(("BatchNorm2d Linear",), weights, base=("--train.precision=bf16",)),
            Flip(("relu mean",), told_of_fp32, same=weights),
        ],
        "bn_eval": [SeenIn("distributed/test_ranks.py::test_batch_norm_statistics_follow_their_rule")],
        "bn_group": [
            Flip(("2",), error),  # there is one process
            SeenIn("unit/models/test_norm.py::test_all_ranks_train_as_one_process_with_the_whole_batch"),
        ],
        "seed": [Flip(("1",), weights)],
        "deterministic": [Flip(("True", "False"), determinism, same=weights)],
    },
    "Run": {
        "out": [Flip(("somewhere/else",), place, home=True)],
        "device": [Flip(("abacus",), error)],
        # One step is enough: threads that wait for each other on busy cores are slow.
        "threads": [Flip(("2",), threads, base=("--train.epochs=1", "--train.global-batch=24"))],
        "max_cpus": [SeenIn("unit/hardware/test_setup.py::test_a_run_keeps_to_the_first_cpus_it_may_use")],
        "affinity": [SeenIn("unit/hardware/test_affinity.py::test_a_run_keeps_to_its_cpus")],
        "bucket_mb": [SeenIn("distributed/test_ddp.py::test_what_torch_is_asked_for")],
        "reduce": [SeenIn("distributed/test_ddp.py::test_two_levels_give_the_gradients_of_one")],
        "save_in_background": [SeenIn("faults/test_background_save.py::test_training_goes_on_while_a_save_is_written")],
        "rank_output": [SeenIn("distributed/test_elastic.py::test_a_killed_rank_leads_to_a_restart_and_equal_weights")],
        "timeout_s": [SeenIn("distributed/test_hang.py::test_a_hung_rank_ends_all_with_their_stacks")],
        "devices": [SeenIn("distributed/test_mpi.py::test_devices_starts_ranks_that_share_the_batch")],
        "workers": [Flip(("1",), workers, same=weights)],
        "device_prefetch": [
            SeenIn("device/test_decode_on_device.py::test_batches_are_the_same_without_a_stream_of_their_own")
        ],
        "prefetch": [Flip(("1000000000",), error, base=("--run.workers=1",))],
        "compile": [Flip(("on",), compilations)],
        "kernels": [SeenIn("unit/kernels/test_switch.py::test_a_run_says_which")],
        "graph": [Flip(("on",), error, base=("--run.device=cpu",))],
        "warmup_steps": [SeenIn("recipes/test_fields.py::test_steps_before_the_run_are_made_and_undone")],
        "channels_last": [SeenIn("unit/train/test_step.py::test_channels_last_is_a_layout_and_not_another_model")],
        "log_every_steps": [Flip(("3",), log_lines, same=weights)],
        "checkpoint_initial": [Flip(("True",), saves, same=weights)],
        "checkpoint_every_epochs": [Flip(("2",), saves, base=("--train.eval-every-epochs=2",), same=weights)],
        "checkpoint_every_steps": [Flip(("1",), saves, same=weights)],
        "keep": [Flip(("1",), kept, base=("--train.epochs=4", "--train.eval-every-epochs=4"), same=weights)],
        "resume": [
            Flip(("never",), error, before=()),
            Flip(("DONOR",), weights, base=("--run.override",), same=steps),
        ],
        "override": [Flip(("True",), error, base=("--train.epochs=3",), before=())],
        "on_nan": [
            Flip(("skip",), error, base=DIVERGING),
            Flip(("rewind",), bad_steps, base=(*DIVERGING, "--run.max-bad-steps=3")),
        ],
        "max_bad_steps": [Flip(("1",), error, base=(*DIVERGING, "--run.on-nan=skip"))],
        "tensorboard": [Flip(("True",), event_files, same=weights)],
        "benchmark_log": [Flip(("measured",), measured, same=weights)],
        "test_id": [Flip(("nightly",), measured, base=("--run.benchmark-log=measured",), same=weights)],
        "profile": [Flip(("1,2",), traces, same=weights), Flip(("4,2",), error)],
        "progress": [Flip(("off", "plain"), shown, same=weights)],
    },
}


@pytest.mark.parametrize("name", recipes.names())
def test_steps_before_the_run_are_made_and_undone(name: str, tmp_path: Path, train, monkeypatch):
    """Two updates more, on the first batch, and not one bit of difference."""
    updates = []
    update = Step._update
    monkeypatch.setattr(
        Step, "_update", lambda self, batch: (updates.append(batch["index"].tolist()), update(self, batch))
    )
    cold = train(name, tmp_path / "cold")
    made = list(updates)
    updates.clear()
    warm = train(name, tmp_path / "warm", "--run.warmup-steps=2")
    assert updates == [made[0], made[0], *made] and len(made) == 6
    assert warm.bits() == cold.bits() and warm.scores == cold.scores


def parts_of(name: str) -> dict[str, object]:
    recipe = recipes.find(name).recipe()
    return {part: config.Run() if part == "run" else getattr(recipe, part) for part in PARTS}


def rows() -> list[tuple[str, str, str, int]]:
    """(recipe, part, field, number of the flip); a field without a row in the table has number -1."""
    found = []
    seen = set()  # a field of a class that several recipes use is looked at once
    for name in recipes.names():
        for part, value in parts_of(name).items():
            for each in dataclasses.fields(value):
                if (type(value), each.name) in seen:
                    continue
                seen.add((type(value), each.name))
                count = len(TABLE.get(type(value).__name__, {}).get(each.name, []))
                found += [(name, part, each.name, number) for number in range(count)] or [(name, part, each.name, -1)]
    return found


def as_flags(part: str, name: str, value: str, default: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(default, bool):
        return [f"--{part}.{flag}" if value == "True" else f"--{part}.no-{flag}"]
    return [f"--{part}.{flag}", *value.split()] if isinstance(default, tuple) else [f"--{part}.{flag}={value}"]


@pytest.fixture(scope="module")
def damaged(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn pictures, one of which is none."""
    root = tmp_path_factory.mktemp("damaged") / "pictures"
    shutil.copytree(shapes, root)
    min(path for path in (root / "train").rglob("*") if path.is_file()).write_text("none")
    return root


@pytest.fixture(scope="module")
def torn(volumes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared volumes, one of which ends too soon."""
    root = tmp_path_factory.mktemp("torn") / "volumes"
    shutil.copytree(volumes, root)
    held_out = {case.name for case in SegmentationData(path=str(root), task="own").source("val").cases}
    whole = min(path for path in root.glob("*_x.npy") if path.name.removesuffix("_x.npy") not in held_out)
    whole.write_bytes(whole.read_bytes()[:-7])
    return root


@pytest.fixture(scope="module")
def known() -> dict[tuple, dict]:
    """What was seen, by the flags of the run: many flips share one baseline."""
    return {}


@pytest.fixture
def ran(known: dict[tuple, dict], train, tmp_path: Path, damaged: Path, torn: Path, monkeypatch):
    """ran(recipe, flip, change): what the flip looks at, after a run with this change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # --train.deterministic sets it in this process

    def record(function, **_):
        COMPILED.append(function)
        return function

    monkeypatch.setattr(torch, "compile", record)

    def spelt(name: str, flag: str) -> str:
        """Words of the table that stand for files."""
        if "WEIGHTS" in flag or "DONOR" in flag:
            donor = train(name, tmp_path / "donor", "--train.seed=77", "--train.epochs=1")
            flag = flag.replace("WEIGHTS", str(donor.checkpoints[-1] / "model.safetensors"))
            flag = flag.replace("DONOR", str(donor.folder))
        return flag.replace("DAMAGED", str(torn if isinstance(parts_of(name)["data"], SegmentationData) else damaged))

    def run(name: str, flip: Flip, change: list[str]) -> list[Any]:
        looks = [flip.look, *([flip.same] if flip.same else [])]
        seen = known.setdefault((name, flip.before, flip.home, *flip.base, *change), {})
        if any(look not in seen for look in looks):
            folder = None if flip.home else tmp_path / f"run {len(list(tmp_path.iterdir()))}"
            if flip.before is not None:
                assert train(name, folder, *flip.before).error is None
            flags = [spelt(name, flag) for flag in (*flip.base, *change)]
            COMPILED.clear()
            result = train(name, folder, *flags)
            seen.update({look: look(result) for look in looks})
        return [seen[look] for look in looks]

    return run


@pytest.mark.parametrize(
    ("name", "part", "field_name", "number"), rows(), ids=lambda value: str(value) if not isinstance(value, int) else ""
)
def test_a_field_does_something(name: str, part: str, field_name: str, number: int, tiny, ran):
    value = parts_of(name)[part]
    kind = type(value).__name__
    assert number >= 0, (
        f"{part}.{field_name} of {name} ({kind}) has no row in the table of {Path(__file__).name}; "
        f"say which change of it shows, and how"
    )
    flip = TABLE[kind][field_name][number]
    if isinstance(flip, SeenIn):
        path, _, function = flip.test.partition("::")
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        return
    changes = [as_flags(part, field_name, each, getattr(value, field_name)) for each in flip.values]
    if len(changes) > 1:
        base = [*tiny(name), *flip.base]
        changes = [flags for flags in changes if config.load(name, [*base, *flags]) != config.load(name, base)]
    change = changes[0]
    before, after = ran(name, flip, []), ran(name, flip, change)
    assert after[0] != before[0], f"{' '.join(change)} changes nothing: {flip.look.__name__} stays {before[0]}"
    assert after[1:] == before[1:], f"{' '.join(change)} changes {flip.same.__name__} too"


@pytest.mark.parametrize("name", recipes.names())
def test_looking_twice_at_the_same_run_sees_no_change(name: str, train, tmp_path: Path):
    """Else a difference would prove nothing."""
    flips = [flip for fields in TABLE.values() for flips in fields.values() for flip in flips]
    looks = {flip.look for flip in flips if isinstance(flip, Flip)}
    first, second = (train(name, tmp_path / folder) for folder in ("first", "second"))
    for look in looks:
        assert look(first) == look(second), look.__name__


@pytest.mark.parametrize("name", recipes.names())
def test_all_changes_together_survive_config_yaml(name: str, tmp_path: Path):
    changes: list[str] = []
    for part, value in parts_of(name).items():
        rows = []
        for field_name, flips in TABLE.get(type(value).__name__, {}).items():
            alone = [flip for flip in flips if isinstance(flip, Flip) and not flip.base]
            rows += [as_flags(part, field_name, alone[0].values[0], getattr(value, field_name))] if alone else []
        # All of a part at once; where some exclude others, one by one.
        for more in ([[flag for row in rows for flag in row]], rows):
            before = len(changes)
            for flags in more:
                with contextlib.suppress(UsageError):
                    config.load(name, [*changes, *flags])
                    changes += flags
            if len(changes) > before:
                break
    made = config.load(name, changes)
    assert len(changes) > 50
    path = tmp_path / "config.yaml"
    path.write_text(config.dump(*made))
    assert config.load(name, [], path) == made != config.load(name)


def test_the_table_has_no_rows_of_fields_that_are_gone():
    known: dict[str, set[str]] = {}
    for name in recipes.names():
        for value in parts_of(name).values():
            known.setdefault(type(value).__name__, set()).update(each.name for each in dataclasses.fields(value))
    assert {kind: set(fields) for kind, fields in TABLE.items()} == known
