"""`sightline benchmark RECIPE --scaling`: predict, from one device, the step on many; nothing runs there.

Each device keeps its batch. A step is the one-device step, plus gradients that are still travelling when the backward
pass has ended, plus collectives that all wait for, plus the wait for the slowest. docs/why/scaling.md tests the model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sightline.engine.model import choose_trainable
from sightline.errors import UsageError
from sightline.measure import links
from sightline.measure.links import Cluster, all_reduce_by, all_reduce_s
from sightline.parts import Bound, Dataset
from sightline.recipe.recipe import Recipe, Run

MIB = 1 << 20
ALL_RANKS = -1  # of train.bn_group
FIRST_BUCKET_BYTES = MIB  # torch: dist._DEFAULT_FIRST_BUCKET_BYTES; small, so that the first exchange starts early
BUCKET_MIB = 25  # torch: DistributedDataParallel(bucket_cap_mb=25)
BACKWARD_SHARE = 2 / 3  # of a step: two products per layer, by weights and by inputs, where the forward pass has one
EVALUATION_SPEEDUP = 3.0  # the forward pass alone
HOST_COPY = 20e9  # bytes/s of a copy from the device to pinned memory; PCIe 4 x16 reaches about 25
DISK_GBS = 1.0  # of the run folder; an NVMe disk, or a share of a parallel file system
# How uneven steps are where hosts also feed the devices, as a share of the step (one standard deviation). One number
# for all rows of the published figures in docs/why/scaling.md: without it every one of them is predicted too fast.
PUBLISHED_SPREAD = 0.05
WORTH_NAMING = 0.01  # of the one-device step: less than this limits nothing
BRATS_DEPTH = 155  # slices of a volume of the Decathlon's task 01


@dataclass(frozen=True)
class ScalingOptions:
    """The machine that --scaling predicts for."""

    devices: tuple[int, ...] = (2, 8, 64, 1024)
    """Numbers of devices to predict for."""
    links: tuple[str, ...] = ("nvlink4", "ib400")
    """Inside a host, and between hosts: names of docs/why/scaling.md or NAME,SPEED; one is taken for both."""
    per_host: int = 8
    """Devices of a host."""
    step_ms: float = 0.0
    """One device's step, in milliseconds; 0: measured now."""
    spread: float = -1.0
    """Standard deviation of single steps as a share of the step, e.g. 0.02; negative: as measured, 0 with step_ms."""
    sample_kb: float = 0.0
    """Kilobytes read per sample; 0: that of ImageNet, COCO, or the crop of a prepared volume."""
    storage_gbs: float = math.inf
    """GB/s at which the storage of the samples serves all hosts together."""
    disk_gbs: float = DISK_GBS
    """GB/s at which checkpoints are written."""

    def __post_init__(self) -> None:
        if not self.devices or min(self.devices) < 1:
            raise UsageError(f"--devices {' '.join(map(str, self.devices))} must be numbers from 1 on")
        if not 1 <= len(self.links) <= 2:
            raise UsageError(f"--links {' '.join(self.links)} must be one or two: inside a host, and between hosts")
        if self.per_host < 1:
            raise UsageError(f"--per-host {self.per_host} must be at least 1")
        for odd in (n for n in self.devices if n > self.per_host and n % self.per_host):
            raise UsageError(f"--devices {odd} do not fill hosts of {self.per_host}; use a multiple, or --per-host")
        for name in ("step_ms", "sample_kb"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} must be a positive number")
        for name in ("storage_gbs", "disk_gbs"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} must be positive")
        if not self.spread < 1:
            raise UsageError(f"--spread {self.spread} must be a share below 1, e.g. 0.05")
        self.cluster()

    def given(self) -> list[str]:
        """Name the fields that differ from their defaults."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]

    def cluster(self) -> Cluster:
        """Return the links by what they can do."""
        return Cluster(links.parse(self.links[0]), links.parse(self.links[-1]), self.per_host)


def as_json(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options as a result holds them: JSON has lists, and null for infinity."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return {name: None if value == math.inf else value for name, value in plain.items()}


def as_on_many(run: Run) -> Run:
    """Switch the graph off: several ranks capture none (see train/step.py), so the step measured for them must not."""
    return replace(run, graph="off")


# The network: what travels, and when it is ready.


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter."""

    size: int  # bytes
    ready: float  # share of the backward pass after which it is there


@dataclass(frozen=True)
class Network:
    """The gradients and statistics that a step sends."""

    gradients: tuple[Gradient, ...]  # in the order in which the model names its parameters
    norms: tuple[int, ...]  # channels of every batch-norm

    @property
    def size(self) -> int:
        """Return the bytes of all gradients."""
        return sum(gradient.size for gradient in self.gradients)


def network_of(model: nn.Module, image: Tensor) -> Network:
    """Describe a model by one image (1, channels, height, width) on the meta device. A layer's backward pass is taken
    to last as long as its share of the products, and layers to run in the order in which they are named."""
    with FlopCounterMode(display=False, depth=None) as counter, torch.no_grad():  # type: ignore[arg-type]
        model.eval()(image)
    root = type(model).__name__
    counts = {name: sum(by_kind.values()) for name, by_kind in counter.get_flop_counts().items()}
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    owners = [f"{root}.{name.rpartition('.')[0]}" for name, _ in named]
    total = sum(counts.get(owner, 0) for owner in dict.fromkeys(owners)) or 1
    ready, done, seen = [0.0] * len(named), 0, set()
    for at in reversed(range(len(named))):
        if owners[at] not in seen:
            seen.add(owners[at])
            done += counts.get(owners[at], 0)
        ready[at] = done / total
    gradients = [Gradient(p.numel() * p.element_size(), share) for (_, p), share in zip(named, ready, strict=True)]
    norms = [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)]
    return Network(tuple(gradients), tuple(norms))


def buckets_of(gradients: Sequence[Gradient], cap: float) -> list[Gradient]:
    """Fill buckets as DistributedDataParallel does: from the last parameter on, full when they reach their size."""
    found: list[Gradient] = []
    size, ready, limit = 0, 0.0, float(FIRST_BUCKET_BYTES)
    for gradient in reversed(gradients):
        size, ready = size + gradient.size, max(ready, gradient.ready)
        if size >= limit:
            found.append(Gradient(size, ready))
            size, ready, limit = 0, 0.0, cap
    return [*found, Gradient(size, ready)] if size else found


# The step.


def exposed_s(buckets: Sequence[Gradient], backward_s: float, devices: int, cluster: Cluster) -> float:
    """Return seconds that gradients still travel after the backward pass; each bucket leaves when it is full."""
    overlaps, end = cluster.overlaps(devices), 0.0
    for bucket in buckets:
        full = bucket.ready * backward_s if overlaps else backward_s
        end = max(end, full) + all_reduce_s(devices, bucket.size, cluster)
    return max(0.0, end - backward_s) if devices > 1 else 0.0


def statistics_s(channels: Sequence[int], bn_group: int, devices: int, cluster: Cluster) -> float:
    """Return seconds of shared batch-norm statistics: one exchange of 2 C + 1 numbers forward and one of 2 C backward,
    each waited for. The gather counts as a sum, which it is not slower than."""
    group = devices if bn_group == ALL_RANKS else min(bn_group, devices)
    if group < 2:
        return 0.0
    return sum(all_reduce_s(group, 4 * numbers, cluster) for c in channels for numbers in (2 * c + 1, 2 * c))


def slowest(devices: int) -> float:
    """Return by how many standard deviations the slowest of `devices` is late (Blom's approximation)."""
    return statistics.NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


@dataclass(frozen=True)
class Work:
    """One device's share, the same for any number of devices."""

    step_s: float
    batch: int  # samples
    network: Network
    bucket_bytes: float = BUCKET_MIB * MIB
    accumulation: int = 1
    bn_group: int = 0
    spread: float = 0.0
    sample_bytes: float = 0.0


def predict(work: Work, devices: int, cluster: Cluster, storage: float = math.inf) -> dict[str, Any]:
    """Return the step on that many devices, by its parts."""
    # Only the last part of an accumulated batch sends.
    backward_s = BACKWARD_SHARE * work.step_s / work.accumulation
    buckets = buckets_of(work.network.gradients, work.bucket_bytes)
    extra = {
        "all-reduce": exposed_s(buckets, backward_s, devices, cluster),
        "batch-norm": statistics_s(work.network.norms, work.bn_group, devices, cluster),
        "flags": all_reduce_s(devices, 4, cluster),  # whether the loss is finite
        "slowest device": work.spread * work.step_s * slowest(devices),
    }
    samples = devices * work.batch
    step_s = work.step_s + sum(extra.values())
    extra["storage"] = max(0.0, samples * work.sample_bytes / storage - step_s)
    step_s += extra["storage"]
    most = max(extra, key=lambda name: extra[name])
    return {
        "devices": devices,
        "step_s": step_s,
        "images_per_s": samples / step_s,
        "efficiency": work.step_s / step_s,
        "limit": most if extra[most] > WORTH_NAMING * work.step_s else "the device",
        "extra_s": extra,
        "all_reduce_s": sum(all_reduce_s(devices, bucket.size, cluster) for bucket in buckets),
        "algorithm": all_reduce_by(devices, max(bucket.size for bucket in buckets), cluster) if buckets else "none",
        "storage_bytes_per_s": samples / step_s * work.sample_bytes,
    }


# The run: epochs, evaluation, checkpoints.


@dataclass(frozen=True)
class Rounds:
    """Evaluations and checkpoints of an epoch."""

    samples: int  # of an epoch
    eval_samples: int
    eval_every_epochs: int
    checkpoint_bytes: int
    checkpoint_every_epochs: int
    disk: float  # bytes/s
    in_background: bool  # whether training continues while a checkpoint is written


def epoch_of(row: dict[str, Any], work: Work, rounds: Rounds) -> dict[str, float]:
    """Return mean seconds of an epoch by its parts; rank 0 writes, so more devices do not make a checkpoint cheaper."""
    devices = row["devices"]
    steps = max(1, rounds.samples // (devices * work.batch))
    train_s = steps * row["step_s"]
    batches = -(-rounds.eval_samples // (devices * work.batch))
    evaluate_s = batches * work.step_s / EVALUATION_SPEEDUP / rounds.eval_every_epochs
    write_s, copy_s = rounds.checkpoint_bytes / rounds.disk, rounds.checkpoint_bytes / HOST_COPY
    # The next one waits for the one before.
    waits = copy_s + max(0.0, write_s - rounds.checkpoint_every_epochs * (train_s + evaluate_s))
    checkpoint_s = (waits if rounds.in_background else write_s) / rounds.checkpoint_every_epochs
    return {
        "steps": steps,
        "train_s": train_s,
        "evaluate_s": evaluate_s,
        "checkpoint_s": checkpoint_s,
        "checkpoint_write_s": write_s,
        "epoch_s": train_s + evaluate_s + checkpoint_s,
    }


# From a recipe.


def predict_recipe(
    recipe: Recipe, run: Run, bound: Bound, image: Tensor, options: ScalingOptions, measured: dict[str, Any]
) -> dict[str, Any]:
    """Predict for every number of devices; `measured` is our row of the benchmark, or {} with --step-ms."""
    cluster, batch, spread = options.cluster(), recipe.train.global_batch, options.spread
    step_s = options.step_ms / 1000
    if measured:
        step_s = batch / measured["images_per_s"]["median"]
        spread = spread_of(measured["latency_s"]) if spread < 0 else spread
    with torch.device("meta"):
        model = recipe.model.build(bound.dataset.spec)
    choose_trainable(model, recipe.train.trainable)
    sample_bytes, source = sample_bytes_of(bound) if not options.sample_kb else (options.sample_kb * 1e3, "given")
    work = Work(
        step_s,
        batch,
        network_of(model, image),
        run.bucket_mb * MIB,
        recipe.train.accumulation,
        recipe.train.bn_group,
        max(0.0, spread),
        sample_bytes,
    )
    rounds = rounds_of(recipe, run, bound, options)
    uneven = replace(work, spread=max(work.spread, PUBLISHED_SPREAD))
    rows = []
    for devices in options.devices:
        row = predict(work, devices, cluster, options.storage_gbs * 1e9)
        careful = predict(uneven, devices, cluster, options.storage_gbs * 1e9)
        rows.append({**row, "careful_efficiency": careful["efficiency"], "epoch": epoch_of(row, work, rounds)})
    return {
        "predicted": True,
        "step_s": step_s,
        "spread": work.spread,
        "batch_per_device": batch,
        "gradient_bytes": work.network.size,
        "buckets": [asdict(bucket) for bucket in buckets_of(work.network.gradients, work.bucket_bytes)],
        "cluster": asdict(cluster),
        "sample_bytes": sample_bytes,
        "sample_bytes_from": source,
        "rounds": asdict(rounds),
        "rows": rows,
    }


def spread_of(seconds: Sequence[float]) -> float:
    """Return deviation over median of single steps, from their 16th and 84th percentiles, which ignore outliers."""
    low, high = np.percentile(seconds, (15.87, 84.13))
    return float((high - low) / 2 / statistics.median(seconds))


def sample_bytes_of(bound: Bound) -> tuple[float, str]:
    """Return bytes read per training sample, where not given, and the source of the number."""
    if "boxes" in bound.layout:
        return 19_336_861_798 / 118_287, "COCO: train2017.zip over its images"
    if not bound.layout["label"][0]:
        return 147_897_477_120 / 1_281_167, "ImageNet: ILSVRC2012_img_train.tar over its images"
    shapes = [(shape, np.dtype(dtype).itemsize) for shape, dtype in (bound.layout["image"], bound.layout["label"])]
    read = sum(math.prod(shape) * size for shape, size in shapes) / bound.samples_per_item
    return read, f"a crop of {'a prepared volume' if _is_volume(bound) else 'an image and its mask'}, not compressed"


def _is_volume(bound: Bound) -> bool:
    return len(bound.layout["label"][0]) == 3


def rounds_of(recipe: Recipe, run: Run, bound: Bound, options: ScalingOptions) -> Rounds:
    """Return the sizes of an epoch, of the data or, without any, as the recipe declares its training samples."""
    cfg, declared = recipe.train, recipe.data.declared()
    if declared is None:
        train, val = (recipe.data.open(split, cfg.seed) for split in ("train", "val"))
        samples, held_out = len(train) * train.samples_per_item(cfg.global_batch), len(val)
    else:
        items = declared[1]
        samples = items * recipe.data.declared_per_item(cfg.global_batch)
        if "boxes" in bound.layout:
            held_out = 5_000  # COCO's val2017
        elif bound.layout["label"][0]:
            held_out = items // 4 * (BRATS_DEPTH if _is_volume(bound) else 1)  # one of five folds
        else:
            held_out = 50_000  # ImageNet's val
    return Rounds(
        samples,
        held_out,
        cfg.eval_every_epochs,
        checkpoint_bytes(recipe, bound.dataset),
        run.checkpoint_every_epochs,
        options.disk_gbs * 1e9,
        run.save_in_background,
    )


def checkpoint_bytes(recipe: Recipe, dataset: Dataset) -> int:
    """Return the bytes of the weights, of their average where there is one, and of the optimizer's state."""
    model = recipe.model.build(dataset.spec)
    choose_trainable(model, recipe.train.trainable)
    optimizer = recipe.optimizer.build(model, torch.device("cpu"))
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return weights * (2 if recipe.train.ema else 1) + sum(tensor.nbytes for tensor in kept)


def as_text(found: dict[str, Any]) -> str:
    """Format the table for people."""
    cluster = found["cluster"]
    speeds = " and ".join(
        f"{cluster[place]['name']} {cluster[place]['bandwidth'] / 1e9:.3g} GB/s {place} hosts".replace(
            "inside hosts", f"inside hosts of {cluster['per_host']}"
        )
        for place in ("inside", "between")
    )
    lines = [
        f"PREDICTED from one device's step of {1e3 * found['step_s']:.4g} ms with {found['batch_per_device']} samples "
        f"(single steps vary by {found['spread']:.1%}): {found['gradient_bytes'] / 1e6:.4g} MB of gradients in "
        f"{len(found['buckets'])} buckets, {speeds}; every device keeps its batch",
        f"{'devices':>8} {'batch':>8} {'step ms':>9} {'img/s':>12} {'efficiency':>10} {'careful':>8} "
        f"{'all-reduce ms':>14} {'by':>10} {'limit':<15} {'storage GB/s':>12} {'epoch s':>9} {'of it eval, save':>17}",
    ]
    for row in found["rows"]:
        epoch = row["epoch"]
        lines.append(
            f"{row['devices']:>8} {row['devices'] * found['batch_per_device']:>8} {1e3 * row['step_s']:>9.3f} "
            f"{row['images_per_s']:>12,.0f} {row['efficiency']:>10.1%} {row['careful_efficiency']:>8.1%} "
            f"{1e3 * row['all_reduce_s']:>14.3f} {row['algorithm']:>10} {row['limit']:<15} "
            f"{row['storage_bytes_per_s'] / 1e9:>12.3f} {epoch['epoch_s']:>9.1f} "
            f"{epoch['evaluate_s']:>8.2f} {epoch['checkpoint_s']:>8.2f}"
        )
    rounds = found["rounds"]
    lines.append(
        f"careful: steps that vary by at least {PUBLISHED_SPREAD:.0%}, as published runs do; storage: "
        f"{found['sample_bytes'] / 1e3:.4g} kB per sample ({found['sample_bytes_from']}); checkpoint of "
        f"{rounds['checkpoint_bytes'] / 1e6:.4g} MB, {rounds['checkpoint_bytes'] / rounds['disk']:.3g} s to write "
        + ("in the background" if rounds["in_background"] else "while all wait")
    )
    return "\n".join(lines)
