"""The three formats of `prepare shapes`: class folders, COCO 2017 and Medical Decathlon.

Each format cuts its work into jobs, draws a job in whatever process it lands, and closes the folder with its tables.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from sightline.data.prepare.shapes.images import (
    CATEGORY_IDS,
    annotation,
    classification_picture,
    detection_picture,
)
from sightline.data.prepare.shapes.nifti import write_nifti
from sightline.data.prepare.shapes.volumes import CHANNELS, LABELS, volume

# Goes up whenever the same options would give other files.
VERSION = 1
_JPEG_QUALITY = 90

Record = dict[str, Any]  # what goes into a JSON file


class Job(NamedTuple):
    """Items start..stop of one split, drawn in one go; `name` is the class, for classification."""

    seed: int
    folder: Path
    split: str
    start: int
    stop: int
    name: str = ""

    @property
    def items(self) -> int:
        return self.stop - self.start


class Format(NamedTuple):
    """How a part is drawn: its jobs, then each job, then the tables over all that the jobs returned."""

    jobs: Callable[[int, int, int, Path], list[Job]]
    draw: Callable[[Job], list[Record]]
    finish: Callable[[Path, list[Record]], dict[str, int]]


def _split_jobs(seed: int, folder: Path, split: str, count: int, per_job: int, name: str = "") -> list[Job]:
    """Jobs of about 0.1 s: long beside the cost of handing one over, short enough to share out evenly."""
    starts = range(0, count, per_job)
    return [Job(seed, folder, split, start, min(start + per_job, count), name) for start in starts]


def _of(split: str, drawn: list[Record]) -> list[Record]:
    return [item for item in drawn if item["split"] == split]


# Classification: class folders.


def _classification_jobs(seed: int, train: int, val: int, folder: Path) -> list[Job]:
    jobs = []
    for split, count in (("train", train), ("val", val)):
        for name in CATEGORY_IDS:
            jobs += _split_jobs(seed, folder / split / name, split, count, 50, name)
    return jobs


def _draw_classification(job: Job) -> list[Record]:
    for index in range(job.start, job.stop):
        pixels = classification_picture(job.seed, job.split, job.name, index)
        Image.fromarray(pixels).save(job.folder / f"{index:05d}.jpg", quality=_JPEG_QUALITY)
    return [{"split": job.split}] * job.items


def _finish_classification(folder: Path, drawn: list[Record]) -> dict[str, int]:
    return {split: len(_of(split, drawn)) for split in ("train", "val")}


# Detection: COCO 2017.


def _detection_jobs(seed: int, train: int, val: int, folder: Path) -> list[Job]:
    jobs = _split_jobs(seed, folder / "train2017", "train", train, 10)
    return jobs + _split_jobs(seed, folder / "val2017", "val", val, 10)


def _draw_detection(job: Job) -> list[Record]:
    """Writes the pictures and returns, for each, its split, its `images` entry and its `annotations` entries."""
    drawn = []
    for index in range(job.start, job.stop):
        pixels, objects = detection_picture(job.seed, job.split, index)
        # Ids with gaps, distinct over both splits, as COCO's are.
        image_id = 3 * index + (1 if job.split == "train" else 2)
        file_name = f"{image_id:012d}.jpg"
        Image.fromarray(pixels).save(job.folder / file_name, quality=_JPEG_QUALITY)
        image = {
            "id": image_id,
            "file_name": file_name,
            "width": pixels.shape[1],
            "height": pixels.shape[0],
            "license": 1,
            "date_captured": "2017-01-01 00:00:00",
        }
        annotations = [annotation(shown, 10 * image_id + number, image_id) for number, shown in enumerate(objects)]
        drawn.append({"split": job.split, "image": image, "annotations": annotations})
    return drawn


def _finish_detection(folder: Path, drawn: list[Record]) -> dict[str, int]:
    (folder / "annotations").mkdir()
    counts = {}
    for split in ("train", "val"):
        pictures = _of(split, drawn)
        annotations = [entry for picture in pictures for entry in picture["annotations"]]
        content = {
            "info": {"description": "Sightline shapes", "version": str(VERSION), "year": 2017, "contributor": ""},
            "licenses": [{"id": 1, "name": "CC0", "url": "https://creativecommons.org/publicdomain/zero/1.0/"}],
            "images": [picture["image"] for picture in pictures],
            "annotations": annotations,
            "categories": [{"supercategory": "shape", "id": i, "name": name} for name, i in CATEGORY_IDS.items()],
        }
        (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
        counts[split] = len(pictures)
        counts[f"{split} objects"] = len(annotations)
    return counts


# Segmentation: Medical Decathlon.


def _segmentation_jobs(seed: int, train: int, test: int, folder: Path) -> list[Job]:
    task = folder / "Task01_Shapes"
    jobs = _split_jobs(seed, task / "imagesTr", "train", train, 1)
    return jobs + _split_jobs(seed, task / "imagesTs", "test", test, 1)


def _draw_segmentation(job: Job) -> list[Record]:
    """Writes the volumes and returns, for each, its split and its entry in dataset.json."""
    drawn = []
    for index in range(job.start, job.stop):
        image, label, affine = volume(job.seed, job.split, index)
        # One row of numbers for both splits, so each has gaps, as in the original archives.
        name = f"SHAPES_{2 * index + (1 if job.split == 'train' else 2):03d}.nii.gz"
        write_nifti(job.folder / name, image, affine)
        entry = {"image": f"./{job.folder.name}/{name}"}
        if job.split == "train":
            labels = job.folder.with_name("labelsTr")
            labels.mkdir(exist_ok=True)
            write_nifti(labels / name, label, affine)
            entry["label"] = f"./labelsTr/{name}"
        drawn.append({"split": job.split, "entry": entry})
    return drawn


def _finish_segmentation(folder: Path, drawn: list[Record]) -> dict[str, int]:
    training = [volume["entry"] for volume in _of("train", drawn)]
    test = [volume["entry"]["image"] for volume in _of("test", drawn)]
    content = {
        "name": "Shapes",
        "description": "Nested lesions in drawn brains",
        "reference": "sightline prepare shapes",
        "licence": "CC0",
        "release": str(VERSION),
        "tensorImageSize": "4D",
        "modality": {str(i): name for i, name in enumerate(CHANNELS)},
        "labels": {str(i): name for i, name in enumerate(LABELS)},
        "numTraining": len(training),
        "numTest": len(test),
        "training": training,
        "test": test,
    }
    (folder / "Task01_Shapes" / "dataset.json").write_text(json.dumps(content, indent=1))
    return {"train": len(training), "test": len(test)}


FORMATS = {
    "classification": Format(_classification_jobs, _draw_classification, _finish_classification),
    "detection": Format(_detection_jobs, _draw_detection, _finish_detection),
    "segmentation": Format(_segmentation_jobs, _draw_segmentation, _finish_segmentation),
}
