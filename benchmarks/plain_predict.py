"""Files to results without Sightline, as somebody writes it who knows torchvision and MONAI well.

    python benchmarks/plain_predict.py photos --weights W.pt --inputs DIR --out DIR
    python benchmarks/plain_predict.py photos --decoder gpu --weights W.pt --inputs DIR --out DIR
    python benchmarks/plain_predict.py volumes --weights W.pt --inputs DIR --out DIR
    python benchmarks/plain_predict.py slices --inputs DIR --out DIR
    python benchmarks/plain_predict.py boxes --run RUN --data COCO --out DIR

`photos` writes the five best classes of ResNet-50 as JSON and CSV, `volumes` a mask per NIfTI file with MONAI's
DynUNet and sliding window inferer, `slices` the same by a network of the same size without MONAI, eight padded volumes
at a time, `boxes` the twelve scores of COCO for the network of a run of ours. They were made fast before anything was
compared with them: loader processes that decode into uint8, or the GPU's decoder; pinned memory, channels_last,
autocast, normalisation on the device, large batches, results written while the next batch is computed, COCO's scores
in C++.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
from collections.abc import Callable, Iterator
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


def decoded(paths: list[Path], args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """Yield batches of indices, images (batch, 3, 224, 224) and heights and widths."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    if args.decoder == "cpu":
        yield from loader_of(Files(paths, centre_square), args)
        return
    with ThreadPoolExecutor(8) as readers:
        files = readers.map(read_file, map(str, paths))
        for at in range(0, len(paths), args.batch):
            batch = list(itertools.islice(files, args.batch))
            images = decode_jpeg(batch, ImageReadMode.RGB, device=DEVICE)
            sides = [torch.tensor([image.shape[axis] for image in images]) for axis in (1, 2)]
            indices = torch.arange(at, at + len(batch))
            yield indices, torch.stack([centre_square(each) for each in images]), sides


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
    for indices, images, sides in decoded(paths, args):
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


class Block(nn.Sequential):
    """Two convolutions, each with instance norm and leaky ReLU."""

    def __init__(self, inputs: int, filters: int, stride: int):
        layers: list[nn.Module] = []
        for channels, step in ((inputs, stride), (filters, 1)):
            layers += [nn.Conv2d(channels, filters, 3, step, 1), nn.InstanceNorm2d(filters, affine=True)]
            layers += [nn.LeakyReLU(0.01, inplace=True)]
        super().__init__(*layers)


class PlainUnet(nn.Module):
    """The network of `dynunet`."""

    def __init__(self, width: int, levels: int = 4):
        super().__init__()
        filters = [width * 2**level for level in range(levels)]
        sides = list(itertools.pairwise(filters))
        self.down = nn.ModuleList([Block(1, width, 1), *(Block(upper, lower, 2) for upper, lower in sides)])
        self.up = nn.ModuleList(nn.ConvTranspose2d(lower, upper, 2, 2) for upper, lower in sides)
        self.join = nn.ModuleList(Block(2 * upper, upper, 1) for upper, _ in sides)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Any:
        """Return logits (batch, 3, height, width)."""
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        kept.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.head(x)


@torch.inference_mode()
def slices(args: argparse.Namespace) -> None:
    """Write a mask for every volume of a folder: all slices of eight volumes, padded to the largest, are one batch."""
    import nibabel
    import numpy as np

    paths = sorted(Path(args.inputs).glob("*.nii.gz"))
    with DEVICE:
        model = PlainUnet(args.width)
    model = model.eval().to(memory_format=torch.channels_last)
    volumes = Volumes(paths)
    Path(args.out).mkdir(parents=True, exist_ok=True)

    def write(index: int, classes: Tensor, shape: Any, box: Any, affine: Any) -> dict[str, Any]:
        mask = np.zeros(shape, np.uint8)
        mask[tuple(box)] = classes.numpy().T
        nibabel.save(nibabel.Nifti1Image(mask, affine), Path(args.out, paths[index].name))
        return {"file": str(paths[index]), "voxels": np.bincount(mask.reshape(-1), minlength=3).tolist()}

    rows = []
    with ThreadPoolExecutor(8) as readers, ThreadPoolExecutor(4) as writers:
        ready = readers.map(volumes.__getitem__, range(len(paths)))
        for group in iter(lambda: list(itertools.islice(ready, 8)), []):
            sides = [max(-(-item[1].shape[axis] // 8) * 8 for item in group) for axis in (2, 3)]
            batch = torch.zeros(sum(len(item[1]) for item in group), 1, *sides)
            at = 0
            for _, image, *_ in group:
                batch[at : at + len(image), :, : image.shape[2], : image.shape[3]] = image
                at += len(image)
            with autocast(args):
                logits = model(batch.to(DEVICE).contiguous(memory_format=torch.channels_last))
            classes = logits.argmax(1).to(torch.uint8).cpu()
            for index, image, *where in group:
                mine, classes = classes[: len(image)], classes[len(image) :]
                rows.append(writers.submit(write, index, mine[:, : image.shape[2], : image.shape[3]], *where))
        found = [row.result() for row in rows]
    Path(args.out, "predictions.json").write_text(json.dumps(found, indent=1))


@torch.inference_mode()
def boxes(args: argparse.Namespace) -> None:
    """Score the SSD of a run of ours on COCO: torchvision's suppression, faster_coco_eval's scores.

    The 1,000 best above 0.05 of each image go into the suppression, and 200 come out of it.
    """
    import numpy as np
    from faster_coco_eval import COCO, COCOeval_faster
    from torchvision.ops import batched_nms
    from torchvision.transforms.v2 import functional as v2

    from sightline import api
    from sightline.boxes import decode

    truth = COCO(str(Path(args.data, "annotations", "instances_val2017.json")))
    ids = sorted(truth.getImgIds())
    paths = [Path(args.data, "val2017", truth.imgs[each]["file_name"]) for each in ids]
    trained = api.model(args.run)
    model, categories, size = trained.network.to(DEVICE), trained.spec.class_ids, trained.spec.size
    found: list[Tensor] = []
    data = Files(paths, lambda image: v2.resize(image, list(size), antialias=True))
    for indices, images, (heights, widths) in loader_of(data, args):
        with autocast(args):
            logits, offsets, anchors = model(normalised(images))
        scores = logits.float().softmax(2)[..., 1:]
        corners = decode(offsets.float(), anchors)
        best = scores.flatten(1).topk(1000)
        scale = torch.stack([heights, widths, heights, widths], 1).to(DEVICE, torch.float32, non_blocking=True)
        for at, (values, places) in enumerate(zip(best.values, best.indices, strict=True)):
            label, chosen = places % scores.shape[2], corners[at, places // scores.shape[2]]
            kept = batched_nms(torch.where((values > 0.05)[:, None], chosen, 0.0), values, label, 0.5)[:200]
            box = chosen[kept] * scale[at]
            place = torch.full_like(values[kept], float(indices[at]))
            found.append(torch.cat([place[:, None], box, values[kept, None], label[kept, None]], 1))
    rows = torch.cat(found).double().cpu().numpy()
    rows = rows[rows[:, 5] > 0.05]
    image, top, left, bottom, right, score, number = rows.T
    image, number = np.asarray(ids)[image.astype(int)], np.asarray(categories)[number.astype(int)]
    stats = [0.0] * 12
    if len(rows):
        table = np.stack([image, left, top, right - left, bottom - top, score, number], 1)
        evaluation = COCOeval_faster(truth, truth.loadRes(table), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        stats = list(map(float, evaluation.stats))
    Path(args.out).mkdir(parents=True, exist_ok=True)
    Path(args.out, "scores.json").write_text(json.dumps(stats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["photos", "volumes", "slices", "boxes"])
    for name in ("--weights", "--inputs", "--out", "--run", "--data"):
        parser.add_argument(name, default="")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--workers", type=int, default=min(16, len(os.sched_getaffinity(0))))
    parser.add_argument("--decoder", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--precision", choices=DTYPES, default="bf16" if DEVICE.type == "cuda" else "fp32")
    args = parser.parse_args()
    {"photos": photos, "volumes": volumes, "slices": slices, "boxes": boxes}[args.what](args)


if __name__ == "__main__":
    main()
