"""Files to results without Sightline, as somebody writes it who knows torchvision and MONAI well.

    python benchmarks/plain_predict.py photos --weights W.pt --inputs DIR --out DIR
    python benchmarks/plain_predict.py volumes --weights W.pt --inputs DIR --out DIR
    python benchmarks/plain_predict.py boxes --run RUN --data COCO --out DIR

`photos` writes the five best classes of ResNet-50 as JSON and CSV, `volumes` a mask per NIfTI file with MONAI's
DynUNet and sliding window inferer, `boxes` the twelve scores of COCO for the network of a run of ours. They were made
fast before anything was compared with them: loader processes that decode into uint8, pinned memory, channels_last,
autocast, normalisation on the device, large batches, results written while the next batch is computed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


class Files(Dataset[tuple[int, Any, tuple[int, int]]]):
    """Images decoded and resized to uint8 (3, size, size), and their sides."""

    def __init__(self, paths: list[Path], make: Callable[[Tensor], Tensor]):
        self.paths, self.make = paths, make

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, Tensor, tuple[int, int]]:
        from torchvision.io import ImageReadMode, decode_jpeg, read_file

        image = decode_jpeg(read_file(str(self.paths[index])), ImageReadMode.RGB)
        return index, self.make(image), (image.shape[1], image.shape[2])


def loader_of(data: Dataset[Any], args: argparse.Namespace, **how: Any) -> DataLoader[Any]:
    """Return batches in order, from processes, in pinned memory."""
    more: dict[str, Any] = {"prefetch_factor": 4} if args.workers else {}
    return DataLoader(data, args.batch, num_workers=args.workers, pin_memory=DEVICE.type == "cuda", **more, **how)


def autocast(args: argparse.Namespace) -> torch.autocast:
    """Return the autocast region of a precision."""
    return torch.autocast(DEVICE.type, DTYPES[args.precision], enabled=args.precision != "fp32")


def normalised(images: Tensor) -> Tensor:
    """Return floats (batch, 3, height, width), channels last, of uint8 on the host."""
    images = images.to(DEVICE, non_blocking=True).contiguous(memory_format=torch.channels_last).float()
    mean, std = (torch.tensor(each, device=DEVICE).view(1, 3, 1, 1) for each in (MEAN, STD))
    return (images - mean) / std


def centre_square(image: Tensor) -> Tensor:
    """Resize the shorter side to 256 and cut out 224 x 224."""
    from torchvision.transforms.v2 import functional as v2

    return v2.center_crop(v2.resize(image, [256], antialias=True), [224, 224])


@torch.inference_mode()
def photos(args: argparse.Namespace) -> None:
    """Write the five best classes of every photo of a folder."""
    from torchvision.models import resnet50

    paths = sorted(Path(args.inputs).rglob("*.jpg"))
    state = torch.load(args.weights, map_location=DEVICE, weights_only=True)
    with DEVICE:
        model = resnet50(num_classes=len(state["fc.bias"]))
    model.load_state_dict(state)
    model = model.eval().to(memory_format=torch.channels_last)
    rows: list[dict[str, Any]] = []

    def keep(indices: Tensor, sides: list[Tensor], best: Any) -> None:
        parts = (indices.tolist(), sides[0].tolist(), sides[1].tolist(), best.values.tolist(), best.indices.tolist())
        for index, height, width, scores, classes in zip(*parts, strict=True):
            found = [{"id": number, "score": score} for number, score in zip(classes, scores, strict=True)]
            rows.append({"file": str(paths[index]), "width": width, "height": height, "found": found})

    last = None
    for indices, images, sides in loader_of(Files(paths, centre_square), args):
        with autocast(args):
            logits = model(normalised(images))
        best = logits.float().softmax(1).topk(5)
        if last:  # what the device has finished meanwhile
            keep(*last)
        last = (indices, sides, best)
    if last:
        keep(*last)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    Path(args.out, "predictions.json").write_text(json.dumps(rows, indent=1))
    with open(Path(args.out, "predictions.csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "id", "score"])
        writer.writerows([row["file"], each["id"], each["score"]] for row in rows for each in row["found"])


class Volumes(Dataset[Any]):
    """NIfTI volumes cut to what is above 0 and scaled by their own mean and deviation, slices first."""

    def __init__(self, paths: list[Path]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        import nibabel
        import numpy as np

        image: Any = nibabel.load(self.paths[index])
        voxels = np.asarray(image.dataobj, np.float32)
        places = np.nonzero(voxels > 0)
        box = tuple(slice(int(axis.min()), int(axis.max()) + 1) for axis in places)
        inside = voxels[box]
        inside = (inside - inside.mean()) / inside.std()
        return index, torch.from_numpy(np.ascontiguousarray(inside.T))[:, None], voxels.shape, box, image.affine


def as_it_is(item: Any) -> Any:
    """Keep a volume as it was read."""
    return item


def dynunet(args: argparse.Namespace) -> nn.Module:
    """Return MONAI's network of slices of 56 x 40, as nnU-Net builds it."""
    from monai.networks.nets import DynUNet

    levels = 4
    return DynUNet(
        2,
        1,
        3,
        [3] * levels,
        [1] + [2] * (levels - 1),
        [2] * (levels - 1),
        filters=[min(args.width * 2**level, 512) for level in range(levels)],
        norm_name=("INSTANCE", {"affine": True}),
    )


@torch.inference_mode()
def volumes(args: argparse.Namespace) -> None:
    """Write a mask for every volume of a folder. Slices of one volume share a batch, as MONAI's inferer works."""
    import nibabel
    import numpy as np
    from monai.inferers import SlidingWindowInferer

    paths = sorted(Path(args.inputs).glob("*.nii.gz"))
    model = dynunet(args)
    if Path(args.weights).is_file():
        model.load_state_dict(torch.load(args.weights, weights_only=True))
    model = model.to(DEVICE).eval().to(memory_format=torch.channels_last)
    inferer = SlidingWindowInferer((56, 40), sw_batch_size=64, overlap=0.5, mode="gaussian")
    Path(args.out).mkdir(parents=True, exist_ok=True)

    def write(index: int, classes: Tensor, shape: Any, box: Any, affine: Any) -> dict[str, Any]:
        mask = np.zeros(shape, np.uint8)
        mask[tuple(box)] = classes.cpu().numpy().T
        nibabel.save(nibabel.Nifti1Image(mask, affine), Path(args.out, paths[index].name))
        return {"file": str(paths[index]), "voxels": np.bincount(mask.reshape(-1), minlength=3).tolist()}

    loader = DataLoader(
        Volumes(paths), None, num_workers=args.workers, collate_fn=as_it_is, pin_memory=DEVICE.type == "cuda"
    )
    with ThreadPoolExecutor(4) as pool:
        rows = []
        for index, slices, *where in loader:
            with autocast(args):
                logits: Any = inferer(slices.to(DEVICE, non_blocking=True), model)
            rows.append(pool.submit(write, index, logits.argmax(1).to(torch.uint8), *where))
        found = [row.result() for row in rows]
    Path(args.out, "predictions.json").write_text(json.dumps(found, indent=1))


@torch.inference_mode()
def boxes(args: argparse.Namespace) -> None:
    """Score the SSD of a run of ours on COCO: torchvision's suppression, pycocotools' scores."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval
    from torchvision.ops import batched_nms
    from torchvision.transforms.v2 import functional as v2

    from sightline import api
    from sightline.boxes import decode

    truth = COCO(str(Path(args.data, "annotations", "instances_val2017.json")))
    ids = sorted(truth.getImgIds())
    paths = [Path(args.data, "val2017", truth.imgs[each]["file_name"]) for each in ids]
    trained = api.model(args.run)
    model, categories, size = trained.network.to(DEVICE), trained.spec.class_ids, trained.spec.size
    found: list[dict[str, Any]] = []
    data = Files(paths, lambda image: v2.resize(image, list(size), antialias=True))
    for indices, images, (heights, widths) in loader_of(data, args):
        with autocast(args):
            logits, offsets, anchors = model(normalised(images))
        scores = logits.float().softmax(2)[..., 1:]
        corners = decode(offsets.float(), anchors)
        row, anchor, number = (scores > 0.05).nonzero(as_tuple=True)
        chosen, values = corners[row, anchor], scores[row, anchor, number]
        kept = batched_nms(chosen, values, row * scores.shape[2] + number, 0.5)
        parts = (row[kept], chosen[kept], values[kept], number[kept])
        for at, (top, left, bottom, right), score, label in zip(*(part.tolist() for part in parts), strict=True):
            height, width = int(heights[at]), int(widths[at])
            box = [left * width, top * height, (right - left) * width, (bottom - top) * height]
            found.append({"image_id": ids[indices[at]], "category_id": categories[label], "bbox": box, "score": score})
    stats = [0.0] * 12
    if found:
        evaluation = COCOeval(truth, truth.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        stats = list(map(float, evaluation.stats))
    Path(args.out).mkdir(parents=True, exist_ok=True)
    Path(args.out, "scores.json").write_text(json.dumps(stats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["photos", "volumes", "boxes"])
    for name in ("--weights", "--inputs", "--out", "--run", "--data"):
        parser.add_argument(name, default="")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--workers", type=int, default=min(16, len(os.sched_getaffinity(0))))
    parser.add_argument("--precision", choices=DTYPES, default="bf16" if DEVICE.type == "cuda" else "fp32")
    args = parser.parse_args()
    {"photos": photos, "volumes": volumes, "boxes": boxes}[args.what](args)


if __name__ == "__main__":
    main()
