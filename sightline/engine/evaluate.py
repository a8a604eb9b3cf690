"""Evaluation: every sample of the split is counted once, for any batch size and number of ranks.

Ranks share the samples and add up their counts, or each of them evaluates all (`train.eval_shards`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sightline.data.loading.loader import Loader
from sightline.data.loading.order import PADDING
from sightline.errors import BadData
from sightline.hardware.devices import Device
from sightline.hardware.precision import DTYPES, autocast
from sightline.hardware.world import World
from sightline.parts import Bound, Dataset, Scores
from sightline.recipe.recipe import Recipe


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    recipe: Recipe,
    bound: Bound,
    loader: Loader,
    device: Device,
    world: World,
    on_batch: Callable[[int, int], None],
    feed: str = "val",
) -> Scores:
    """Score `model` on a feed of the loader; `on_batch(done, total)` is called between batches."""
    task, precision = recipe.task.build(), recipe.train.eval_precision
    shares = World() if recipe.train.eval_shards == "full" else world  # whose counts belong together
    dataset = bound.dataset
    model.eval()
    metric = task.metric(dataset.spec, device.torch_device)
    unread = torch.zeros((), dtype=torch.int64, device=device.torch_device)
    order = loader.feeds[feed].order
    total = order.steps_per_epoch
    loader.seek(feed, 0, total)
    for number in range(total):
        on_batch(number, total)
        batch = bound.finish(loader.next(feed), DTYPES[precision])
        with autocast(device, precision):
            predictions = task.predict(model, batch)
        metric.update(predictions, batch)
        unread += ((batch["index"] != PADDING) & ~batch["valid"]).sum()
    world.beat(is_long=True)  # ranks merge their counts, and COCO's figures take minutes
    metric.merge(shares)
    scores = metric.result()
    skipped = int(shares.sum(unread))
    asked = min(len(dataset), total * order.local_batch * shares.size)  # fewer than there are with eval_max_steps
    if scores.values["samples"] + skipped != asked:
        raise BadData(
            f"evaluation counted {scores.values['samples']:.0f} of {asked} samples and {skipped} were skipped"
        )
    for row in scores.worst:
        row["name"] = dataset.name(row["index"])
        if path := _file_of(dataset, row["name"]):
            row["path"] = path
    values = {**scores.values, "skipped": float(skipped)} if skipped else scores.values
    if shares is not world:
        # Ranks must decide alike (best, the end, a schedule), also where their statistics differ.
        told = torch.tensor(list(values.values()), dtype=torch.float64, device=device.torch_device)
        world.copy_from_main([told])
        values = dict(zip(values, told.tolist(), strict=True))
    return replace(scores, values=values)


def _file_of(dataset: Dataset, name: str) -> str:
    """Return the absolute path of a sample, for `predict`; "" where samples are not files of their own. Sources name
    them relative to the folder of a split (`root`), or beginning with it (`folder`)."""
    source: Any = getattr(dataset, "source", None)
    for root in (getattr(source, "root", None), getattr(getattr(source, "folder", None), "parent", None)):
        if isinstance(root, Path) and (root / name).is_file():
            return str((root / name).absolute())
    return ""
