"""Evaluation: every sample of the split counted once, whatever the batch size and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from sightline.data.loader import Loader
from sightline.data.order import PADDING
from sightline.errors import BadData
from sightline.hardware.devices import Device
from sightline.hardware.precision import DTYPES, autocast
from sightline.hardware.world import World
from sightline.parts import Dataset, Scores, Task


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    task: Task,
    dataset: Dataset,
    loader: Loader,
    device: Device,
    world: World,
    precision: str,
    on_batch: Callable[[int, int], None],
) -> Scores:
    """Scores of `model` on the loader's "val" feed. `on_batch(done, total)` is called between batches."""
    model.eval()
    metric = task.metric(dataset.spec, device.torch_device)
    unread = torch.zeros((), dtype=torch.int64, device=device.torch_device)
    total = loader.feeds["val"].order.steps_per_epoch
    loader.seek("val", 0, total)
    for number in range(total):
        on_batch(number, total)
        batch = dataset.finish(loader.next("val"), DTYPES[precision])
        with autocast(device, precision):
            predictions = task.predict(model, batch)
        metric.update(predictions, batch)
        unread += ((batch["index"] != PADDING) & ~batch["valid"]).sum()
    metric.merge(world)
    scores = metric.result()
    skipped = int(world.sum(unread))
    if scores.values["samples"] + skipped != len(dataset):
        raise BadData(
            f"evaluation counted {scores.values['samples']:.0f} of {len(dataset)} samples and {skipped} were skipped"
        )
    for row in scores.worst:
        row["name"] = dataset.name(row["index"])
    return replace(scores, values={**scores.values, "skipped": float(skipped)} if skipped else scores.values)
