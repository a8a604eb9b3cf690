"""`sightline prepare coco`: COCO 2017 from its zips, fetched on request, or data of one's own in any layout, become the
folders or the TFRecord shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from sightline.data.decode import MAX_BYTES
from sightline.data.formats.coco import Instances, read_instances
from sightline.data.prepare.coco.files import Files, find_files
from sightline.data.prepare.coco.own_data import own_data
from sightline.data.prepare.coco.writing import CocoDownload, CocoFolders, CocoRecords
from sightline.data.sources import recognised
from sightline.data.writing.pieces import alone_in, jobs_or_cores, refuse_unwritable, write_pieces
from sightline.errors import BadData, UsageError
from sightline.files.archive import Limits
from sightline.files.download import Expected, fetch
from sightline.parts import Split
from sightline.terminal.progress import Progress

_SPLITS: tuple[Split, ...] = ("train", "val")
# Of one json file: COCO's training annotations have 450 MB, nearly all of it outlines.
_MAX_JSON_BYTES = 2 * 2**30
_IMAGES = Limits(members=500_000, member_bytes=MAX_BYTES)
_ANNOTATIONS = Limits(members=1000, member_bytes=_MAX_JSON_BYTES)
_COCO_2017 = {"train": 118_287, "train with boxes": 117_266, "val": 5_000}


class Remote(NamedTuple):
    """A file to fetch."""

    name: str
    folder: str
    url: str
    size: int
    sha256: str


# Sizes and sha256 as TensorFlow Datasets publishes them (tensorflow_datasets/url_checksums/coco.txt); torchvision's
# datasets of 2022 (torchvision/prototype/datasets/_builtin/coco.py) have the same sha256. The bucket is read under
# Amazon's own name, because https://images.cocodataset.org answers with a certificate of s3.amazonaws.com
# (mlcommons/inference pull request 2572).
_BUCKET = "https://s3.amazonaws.com/images.cocodataset.org"
OFFICIAL = (
    Remote(
        "annotations_trainval2017.zip",
        "annotations",
        f"{_BUCKET}/annotations/annotations_trainval2017.zip",
        252_907_541,
        "113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268",
    ),
    Remote(
        "val2017.zip",
        "val2017",
        f"{_BUCKET}/zips/val2017.zip",
        815_585_330,
        "4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05",
    ),
    Remote(
        "train2017.zip",
        "train2017",
        f"{_BUCKET}/zips/train2017.zip",
        19_336_861_798,
        "69a8bb58ea5f8f99d24875f21416de2e9ded3178e903f1f7603e283b9e06d929",
    ),
)


@dataclass(frozen=True)
class CocoOptions:
    """Prepare COCO 2017 for training, from train2017.zip, val2017.zip and annotations_trainval2017.zip.

    folder: train2017/*.jpg, val2017/*.jpg and annotations/instances_{train,val}2017.json, the images as they are.
    tfrecord: train-00000-of-00256.tfrecord and val-00000-of-00032.tfrecord, as the TensorFlow originals read them, with
    the two json files in raw-data/annotations; no masks, no captions. Training records are of images with a box.
    A start after a kill resumes with what is missing; the files are the same for any number of jobs.
    """

    source: Path
    """Folder with the three zips, or with what was unpacked from them: train2017, val2017, annotations. Also images
    with boxes in any layout that --data.path takes."""
    out: Path
    """Folder to write into."""
    form: Literal["folder", "tfrecord"] = "folder"
    """folder: images and json; tfrecord: TensorFlow's records."""
    download: bool = False
    """Fetch into --source what is missing there (20.4 GB in all), and check what is there, by size and sha256."""
    shards: int = 256
    """tfrecord: training shards."""
    val_shards: int = 32
    """tfrecord: validation shards."""
    jobs: int = 0
    """Processes; 0 takes one per core, at most 16."""

    def __post_init__(self) -> None:
        for name in ("shards", "val_shards"):
            if not 1 <= getattr(self, name) <= 99_999:
                raise UsageError(f"{name}={getattr(self, name)}: use 1 to 99999")


def prepare(options: CocoOptions, progress: Progress) -> dict[str, int]:
    """Write what is missing and return counts; progress(what, done, total) is called as work proceeds."""
    jobs = jobs_or_cores(options.jobs)
    _check_places(options)
    if options.download:
        refuse_unwritable(options.out)
        _download(options.source, progress)
    with alone_in(options.out):
        found = _published(options.source, progress) if _is_published(options) else own_data(str(options.source))
        if found.instances["train"].categories != found.instances["val"].categories:
            raise BadData(f"{options.source}: train and val have different categories; both need the same")
        plan: CocoFolders | CocoRecords
        if options.form == "folder":
            plan = CocoFolders(options.out, found)
        else:
            plan = CocoRecords(options.out, found, {"train": options.shards, "val": options.val_shards})
        _check_counts(plan.counts)
        return write_pieces(plan, jobs, progress)


def _is_published(options: CocoOptions) -> bool:
    """Return whether the source is COCO's own download: also if nothing else could be meant, so that the error says
    what is missing of it."""
    own = ("annotations_trainval2017.zip", "annotations/instances_train2017.json")
    has_any = any((options.source / name).is_file() for name in own)
    return options.download or has_any or not recognised("open_boxes", str(options.source))


def _published(source: Path, progress: Progress) -> CocoDownload:
    annotations = find_files(source, "annotations", "annotations_trainval2017.zip", _ANNOTATIONS)
    images: dict[Split, Files] = {}
    instances: dict[Split, Instances] = {}
    digests: dict[Split, str] = {}
    for split in _SPLITS:
        images[split] = find_files(source, f"{split}2017", f"{split}2017.zip", _IMAGES)
        instances[split], digests[split] = _read_annotations(annotations, split)
        _check_images(instances[split], images[split], split)
        progress("reading annotations", _SPLITS.index(split) + 1, len(_SPLITS))
    return CocoDownload(annotations, images, instances, digests)


def _check_places(options: CocoOptions) -> None:
    source, out = options.source.resolve(), options.out.resolve()
    if source == out or source in out.parents or out in source.parents:
        raise UsageError(f"--out {options.out} lies in --source {options.source} or around it; choose another --out")
    if not options.download and not source.exists():
        raise UsageError(f"{options.source} is not a folder; put COCO's three zips there, or let --download fetch them")


def _download(source: Path, progress: Progress) -> None:
    try:
        source.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{source} cannot be written: {error.strerror}; choose another --source") from error
    for remote in OFFICIAL:
        if (source / remote.name).exists() or not (source / remote.folder).is_dir():
            fetch(remote.url, source / remote.name, Expected(remote.size, remote.sha256), progress)


def _read_annotations(files: Files, split: Split) -> tuple[Instances, str]:
    """Read the json file of a split; return a digest of it too."""
    name = f"instances_{split}2017.json"
    if name not in files.sizes:
        raise BadData(f"{files.place(name)} is not there; give COCO's annotations_trainval2017.zip")
    if files.sizes[name] > _MAX_JSON_BYTES:
        raise BadData(f"{files.place(name)} has {files.sizes[name]} bytes, more than the {_MAX_JSON_BYTES} allowed")
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        for chunk in files.chunks(name):
            digest.update(chunk)
            yield chunk

    return read_instances(chunks(), files.place(name)), digest.hexdigest()


def _check_images(instances: Instances, files: Files, split: Split) -> None:
    missing = [image.file for image in instances.images if image.file not in files.sizes]
    if missing:
        raise BadData(
            f"{len(missing)} of {len(instances.images)} images of instances_{split}2017.json are missing, "
            f"the first is {files.place(missing[0])}; fetch {split}2017.zip again"
        )


def _check_counts(counts: dict[str, int]) -> None:
    """Compare with COCO 2017's numbers, on which published results count; a set of another size has its own."""
    if counts["train"] != _COCO_2017["train"]:
        return
    for what, expected in _COCO_2017.items():
        if counts[what] != expected:
            raise BadData(
                f"{what}: {counts[what]} images, COCO 2017 has {expected}; give its own annotations_trainval2017.zip"
            )
