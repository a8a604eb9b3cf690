"""Does speed cost accuracy? The same training by Sightline and by a plain torchvision loop, seed by seed.

    python benchmarks/accuracy.py --data DIR --classes 20 --epochs 20 --batch 128 --size 64 --seeds 0 1 2

DIR holds train/CLASS/*.jpg and val/CLASS/*.jpg. Architecture, initial weights, epochs, batch, augmentation, label
smoothing, optimizer, schedule and precision are equal; only what the engines do with them differs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from sightline import api
from sightline.data.loading.loader import worker_count
from sightline.hardware import devices
from sightline.hardware.devices import Device
from sightline.hardware.precision import DTYPES
from sightline.hardware.world import World
from sightline.measure.provenance import provenance, result_file

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_SCALE = (0.35, 1.0)
MOMENTUM, WEIGHT_DECAY, LABEL_SMOOTHING, WARMUP_EPOCHS = 0.9, 5e-4, 0.1, 1


def ours(args: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """Train as the command does: a recipe and flags."""
    flags = f"""--data.classes={args.classes} --data.size={args.size} --data.eval-size={args.size}
        --data.eval-resize={resize(args.size)} --data.crop-scale {CROP_SCALE[0]} {CROP_SCALE[1]}
        --model.depth={args.depth} --model.width=64 --task.label-smoothing={LABEL_SMOOTHING}
        --optimizer.lr={args.lr} --optimizer.momentum={MOMENTUM} --optimizer.weight-decay={WEIGHT_DECAY}
        --optimizer.nesterov --optimizer.norm-weight-decay=-1 --optimizer.bias-weight-decay=-1
        --schedule.kind=cosine --schedule.warmup-epochs={WARMUP_EPOCHS}
        --train.epochs={args.epochs} --train.global-batch={args.batch} --train.precision={args.precision}
        --train.seed={seed} --run.device={args.device} --run.workers={args.workers} --run.progress=off"""
    where = [f"--data.path={args.data}", f"--run.out={folder}"]
    started = time.perf_counter()
    scores = api.train(*api.load("demo_classification", [*flags.split(), *where]))
    wall_s = time.perf_counter() - started
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    images, seconds, last = 0.0, 0.0, 0
    for line in (line for line in lines if line["event"] == "train"):
        count, last = (line["step"] - last) * args.batch, line["step"]
        if line["epoch"] > 0 or args.epochs == 1:
            images, seconds = images + count, seconds + count / line["images_per_s"]
    return {"top1": scores.values["top1"], "images_per_s": images / seconds, "wall_s": wall_s}


def theirs(args: argparse.Namespace, seed: int, device: Device) -> dict[str, float]:
    """Train with a plain loop: ImageFolder, torchvision transforms, DataLoader, SGD, autocast, channels_last, eager."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    to_float = [
        transforms.PILToTensor(),
        transforms.ConvertImageDtype(torch.float),
        transforms.Normalize(MEAN, STD),
    ]
    crop = transforms.RandomResizedCrop(args.size, scale=CROP_SCALE, antialias=True)
    middle = [transforms.Resize(resize(args.size), antialias=True), transforms.CenterCrop(args.size)]
    training = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *to_float])
    train_set = ImageFolder(f"{args.data}/train", training)
    val_set = ImageFolder(f"{args.data}/val", transforms.Compose([*middle, *to_float]))
    settings: dict[str, Any] = {
        "num_workers": args.workers,
        "pin_memory": device.can_pin,
        "persistent_workers": args.workers > 0,
    }
    train_loader = DataLoader(train_set, args.batch, shuffle=True, drop_last=True, **settings)
    val_loader = DataLoader(val_set, args.batch, **settings)

    torch.manual_seed(seed)  # again, so that the initial weights are those of our run
    model = torchvision.models.get_model(f"resnet{args.depth}", weights=None, num_classes=args.classes)
    model = model.to(device.torch_device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=LABEL_SMOOTHING)
    steps = args.epochs * len(train_loader)
    step, seen, seconds, top1 = 0, 0, 0.0, 0.0

    def logits(images: torch.Tensor) -> torch.Tensor:
        images = images.to(device.torch_device, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast(device.kind, DTYPES[args.precision], enabled=args.precision != "fp32"):
            return model(images)

    for epoch in range(args.epochs):
        model.train()
        device.synchronize()
        epoch_started = time.perf_counter()
        for images, labels in train_loader:
            for group in optimizer.param_groups:
                group["lr"] = rate(step, args.lr, steps, WARMUP_EPOCHS * len(train_loader))
            loss = criterion(logits(images).float(), labels.to(device.torch_device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        device.synchronize()
        if epoch > 0 or args.epochs == 1:
            seen, seconds = seen + len(train_loader) * args.batch, seconds + time.perf_counter() - epoch_started
        model.eval()
        with torch.no_grad():
            hits = [(logits(p).argmax(1).cpu() == labels).sum().item() for p, labels in val_loader]
        top1 = sum(hits) / len(val_set)
    return {"top1": top1, "images_per_s": seen / seconds, "wall_s": time.perf_counter() - started}


def rate(step: int, lr: float, steps: int, warmup_steps: int) -> float:
    """Return the rate: a linear rise to `lr`, then half a cosine down to 0."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


def resize(size: int) -> int:
    """Return the size before the middle crop, with the usual margin: 256 for 224."""
    return round(size * 256 / 224)


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return mean and standard deviation over seeds of the accuracy, medians of the speeds, and every run."""
    top1 = [run["top1"] for run in runs]
    return {
        "top1_mean": statistics.mean(top1),
        "top1_sd": statistics.stdev(top1) if len(top1) > 1 else 0.0,
        "images_per_s": statistics.median(run["images_per_s"] for run in runs),
        "wall_s": statistics.median(run["wall_s"] for run in runs),
        "runs": runs,
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train/CLASS and val/CLASS")
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--depth", type=int, default=18, choices=(18, 34, 50, 101, 152))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=64, help="side of the training and evaluation crop in pixels")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--workers", type=int, default=-1, help="loader processes of both; -1 chooses from the cores")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train both with every seed, in turn, and write the results."""
    args = arguments(argv)
    device = devices.select(args.device)
    device.activate()
    devices.set_deterministic(False)
    args.precision = device.resolve_precision(args.precision)
    args.workers = worker_count(args.workers, device, World())
    args.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, float]]] = {"sightline": [], "torchvision": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            runs["sightline"].append(ours(args, seed, Path(folder) / f"seed{seed}"))
            runs["torchvision"].append(theirs(args, seed, device))
            for name, done in runs.items():
                numbers = ", ".join(f"{key} {value:.4g}" for key, value in done[-1].items())
                print(f"seed {seed}  {name:<12} {numbers}", flush=True)
    now = datetime.now(UTC)
    settings = {**vars(args), "out": str(args.out), "crop_scale": CROP_SCALE, "weight_decay": WEIGHT_DECAY}
    result = {"time": now.isoformat(timespec="seconds"), "settings": settings, **provenance(device)}
    result["results"] = {name: summary(done) for name, done in runs.items()}
    path = result_file(args.out, "accuracy", device, now)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"resnet{args.depth}, {args.epochs} epochs, batch {args.batch}, {args.precision} on {device.name()}")
    print(f"{'':<12} {'top-1, mean and sd of ' + str(len(args.seeds)):<26} {'img/s':>9} {'wall s':>8}")
    for name, found in result["results"].items():
        spread = f" ± {found['top1_sd']:.4f}" if len(args.seeds) > 1 else ""  # one seed has none
        accuracy = f"{found['top1_mean']:.4f}{spread}"
        print(f"{name:<12} {accuracy:<26} {found['images_per_s']:>9,.0f} {found['wall_s']:>8.1f}")
    print(f"written to {path}")
    return result


if __name__ == "__main__":
    main()
