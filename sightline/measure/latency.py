"""Latency of one training step or one batch of predictions, in a pass that waits for the device after each.

The five numbers and their names are those of the original U-Net's perf.json. What is predicted with is here too.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sightline.data.loading.loader import Loader
from sightline.data.loading.order import EvalOrder
from sightline.engine.model import build_model
from sightline.hardware.devices import Device
from sightline.hardware.precision import DTYPES, autocast
from sightline.measure.peers import BATCHES, Contender
from sightline.parts import Batch, Bound
from sightline.recipe.recipe import Recipe, Run

PERCENTILES = (90, 95, 99)


def deltas(starts: Sequence[float], warmup: int) -> list[float]:
    """Return seconds from the start of each batch to that of the next, without the first `warmup` batches: 12 batches
    with 3 to warm up leave nine starts and so eight times."""
    return [after - before for before, after in itertools.pairwise(starts[warmup:])]


def perf(what: str, seconds: Sequence[float], images_per_s: float) -> dict[str, float]:
    """Return the five numbers, flat: images (slices, where data are slices) per second, and milliseconds per batch."""
    found = {f"throughput_{what}": images_per_s, f"latency_{what}_mean": 1000 * statistics.fmean(seconds)}
    found |= {f"latency_{what}_{level}": 1000 * float(np.percentile(seconds, level)) for level in PERCENTILES}
    return {name: round(value, 3) for name, value in found.items()}


def perf_of(what: str, row: dict[str, Any]) -> dict[str, float]:
    """Return the five numbers of a contender's row. Throughput is that of its repeats, which wait only at their end."""
    return perf(what, row["latency_s"], row["images_per_s"]["median"])


def as_text(what: str, found: dict[str, float], batches: int) -> str:
    """Format the numbers as a line."""
    levels = ", ".join(f"{level} % {found[f'latency_{what}_{level}']:.3f}" for level in PERCENTILES)
    return f"latency of {what}, ms, waiting for each of {batches}: mean {found[f'latency_{what}_mean']:.3f}, {levels}"


def kept_batches(loader: Loader, feed: str) -> list[Batch]:
    """Take the next batches from a loader, and copy them: it uses their memory again."""
    taken = (loader.next(feed) for _ in range(BATCHES))
    return [{key: value.clone() for key, value in batch.items()} for batch in taken]


def measure(contender: Contender, warmup: int, batches: int, device: Device) -> list[float]:
    """Time `batches` batches one by one, after others to warm up."""
    starts = []
    for _ in range(warmup + batches + 1):
        device.synchronize()
        starts.append(time.perf_counter())
        contender.advance()
    device.synchronize()
    return deltas(starts, warmup)


@dataclass(frozen=True)
class EvalRounds:
    """The full batches of an evaluation over and over; where there is not one, the padded one."""

    order: EvalOrder

    @property
    def local_batch(self) -> int:
        """Return the samples of one batch."""
        return self.order.local_batch

    @property
    def steps_per_epoch(self) -> int:
        """Return the batches of a round."""
        return max(1, self.order.samples // (self.order.local_batch * self.order.ranks))

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, indices) of the samples of batch `step`."""
        return self.order.batch(step % self.steps_per_epoch)


class OurPredictions(Contender):
    """Batches through the data set's device half and the task's `predict`, as `sightline evaluate` runs them: in the
    precision of evaluation, never compiled, with weights that have learnt nothing, and without the metric."""

    name = "sightline predict"

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        bound: Bound,
        loader: Loader,
        device: Device,
        is_real: bool,
        timed: tuple[int, int],
    ):
        self.task = recipe.task.build()
        self.bound = bound
        self.loader = loader
        self.device = device
        self.precision = recipe.train.eval_precision
        self.timed = timed  # batches to warm up and to measure, one by one
        self.images = min(len(bound.dataset), loader.feeds["val"].order.local_batch)
        self.number = 0
        self.batches: list[Batch] = []
        try:
            if not is_real:
                self.batches = kept_batches(loader, "val")
                loader.close()
            started = time.perf_counter()
            self.model = build_model(recipe, run, bound.dataset.spec, device).model.eval()
            self.advance()
            device.synchronize()
        except BaseException:
            loader.close()
            raise
        self.first_s = time.perf_counter() - started

    @torch.inference_mode()
    def advance(self) -> None:
        raw = self.batches[self.number % BATCHES] if self.batches else self.loader.next("val")
        batch = self.bound.finish(raw, DTYPES[self.precision])
        with autocast(self.device, self.precision):
            self.task.predict(self.model, batch)
        self.number += 1

    def waited_s(self) -> float:
        return self.loader.wait_s if not self.batches else 0.0

    def facts(self) -> dict[str, Any]:
        """Time single batches, before it is closed."""
        seconds = measure(self, *self.timed, self.device)
        return {"latency_s": seconds, "calls": self.number, "peak_memory_gb": self.device.peak_memory_bytes() / 1e9}

    def close(self) -> None:
        self.loader.close()
