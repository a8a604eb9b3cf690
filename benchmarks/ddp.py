"""The cost of DistributedDataParallel without communication: one rank in a group of one, ResNet-50.

    python benchmarks/ddp.py --batch 256

Three steps take turns: ours as one device runs it (compiled and captured), the same without a graph, which several
devices have, and the same with DDP around the network in a group of one rank. The rest of scaling is communication.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist

from sightline import config
from sightline.engine.setup import set_up
from sightline.hardware.world import World
from sightline.measure import peers
from sightline.measure.benchmark import OurStep, synthetic_data
from sightline.measure.provenance import provenance, result_file


class WithoutGraph(OurStep):
    """Ours, compiled only."""

    name = "compiled, no graph"


class WithDdp(OurStep):
    """Ours as one of several ranks; the group has no other rank."""

    name = "compiled, DDP in a group of one"
    world = World(size=2)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="resnet50")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    arguments, flags = parser.parse_known_args()
    recipe, run = config.load(arguments.recipe, ["--train.global-batch", str(arguments.batch), *flags])
    _, device, recipe = set_up(recipe, run)
    ungraphed = config.load(arguments.recipe, [*flags, "--run.graph", "off"])[1]
    given = (synthetic_data(recipe, device), device, False, print, (0, 1))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(device.backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        makers: list[peers.Maker] = [
            lambda: OurStep(recipe, run, *given),
            lambda: WithoutGraph(recipe, ungraphed, *given),
            lambda: WithDdp(recipe, ungraphed, *given),
        ]
        timings, order = peers.measure_in_turn(makers, arguments.steps, 5, arguments.repeats, device, print)
        dist.destroy_process_group()
    now = datetime.now(UTC)
    settings = {"recipe": recipe.name, "batch": arguments.batch, "precision": recipe.train.precision, "order": order}
    result = {"time": now.isoformat(timespec="seconds"), **provenance(device), "settings": settings}
    rows = peers.rows(timings)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = result_file(arguments.out, f"ddp-{recipe.name}", device, now)
    path.write_text(json.dumps({**result, "contenders": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['name']:34} {row['images_per_s']['median']:9,.0f} img/s")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
