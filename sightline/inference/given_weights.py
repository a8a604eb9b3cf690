"""Scores of weights from a file, without a run: `evaluate RECIPE --model.weights FILE --data.path DIR`."""

from __future__ import annotations

import contextlib
import math
import tempfile
from pathlib import Path

import torch
from torch import nn

from sightline.data.loading.cache import read_once
from sightline.engine.model import build_model
from sightline.engine.setup import set_up
from sightline.errors import BadData, UsageError, first_of
from sightline.hardware import devices, early_cuda
from sightline.inference.checkpoints import Evaluation, loading, open_split
from sightline.parts import Scores, Split
from sightline.recipe.recipe import Recipe, Run


def evaluate_weights(recipe: Recipe, run: Run, split: Split = "val") -> Scores:
    """Score a recipe's `model.weights` on a split; scores.json is written into run.out, nothing without it."""
    weights = getattr(recipe.model, "weights", "")
    if not weights:
        raise UsageError(
            f"evaluate {recipe.name} scores given weights: add --model.weights FILE; to score a run, name its folder"
        )
    here, device, recipe = set_up(recipe, run)
    devices.follow_rules()
    early_cuda.load_libraries(device, recipe.train.eval_precision, trains=False)
    dataset = open_split(read_once(recipe.data), split, recipe.train.seed)
    model = build_model(recipe, run, dataset.spec, device).model
    note = load_all(recipe, model)
    with contextlib.ExitStack() as stack:
        folder = Path(run.out or stack.enter_context(tempfile.TemporaryDirectory(prefix="sightline-evaluate-")))
        here, bound, loader, log = stack.enter_context(loading(recipe, run, device, here, dataset, folder, split))
        log.say(note)
        if "split.json" in dataset.kept and not getattr(recipe.data, "split", ""):
            log.say(f"no val split: {len(dataset)} samples, drawn by name, are scored; --data.split all scores all")
        evaluation = Evaluation(recipe, model, device, here, bound, loader, log, split)
        if split == "val":
            return evaluation.score_as("scores.json", weights=weights)
        return evaluation.score_as(f"scores-{split}.json", weights=weights, split=split)


@torch.no_grad()
def load_all(recipe: Recipe, model: nn.Module) -> str:
    """Load the weights into every layer; raise BadData if a part of the network would stay random, as a head for other
    classes does in training. Return a note that says what was loaded."""
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    for tensor in state.values():
        tensor.fill_(math.nan)
    note = recipe.model.start_from(model)
    if left := [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]:
        raise BadData(
            f"these weights do not fill the network for these data, and a random head would score nothing: {note}; "
            f"without values: {first_of(left)}. Give data with the classes of the weights, or fine-tune them first"
        )
    return note
