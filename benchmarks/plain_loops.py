"""Plain training loops that use a given wall-clock time, as somebody writes them who knows timm and torchvision well.

    python benchmarks/plain_loops.py classification --data DIR --test DIR --seconds 60 --weights FILE --out FILE

DIR is what Sightline reads: class folders; `annotations.json` and `images`; or `images` and `masks`. All training
images are learnt from, and the last weights are scored: nothing is selected. The time counts from --started, before the
imports, to the last step; scoring comes after it. benchmarks/own_data.py runs these beside recipes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import models, tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MASK = "_mask.png"  # ends the names of predicted masks, as of `sightline predict`
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WARMUP = 0.05  # of the time


def autocast() -> torch.autocast:
    """Return bf16 autocast; none on a CPU."""
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda")


def train(
    args: argparse.Namespace, data: Any, groups: list[dict[str, Any]], loss: Callable[..., Any], **how: Any
) -> dict[str, float]:
    """Take AdamW steps until the time is up, the rate rising, then falling as half a cosine of the time."""
    end = args.started + args.seconds
    size = min(args.batch, len(data))
    # Many short epochs would wait for the first batch of each.
    sampler = RandomSampler(data, num_samples=max(len(data), 50 * size))
    settings: dict[str, Any] = {"num_workers": args.workers, "pin_memory": DEVICE.type == "cuda", **how}
    loader = DataLoader(data, size, sampler=sampler, drop_last=True, persistent_workers=args.workers > 0, **settings)
    optimizer = torch.optim.AdamW(groups, weight_decay=args.weight_decay)
    rates, steps, first = [group["lr"] for group in optimizer.param_groups], 0, 0.0
    while True:
        for batch in loader:
            if (now := time.time()) >= end:
                return {"steps": steps, "passes": steps * size / len(data)}
            first = first or now
            done = (now - first) / (end - first)
            scale = min(done / WARMUP, 0.5 * (1 + math.cos(math.pi * done)))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
            with autocast():
                value = loss(*batch)
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_([each for group in groups for each in group["params"]], args.clip)
            optimizer.step()
            steps += 1


def classification(args: argparse.Namespace) -> dict[str, float]:
    """Tune a network of timm with its own transforms and label smoothing."""
    import timm

    train_set, test_set = ImageFolder(args.data), ImageFolder(args.test)
    assert train_set.classes == test_set.classes
    model: Any = timm.create_model(
        args.network or Path(args.weights).stem,
        pretrained=True,
        pretrained_cfg_overlay={"file": args.weights},
        num_classes=len(train_set.classes),
    )
    model = model.to(DEVICE, memory_format=torch.channels_last)
    size = args.size or model.default_cfg["input_size"][-1]
    config = timm.data.resolve_data_config({"input_size": (3, size, size)}, model=model)
    train_set.transform = timm.data.create_transform(**config, is_training=True)
    test_set.transform = timm.data.create_transform(**config)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    head = list(model.get_classifier().parameters())
    below = [each for each in model.parameters() if all(each is not other for other in head)]
    groups = [{"params": below, "lr": args.lr * args.trunk_lr_scale}, {"params": head, "lr": args.lr}]

    def logits(images: torch.Tensor) -> torch.Tensor:
        return model(images.to(DEVICE, non_blocking=True, memory_format=torch.channels_last))

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return criterion(logits(images), labels.to(DEVICE, non_blocking=True))

    model.train()
    found = train(args, train_set, groups, loss)
    model.eval()
    with torch.inference_mode(), autocast():
        loader = DataLoader(test_set, 128, num_workers=args.workers)
        hits = sum((logits(images).argmax(1).cpu() == labels).sum().item() for images, labels in loader)
    return {"top1": hits / len(test_set), **found}


class Boxes(Dataset[Any]):
    """Images and their boxes from COCO's format."""

    def __init__(self, folder: Path, transform: Callable[..., Any]):
        content = json.loads((folder / "annotations.json").read_text(encoding="utf-8"))
        self.ids = sorted(each["id"] for each in content["categories"])
        self.folder, self.transform, self.images = folder / "images", transform, content["images"]
        self.notes: dict[int, list[dict[str, Any]]] = {each["id"]: [] for each in self.images}
        for note in content["annotations"]:
            self.notes[note["image_id"]].append(note)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, dict[str, Any]]:
        image = Image.open(self.folder / self.images[place]["file_name"]).convert("RGB")
        notes = self.notes[self.images[place]["id"]]
        boxes = torch.tensor([note["bbox"] for note in notes], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        canvas = (image.height, image.width)
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=canvas),
            "labels": torch.tensor([1 + self.ids.index(note["category_id"]) for note in notes], dtype=torch.int64),
        }
        return self.transform(tv_tensors.Image(v2.functional.pil_to_tensor(image)), target)


def pairs(batch: list[Any]) -> tuple[Any, ...]:
    """Return images and targets without stacking them."""
    return tuple(zip(*batch, strict=True))


def detection(args: argparse.Namespace) -> dict[str, float]:
    """Train torchvision's SSDlite from random weights with the augmentation of its reference script."""
    from faster_coco_eval import COCO, COCOeval_faster

    end = [v2.SanitizeBoundingBoxes(), v2.ToDtype(torch.float32, scale=True)]
    augment = [v2.RandomPhotometricDistort(), v2.RandomIoUCrop(), v2.RandomHorizontalFlip()]
    train_set, test_set = Boxes(args.data, v2.Compose([*augment, *end])), Boxes(args.test, end[-1])
    model: Any = models.get_model(
        args.network or "ssdlite320_mobilenet_v3_large",
        weights=None,
        weights_backbone=None,
        num_classes=1 + len(train_set.ids),
    ).to(DEVICE)

    def loss(images: Sequence[torch.Tensor], targets: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
        moved = [{name: value.to(DEVICE) for name, value in target.items()} for target in targets]
        losses = model([each.to(DEVICE, non_blocking=True) for each in images], moved)
        return sum(losses.values(), torch.zeros((), device=DEVICE))

    model.train()
    found = train(args, train_set, [{"params": list(model.parameters()), "lr": args.lr}], loss, collate_fn=pairs)
    model.eval()
    rows = []
    with torch.inference_mode():
        loader = DataLoader(test_set, 16, num_workers=args.workers, collate_fn=pairs)
        outputs = (each for images, _ in loader for each in model([image.to(DEVICE) for image in images]))
        for image, output in zip(test_set.images, outputs, strict=True):
            boxes = output["boxes"].cpu()
            boxes[:, 2:] -= boxes[:, :2]
            for box, label, score in zip(
                boxes.tolist(), output["labels"].tolist(), output["scores"].tolist(), strict=True
            ):
                row = {"image_id": image["id"], "category_id": test_set.ids[label - 1], "bbox": box, "score": score}
                rows.append(row)
    if not rows:
        return {"ap": 0.0, "ap50": 0.0, **found}
    truth = COCO(str(args.test / "annotations.json"))
    scores = COCOeval_faster(truth, truth.loadRes(rows), "bbox", print_function=lambda *_: None)
    scores.evaluate()
    scores.accumulate()
    scores.summarize()
    return {"ap": float(scores.stats[0]), "ap50": float(scores.stats[1]), **found}


class Masks(Dataset[Any]):
    """Images and masks, whose values are renumbered from 0 on. 255 stays, to be ignored, except beside 0 alone."""

    def __init__(self, folder: Path, transform: Callable[..., Any]):
        self.images = sorted((folder / "images").iterdir())
        self.transform, self.masks = transform, folder / "masks"
        found = {value for path in self.masks.glob("*.png") for value in np.unique(np.array(Image.open(path))).tolist()}
        self.values = np.array(sorted(found if found <= {0, 255} else found - {255}), np.uint8)
        self.numbers = np.full(256, 255, np.uint8)
        self.numbers[self.values] = np.arange(len(self.values))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        path = self.images[place]
        image = v2.functional.pil_to_tensor(Image.open(path).convert("RGB"))
        mask = torch.from_numpy(self.numbers[np.array(Image.open(self.masks / f"{path.stem}.png"))])
        return self.transform(tv_tensors.Image(image), tv_tensors.Mask(mask))


class Last(nn.Module):
    """The features of timm that torchvision's FCN takes."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the smallest features."""
        return {"out": self.backbone(images)[-1]}


def network(args: argparse.Namespace, classes: int) -> Any:
    """Return a network of torchvision with random weights; with --weights its FCN on a classifier of timm."""
    if args.weights in (None, "none"):
        name = args.network or "lraspp_mobilenet_v3_large"
        return models.get_model(name, weights=None, weights_backbone=None, num_classes=classes)
    import timm

    backbone: Any = timm.create_model(
        args.network or Path(args.weights).stem,
        pretrained=True,
        pretrained_cfg_overlay={"file": args.weights},
        features_only=True,
        output_stride=16,
    )
    channels = backbone.feature_info.channels()[-1]
    return models.segmentation.FCN(Last(backbone), models.segmentation.fcn.FCNHead(channels, classes))


def segmentation(args: argparse.Namespace) -> dict[str, float]:
    """Train a network of torchvision, and write its masks of the test images."""
    size = args.size or 256
    end = [v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True)]
    end += [v2.Normalize(MEAN, STD)]
    augment = [v2.RandomResizedCrop(size, scale=(0.25, 1), antialias=True), v2.RandomHorizontalFlip()]
    augment += [v2.RandomPhotometricDistort()]
    train_set = Masks(args.data, v2.Compose([*augment, *end]))
    test_set = Masks(args.test, v2.Compose(end))
    model = network(args, len(train_set.values)).to(DEVICE, memory_format=torch.channels_last)

    def logits(images: torch.Tensor) -> torch.Tensor:
        return model(images.to(DEVICE, non_blocking=True, memory_format=torch.channels_last))["out"]

    def loss(images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits(images), masks.to(DEVICE, non_blocking=True), ignore_index=255)

    model.train()
    found = train(args, train_set, [{"params": list(model.parameters()), "lr": args.lr}], loss)
    model.eval()
    args.masks.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(), autocast():
        for place, path in enumerate(test_set.images):
            image, _ = test_set[place]
            small = v2.functional.resize(image, [size], antialias=True)
            full = nn.functional.interpolate(logits(small[None]).float(), image.shape[-2:], mode="bilinear")
            mask = train_set.values[full[0].argmax(0).cpu().numpy()]
            Image.fromarray(mask).save(args.masks / f"{path.stem}{MASK}")
    return found


LOOPS = {"classification": classification, "detection": detection, "segmentation": segmentation}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, score and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(LOOPS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--started", type=float, default=time.time(), help="seconds since 1970; without: now")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="loader processes")
    parser.add_argument("--out", type=Path, required=True, help="json file of the scores")
    parser.add_argument("--masks", type=Path, help="folder of predicted masks, for segmentation")
    parser.add_argument("--weights", help="file of timm; for segmentation, of what lies below torchvision's FCN")
    parser.add_argument("--network", default="", help="name in timm or torchvision; without: that of the weights' file")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--trunk-lr-scale", type=float, default=1.0, help="of the layers below the head")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--clip", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=0, help="pixels; 0: those the network was trained with")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    # cuDNN goes by its own rules: to try its kernels would take half a minute of a run that has not much more.
    args.out.write_text(json.dumps(LOOPS[args.task](args)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
