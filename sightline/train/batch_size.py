"""`--train.global-batch auto`: measure, before the first step of a run, the largest batch that is worth its memory;
`--train.accumulation auto`: the fewest parts of a given batch that fit.

Steps run on a network of their own, which is thrown away: the run's weights, random numbers and bits are those of a run
with the number typed. They are not compiled, because that takes longer than all measurements and saves memory only.
"""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from sightline.data.loading.loader import BadSamples, Loader, worker_count
from sightline.data.loading.order import TrainOrder
from sightline.engine.model import build_model
from sightline.engine.orders import train_order_of
from sightline.errors import OutOfMemory, UsageError
from sightline.hardware.devices import Device, is_out_of_memory
from sightline.hardware.world import World, local_size
from sightline.parts import Batch, Bound, Dataset
from sightline.recipe.recipe import Recipe, Run
from sightline.train.schedules import length_of
from sightline.train.state import TrainState
from sightline.train.step import build_step

SHARE = 0.8  # of the memory of a device; fragments, graphs and evaluation take the rest
HOST_SHARE = 0.4  # of free memory, for a device that shares it with others: a cache of the data may take half
NOT_SLOWER = 0.95  # of the best rate; timings differ by some per cent
LONGEST_STEP_S, LONGEST_STEP_ON_CPU_S = 5.0, 1.0  # a CPU gains nothing by larger batches
LEAST_STEPS = 10  # of an epoch
TIMED_STEPS, TIMED_S = 2, 0.3  # at least so many steps, and so long; the fastest counts, as others disturb the rest
DISTINCT = 64  # samples of a larger batch; the step does not care about their values
SHARED_MEMORY = Path("/dev/shm")  # holds the loader's batches


class Probe(NamedTuple):
    """A step with some batch."""

    seconds: float
    memory: float  # share of what may be used; infinite if there was not enough


class Choice(NamedTuple):
    """A batch on one device, its step, and why it is not larger."""

    batch: int
    probe: Probe
    limit: str  # memory, rate, time, or "" if all sizes were tried


def measure_batch(recipe: Recipe, run: Run, device: Device, world: World) -> tuple[int, str]:
    """Return the global batch and a line that says why; the same on all ranks."""
    if getattr(recipe.data, "cache", "") == "gpu":
        raise UsageError(
            "train.global_batch=auto cannot be combined with data.cache=gpu, which takes the memory that it would "
            "measure; use --train.global-batch N"
        )
    dataset = recipe.data.open("train", recipe.train.seed)
    recipe = replace(recipe, task=recipe.task.for_data(dataset.spec))
    sizes, end = possible_sizes(recipe, run, dataset, device, world)
    sizes = sizes[: -world.largest(-len(sizes))]  # hosts may have different room for the loader
    room, fits = _room(device, world)
    longest_s = LONGEST_STEP_ON_CPU_S if device.kind == "cpu" else LONGEST_STEP_S
    with torch.random.fork_rng(devices=[]):
        steps = _Steps(recipe, run, dataset, device, world, room)
        try:
            found = choose(sizes, recipe.train.accumulation, longest_s, steps.probe)
        finally:
            steps.free()
    if found is None:
        raise OutOfMemory(
            f"train.global_batch=auto: not even a batch of {sizes[0]} per device {fits}; use smaller images, a smaller "
            f"network, or another --run.device"
        )
    batch, each = found.batch * world.size, f" ({found.batch} on each of {world.size})" if world.size > 1 else ""
    why = {
        "memory": f"the largest that {fits}",
        "rate": "larger ones are slower per image",
        "time": f"a step of a larger one takes more than {longest_s:g} s",
        "": end,
    }[found.limit]
    return batch, f"batch {batch}{each}: {why}; {batch / found.probe.seconds:,.0f} img/s"


def measure_accumulation(recipe: Recipe, run: Run, device: Device, world: World) -> tuple[int, str]:
    """Return the fewest parts in which the batch fits and a line that says so, the same on all ranks; OutOfMemory where
    none do, or where the number would change what is learnt: then it names the number."""
    cfg = replace(recipe.train, accumulation=1)
    dataset = recipe.data.open("train", cfg.seed)
    recipe = replace(recipe, train=cfg, task=recipe.task.for_data(dataset.spec))
    order = train_order_of(cfg, dataset.bind(device, cfg.global_batch), world)
    room, fits = _room(device, world)
    with torch.random.fork_rng(devices=[]):
        steps = _Steps(recipe, run, dataset, device, world, room)
        try:
            found = fewest_parts(order.local_batch, lambda parts: steps.probe(order.local_samples, parts))
            shares = _shared_by_batch(recipe, steps.model)
        finally:
            steps.free()
    least = order.local_samples // order.local_batch
    if not found:
        raise OutOfMemory(
            f"train.accumulation=auto: not even a step in parts of {least} per device {fits}; use smaller images, a "
            f"smaller network, or another --run.device"
        )
    at_once = order.local_samples // found
    fit = fits.replace("fits", "fit", 1)
    told = f"{at_once} samples at once per device are the most of train.global_batch={cfg.global_batch} that {fit}"
    if found > 1 and shares:
        raise OutOfMemory(
            f"{told}: --train.accumulation {found} keeps the batch. It is not chosen for you, because {shares} would "
            f"come from {at_once} samples instead of {order.local_samples}, and the fewer, the noisier: give the "
            f"number to accept that, or a smaller --train.global-batch"
        )
    whole = f"all {order.local_samples} samples of a device at once: they {fit}"
    return found, f"accumulation {found}: {told if found > 1 else whole}"


def fewest_parts(items: int, probe: Callable[[int], Probe]) -> int:
    """Return the smallest number of equal parts of a batch that fits, 0 if none does. Parts grow from the smallest one:
    memory of the host must not run out even once."""
    taken: list[tuple[int, Probe]] = []
    sizes = [size for size in range(1, items + 1) if items % size == 0]
    for size in sizes[1:] or sizes:  # not with one sample, on which batch-norm may not be able to train
        if _foreseen(taken, size, math.inf):
            break
        seen = probe(items // size)
        if seen.memory > 1:
            break
        taken.append((size, seen))
    if taken:
        return items // taken[-1][0]
    return items if len(sizes) > 1 and probe(items).memory <= 1 else 0


def _shared_by_batch(recipe: Recipe, model: nn.Module | None) -> str:
    """Name what depends on all samples that are computed at once; "" if nothing does."""
    layers = model.modules() if model else ()
    has_statistics = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers)
    return "the batch-norm statistics" if has_statistics else recipe.task.batch_loss


def _room(device: Device, world: World) -> tuple[float, str]:
    """Return the bytes that this process may take, and what a batch does that needs fewer, in words."""
    own, free = device.memory_bytes()
    if not own + free:
        return math.inf, "fits"
    if device.is_shared:
        free //= local_size(world)
        return (
            own + HOST_SHARE * free,
            f"fits in {100 * HOST_SHARE:.0f} % of the {free / 1e9:.3g} GB that are free, the most it may take",
        )
    return SHARE * (own + free), f"fits in {100 * SHARE:.0f} % of {(own + free) / 1e9:.3g} GB, the most it may take"


def choose(sizes: Sequence[int], unit: int, longest_s: float, probe: Callable[[int], Probe]) -> Choice | None:
    """Double the batch while it fits, takes no longer per sample, and no step is too long; then try half as much again.

    `sizes` are possible and rise. None if not even the first fits.
    """
    taken: list[tuple[int, Probe]] = []

    def refusal(size: int) -> str:
        if why := _foreseen(taken, size, longest_s):
            return why
        seen = probe(size)
        if seen.memory > 1:
            return "memory"
        if taken and seen.seconds > longest_s:
            return "time"
        fast = NOT_SLOWER * max((s / p.seconds for s, p in taken), default=0)
        if size / seen.seconds < fast:
            seen = min(seen, probe(size))  # once more: somebody else may have used the machine
        if size / seen.seconds < fast:
            return "rate"
        taken.append((size, seen))
        return ""

    doubled = [size for size in sizes if size % unit == 0 and (size // unit).bit_count() == 1] or list(sizes)
    begun = doubled[1:] or doubled  # not with one sample, on which batch-norm may not be able to train
    limit = next(filter(None, map(refusal, begun)), "")
    if not taken and sizes[0] != begun[0]:
        refusal(sizes[0])
    elif taken and limit in ("memory", ""):
        between = [size for size in sizes if taken[-1][0] < size < 2 * taken[-1][0]]
        limit = next(map(refusal, between), "") or limit
    return Choice(*taken[-1], limit) if taken else None


def _foreseen(taken: list[tuple[int, Probe]], size: int, longest_s: float) -> str:
    """Return why a larger batch will be refused, by extrapolation; memory of the host must not run out even once."""
    if not taken:
        return ""
    last, probe = taken[-1]
    if probe.seconds * size / last > longest_s:
        return "time"
    if len(taken) > 1:
        before, smaller = taken[-2]
        grown = (probe.memory - smaller.memory) / (last - before)
        return "memory" if probe.memory + grown * (size - last) > 1 else ""
    return ""


def possible_sizes(recipe: Recipe, run: Run, dataset: Dataset, device: Device, world: World) -> tuple[list[int], str]:
    """Return rising numbers of samples on a device that the data can come in, and why there is no larger one."""
    sizes: list[int] = []
    refused: UsageError | None = None
    for factor in sorted({2**k for k in range(17)} | {3 * 2**k for k in range(15)}):
        size = factor * recipe.train.accumulation
        try:
            _, bound, order = _with_size(recipe, size, dataset, device, world)
            bound.check_batch(order.local_batch)
        except UsageError as error:  # it cannot be split into volumes, or comes in files of another size
            refused = error
            continue
        # Of one sample batch-norm may not be able to learn, so that two are possible in a short epoch too.
        if len(sizes) > 1 and order.samples_per_epoch < LEAST_STEPS * size * world.size:
            samples = f"{order.samples_per_epoch:,} samples"
            return sizes, f"a larger one leaves fewer than {LEAST_STEPS} steps in an epoch of {samples}"
        if sizes and not _fits_shared_memory(bound, order.local_batch, run, device, world):
            return sizes, f"the loader has no room in {SHARED_MEMORY} for a larger one"
        sizes.append(size)
    if not sizes:
        assert refused is not None, "each size was taken or refused"
        raise refused
    return sizes, "the data come in no larger one"


def _with_size(
    recipe: Recipe, size: int, dataset: Dataset, device: Device, world: World
) -> tuple[Recipe, Bound, TrainOrder]:
    """Return the recipe with this many samples on a device, and the data in such batches; UsageError if impossible."""
    recipe = replace(recipe, train=replace(recipe.train, global_batch=size * world.size))
    bound = dataset.bind(device, recipe.train.global_batch)
    return recipe, bound, train_order_of(recipe.train, bound, world)


def _fits_shared_memory(bound: Bound, items: int, run: Run, device: Device, world: World) -> bool:
    """Return whether the batches that loader processes prepare ahead, for training and evaluation, have room."""
    if not worker_count(run.workers, device, world) or not SHARED_MEMORY.is_dir():
        return True
    item = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in bound.layout.values())
    needed = 2 * (run.prefetch + 1) * items * item * local_size(world)
    return needed < SHARE * shutil.disk_usage(SHARED_MEMORY).free


def _few(bound: Bound, order: TrainOrder) -> TrainOrder:
    """Return an order of few samples, which are repeated: to load thousands in this process would take minutes."""
    if bound.samples_per_item > 1 or order.local_batch <= DISTINCT:
        return order
    few = replace(order, global_batch=DISTINCT * order.ranks)
    try:
        bound.check_batch(few.local_batch)
    except UsageError:  # batches of a fixed size
        return order
    return few


def _tiled(batch: Batch, rows: int, wanted: int) -> Batch:
    """Repeat the rows of a batch until there are as many as wanted; numbers of the whole batch stay."""
    times = -(-wanted // rows)
    return {
        key: value.repeat(times, *[1] * (value.ndim - 1))[:wanted] if value.ndim and len(value) == rows else value
        for key, value in batch.items()
    }


class _Steps:
    """Training steps with batches of any size on a network of their own."""

    def __init__(self, recipe: Recipe, run: Run, dataset: Dataset, device: Device, world: World, room: float):
        self.recipe = recipe
        self.run = replace(run, workers=0, compile="off", graph="off")
        self.dataset = dataset
        self.device = device
        self.world = world
        self.room = room  # bytes
        self._state: TrainState | None = None

    def probe(self, size: int, parts: int = 0) -> Probe:
        """Measure a step with this many samples, in as many parts as the recipe says, or in these. All ranks try the
        same sizes and see the slowest and fullest rank."""
        self.world.beat(is_long=True)
        try:
            seen = self._measured(size, parts or self.recipe.train.accumulation)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            seen = Probe(0.0, 1000.0)
        self._free_batch()
        microseconds, permille = (self.world.largest(math.ceil(part)) for part in (seen[0] * 1e6, seen[1] * 1e3))
        return Probe(max(1, microseconds) / 1e6, permille / 1e3)

    def _measured(self, size: int, parts: int) -> Probe:
        recipe, bound, order = _with_size(self.recipe, size, self.dataset, self.device, self.world)
        recipe = replace(recipe, train=replace(recipe.train, accumulation=parts))
        if self._state is None:
            built = build_model(recipe, self.run, self.dataset.spec, self.device, World())
            self._state = TrainState(recipe, built, self.device, length_of(recipe.train, order))
        bad = BadSamples(recipe.data.on_bad_sample, recipe.data.max_bad_samples, lambda _: None)
        distinct = _few(bound, order)
        loader = Loader({"train": (bound, distinct)}, self.run, self.device, World(), bad, lambda: None)
        try:
            loader.seek("train", 0, 1)
            batch = _tiled(loader.next("train"), distinct.local_batch, order.local_batch)
            self.device.reset_peak_memory()
            # Alone even among several ranks: one that runs out of memory must not leave others in a collective.
            step = build_step(recipe, self.run, self.device, World(), self._state, bound)

            def timed(number: int) -> float:
                started = time.perf_counter()
                step(batch, number, 0.0)
                self.device.synchronize()
                return time.perf_counter() - started

            is_alone = self.world.size == 1  # else all ranks make equally many steps: a loss may have sums over ranks
            times = [timed(0)]  # also allocates and chooses kernels; on an accelerator it may compile some for minutes
            if times[0] < LONGEST_STEP_S or not is_alone or self.device.kind != "cpu":
                times = [timed(1)]
                while len(times) < TIMED_STEPS or (is_alone and sum(times) < TIMED_S):
                    times.append(timed(1 + len(times)))
            return Probe(min(times), self.device.peak_memory_bytes() / self.room)
        finally:
            loader.close()

    @property
    def model(self) -> nn.Module | None:
        """Return the network, if a step was tried."""
        return self._state.model if self._state else None

    def _free_batch(self) -> None:
        gc.collect()
        self.device.free_cached_memory()

    def free(self) -> None:
        """Return all memory, so that the run finds it as a run with a typed batch does."""
        self._state = None
        self._free_batch()
        self.device.reset_peak_memory()
