"""`sightline prepare convert`: images with labels, boxes or masks from any source into another form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sightline.data.sources import (
    Images,
    Source,
    SourceOptions,
    kinds,
    open_boxes,
    open_masks,
    open_source,
    recognised,
)
from sightline.data.sources.folder import FolderSource
from sightline.data.sources.shards import ShardSource
from sightline.data.sources.table import TableSource
from sightline.data.writing.forms import Form, LabelledImages
from sightline.data.writing.object_forms import ObjectForm, ObjectImages, bytes_of
from sightline.data.writing.pieces import alone_in, jobs_or_cores, write_pieces
from sightline.errors import BadData, UsageError
from sightline.parts import Split
from sightline.terminal.progress import Progress

_IMAGES_PER_SHARD = 1252  # makes 1024 training shards of ImageNet, as its TFRecords have
_SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True)
class ConvertOptions:
    """Write a data set in another form. Names, labels and the images' bytes stay what they are.

    Of labels, so does the order of the samples, by class and name: a run sees the same batches whichever form it reads.
    A start after a kill resumes with what is missing; the files are the same for any number of jobs.
    """

    source: Path
    """Folder with the data: what --data.path would be."""
    out: Path
    """Folder to write into."""
    form: Literal["folder", "tar", "tfrecord", "coco", "yolo", "parquet"]
    """folder: class folders; tar: WebDataset shards; tfrecord: TensorFlow's records, with labels from 1; coco, yolo:
    boxes (coco also masks) as their tools read them; parquet: files of Hugging Face's datasets."""
    kind: str = "auto"
    """Kind of the source, as --data.source."""
    of: Literal["auto", "labels", "boxes", "masks"] = "auto"
    """What to write; auto: labels as folder and tfrecord, boxes as coco and yolo, else the first that the data have."""
    first_label: int = 1
    """The smallest label in a source of TFRecords, as --data.first-label."""
    shards: int = 0
    """tar, tfrecord: training shards; 0 takes one per 1252 images."""
    val_shards: int = 0
    """tar, tfrecord: validation shards, as above."""
    repair: bool = False
    """Encode again, at quality 100, what is not an 8-bit grey or colour JPEG: PNG, CMYK and others."""
    jobs: int = 0
    """Processes; 0 takes one per core, at most 16."""

    def __post_init__(self) -> None:
        for name in ("shards", "val_shards"):
            if not 0 <= getattr(self, name) <= 99_999:
                raise UsageError(f"{name}={getattr(self, name)}: use 1 to 99999, or 0")


def prepare(options: ConvertOptions, progress: Progress) -> dict[str, int]:
    """Write what is missing and return counts; progress(what, done, total) is called as work proceeds."""
    source, out = options.source.resolve(), options.out.resolve()
    if not source.exists():
        raise UsageError(f"{options.source} is not a folder; give --source what --data.path would be")
    if source == out or source in out.parents or out in source.parents:
        raise UsageError(f"--out {options.out} lies in --source {options.source} or around it; choose another --out")
    jobs = jobs_or_cores(options.jobs)
    what = _what(options)
    with alone_in(options.out):
        is_labelled = what == "labels" and options.form in get_args(Form)
        plan = _labelled(options) if is_labelled else _with_objects(options, what)
        counts = write_pieces(plan, jobs, progress)
    is_drawn = plan.sources["val"].held_out is not None
    return {"val (drawn from train)" if is_drawn and name == "val" else name: n for name, n in counts.items()}


def _what(options: ConvertOptions) -> str:
    """Return what to write: labels, boxes or masks."""
    of_form = {"folder": "labels", "tfrecord": "labels", "yolo": "boxes"}.get(options.form, "")
    if options.of != "auto":
        if of_form and options.of != of_form:
            raise UsageError(f"--form {options.form} holds {of_form}, not {options.of}; choose tar, parquet or coco")
        return options.of
    path = str(options.source)
    if options.form == "folder" or options.form == "tfrecord":
        _refuse_boxes(options)
        return "labels"
    order = ("masks", "boxes") if options.kind == "masks" else ("boxes", "masks", "labels")
    for what in order[: 2 if options.form == "coco" else 3]:
        opener = _OPENERS[what]
        if options.kind != "auto" and options.kind not in kinds(opener.__name__):
            continue
        if options.kind == "auto" and not recognised(opener.__name__, path):
            continue
        try:
            opener(options.kind, path, "train", SourceOptions(keeps_all=True))
            return what
        except (BadData, UsageError):
            continue
    return of_form or ("boxes" if options.form == "coco" else "labels")


def _labelled(options: ConvertOptions) -> LabelledImages:
    known = SourceOptions(first_label=options.first_label, keeps_all=True)
    sources: dict[Split, Source] = {
        split: open_source(options.kind, str(options.source), split, known) for split in _SPLITS
    }
    _check_classes(options, sources)
    size = sum(map(_bytes_of, sources.values()))
    form: Form = options.form  # type: ignore[assignment]  # one of these
    return LabelledImages(options.out, form, sources, _shards(options, sources), options.repair, size)


def _with_objects(options: ConvertOptions, what: str) -> ObjectImages:
    if options.repair:
        raise UsageError(f"--repair is for labels as folder, tar or tfrecord; leave it out with --form {options.form}")
    known = SourceOptions(first_label=options.first_label, keeps_all=True)
    sources: dict[Split, Images] = {
        split: _OPENERS[what](options.kind, str(options.source), split, known) for split in _SPLITS
    }
    _check_classes(options, sources)
    size = sum(map(bytes_of, sources.values()))
    form: ObjectForm = options.form  # type: ignore[assignment]  # the others have gone another way
    return ObjectImages(options.out, form, sources, _shards(options, sources), size)


def _check_classes(options: ConvertOptions, sources: Mapping[Split, Images]) -> None:
    if sources["train"].classes != sources["val"].classes:
        raise BadData(f"{options.source}: its two splits number their classes differently; run `sightline check`")


def _shards(options: ConvertOptions, sources: Mapping[Split, Images]) -> dict[Split, int]:
    asked: dict[Split, int] = {"train": options.shards, "val": options.val_shards}
    return {split: asked[split] or -(-len(sources[split]) // _IMAGES_PER_SHARD) for split in _SPLITS}


def _refuse_boxes(options: ConvertOptions) -> None:
    path = str(options.source)
    if options.kind == "auto" and recognised("open_boxes", path) and not recognised("open_source", path):
        raise UsageError(
            f"{path} holds images with boxes, which --form {options.form} cannot hold; choose coco, yolo, tar, parquet"
        )


_OPENERS: dict[str, Any] = {"labels": open_source, "boxes": open_boxes, "masks": open_masks}


def _bytes_of(source: Source) -> int:
    """Return the bytes that the images of a split take."""
    if isinstance(source, ShardSource):
        return int(source.index.length.sum())
    if not isinstance(source, FolderSource | TableSource):
        return 0
    files = (source.root / source.name(index) for index in range(len(source)))
    return sum(os.stat(file).st_size for file in files if os.path.exists(file))  # a link may lead nowhere
