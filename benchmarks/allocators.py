"""jemalloc and TcMalloc under the loader: CPU time of a thousand images with and without each, in turns.

    python benchmarks/allocators.py --preload /usr/lib/x86_64-linux-gnu/libjemalloc.so.2 libtcmalloc_minimal.so.4 \
        --recipe resnet50 --data.path DIR --train.global-batch 64 --run.workers 2

A round starts the loader of `benchmark --loader` once for each allocator, in the order that the round before reversed.
CPU time is that of the process and of its workers: other programs on the machine disturb it less than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from sightline import config
from sightline.data.loading.cache import read_once
from sightline.engine.setup import set_up
from sightline.measure.benchmark import OurLoader
from sightline.measure.provenance import provenance, result_file

NONE = "glibc"


def cpu_s() -> float:
    """Return the CPU seconds of this process and of all below it."""
    here = psutil.Process()
    times = [each.cpu_times() for each in (here, *here.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(recipe_name: str, flags: list[str], batches: int) -> None:
    """Print what a thousand images take; in a process of its own, which LD_PRELOAD concerns."""
    recipe, run = config.load(recipe_name, flags)
    here, device, recipe = set_up(recipe, run)
    recipe = replace(recipe, data=read_once(recipe.data))  # as `benchmark --loader`: nothing is cached
    ours = OurLoader(recipe, run, device, here, lambda _: None)
    for _ in range(ours.settle + 3):
        ours.advance()
    began, before = time.perf_counter(), cpu_s()
    for _ in range(batches):
        ours.advance()
    used, passed = cpu_s() - before, time.perf_counter() - began
    images = batches * ours.images
    print(json.dumps({"cpu_ms": 1e3 * used / images, "images_per_s": images / passed}), flush=True)
    ours.close()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preload", nargs="+", default=[])
    parser.add_argument("--recipe", default="resnet50")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments, flags = parser.parse_known_args()
    if arguments.one:
        measure(arguments.recipe, flags, arguments.batches)
        return
    command = [sys.executable, __file__, "--one", "--recipe", arguments.recipe, "--batches", str(arguments.batches)]
    names = {NONE: "", **{Path(path).name: path for path in arguments.preload}}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        for name in [*names] if number % 2 == 0 else [*names][::-1]:
            done = subprocess.run(
                [*command, *flags], env={**os.environ, "LD_PRELOAD": names[name]}, stdout=subprocess.PIPE, check=True
            )
            rows[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number + 1}  {name:28} {rows[name][-1]['cpu_ms']:.3f} ms of CPU per image", flush=True)
    recipe, run = config.load(arguments.recipe, flags)
    _, device, recipe = set_up(recipe, run)
    ratios = {
        name: [found["cpu_ms"] / plain["cpu_ms"] for found, plain in zip(rows[name], rows[NONE], strict=True)]
        for name in names
    }
    for name, row in rows.items():
        values, share = [each["cpu_ms"] for each in row], ratios[name]
        print(
            f"{name:28} {statistics.median(values):.3f} ms of CPU per image ({min(values):.3f} to {max(values):.3f}), "
            f"{statistics.median(share):.3f} of {NONE}'s ({min(share):.3f} to {max(share):.3f})"
        )
    now = datetime.now(UTC)
    settings = {"recipe": recipe.name, "batch": recipe.train.global_batch, "workers": run.workers}
    settings |= {"batches": arguments.batches, "rounds": arguments.rounds}
    result = {"time": now.isoformat(timespec="seconds"), **provenance(device), "settings": settings}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = result_file(arguments.out, f"allocators-{recipe.name}", device, now)
    path.write_text(json.dumps({**result, "rounds": rows, "ratios": ratios}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
