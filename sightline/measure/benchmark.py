"""`sightline benchmark RECIPE`: images per second of the training step or of the input, alone or beside peers.

The step is built as the loop builds it. Contenders take turns (A B C A B C ...) in one process, so that heat and
neighbours hit all alike; every repeat is kept. Numbers go to a JSON file with all that is needed to repeat them.
Several ranks measure at the same time, after one of them has measured alone: see ranks.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from sightline.data.loading.cache import read_once
from sightline.data.loading.loader import worker_count
from sightline.engine.orders import eval_order
from sightline.engine.setup import set_up
from sightline.errors import OutOfMemory, UsageError
from sightline.files.whole import replace_text
from sightline.hardware import devices
from sightline.hardware.devices import Device
from sightline.hardware.precision import DTYPES
from sightline.hardware.world import World, joined
from sightline.measure import from_files, latency, peers, ranks, scaling
from sightline.measure.our_step import OURS, KeptBatches, OurStep, open_loader, order_of
from sightline.measure.peers import BATCHES, Contender, Maker, PeerLoader, Say
from sightline.measure.provenance import provenance, result_file
from sightline.measure.scaling import ScalingOptions
from sightline.parts import Bound, Split
from sightline.recipe import store
from sightline.recipe.recipe import Recipe, Run
from sightline.recipe.settings import plain

SCHEMA = 2  # 1: `mfu` was of the matrix product measured in the same run (`step.peak`)

# Dense TFLOP/s of bf16 and fp16 from NVIDIA's data sheets (half of what they give with sparsity), by the name that the
# driver reports. Whole names: "NVIDIA H200 NVL" is a slower chip than "NVIDIA H200".
PUBLISHED_TFLOPS = {
    "NVIDIA H200": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
}


@dataclass(frozen=True)
class BenchmarkOptions:
    """Measure the speed of a recipe's step or input. The recipe comes first; flags not listed here are passed to it.

    Example: `sightline benchmark resnet50 --peers`"""

    steps: int = 50
    """Steps (with --loader: batches) per repeat."""
    warmup: int = 10
    """Steps before the first repeat that are not timed."""
    repeats: int = 5
    """Timed repeats; median, smallest and largest are shown."""
    data: Literal["synthetic", "real"] = "synthetic"
    """synthetic: four batches that are on the device already; real: the recipe's data through the loader, beside
    the same step on such batches; a folder: real, with --data.path."""
    loader: bool = False
    """Only the input: our loader beside two of torchvision's pipelines."""
    peers: bool = False
    """The step beside what a user would run instead."""
    what: Literal["train", "predict"] = "train"
    """The training step, or forward and predictions of evaluation batches (not compiled, as `evaluate` runs them); with
    a folder of images also from files to the results of `predict`."""
    out: Path = Path("benchmarks/results")
    """Folder of the JSON file."""
    logname: str = ""
    """A second file with throughput and latencies alone, flat."""
    whole: bool = False
    """Whole runs, from the start of the process to its exit, beside a plain loop; the recipe needs --data.path."""
    scaling: bool = False
    """Also predict the step on many devices, from the one that is measured, or given; see docs/why/scaling.md."""
    machine: ScalingOptions = dataclasses.field(default_factory=ScalingOptions)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup", 0), ("repeats", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} {getattr(self, name)} must be at least {least}")
        if self.data not in ("synthetic", "real"):
            raise UsageError(f"--data {self.data} is unknown; use synthetic, real or a folder")
        if self.what not in ("train", "predict"):
            raise UsageError(f"--what {self.what} is unknown; use train or predict")
        if self.what == "predict" and (self.peers or self.loader):
            raise UsageError("--what predict is measured alone; leave --peers and --loader out")
        if self.logname and self.loader and not self.peers:
            raise UsageError("--logname keeps latencies of steps, and --loader alone makes none; leave one of them out")
        if self.logname and Path(self.logname).is_dir():
            raise UsageError(f"--logname {self.logname} is a folder; name a file, e.g. {self.logname}/perf.json")
        if self.scaling and (self.what == "predict" or self.loader or self.peers or self.logname):
            raise UsageError("--scaling stands alone; leave --loader, --peers, --what predict and --logname out")
        if self.whole and (self.what == "predict" or self.loader or self.peers or self.logname or self.scaling):
            raise UsageError("--whole stands alone; leave --loader, --peers, --scaling, --what and --logname out")
        if not self.scaling and (given := self.machine.given()):
            raise UsageError(f"--{given[0].replace('_', '-')} belongs to --scaling; add it")
        if self.peers and self.data == "real":
            raise UsageError("--peers compares steps on input that is on the device; leave --data out, or --peers")


def with_folder(flags: Sequence[str]) -> list[str]:
    """Return the flags with `--data DIR` as `--data.path DIR --data real`."""
    words = [each for word in flags for each in (word.split("=", 1) if word.startswith("--data=") else [word])]
    for at in range(len(words) - 1):
        if words[at] == "--data" and not _is_kind(words[at + 1]):
            words[at : at + 2] = ["--data.path", words[at + 1], "--data", "real"]
            break
    return words


def _is_kind(value: str) -> bool:
    """Return whether `value` is synthetic or real, or a misspelling of them, and not a place."""
    kinds = ("synthetic", "real")
    is_place = value.startswith("synthetic:") or os.path.exists(value)
    return value in kinds or (not is_place and bool(difflib.get_close_matches(value, kinds, n=1)))


def benchmark(recipe: Recipe, run: Run, options: BenchmarkOptions, say: Say) -> dict[str, Any]:
    """Measure what `options` ask for on this process's device, together with the other ranks if a launcher started
    several; rank 0 writes it to a file under `options.out`."""
    if options.loader:
        peers.check_comparable(recipe.data)
    for flag, folder in (("--out", options.out), ("--logname", Path(options.logname).parent)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{flag} {folder} cannot be written: {error.strerror}; give another folder") from error
    run = scaling.as_on_many(run) if options.scaling else run
    here, device, recipe = set_up(recipe, run)
    recipe = dataclasses.replace(recipe, data=recipe.data.for_ranks(here.size))
    if options.what == "predict":
        devices.follow_rules()
    ranks.refuse(recipe, here, [f"--{name}" for name in ("peers", "scaling", "whole") if getattr(options, name)])
    say = say if here.is_main else (lambda _: None)
    with joined(here, device, "measuring", "nothing was written; give the command again", say) as here:
        result = _result(recipe, run, options, device, here, say, now := datetime.now(UTC))
    if here.is_main:
        path = result_file(options.out, recipe.name, device, now)
        replace_text(path, json.dumps(result, indent=1) + "\n")
        if options.logname:
            Path(options.logname).write_text(json.dumps(result["perf"]) + "\n", encoding="utf-8")
        say(f"written to {path}")
    return result


def _result(
    recipe: Recipe, run: Run, options: BenchmarkOptions, device: Device, here: World, say: Say, now: datetime
) -> dict[str, Any]:
    """Return all that the JSON file holds."""
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "time": now.isoformat(timespec="seconds"),
        "recipe": recipe.name,
        "device": device.name(),
        "batch": recipe.train.global_batch,
        "precision": recipe.train.precision,
        "options": _as_json(options),
        **provenance(device),
        "config": {**store.to_json(recipe), "run": plain(run)},
    }
    one, alone = ranks.share_of(recipe, here), {}
    try:
        if here.size > 1:
            share = f"{one.train.global_batch} of {recipe.train.global_batch} images"
            say(f"to compare with: rank 0 alone, {share}; the others wait")
            alone = _measure(one, run, options, device, World(), say) if here.is_main else {}
            peers.free(device)
            here.barrier()
            say(f"all {here.size} ranks, {recipe.train.global_batch} images per step")
        result |= _measure(recipe, run, options, device, here, say)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{device.name()} ran out of memory with batch {recipe.train.global_batch}"
            f"{f' on {here.size} ranks' if here.size > 1 else ''}; use a smaller --train.global-batch ({error})"
        ) from error
    if here.size > 1:
        result["ranks"] = ranks.beside_one(result, alone, one.train.global_batch, device, here)
    if options.scaling:
        bound, row = synthetic_data(recipe, device), _our_row(result)
        result["scaling"] = scaling.predict_recipe(recipe, run, bound, image_of(bound), options.machine, row)
    if ours := _our_row(result):
        result["perf"] = latency.perf_of(options.what, ours)
    return result


def _measure(
    recipe: Recipe, run: Run, options: BenchmarkOptions, device: Device, here: World, say: Say
) -> dict[str, Any]:
    """Return what was asked for of the input, the step and the predictions, by these ranks together."""
    found = {}
    if options.loader:
        found["loader"] = _measure_loaders(recipe, run, options, device, here, say)
    if options.what == "predict":
        found["predict"] = _measure_predictions(recipe, run, options, device, here, say)
    elif options.peers or not (options.loader or (options.scaling and options.machine.step_ms)):
        found["step"] = _measure_steps(recipe, run, options, device, here, say)
    return found


def _as_json(options: BenchmarkOptions) -> dict[str, Any]:
    """Return the options as a result holds them."""
    plain = {**asdict(options), "out": str(options.out)}
    machine = plain.pop("machine")
    return {**plain, "scaling": scaling.as_json(machine) if options.scaling else None}


def as_text(result: dict[str, Any]) -> str:
    """Format the result for people."""
    commit = result["commit"]
    versions = result["environment"]["versions"]
    repeats, steps = result["options"]["repeats"], result["options"]["steps"]
    lines = [
        f"{result['recipe']} on {result['device']}: batch {result['batch']}, {result['precision']}, "
        + (f"{repeats} repeats of {steps} steps" if result.keys() & {"loader", "step", "predict"} else "not measured"),
        f"torch {versions['torch']}, cuda {versions['cuda']}, cudnn {versions['cudnn']}, triton {versions['triton']}, "
        f"commit {commit['id'][:10]}{' with changes' if commit['dirty'] else ''}",
    ]
    for part in ("loader", "step", "predict"):
        if part not in result:
            continue
        found = result[part]
        lines.append(f"{part:<45} {'img/s':>9} {'min':>9} {'max':>9} {'ours is':>8} {'MFU':>6} {'first s':>8}")
        for row in found["contenders"]:
            rate = row["images_per_s"]
            ratio = f"{row['ratio']:.2f} x" if "ratio" in row else ""
            mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
            numbers = f"{rate['median']:>9,.0f} {rate['min']:>9,.0f} {rate['max']:>9,.0f}"
            lines.append(f"  {row['name']:<43} {numbers} {ratio:>8} {mfu:>6} {row['first_s']:>8.1f}")
    if "ranks" in result:
        lines += ranks.as_lines(result)
    if "step" in result:
        step, ours = result["step"], result["step"]["contenders"][0]
        chip = step["chip_tflops"]
        mfu_of = f"is of the chip's published {chip:g}" if chip else "is not given: no published peak is known"
        lines += [
            f"{step['forward_gflop']:.3g} GFLOP forward per image, counted three times per step; "
            f"data wait {ours['data_wait']:.1%}; peak memory {ours['peak_memory_gb']:.2f} GB",
            f"{_product_text(step['peak'])}; MFU {mfu_of}",
        ]
        lines += [f"not measured: {name}" for name in step["left_out"]]
    if row := _our_row(result):
        lines.append(latency.as_text(result["options"]["what"], result["perf"], len(row["latency_s"])))
    if "scaling" in result:
        lines.append(scaling.as_text(result["scaling"]))
    return "\n".join(lines)


def _our_row(result: dict[str, Any]) -> dict[str, Any]:
    """Return our row of the step or of the predictions; {} where only the input was measured."""
    measured = [result[part] for part in ("step", "predict") if part in result]
    row: dict[str, Any] = measured[0]["contenders"][0] if measured else {}
    return row


# The step.


def _measure_steps(
    recipe: Recipe, run: Run, options: BenchmarkOptions, device: Device, here: World, say: Say
) -> dict[str, Any]:
    is_real = options.data == "real"
    bound = bound_of(recipe, device) if is_real else synthetic_data(recipe, device)
    with torch.device("meta"):
        model = recipe.model.build(bound.dataset.spec)
    image = image_of(bound)
    flop = peers.forward_flop(model, image)
    timed = (options.warmup, options.steps)
    shared: list[OurStep] = []

    def ours() -> OurStep:
        return OurStep(recipe, run, bound, device, is_real, say, timed, here)

    def ours_to_share() -> OurStep:
        shared[:] = [ours()]
        return shared[0]

    makers: list[Maker] = [ours_to_share, lambda: KeptBatches(shared.pop())] if is_real else [ours]
    left_out: list[str] = []
    if options.peers:
        compared = peers.Ours(recipe.model, model, image, bound.dataset.spec, recipe.train.global_batch, device)
        others, left_out = _peers_of(recipe, run, compared)
        makers += others
    peak = matmul_peak(device, recipe.train.precision)
    say(_product_text(peak))
    timings, order = ranks.measure(makers, options.steps, options.warmup, options.repeats, device, here, say)
    rows = peers.rows(timings)
    chip = published_tflops(device.name(), recipe.train.precision)
    own = rows if is_real else rows[:1]  # a peer's network may have other FLOP, as torchvision's SSD does
    for row in own if chip else ():
        row["mfu"] = mfu(flop, row["images_per_s"]["median"], chip * here.size / device.sharers)
    return {
        "data": options.data,
        "order": order,
        "forward_gflop": flop / 1e9,
        "peak": peak,
        "chip_tflops": chip or None,
        "contenders": rows,
        "left_out": left_out,
    }


def _peers_of(recipe: Recipe, run: Run, ours: peers.Ours) -> tuple[list[Maker], list[str]]:
    """Return the steps that users of such a network would run instead, and what was left out and why."""
    task = recipe.task.build()
    if not task.peers:
        raise UsageError(f"--peers: {type(task).__name__} names nothing to compare with (peers); leave --peers out")
    named = importlib.import_module(f"sightline.measure.peers_{task.peers}")
    precision = ours.device.precision_of(recipe)
    chosen, left_out = peers.choose_peers(named.STEP_PEERS, run.compile, ours.device, precision)
    return named.steps(chosen, ours), left_out


def _measure_predictions(
    recipe: Recipe, run: Run, options: BenchmarkOptions, device: Device, here: World, say: Say
) -> dict[str, Any]:
    is_real = options.data == "real"
    bound = bound_of(recipe, device, "val") if is_real else synthetic_data(recipe, device, "val")
    order = latency.EvalRounds(eval_order(recipe.train, len(bound.dataset), here, bound.dataset.eval_batch))
    run = run if is_real else dataclasses.replace(run, workers=0)

    def make() -> Contender:
        loader = open_loader(recipe, run, bound, order, device, say, "val", here)
        timed = (options.warmup, options.steps)
        return latency.OurPredictions(recipe, run, bound, loader, device, is_real, timed)

    timings, _ = ranks.measure([make], options.steps, options.warmup, options.repeats, device, here, say)
    rows = peers.rows(timings)
    if is_real and here.size == 1 and (row := from_files.measure(recipe, run, device, options.repeats, say)):
        rows.append(row)
    return {"data": options.data, "contenders": rows}


def synthetic_data(recipe: Recipe, device: Device, split: Split = "train") -> Bound:
    """Bind the recipe's own data path to synthetic samples: as many classes, as large."""
    declared = recipe.data.declared()
    spec = declared[0] if declared else recipe.data.open("train", recipe.train.seed).spec
    samples = BATCHES * recipe.train.global_batch * (1 if split == "train" else 8)  # of which an eighth is for val
    return bound_of(dataclasses.replace(recipe, data=recipe.data.synthetic(spec, samples)), device, split)


def bound_of(recipe: Recipe, device: Device, split: Split = "train") -> Bound:
    """Open a split of the recipe's data and bind it to the device."""
    return recipe.data.open(split, recipe.train.seed).bind(device, recipe.train.global_batch)


def image_of(bound: Bound) -> torch.Tensor:
    """Return one training sample as the network sees it, on the meta device: (1, channels, height, width)."""
    sample = {
        key: torch.empty((1, *shape), dtype=getattr(torch, dtype), device="meta")
        for key, (shape, dtype) in bound.layout.items()
        if key in ("image", "label")  # random numbers for the device half change no shape
    }
    return bound.finish(sample, torch.float32)["image"][:1]


def published_tflops(name: str, precision: str) -> float:
    """Return the chip's published peak for a run in this precision; 0 if it is not known here."""
    return PUBLISHED_TFLOPS.get(name, 0.0) if precision in ("bf16", "fp16") else 0.0


def mfu(forward_flop: float, images_per_s: float, tflops: float) -> float:
    """Return the share of a peak that training uses; backward counts as two forward passes."""
    return 3 * forward_flop * images_per_s / (tflops * 1e12)


def _product_text(peak: dict[str, Any]) -> str:
    return f"matrix product of {peak['side']} cubed in {peak['dtype']}: {peak['tflops']:.3g} TFLOP/s measured"


def matmul_peak(device: Device, precision: str) -> dict[str, Any]:
    """Measure TFLOP/s of a plain matrix product: bf16, on the CPU in the run's precision."""
    on_cpu = device.kind == "cpu"
    side, products = (512, 4) if on_cpu else (8192, 10)
    dtype = DTYPES[precision] if on_cpu else torch.bfloat16
    a, b = (torch.randn(side, side, device=device.torch_device).to(dtype) for _ in range(2))
    seconds = []
    for repeat in range(6):
        device.synchronize()
        started = time.perf_counter()
        for _ in range(products):
            torch.mm(a, b)
        device.synchronize()
        if repeat:  # the first one chooses the kernel
            seconds.append(time.perf_counter() - started)
    tflops = [2 * side**3 * products / s / 1e12 for s in seconds]
    return {
        "tflops": statistics.median(tflops),
        "all": tflops,
        "dtype": str(dtype).removeprefix("torch."),
        "side": side,
    }


# The input.


class OurLoader(Contender):
    """Our loader, to the device, with nobody using the batches."""

    def __init__(self, recipe: Recipe, run: Run, device: Device, here: World, say: Say):
        started = time.perf_counter()
        self.name = f"{OURS} loader" + (", decoded on the CPU" if getattr(recipe.data, "decoder", "") == "cpu" else "")
        self.images = recipe.train.global_batch // here.size
        bound = bound_of(recipe, device)
        self.loader = open_loader(recipe, run, bound, order_of(recipe, bound, here), device, say, ranks=here)
        self.settle = run.prefetch + 1  # as for the peers: what was prepared ahead goes first
        self.advance()
        device.synchronize()
        self.first_s = time.perf_counter() - started

    def advance(self) -> None:
        self.loader.next("train")

    def waited_s(self) -> float:
        return self.loader.wait_s

    def close(self) -> None:
        self.loader.close()


def _measure_loaders(
    recipe: Recipe, run: Run, options: BenchmarkOptions, device: Device, here: World, say: Say
) -> dict[str, Any]:
    workers = worker_count(run.workers, device, here)
    images = recipe.train.global_batch // here.size
    recipe = dataclasses.replace(recipe, data=read_once(recipe.data))  # peers keep nothing either
    # The second decodes as the peers do, where the first leaves that to the device.
    on_cpu = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, decoder="cpu"))  # type: ignore[type-var]
    ours = [recipe] if device.kind == "cpu" or recipe.data == on_cpu.data else [recipe, on_cpu]
    makers: list[Maker] = [
        *(functools.partial(OurLoader, each, run, device, here, say) for each in ours),
        lambda: PeerLoader("v2", recipe.data, images, workers, device),
        lambda: PeerLoader("pil", recipe.data, images, workers, device),
    ]
    # DataLoader's workers finish a batch each at about the same time; only whole waves of them are a fair measure.
    batches = -(-options.steps // max(1, workers)) * max(1, workers)
    timings, order = ranks.measure(makers, batches, options.warmup, options.repeats, device, here, say)
    return {"workers": workers, "batches": batches, "order": order, "contenders": peers.rows(timings)}
