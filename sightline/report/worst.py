"""Draw the most wrong samples of an evaluation, truth beside prediction, as the report shows them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sightline.errors import BadSample
from sightline.hardware.devices import Device
from sightline.hardware.precision import DTYPES, autocast
from sightline.parts import Arrays, Bound, Scores
from sightline.recipe.recipe import Recipe
from sightline.report.by_task import tiles
from sightline.report.tiles import Drawing


@torch.inference_mode()
def draw_worst(
    network: Callable[[], nn.Module], recipe: Recipe, bound: Bound, local_batch: int, device: Device, scores: Scores
) -> dict[str, Any]:
    """Return the task's drawings by the index of the sample, and the colours of its classes, if these mean something.

    A few samples are loaded once more and, where the task needs it, predicted once more by the `network` that these are
    the scores of; one rank does this alone.
    """
    task, spec, source = recipe.task.build(), bound.dataset.spec, bound.on_host or bound
    model = functools.cache(lambda: network().eval())  # it may be read from a checkpoint: once, if at all
    loaded: dict[int, Arrays] = {}
    for row in scores.worst[: task.drawn]:
        try:
            loaded[row["index"]] = source.load(0, row["index"])
        except BadSample:  # changed since it was evaluated
            continue
    drawings: dict[int, Drawing] = {}
    colours: dict[str, str] = {}
    indices = list(loaded)
    for start in range(0, len(indices), local_batch):
        part = indices[start : start + local_batch]
        # Accelerators tune their kernels to a shape, so the batch is filled up to that of the evaluation.
        rows = part if device.kind == "cpu" else [part[n % len(part)] for n in range(local_batch)]
        batch = source.finish(_stacked(source, [loaded[index] for index in rows], rows, device), DTYPES["fp32"])

        def predict(batch: dict[str, Tensor] = batch) -> Mapping[str, Tensor]:
            precision = recipe.train.eval_precision
            image = batch["image"].to(DTYPES[precision])
            with autocast(device, precision):
                return task.predict(model(), {**batch, "image": image})

        made = tiles(task, batch, predict, spec, len(part))
        drawings |= dict(zip(part, made.drawings, strict=True))
        colours |= made.colours
    return {"drawings": {str(index): drawing for index, drawing in drawings.items()}, "colours": colours}


def _stacked(bound: Bound, samples: list[Arrays], indices: list[int], device: Device) -> dict[str, Tensor]:
    arrays = {
        key: np.stack([_filled(sample[key], shape) for sample in samples]).astype(dtype, copy=False)
        for key, (shape, dtype) in bound.layout.items()
    }
    arrays |= {"index": np.array(indices, np.int64), "valid": np.ones(len(indices), bool)}
    return {key: torch.from_numpy(values).to(device.torch_device) for key, values in arrays.items()}


def _filled(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return values in a row that may be shorter than the room for them, as the loader has them."""
    if values.shape == shape:
        return values
    row = np.zeros(shape, values.dtype)
    row[: len(values)] = values
    return row
