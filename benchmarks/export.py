"""Does an exported network compute the same, how large is its file, and how fast does it run?

    python benchmarks/export.py --threads 1

Every recipe at its real size, with random weights; detectors with a threshold low enough for boxes. Each format is
written by `sightline export`, which compares outputs on random input. Speeds are of the whole graph, pixels in and
logits or boxes out, on the CPU in fp32: the median of the repeats. With one thread they are per second of CPU time, so
that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sightline import config, recipes
from sightline.engine import checkpoint
from sightline.engine.model import build_model
from sightline.engine.progress import TrainProgress
from sightline.export import formats
from sightline.export.by_task import outputs_of
from sightline.export.run import ExportOptions, export
from sightline.export.served import Served
from sightline.hardware import devices
from sightline.measure.provenance import provenance, result_file
from sightline.parts import DataSpec
from sightline.recipe import store

CLASSES = ("circle", "square", "star", "ring")
SHAPES = DataSpec(CLASSES, 2, (64, 64), (), ())  # of `prepare shapes`
LOW_THRESHOLD = "--task.score-threshold=0.02"  # random weights give most anchors 1/81, and few of them more
SECONDS, MOST_REPEATS = 3.0, 20  # of one speed


def spec_of(recipe: config.Recipe) -> DataSpec:
    """Return the spec that the recipe declares; one of small data where it takes any."""
    data: Any = recipe.data
    if getattr(data, "task", "") == "own":
        return SHAPES
    if getattr(data, "classes", 1):
        return data.declared()[0]
    return dataclasses.replace(data, classes=len(CLASSES)).declared()[0]


@torch.no_grad()
def network(recipe: config.Recipe, run: config.Run, spec: DataSpec) -> nn.Module:
    """Build a network with random weights, whose batch-norms know noise: else its outputs grow from layer to layer."""
    model = build_model(recipe, run, spec, devices.select("cpu")).model
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean of all batches
    if norms:
        model.train()(torch.randn(4, spec.channels, *spec.size))
    return model.eval()


def write_checkpoint(name: str, folder: Path, flags: list[str]) -> Path:
    """Write a checkpoint of a recipe with random weights, as if no step had been made."""
    recipe, run = config.load(name, flags)
    spec = spec_of(recipe)
    model = network(recipe, run, spec)
    state = {"recipe": store.to_json(recipe), "spec": spec.to_json(), "progress": vars(TrainProgress())}
    return checkpoint.write(folder, {"model": model.state_dict()}, state)


def images_per_second(run: Callable[[Tensor], Any], images: Tensor) -> float:
    """Return the median over repeats, after a warm-up."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    rates: list[float] = []
    began = time.perf_counter()
    with torch.inference_mode():
        while len(rates) < 3 or (time.perf_counter() - began < SECONDS and len(rates) < MOST_REPEATS):
            start = clock()
            run(images)
            rates.append(len(images) / (clock() - start))
            if len(rates) == 1 and len(images) / rates[0] > 2 * SECONDS:
                return rates[0]  # a volume takes half a minute
    return statistics.median(rates[1:])


def measure(name: str, format_name: str, batches: list[int], folder: Path, flags: list[str]) -> dict[str, Any]:
    """Export one recipe; return its row."""
    said: list[str] = []
    ckpt = folder / name
    if not ckpt.exists():
        write_checkpoint(name, ckpt, flags)
    began = time.perf_counter()
    out = folder / f"{name}{formats.find(format_name).SUFFIX}"
    path = export(str(ckpt), ExportOptions(format_name, str(out)), say=said.append)
    took = time.perf_counter() - began
    row: dict[str, Any] = {"recipe": name, "format": format_name, "said": said[:-1], "seconds": round(took, 1)}
    row["difference"] = next(line.rsplit(" ", 1)[1] for line in said if "largest relative difference" in line)
    row["megabytes"] = round(path.stat().st_size / 1e6, 1)
    if formats.find(format_name).RUNS:
        recipe, run = config.load(name, flags)
        spec = spec_of(recipe)
        served = Served(network(recipe, run, spec), recipe.task.build(), recipe.data.served(spec), raw=False).eval()
        loaded = formats.find(format_name).load(path)
        for batch in batches if len(spec.size) == 2 else batches[:1]:
            images = served.random_input(batch)
            row[f"exported_{batch}"] = round(images_per_second(loaded, images), 2)
            row[f"torch_{batch}"] = round(images_per_second(served, images), 2)
    return row


def as_text(rows: list[dict[str, Any]], batches: list[int]) -> str:
    """Return a table in Markdown."""
    heads = ["recipe", "format", "largest difference", "MB"]
    heads += [f"{what} img/s, batch {batch}" for batch in batches for what in ("exported", "torch")]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        speeds = [str(row.get(f"{what}_{batch}", "–")) for batch in batches for what in ("exported", "torch")]
        lines.append([row["recipe"], row["format"], row["difference"], str(row["megabytes"]), *speeds])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=recipes.names())
    parser.add_argument("--formats", nargs="+", default=["onnx"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name in args.recipes:
        with tempfile.TemporaryDirectory() as folder:
            flags = [LOW_THRESHOLD] if outputs_of(config.load(name, [])[0].task).decodes else []
            for format_name in args.formats:
                rows.append(measure(name, format_name, args.batches, Path(folder), flags))
                print(json.dumps(rows[-1]), flush=True)
    print(as_text(rows, args.batches))
    device, now = devices.select("cpu"), datetime.now(UTC)
    result = {"time": now.isoformat(timespec="seconds"), "device": device.name(), "threads": args.threads, "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    path = result_file(args.out, "export", device, now)
    path.write_text(json.dumps({**result, **provenance(device)}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
