"""The three formats of `prepare shapes`: class folders, COCO 2017 and Medical Decathlon.

Each format cuts its work into jobs, draws the files of a job in whatever process it lands, and closes with its tables.
"""

import io
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sightline.data.prepare.shapes.images import CATEGORY_IDS, annotation, classification_image, detection_image
from sightline.data.prepare.shapes.nifti import encode_nifti
from sightline.data.prepare.shapes.volumes import CHANNELS, LABELS, volume

_VERSION = "1"  # of the drawings, as the tables name it
_JPEG_QUALITY = 90

Entry = dict[str, Any]  # of one item in the tables, with its split


class Job(NamedTuple):
    """Items start..stop of one split, drawn in one go; `name` is the class, for classification."""

    seed: int
    folder: str
    split: str
    start: int
    stop: int
    name: str = ""

    @property
    def items(self) -> int:
        return self.stop - self.start


class Drawn(NamedTuple):
    """One item: its files by their paths, and its entry."""

    files: dict[str, bytes]
    entry: Entry


class Tables(NamedTuple):
    """The last files of a part by their paths, and what to count."""

    files: dict[str, str]
    counts: dict[str, int]


class Format(NamedTuple):
    """The way a part is drawn: its jobs, then each job, then the tables over all entries in their order."""

    jobs: Callable[[int, int, int], list[Job]]
    draw: Callable[[Job], Iterator[Drawn]]
    tables: Callable[[list[Entry]], Tables]
    item_bytes: int  # on disk, at most


def _split_jobs(seed: int, folder: str, split: str, count: int, per_job: int, name: str = "") -> list[Job]:
    """Return jobs of about 0.1 s: long beside the cost of handing one over, short enough to share out evenly."""
    starts = range(0, count, per_job)
    return [Job(seed, folder, split, start, min(start + per_job, count), name) for start in starts]


def _of(split: str, entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry["split"] == split]


def _jpeg(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=_JPEG_QUALITY)
    return out.getvalue()


# Classification: class folders.


def _classification_jobs(seed: int, train: int, val: int) -> list[Job]:
    jobs = []
    for split, count in (("train", train), ("val", val)):
        for name in CATEGORY_IDS:
            jobs += _split_jobs(seed, f"{split}/{name}", split, count, 50, name)
    return jobs


def _draw_classification(job: Job) -> Iterator[Drawn]:
    for index in range(job.start, job.stop):
        pixels = classification_image(job.seed, job.split, job.name, index)
        yield Drawn({f"{job.folder}/{index:05d}.jpg": _jpeg(pixels)}, {"split": job.split})


def _classification_tables(entries: list[Entry]) -> Tables:
    return Tables({}, {split: len(_of(split, entries)) for split in ("train", "val")})


# Detection: COCO 2017.


def _detection_jobs(seed: int, train: int, val: int) -> list[Job]:
    return _split_jobs(seed, "train2017", "train", train, 10) + _split_jobs(seed, "val2017", "val", val, 10)


def _draw_detection(job: Job) -> Iterator[Drawn]:
    """Draw images; the entry of one has those of the lists `images` and `annotations`."""
    for index in range(job.start, job.stop):
        pixels, objects = detection_image(job.seed, job.split, index)
        # Ids with gaps, distinct over both splits, as COCO's are.
        image_id = 3 * index + (1 if job.split == "train" else 2)
        file_name = f"{image_id:012d}.jpg"
        image = {
            "id": image_id,
            "file_name": file_name,
            "width": pixels.shape[1],
            "height": pixels.shape[0],
            "license": 1,
            "date_captured": "2017-01-01 00:00:00",
        }
        annotations = [annotation(shown, 10 * image_id + number, image_id) for number, shown in enumerate(objects)]
        entry = {"split": job.split, "image": image, "annotations": annotations}
        yield Drawn({f"{job.folder}/{file_name}": _jpeg(pixels)}, entry)


def _detection_tables(entries: list[Entry]) -> Tables:
    files, counts = {}, {}
    for split in ("train", "val"):
        images = _of(split, entries)
        annotations = [annotation for entry in images for annotation in entry["annotations"]]
        content = {
            "info": {"description": "Sightline shapes", "version": _VERSION, "year": 2017, "contributor": ""},
            "licenses": [{"id": 1, "name": "CC0", "url": "https://creativecommons.org/publicdomain/zero/1.0/"}],
            "images": [entry["image"] for entry in images],
            "annotations": annotations,
            "categories": [{"supercategory": "shape", "id": i, "name": name} for name, i in CATEGORY_IDS.items()],
        }
        files[f"annotations/instances_{split}2017.json"] = json.dumps(content)
        counts[split] = len(images)
        counts[f"{split} objects"] = len(annotations)
    return Tables(files, counts)


# Segmentation: Medical Decathlon.


def _segmentation_jobs(seed: int, train: int, test: int) -> list[Job]:
    jobs = _split_jobs(seed, "Task01_Shapes/imagesTr", "train", train, 1)
    return jobs + _split_jobs(seed, "Task01_Shapes/imagesTs", "test", test, 1)


def _draw_segmentation(job: Job) -> Iterator[Drawn]:
    for index in range(job.start, job.stop):
        image, label, affine = volume(job.seed, job.split, index)
        # One row of numbers for both splits, so each has gaps, as in the original archives.
        name = f"SHAPES_{2 * index + (1 if job.split == 'train' else 2):03d}.nii.gz"
        voxels = {f"{job.folder}/{name}": image}
        if job.split == "train":
            voxels[f"Task01_Shapes/labelsTr/{name}"] = label
        paths = {kind: f"./{path.partition('/')[2]}" for kind, path in zip(("image", "label"), voxels, strict=False)}
        files = {path: encode_nifti(array, affine, path) for path, array in voxels.items()}
        yield Drawn(files, {"split": job.split, "entry": paths})


def _segmentation_tables(entries: list[Entry]) -> Tables:
    training = [entry["entry"] for entry in _of("train", entries)]
    test = [entry["entry"]["image"] for entry in _of("test", entries)]
    content = {
        "name": "Shapes",
        "description": "Nested lesions in drawn brains",
        "reference": "sightline prepare shapes",
        "licence": "CC0",
        "release": _VERSION,
        "tensorImageSize": "4D",
        "modality": {str(i): name for i, name in enumerate(CHANNELS)},
        "labels": {str(i): name for i, name in enumerate(LABELS)},
        "numTraining": len(training),
        "numTest": len(test),
        "training": training,
        "test": test,
    }
    counts = {"train": len(training), "test": len(test)}
    return Tables({"Task01_Shapes/dataset.json": json.dumps(content, indent=1)}, counts)


FORMATS = {
    "classification": Format(_classification_jobs, _draw_classification, _classification_tables, 8192),
    "detection": Format(_detection_jobs, _draw_detection, _detection_tables, 2**16),
    "segmentation": Format(_segmentation_jobs, _draw_segmentation, _segmentation_tables, 2**20),
}
