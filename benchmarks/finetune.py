"""Does fine-tuning beat training from scratch on few samples? Three tasks, three seeds each, the same steps for both.

    python benchmarks/finetune.py --tiny-imagenet DIR --task04 Task04_Hippocampus --out DIR

classification: a ResNet-18 trained on 12 classes, tuned on 24 images of each of the other 8. detection: an SSD trained
on six kinds of drawn shapes, tuned on 200 images with boxes of the other four. segmentation: a U-Net trained on half of
the cases of task 04, tuned on 6 cases of the other half, scored on 47 that neither has seen. Both sides use the
finetune recipe; training from scratch has all layers at the full rate from the first step (--train.head-epochs 0
--optimizer.trunk-lr-scale 1). Other flags, e.g. --optimizer.lr 0.002, go to both sides. Scores are those of the last
step: nothing is selected on the images that are scored. Prints a table, asserts nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sightline import api
from sightline.data.prepare import decathlon as prepare_decathlon
from sightline.data.prepare import shapes as prepare_shapes
from sightline.data.prepare.shapes.images import CATEGORY_IDS
from sightline.data.volumes.plan import read_plan, write_plan
from sightline.hardware import devices
from sightline.measure.provenance import provenance, result_file

SCRATCH = ["--train.head-epochs=0", "--optimizer.trunk-lr-scale=1"]
PRETRAINED_CLASSES = 12
KNOWN_KINDS = 6  # of the ten kinds of drawn shapes


@dataclass(frozen=True)
class Amounts:
    """Lengths and sizes of all parts."""

    # Epochs of pretraining, and of tuning and training from scratch: classification, detection, segmentation.
    pretrain_epochs: tuple[int, int, int] = (100, 28, 15)
    epochs: tuple[int, int, int] = (20, 40, 10)
    epoch_steps: tuple[int, int, int] = (50, 50, 25)  # at least, in tuning and from scratch
    pretrain_images: int = 500  # of each class
    tune_images: int = 24  # of each class
    val_images: int = 50
    size: int = 128  # pixels; the images have 64
    drawn: int = 4000  # images with boxes to pretrain on
    pictures: int = 200  # to tune on
    val_pictures: int = 200
    cases: int = 130  # half of task 04
    tune_cases: int = 6
    width: int = 32  # of the SSD, and half of it of the U-Net


SMOKE = Amounts(
    *((2, 2, 2),) * 3, 4, 2, 2, size=24, drawn=4, pictures=4, val_pictures=2, cases=6, tune_cases=2, width=4
)


@dataclass(frozen=True)
class Job:
    """Folders, and the settings of all runs."""

    args: argparse.Namespace
    amounts: Amounts
    seeds: list[int]

    @property
    def work(self) -> Path:
        return Path(self.args.work)

    def train(self, recipe: str, name: str, flags: Sequence[str]) -> dict[str, float]:
        """Train once; return the last scores, and the seconds under "seconds"."""
        how = ["--run.compile=off", "--run.progress=off", f"--run.device={self.args.device}", "--run.keep=1"]
        how += ["--run.checkpoint-every-epochs=1000"]  # the last one
        how += [f"--run.workers={self.args.workers}", f"--run.out={self.folder(name)}"]
        started = time.perf_counter()
        scores = api.train(*api.load(recipe, [*flags, *how]))
        gc.collect()  # a captured graph holds memory that the next run needs
        return {**scores.values, "seconds": time.perf_counter() - started}

    def folder(self, name: str) -> Path:
        return self.work / "runs" / name

    def weights(self, name: str) -> str:
        """Return the weights of the last checkpoint of a run."""
        return str(max(self.folder(name).glob("checkpoints/ckpt-????????")) / "model.safetensors")

    def compare(
        self, part: str, recipe: str, flags: Callable[[int], list[str]], score: Callable[[str, dict[str, float]], float]
    ) -> dict[str, Any]:
        """Tune the weights of `PART-pretrained`, and train from scratch, with every seed; return the scores."""
        rows = []
        for seed in self.seeds:
            for way, own in (
                ("tuned", [f"--model.weights={self.weights(f'{part}-pretrained')}"]),
                ("scratch", SCRATCH),
            ):
                name = f"{part}-{way}-{seed}"
                values = self.train(recipe, name, [*flags(seed), *self.args.flags, *own, f"--train.seed={seed}"])
                rows.append({"way": way, "seed": seed, "score": score(name, values), "seconds": values["seconds"]})
                print(f"{part}  seed {seed}  {way:8} {rows[-1]['score']:.4f}  {values['seconds']:.0f} s", flush=True)
        return summary(rows)

    def steps(self, part: int) -> list[str]:
        """Return flags of the length of tuning and of training from scratch."""
        epochs, steps = self.amounts.epochs[part], self.amounts.epoch_steps[part]
        last = f"--train.eval-every-epochs={epochs}"  # nothing depends on scores in between
        return [f"--train.epochs={epochs}", f"--train.min-epoch-steps={steps}", last]


def classification(job: Job) -> dict[str, Any]:
    """Train on 12 classes, tune on few images of the other 8; another few for every seed."""
    amounts, source = job.amounts, Path(job.args.tiny_imagenet)
    classes = sorted(path.name for path in (source / "train").iterdir())
    images = [f"--data.size={amounts.size}", f"--data.eval-size={amounts.size}", f"--data.eval-resize={amounts.size}"]
    images += ["--data.decoder=cpu"]
    known = class_folders(job, "known", source, classes[:PRETRAINED_CLASSES], amounts.pretrain_images, 0)
    flags = [f"--data.path={known}", *images, "--model.width=64", "--data.crop-scale", "0.35", "1.0"]
    flags += [f"--train.epochs={amounts.pretrain_epochs[0]}", "--train.last-batch=pad", "--data.mixup=0.2"]
    flags += ["--train.eval-every-epochs=1000"]
    values = job.train("demo_classification", "classification-pretrained", flags)
    print(f"classification  backbone: top1 {values['top1']:.4f}  {values['seconds']:.0f} s", flush=True)

    def of_seed(seed: int) -> list[str]:
        few = class_folders(job, f"few-{seed}", source, classes[PRETRAINED_CLASSES:], amounts.tune_images, seed)
        return [f"--data.path={few}", "--model.arch=resnet18", *images, *job.steps(0)]

    return job.compare("classification", "finetune_classification", of_seed, lambda _, values: values["top1"])


def class_folders(job: Job, name: str, source: Path, classes: list[str], images: int, seed: int) -> Path:
    """Copy class folders with this many training images, drawn by the seed, and the val images."""
    out = job.work / "images" / name
    for split, count in (("train", images), ("val", job.amounts.val_images)):
        for each in classes:
            files = sorted((source / split / each).rglob("*.*"))
            chosen = np.random.default_rng(seed).permutation(len(files))[:count]
            (out / split / each).mkdir(parents=True, exist_ok=True)
            for place in chosen:
                shutil.copyfile(files[place], out / split / each / files[place].name)
    return out


def detection(job: Job) -> dict[str, Any]:
    """Train a detector of six kinds of drawn shapes, tune its trunk for the other four; other images for every seed."""
    amounts = job.amounts
    known = drawn_boxes(job, "known", 0, amounts.drawn, slice(KNOWN_KINDS))
    network = ["--model.depth=18", f"--model.width={amounts.width}", "--data.max-boxes=20"]
    seldom = [f"--train.epochs={amounts.pretrain_epochs[1]}", "--train.eval-every-epochs=1000"]
    values = job.train(
        "demo_detection",
        "detection-pretrained",
        [f"--data.path={known}", *network, f"--data.classes={KNOWN_KINDS}", "--train.last-batch=pad", *seldom],
    )
    print(f"detection  first six kinds: ap {values['ap']:.4f}  {values['seconds']:.0f} s", flush=True)
    # A thin network for small images learns at a higher rate than the recipe's; both sides have it.
    flags = [*network, "--data.size=128", "--data.crop=off", "--data.jitter=off", "--optimizer.lr=2e-3"]
    flags += job.steps(1)

    def of_seed(seed: int) -> list[str]:
        few = drawn_boxes(job, f"few-{seed}", seed + 1, amounts.pictures, slice(KNOWN_KINDS, None))
        return [f"--data.path={few}", *flags]

    return job.compare("detection", "finetune_detection", of_seed, lambda _, values: values["ap"])


def drawn_boxes(job: Job, name: str, seed: int, pictures: int, kinds: slice) -> Path:
    """Draw images of all kinds of shapes, and keep the boxes of some kinds."""
    out = job.work / "shapes" / name
    options = prepare_shapes.ShapesOptions(
        out, seed=seed, only=("detection",), train_pictures=pictures, val_pictures=job.amounts.val_pictures
    )
    prepare_shapes.prepare(options, lambda what, done, total: None)
    ids = list(CATEGORY_IDS.values())[kinds]
    for file in (out / "detection/annotations").iterdir():
        content = json.loads(file.read_text(encoding="utf-8"))
        content["categories"] = [each for each in content["categories"] if each["id"] in ids]
        content["annotations"] = [each for each in content["annotations"] if each["category_id"] in ids]
        file.write_text(json.dumps(content), encoding="utf-8")
    return out / "detection"


def segmentation(job: Job) -> dict[str, Any]:
    """Train on one half of the cases, tune on a few of the other; score on cases of that half that none has seen."""
    amounts, whole = job.amounts, job.work / "task04"
    options = prepare_decathlon.DecathlonOptions(Path(job.args.task04), whole)
    prepare_decathlon.prepare(options, lambda what, done, total: None)
    count = len(read_plan(whole).cases)
    order = np.random.default_rng(0).permutation(count)
    half = min(amounts.cases, count // 2)
    network = ["--data.task=04", f"--model.width={max(4, amounts.width // 2)}"]
    first = volumes(job, whole, "half", order[:half])
    flags = [f"--data.path={first}", "--schedule.kind=cosine", f"--train.epochs={amounts.pretrain_epochs[2]}"]
    values = job.train("unet2d", "segmentation-pretrained", [*flags, *network, "--train.eval-every-epochs=1000"])
    print(f"segmentation  first half: dice {values['dice']:.4f}  {values['seconds']:.0f} s", flush=True)
    rest = volumes(job, whole, "rest", order[half + 6 * amounts.tune_cases :])

    def of_seed(seed: int) -> list[str]:
        # Of two folds one trains and the other is scored while training, which decides nothing here.
        start = half + 2 * amounts.tune_cases * (seed % 3)
        few = volumes(job, whole, f"few-{seed}", order[start : start + 2 * amounts.tune_cases])
        return [f"--data.path={few}", "--data.folds=2", *network, *job.steps(2)]

    def score(name: str, _: dict[str, float]) -> float:
        flags = [f"--data.path={rest}", "--data.folds=2", f"--run.device={job.args.device}", "--run.progress=off"]
        flags += [f"--run.workers={job.args.workers}"]
        return api.evaluate(str(job.folder(name)), flags, which="latest").values["dice"]

    return job.compare("segmentation", "finetune_segmentation", of_seed, score)


def volumes(job: Job, whole: Path, name: str, places: np.ndarray) -> Path:
    """Link the prepared files of some cases into a folder with a plan of its own."""
    out, plan = job.work / "cases" / name, read_plan(whole)
    out.mkdir(parents=True, exist_ok=True)
    cases = tuple(plan.cases[place] for place in sorted(places.tolist()))
    for file in (file for case in cases for file in (case.image, case.label) if file):
        if not (out / file).exists():
            os.link(whole / file, out / file)
    write_plan(out, replace(plan, cases=cases))
    return out


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means, their difference, and whether every tuned seed is above every one from scratch."""
    tuned, scratch = ([row["score"] for row in rows if row["way"] == way] for way in ("tuned", "scratch"))
    means = {"tuned": statistics.mean(tuned), "scratch": statistics.mean(scratch)}
    gain = means["tuned"] - means["scratch"]
    return {**means, "gain": gain, "all_above": min(tuned) > max(scratch), "rows": rows}


PARTS = {"classification": classification, "detection": detection, "segmentation": segmentation}
NEEDS = {"classification": "tiny_imagenet", "segmentation": "task04"}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny-imagenet", help="folder with train/CLASS and val/CLASS of 20 classes")
    parser.add_argument("--task04", help="the Decathlon's Task04_Hippocampus, as it is unpacked")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=8, help="loader processes")
    parser.add_argument("--work", default="runs/finetune", help="folder for copied data and for runs; must be new")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--smoke", action="store_true", help="tiny amounts and one seed: shows that it runs")
    found, flags = parser.parse_known_args(argv)
    found.flags = flags
    for part in found.only:
        if part in NEEDS and not getattr(found, NEEDS[part]):
            parser.error(f"{part} needs --{NEEDS[part].replace('_', '-')} DIR; or leave it out with --only")
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Carry out the parts, print a table and write the results."""
    args = arguments(argv)
    device = devices.select(args.device)
    device.activate()
    job = Job(args, SMOKE if args.smoke else Amounts(), args.seeds[:1] if args.smoke else args.seeds)
    started = time.perf_counter()
    results = {part: PARTS[part](job) for part in args.only}
    now = datetime.now(UTC)
    settings = {**vars(args), "out": str(args.out), "amounts": vars(job.amounts)}
    result = {"time": now.isoformat(timespec="seconds"), "settings": settings, **provenance(device)}
    result |= {"seconds": time.perf_counter() - started, "results": results}
    args.out.mkdir(parents=True, exist_ok=True)
    path = result_file(args.out, "finetune", device, now)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{'':<16}{'tuned':>8}{'scratch':>9}{'gain':>8}  every tuned seed above every scratch seed")
    for part, found in results.items():
        numbers = f"{found['tuned']:>8.4f}{found['scratch']:>9.4f}{found['gain']:>+8.4f}"
        print(f"{part:<16}{numbers}  {'yes' if found['all_above'] else 'no'}")
    print(f"{result['seconds']:.0f} s on {device.name()}, torch {torch.__version__}; written to {path}")
    return result


if __name__ == "__main__":
    main()
