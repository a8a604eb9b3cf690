"""Do our kernels cost accuracy? The same training with `--run.kernels auto` and `off`, seed by seed.

    python benchmarks/kernels_accuracy.py resnet50 --seeds 1 2 3 --at-once 4 --data.path=DIR --train.precision=fp16

Flags that are not listed by --help go to both trainings. Runs share the device, `--at-once` at a time: scores do not
depend on that, speed does and is not reported. The result is a JSON file in benchmarks/results with every loss.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

CHOICES = ("auto", "off")
LAST = 0.2  # share of the steps whose mean loss is compared
FIXED = ["--run.progress=plain", "--run.report=off", "--run.log-every-steps=1", "--run.resume=never"]


def main() -> None:
    """Train both with every seed, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the device")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    arguments, flags = parser.parse_known_args()
    jobs = [(choice, seed) for seed in arguments.seeds for choice in CHOICES]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.at_once) as pool:
        train = functools.partial(trained, arguments.recipe, flags, Path(folder))
        rows = list(pool.map(train, *zip(*jobs, strict=True)))
    found = {choice: [row for (name, _), row in zip(jobs, rows, strict=True) if name == choice] for choice in CHOICES}
    compared = {key: differences(found, key) for key in ("last_loss", "score")}
    for key, row in compared.items():
        means = ", ".join(f"{choice} {statistics.mean(each[key] for each in found[choice]):.4f}" for choice in CHOICES)
        print(f"{key}: {means}; auto - off {row['mean']:+.4f}, standard error {row['error']:.4f}, {row['pairs']} pairs")
    write(arguments, flags, found, compared)


def trained(recipe: str, flags: list[str], folder: Path, choice: str, seed: int) -> dict[str, Any]:
    """Train once; return every loss, the mean of the last ones, and the score of the last evaluation."""
    out, started = folder / f"{choice}-{seed}", time.perf_counter()
    words = ["train", recipe, *flags, *FIXED, f"--run.kernels={choice}", f"--train.seed={seed}", f"--run.out={out}"]
    done = subprocess.run([sys.executable, "-m", "sightline", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{choice} with seed {seed} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "train"]
    scores = json.loads((out / "scores.json").read_text())["values"]
    name, score = next(iter(scores.items()))  # the first is the task's own
    last = statistics.mean(losses[-max(1, round(LAST * len(losses))) :])
    said = [line for line in (done.stdout + done.stderr).splitlines() if "kernels" in line]
    print(f"{choice:4} seed {seed}: last loss {last:.4f}, {name} {score:.4f}", *said, flush=True)
    row = {
        "seed": seed,
        "last_loss": last,
        "score": score,
        "scores": scores,
        "losses": [round(loss, 5) for loss in losses],
    }
    return {**row, "said": said, "seconds": time.perf_counter() - started}


def differences(found: dict[str, list[dict[str, Any]]], key: str) -> dict[str, Any]:
    """Return auto - off of equal seeds: each, mean and standard error."""
    each = [ours[key] - plain[key] for ours, plain in zip(*(found[choice] for choice in CHOICES), strict=True)]
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return {"mean": statistics.mean(each), "error": error, "pairs": len(each), "each": each}


def write(arguments: argparse.Namespace, flags: list[str], found: dict[str, Any], compared: dict[str, Any]) -> None:
    """Write every loss and score, with where they were measured."""
    from sightline import config
    from sightline.engine.setup import set_up
    from sightline.measure.provenance import provenance, result_file
    from sightline.recipe import store

    recipe, run = config.load(arguments.recipe, flags)
    _, device, recipe = set_up(recipe, run)
    now = datetime.now(UTC)
    about = {"time": now.isoformat(timespec="seconds"), "recipe": store.to_json(recipe), "flags": flags}
    about |= {"at_once": arguments.at_once, **provenance(device), "compared": compared, "runs": found}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = result_file(arguments.out, f"kernels-accuracy-{arguments.recipe}", device, now)
    path.write_text(json.dumps(about) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
