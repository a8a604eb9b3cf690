"""Dice of our U-Net beside MONAI's DynUNet: same loader, loss, optimizer, schedule, epochs and seed, scored in the
original geometry of the label files.

    sightline prepare decathlon --source Task04_Hippocampus --out DIR
    python benchmarks/segmentation.py --data DIR --raw Task04_Hippocampus --task 04 --epochs 100

Networks take turns fold by fold. The result is a JSON file in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sightline import api, config
from sightline.engine.setup import set_up
from sightline.measure.provenance import provenance, result_file

HERE = Path(__file__).resolve().parent
NETWORKS = {"sightline": "unet2d", "MONAI DynUNet": str(HERE / "dynunet.py")}


def main() -> None:
    """Train, score, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder written by `sightline prepare decathlon`")
    parser.add_argument("--raw", type=Path, required=True, help="the folder it was prepared from")
    parser.add_argument("--task", default="04")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--folds", type=int, nargs="+", default=[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--runs", type=Path, default=Path("runs/segmentation"), help="where runs and masks go")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments, flags = parser.parse_known_args()
    rows = []
    for fold in arguments.folds:
        for name in arguments.networks:
            rows.append(trained_and_scored(name, fold, arguments, flags))
            print(f"fold {fold}  {name:14} dice {rows[-1]['dice']:.4f}  {rows[-1]['seconds']:.0f} s", flush=True)
    recipe, run = config.load("unet2d", flags)
    _, device, _ = set_up(recipe, run)
    now = datetime.now(UTC)
    summary = {name: spread([row["dice"] for row in rows if row["network"] == name]) for name in arguments.networks}
    settings = {"task": arguments.task, "epochs": arguments.epochs, "folds": arguments.folds, "flags": flags}
    result = {"time": now.isoformat(timespec="seconds"), **provenance(device), "settings": settings}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = result_file(arguments.out, f"segmentation-task{arguments.task}", device, now)
    path.write_text(json.dumps({**result, "summary": summary, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1), f"\nwritten to {path}")


def trained_and_scored(name: str, fold: int, arguments: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Train once and return the Dice against the label files."""
    folder = arguments.runs / f"{NETWORKS[name].rpartition('/')[2].removesuffix('.py')}-{fold}"
    given = ["--data.path", arguments.data, "--data.task", arguments.task, "--data.fold", str(fold)]
    given += ["--train.epochs", str(arguments.epochs), "--run.out", str(folder), *flags]
    started = time.perf_counter()
    scores = api.train(*config.load(NETWORKS[name], given))
    seconds = time.perf_counter() - started
    found = api.evaluate_labels(str(folder), str(arguments.raw), [], recipe_file=recipe_file(name))
    return {
        "network": name,
        "fold": fold,
        "dice": found.values["dice"],
        "classes": found.tables["classes"],
        "prepared_dice": scores.values["dice"],
        "seconds": seconds,
    }


def recipe_file(name: str) -> str:
    """Return the recipe file; "" for our own recipes, which are found by name."""
    return NETWORKS[name] if NETWORKS[name].endswith(".py") else ""


def spread(values: list[float]) -> dict[str, Any]:
    """Return mean, deviation and all values."""
    return {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else 0.0, "all": values}


if __name__ == "__main__":
    main()
