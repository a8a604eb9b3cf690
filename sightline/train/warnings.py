"""Warnings about rates and weights at the start of training, and about an early evaluation; the loop shows them."""

from __future__ import annotations

import contextlib
import math
import shlex
from pathlib import Path

from torch import nn

from sightline.engine.checkpoint import MAX_STATE_BYTES
from sightline.errors import SightlineError
from sightline.files.checkpoint_folder import STATE, find
from sightline.files.typed_json import read_json
from sightline.parts import DataSpec
from sightline.recipe.recipe import Recipe

# Absolute rates of published tables, and the batch that they were made for.
TABLES: dict[tuple[float, ...], int] = {(0.275, 0.45, 0.625, 0.8, 0.08, 0.008, 0.0008): 2048}  # ResNet-50 in PyTorch
# Highest rate at which pretrained weights are expected to survive. SGD: the largest rate of the SSD runs that start
# from a trunk, 0.096 for a batch of 1024, rounded up. Adam and its kin move every weight by about the rate per step;
# 1e-3 is what they are trained from scratch with. LARS scales each tensor's rate by the tensor's own size.
MOST = {"sgd": 0.1, "sgd_keras": 0.1, "rmsprop": 1e-3, "adam": 1e-3, "adamw": 1e-3, "radam": 1e-3}

# Training images from which random weights learn little: demo_classification learnt nothing from 100, 300 and 1,000
# drawn shapes. Recipes that start from weights; U-Nets are not listed, since they learn from some tens of volumes.
FEW = 1000
TUNED = {"Classification": "classification", "Detection": "detection"}

# Batch-norm statistics keep exp(-4), 2 %, of what they were 4 / momentum steps before: 40 steps at torch's 0.1. A
# validation loss three times that of training is explained by them until then. docs/reference/runs.md has the
# experiment.
SETTLED = 4
HIGH = 3


def start_warnings(recipe: Recipe, base_lr: float, classes: tuple[str, ...], images: int) -> list[str]:
    """Return a line for each that applies; `base_lr` is the rate that the schedule starts from, `images` the number of
    training samples."""
    rates = (rates_for_another_batch(recipe), high_rate(recipe, base_lr))
    weights = (no_weights(recipe), few_images(recipe, images), head_of_other_classes(recipe, classes))
    found = (*rates, *weights, other_size(recipe))
    return [line for line in found if line]


def rates_for_another_batch(recipe: Recipe) -> str:
    """Warn about a published table of absolute rates with another batch than it was made for."""
    batch, made_for = recipe.train.global_batch, TABLES.get(recipe.schedule.table_rates, 0)
    if recipe.schedule.kind != "table" or made_for in (0, batch):
        return ""
    return (
        f"schedule.table_rates were made for a global batch of {made_for} and are not scaled to this run's {batch}; "
        f"for scaled rates add --schedule.kind cosine --optimizer.lr 0.1 --optimizer.lr-for-batch 256"
    )


def other_size(recipe: Recipe) -> str:
    """Warn about images that are evaluated much larger than in training, or smaller: scores would be those of another
    task. A third larger is common, and helps."""
    size, at = getattr(recipe.data, "size", 0), getattr(recipe.data, "eval_size", 0)
    if not size or not at or size <= at <= 1.35 * size:
        return ""
    return f"images are {size} pixels wide in training and {at} in evaluation; --data.eval-size {size} makes them equal"


def high_rate(recipe: Recipe, base_lr: float) -> str:
    """Warn about pretrained weights that a high rate would destroy."""
    kind, weights = recipe.optimizer.kind, getattr(recipe.model, "weights", "")
    rates = recipe.schedule.table_rates if recipe.schedule.kind == "table" else ()
    highest = max(base_lr, *rates, 0.0) * recipe.optimizer.trunk_lr_scale
    if not weights or highest <= MOST.get(kind, highest):
        return ""
    return (
        f"the rate of pretrained layers rises to {highest:g}; above {MOST[kind]:g} {kind} is likely to destroy what "
        f"{weights} has learnt: lower --optimizer.lr or --optimizer.trunk-lr-scale"
    )


def no_weights(recipe: Recipe) -> str:
    """Warn about settings for pretrained weights without any, as in a finetune recipe without --model.weights."""
    given = ["--train.head-epochs 0"] if recipe.train.head_epochs else []
    given += ["--optimizer.trunk-lr-scale 1"] if recipe.optimizer.trunk_lr_scale != 1 else []
    weights = getattr(recipe.model, "weights", "")
    if weights or not given:
        return ""
    return (
        f"no --model.weights: {recipe.name} trains from scratch, with settings for pretrained weights; give weights, "
        f"or add {' '.join(given)}"
    )


def few_images(recipe: Recipe, images: int) -> str:
    """Warn about random weights and fewer images than they can learn from."""
    better, path = TUNED.get(type(recipe.task.build()).__name__, ""), str(getattr(recipe.data, "path", ""))
    says_so = recipe.plan is not None or recipe.name == f"finetune_{better}"
    weights = getattr(recipe.model, "weights", "")
    if images > FEW or weights or not better or says_so or path.startswith("synthetic:"):
        return ""
    given = f" --data {shlex.quote(path)}" if path else ""
    return (
        f"{images} images are few for training from scratch; the model may not learn. Start from pretrained weights: "
        f"sightline train {better}{given}"
    )


def head_of_other_classes(recipe: Recipe, classes: tuple[str, ...]) -> str:
    """Warn about a head that fits because it has equally many classes, though they are others or in another order."""
    weights = getattr(recipe.model, "weights", "")
    if not weights or not Path(weights).is_dir():
        return ""  # a file does not name its classes
    theirs: tuple[str, ...] = ()
    with contextlib.suppress(SightlineError, OSError, ValueError, KeyError, TypeError):  # deleted or damaged since
        theirs = DataSpec.from_json(read_json(find(Path(weights), "best") / STATE, MAX_STATE_BYTES)["spec"]).classes
    if len(theirs) != len(classes) or theirs == classes:
        return ""
    place = next(i for i, pair in enumerate(zip(theirs, classes, strict=True)) if pair[0] != pair[1])
    return (
        f"{weights} was trained on other classes, or in another order: number {place} is {theirs[place]} there and "
        f"{classes[place]} here. Its head is loaded all the same and must learn yours"
    )


def young_statistics(model: nn.Module, step: int, trained: float, validated: float) -> str:
    """Explain a validation loss far above that of training, also of the first step, while batch-norm statistics are
    young; "" otherwise."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    momenta = [layer.momentum for layer in layers if layer.track_running_stats and layer.momentum]
    enough = math.ceil(SETTLED / min(momenta)) if momenta else 0
    if step >= enough or not validated > HIGH * trained:
        return ""
    return (
        f"the validation loss is this high because batch-norm statistics lag behind the weights; it means little "
        f"before about {enough} steps, and this is step {step} (docs/reference/runs.md)"
    )
