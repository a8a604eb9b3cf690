"""Do the recipes learn? Each on the same small data, shortened alike, over several seeds.

    python benchmarks/recipes.py --data DIR --classes 20 --epochs 30 --size 64 --seeds 0 1 2

DIR is anything a recipe reads. Network, optimizer, weight decay, losses and augmentation are the recipe's own; epochs,
drops of the rate and images are cut to the size of the data. All runs are started at once: their scores do not
depend on it, their speed does and is not reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from sightline.hardware import devices
from sightline.measure.provenance import provenance, result_file

RECIPES = ("resnet50", "resnet50_keras", "resnet50_lars")


def schedule(recipe: str, epochs: int) -> list[str]:
    """Fit the recipe's schedule into fewer epochs: its shape is kept, its epochs are not."""
    if recipe == "resnet50":  # 90 epochs that begin with 4 of warm-up and drop at a third, two thirds and eight ninths
        drops = [1, 2, 3, 4, epochs // 3 + 4, 2 * epochs // 3 + 2, 8 * epochs // 9]
        return ["--schedule.table-epochs", *map(str, drops)]
    if recipe == "resnet50_keras":
        drops = [epochs // 3 + 5, 2 * epochs // 3 + 2, 8 * epochs // 9]
        return ["--schedule.drop-epochs", *map(str, drops), "--schedule.warmup-epochs", "3"]
    return []  # polynomial ends where the run does


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    if args.epochs < 18:
        parser.error(f"--epochs {args.epochs} leaves no room for the drops of the rate; use 18 or more")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for recipe, seed in ((recipe, seed) for recipe in RECIPES for seed in args.seeds):
            out = Path(folder) / f"{recipe}-{seed}"
            command = [sys.executable, "-m", "sightline", "train", recipe, "--data.path", args.data]
            command += f"""--data.classes {args.classes} --data.size {args.size} --data.eval-size {args.size}
                --data.eval-resize {args.size} --data.crop-scale 0.35 1 --data.decoder cpu --train.epochs {args.epochs}
                --train.global-batch {args.batch} --train.eval-every-epochs {args.epochs} --train.seed {seed}
                --run.workers 1 --run.compile off --run.progress off""".split()
            command += [*schedule(recipe, args.epochs), "--run.out", str(out)]
            errors = (Path(folder) / f"{out.name}.log").open("w+")
            running[recipe, seed] = (subprocess.Popen(command, stdout=errors, stderr=errors), out, errors)
        found: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
        for (recipe, seed), (process, out, errors) in running.items():
            if process.wait() != 0:
                errors.seek(0)
                raise SystemExit(
                    f"{recipe} with seed {seed} ended with exit code {process.returncode}:\n{errors.read()}"
                )
            top1 = json.loads((out / "scores.json").read_text())["values"]["top1"]
            found[recipe].append(top1)
            print(f"{recipe} seed {seed}: top-1 {top1:.3f} after {time.perf_counter() - started:.0f} s", flush=True)
    device, now = devices.select(), datetime.now(UTC)
    result = {
        "time": now.isoformat(timespec="seconds"),
        "device": device.name(),
        "epochs": args.epochs,
        "batch": args.batch,
        "size": args.size,
        "seeds": args.seeds,
        "top1": found,
        **provenance(device),
    }
    for recipe, scores in found.items():
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        print(f"{recipe:16} top-1 {statistics.mean(scores):.3f} +- {spread:.3f} over {len(scores)} seeds")
    args.out.mkdir(parents=True, exist_ok=True)
    path = result_file(args.out, "recipes", device, now)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
