"""Our training step as a contender of `sightline benchmark`: built as the loop builds it, fed from the device or by the
loader, or fed by the loader and beside it from the device, which tells what the input costs."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from sightline.data.loading.ahead import DEPTH
from sightline.data.loading.loader import BadSamples, Loader, Order
from sightline.data.loading.order import TrainOrder
from sightline.data.loading.workers import Bad
from sightline.engine.model import build_model
from sightline.engine.orders import length_of
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.measure import latency
from sightline.measure.peers import BATCHES, ENDLESS, Contender, Say
from sightline.parts import Batch, Bound
from sightline.recipe.recipe import Recipe, Run
from sightline.train.state import TrainState
from sightline.train.step import build_step

OURS = "sightline"


class OurStep(Contender):
    """The step as the loop runs it, on batches of the device or of the loader."""

    name = OURS
    world = World()  # whose step it is, unless ranks are given

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        bound: Bound,
        device: Device,
        is_real: bool,
        say: Say,
        timed: tuple[int, int],
        here: World | None = None,
    ):
        cfg = recipe.train
        self.world, self.ranks = here or self.world, here or World()
        recipe = dataclasses.replace(recipe, task=recipe.task.for_data(bound.dataset.spec))
        self.timed = timed  # steps to warm up and to measure, one by one
        self.images = cfg.global_batch // self.ranks.size
        self.recipe = recipe
        self.device = device
        self.base_lr = recipe.optimizer.base_lr(cfg.global_batch, self.ranks.size)
        order = order_of(recipe, bound, self.ranks)
        self.length = length_of(cfg, order)
        self.number = 0
        run_here = run if is_real else dataclasses.replace(run, workers=0)
        self.loader = open_loader(recipe, run_here, bound, order, device, say, ranks=self.ranks)
        self.is_real = is_real
        if is_real:  # what was made ahead, in the turns of others, must be gone before the clock starts
            self.settle = run.prefetch + DEPTH
            self.timed = (max(timed[0], self.settle), timed[1])
        try:
            self.kept = latency.kept_batches(self.loader, "train")
            if not is_real:
                self.loader.close()
            started = time.perf_counter()
            if hasattr(device.api, "reset_peak_memory_stats"):
                device.api.reset_peak_memory_stats()
            model = build_model(recipe, run, bound.dataset.spec, device, self.ranks)
            for note in model.notes:
                say(note)
            self.state = TrainState(recipe, model, device, self.length)
            self.step = build_step(recipe, run, device, self.world, self.state, bound)
            self.advance()
            device.synchronize()
        except BaseException:
            self.loader.close()
            raise
        self.first_s = time.perf_counter() - started
        self.peak_memory_bytes = device.peak_memory_bytes()  # now, before peers are built beside us

    def advance(self) -> None:
        self.learn(self.loader.next("train") if self.is_real else self.kept[self.number % BATCHES])

    def learn(self, batch: Batch) -> None:
        """Make one step with a batch."""
        rate = self.recipe.schedule.rate(self.number, self.base_lr, self.length)
        self.step(batch, self.number, rate)
        self.step.take_bad_steps()
        self.number += 1

    def waited_s(self) -> float:
        return self.loader.wait_s if self.is_real else 0.0

    def facts(self) -> dict[str, Any]:
        """Time single steps, before it is closed. The step itself counts `images_trained`, without steps that were not
        finite."""
        seconds = latency.measure(self, *self.timed, self.device)
        totals = self.step.read_totals(self.ranks)
        return {
            "latency_s": seconds,
            "calls": self.number,
            "images_trained": int(totals["samples"]),
            "bad_steps": int(totals["bad_steps"]) // self.ranks.size,
            "peak_memory_gb": self.peak_memory_bytes / 1e9,
        }

    def close(self) -> None:
        self.loader.close()


class KeptBatches(Contender):
    """The step of another contender on batches that lie on the device: how fast it would be if input cost nothing."""

    name = "the same step, batches kept on the device"

    def __init__(self, ours: OurStep):
        self.ours = ours
        self.images, self.settle = ours.images, ours.settle

    def advance(self) -> None:
        self.ours.learn(self.ours.kept[self.ours.number % BATCHES])


def open_loader(
    recipe: Recipe,
    run: Run,
    bound: Bound,
    order: Order,
    device: Device,
    say: Say,
    feed: str = "train",
    ranks: World | None = None,
) -> Loader:
    """Open a loader of one feed alone, from the first batch on, without end."""

    def on_bad(bad: Bad) -> None:
        say(f"sample skipped: {bad.name}: {bad.reason}")

    bad_samples = BadSamples(recipe.data.on_bad_sample, recipe.data.max_bad_samples, on_bad)
    loader = Loader({feed: (bound, order)}, run, device, ranks or World(), bad_samples, check_stop=lambda: None)
    for note in loader.notes:
        say(note)
    loader.seek(feed, 0, ENDLESS)
    return loader


def order_of(recipe: Recipe, bound: Bound, here: World) -> TrainOrder:
    """Return the order of training samples on this rank."""
    cfg, each, place = recipe.train, bound.samples_per_item, (here.rank, here.size)
    return TrainOrder(len(bound.dataset), cfg.global_batch, cfg.seed, cfg.last_batch, *place, samples_per_item=each)
