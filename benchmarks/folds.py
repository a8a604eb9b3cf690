"""Five folds, alone and as an ensemble, on cases that no fold has seen: with and without post-processing, with and
without nnU-Net's rotation and gamma, for a short and a longer schedule.

    python benchmarks/folds.py --raw Task04_Hippocampus --epochs 60 --long-epochs 200

40 cases are held out before the folds are made. All runs of a schedule train at once on one device. Dice is in the
geometry of the label files. The result is a JSON file in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
CONFIGURATIONS = ("plain", "augmented")
AUGMENTATIONS = ["--data.rotation=0.2", "--data.gamma=0.3", "--data.gamma-inverted=0.1"]
START_S, SCORE_S = 20, 45  # a start of all runs, and scoring: what a budget leaves for them
SEED = 2026


def main() -> None:
    """Hold out, prepare, train, score, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, required=True, help="folder of the task, with its labels")
    parser.add_argument("--task", default="04")
    parser.add_argument("--held-out", type=int, default=40)
    parser.add_argument("--cases", type=int, default=0, help="use this many cases in all; 0: all")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--only", choices=CONFIGURATIONS, help="train one configuration, and for --epochs alone")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--long-epochs", type=int, default=0, help="0: what --seconds leaves time for")
    parser.add_argument("--seconds", type=float, default=3600, help="for everything, if --long-epochs is 0")
    parser.add_argument("--work", type=Path, default=Path("runs/folds"), help="where data, runs and masks go")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--score", default="", help=argparse.SUPPRESS)  # this script, started by itself
    arguments, flags = parser.parse_known_args()
    if arguments.score:
        score(arguments, flags)
        return
    started = time.perf_counter()
    arguments.work.mkdir(parents=True, exist_ok=True)
    cases = hold_out(arguments)
    prepare = ["prepare", "decathlon", "--source", arguments.work / "seen", "--task", arguments.task]
    run([[*prepare, "--out", arguments.work / "data"]], arguments.work, started + arguments.seconds)
    seconds: dict[str, float] = {}
    script = [sys.executable, str(Path(__file__).resolve()), "--raw", str(arguments.raw), "--work", str(arguments.work)]
    script += ["--task", arguments.task, "--folds", str(arguments.folds), *flags]
    scoring = []
    names: tuple[str, ...] = (arguments.only,) if arguments.only else CONFIGURATIONS
    epochs, until = arguments.epochs, started + arguments.seconds - SCORE_S
    while names:
        if train(arguments, names, epochs, flags, seconds, until):
            scoring += [subprocess.Popen([*script, "--score", name]) for name in names]
        is_first = seconds.keys() == set(CONFIGURATIONS)
        names, epochs = longer(arguments, until, seconds["plain"]) if is_first else ((), epochs)
    for child in scoring:
        child.wait()
    rows = {}
    for name in seconds:
        if (path := arguments.work / f"{name}.json").is_file():
            rows[name] = {**json.loads(path.read_text()), "seconds_of_all_runs_at_once": seconds[name]}
    for name, row in rows.items():
        print(as_text(name, row))
    write(arguments, cases, flags, rows, started)


def hold_out(arguments: argparse.Namespace) -> list[str]:
    """Copy the other cases into seen/ as a task of their own; return the names of those held out, drawn by a seed."""
    about = json.loads((arguments.raw / "dataset.json").read_text())
    names = sorted(Path(row["image"]).name.removesuffix(".nii.gz") for row in about["training"])
    drawn = np.random.default_rng(SEED).permutation(len(names))[: arguments.cases or None]
    held_out = {names[number] for number in drawn[: arguments.held_out]}
    kept = {names[number] for number in drawn[arguments.held_out :]}
    for folder, wanted in (("seen", kept), ("unseen", held_out)):
        for part in ("imagesTr", "labelsTr"):
            (arguments.work / folder / part).mkdir(parents=True, exist_ok=True)
            for name in wanted:
                target = arguments.work / folder / part / f"{name}.nii.gz"
                shutil.copyfile(arguments.raw / part / f"{name}.nii.gz", target)
    rows = [row for row in about["training"] if Path(row["image"]).name.removesuffix(".nii.gz") in kept]
    seen = {**about, "training": rows, "numTraining": len(rows), "test": [], "numTest": 0}
    (arguments.work / "seen" / "dataset.json").write_text(json.dumps(seen))
    return sorted(held_out)


def flags_of(name: str, arguments: argparse.Namespace, epochs: int, flags: list[str]) -> list[str]:
    """Return the flags of a configuration, without the fold and the folder."""
    every = max(1, epochs // 10)
    given = [
        f"--data.path={arguments.work / 'data'}",
        f"--data.task={arguments.task}",
        f"--data.folds={arguments.folds}",
    ]
    given += [f"--train.epochs={epochs}", "--schedule.kind=cosine", f"--train.eval-every-epochs={every}"]
    given += [f"--run.checkpoint-every-epochs={epochs}", "--run.report=off"]
    return [*given, *(AUGMENTATIONS if name.startswith("augmented") else []), *flags]


def train(
    arguments: argparse.Namespace,
    names: tuple[str, ...],
    epochs: int,
    flags: list[str],
    seconds: dict[str, float],
    until: float,
) -> bool:
    """Train every fold of these configurations, all at once; return whether all have ended well in time."""
    started = time.perf_counter()
    commands = []
    for name in names:
        given = flags_of(name, arguments, epochs, flags)
        (arguments.work / f"{name}.flags").write_text(json.dumps(given))
        for fold in range(arguments.folds):
            out = arguments.work / name / f"fold-{fold}"
            commands.append(["train", "unet2d", *given, f"--data.fold={fold}", f"--run.out={out}"])
    is_done = run(commands, arguments.work, until)
    seconds |= dict.fromkeys(names, time.perf_counter() - started)
    print(f"{', '.join(names)}: {epochs} epochs, {len(commands)} runs in {seconds[names[0]]:.0f} s", flush=True)
    return is_done


def run(commands: list[list[Any]], work: Path, until: float) -> bool:
    """Run commands of sightline at once, each with a log; failures are shown, and what is late is stopped."""
    children = []
    for number, words in enumerate(commands):
        log = (work / f"{words[0]}-{number}.log").open("w")
        command = [sys.executable, "-m", "sightline", *map(str, words)]
        children.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log))
    codes = []
    for (child, log), words in zip(children, commands, strict=True):
        while child.poll() is None and time.perf_counter() < until and exit_of(words) is None:
            time.sleep(0.2)
        try:
            child.wait(5)  # loader processes may keep a run that has ended
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        codes.append(child.returncode if exit_of(words) is None else exit_of(words))
        if codes[-1]:
            print(f"exit {codes[-1]}: {Path(log.name).read_text()[-1000:]}", flush=True)
        log.close()
    return not any(codes)


def exit_of(words: list[Any]) -> int | None:
    """Return how the run of a command has ended, as its folder says; None while it is at work."""
    out = next((str(word).partition("=")[2] for word in words if str(word).startswith("--run.out=")), "")
    file = Path(out) / "exit.json"
    return json.loads(file.read_text())["code"] if out and file.is_file() else None


def longer(arguments: argparse.Namespace, until: float, took: float) -> tuple[tuple[str, ...], int]:
    """Return which configurations to train for longer, and for how many epochs. Both are trained if the time left is
    enough for twice the epochs of the first runs, else only the augmented one; none if the time is too short."""
    if arguments.long_epochs:
        return ("plain-long", "augmented-long"), arguments.long_epochs
    left = 0.85 * (until - time.perf_counter() - START_S)
    fitting = int(left * arguments.epochs / max(took - START_S, 1))
    if fitting >= 2 * arguments.epochs:
        return ("plain-long", "augmented-long"), fitting
    return (("augmented-long",), 2 * fitting) if 2 * fitting > 1.2 * arguments.epochs else ((), 0)


def score(arguments: argparse.Namespace, flags: list[str]) -> None:
    """Score one configuration: folds on their own cases, then folds and ensemble on cases that none has seen."""
    from sightline import api
    from sightline.inference.postprocessing import chosen

    name, folder = arguments.score, arguments.work / arguments.score
    given = json.loads((arguments.work / f"{name}.flags").read_text())
    recipe, where = api.load("unet2d", [*given, f"--run.out={folder}", "--run.progress=off"])
    folds = api.train_folds(recipe, where)  # all are trained: this writes folds.json
    quiet = ["--run.progress=off", *[flag for flag in flags if flag.startswith("--run.device")]]
    validation = api.choose_postprocessing(folder, arguments.work / "seen", quiet)
    largest = chosen(folder, ("background", *(row["class"] for row in validation["classes"])))
    single, processed = [], []
    for fold in range(arguments.folds):
        masks = predicted(folder / f"fold-{fold}", arguments, quiet, postprocess=False)
        single.append(dice(masks, arguments))
        processed.append(dice(masks, arguments, largest))
    ensemble = {
        "plain": dice(predicted(folder, arguments, quiet, postprocess=False), arguments),
        "postprocessed": dice(predicted(folder, arguments, quiet, postprocess=True), arguments),
        "tta": dice(predicted(folder, arguments, [*quiet, "--task.tta"], postprocess=False), arguments),
    }
    result = {
        "epochs": recipe.train.epochs,
        "best_prepared": folds["mean"]
        | {"spread": folds["spread"]["dice"], "of": [r["epoch"] for r in folds["folds"]]},
        "validation": validation,
        "single": single,
        "single_postprocessed": processed,
        "ensemble": ensemble,
    }
    (arguments.work / f"{name}.json").write_text(json.dumps(result))


def predicted(run: Path, arguments: argparse.Namespace, flags: list[str], postprocess: bool) -> dict[str, Any]:
    """Return the masks of the cases that were held out."""
    from sightline import api

    found = api.predict(run, arguments.work / "unseen" / "imagesTr", flags=flags, postprocess=postprocess)
    return {Path(each.file).name: each for each in found}


def dice(found: dict[str, Any], arguments: argparse.Namespace, largest: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the mean Dice over cases, of each class and in all, and the Dice of every case."""
    from sightline.data.volumes.components import keep_largest
    from sightline.data.volumes.files import read_label
    from sightline.inference.label_files import Counts, scores_of

    counts = []
    for name, each in sorted(found.items()):
        mask, truth = (
            keep_largest(each.mask, largest),
            read_label(arguments.work / "unseen" / "labelsTr" / name, name)[0],
        )
        parts = (mask[mask == truth], mask, truth)
        counts.append(Counts(name, *(np.bincount(part.reshape(-1), minlength=256) for part in parts)))
    scores = scores_of(counts, next(iter(found.values())).classes)
    rows = {row["class"]: row["dice"] for row in scores.tables["classes"]}
    return {"dice": scores.values["dice"], **rows, "cases": [row["dice"] for row in scores.tables["volumes"]]}


def spread(rows: list[dict[str, Any]]) -> str:
    """Format mean and standard deviation over folds."""
    values = [row["dice"] for row in rows]
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def as_text(name: str, row: dict[str, Any]) -> str:
    """Format a configuration for people."""
    plain, largest = (statistics.mean(r[key] for r in row["validation"]["classes"]) for key in ("dice", "dice_largest"))
    kept = [r["class"] for r in row["validation"]["classes"] if r["largest"]] or ["none"]
    ensemble = {key: f"{value['dice']:.4f}" for key, value in row["ensemble"].items()}
    return (
        f"{name:15} {row['epochs']} epochs  cross validation {plain:.4f} (largest {largest:.4f}: {', '.join(kept)})  "
        f"single {spread(row['single'])} (postprocessed {spread(row['single_postprocessed'])})  ensemble {ensemble}"
    )


def write(
    arguments: argparse.Namespace, cases: list[str], flags: list[str], rows: dict[str, Any], started: float
) -> None:
    """Write everything, with where it was measured."""
    from sightline import config
    from sightline.engine.setup import set_up
    from sightline.measure.provenance import provenance, result_file

    _, device, _ = set_up(*config.load("unet2d", flags))
    now = datetime.now(UTC)
    settings = {"task": arguments.task, "folds": arguments.folds, "cases": arguments.cases}
    about = {"time": now.isoformat(timespec="seconds"), **provenance(device), "settings": {**settings, "flags": flags}}
    about |= {"held_out": cases, "seed": SEED, "seconds": time.perf_counter() - started}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = result_file(arguments.out, f"folds-task{arguments.task}", device, now)
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
