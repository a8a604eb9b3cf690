"""`sightline prepare convert`: images with labels from one form into another: folders, tar or TFRecord shards."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sightline.data.sources import Source, SourceOptions, open_source, recognised
from sightline.data.sources.folder import FolderSource
from sightline.data.sources.shards import ShardSource
from sightline.data.sources.table import TableSource
from sightline.data.writing.forms import Form, LabelledImages
from sightline.data.writing.pieces import alone_in, jobs_or_cores, write_pieces
from sightline.errors import BadData, UsageError
from sightline.parts import Split
from sightline.terminal.progress import Progress

_IMAGES_PER_SHARD = 1252  # makes 1024 training shards of ImageNet, as its TFRecords have
_SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True)
class ConvertOptions:
    """Write a data set in another form. Names, labels and the images' bytes stay what they are.

    So does the order of the samples, by class and name: a run sees the same batches whichever form it reads.
    A start after a kill resumes with what is missing; the files are the same for any number of jobs.
    """

    source: Path
    """Folder with the data: what --data.path would be."""
    out: Path
    """Folder to write into."""
    form: Form
    """folder: class folders; tar: WebDataset shards; tfrecord: TensorFlow's records, with labels from 1."""
    kind: str = "auto"
    """Kind of the source, as --data.source: auto, folder, table, tar, tfrecord."""
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
    if not source.is_dir():
        raise UsageError(f"{options.source} is not a folder; give --source what --data.path would be")
    if source == out or source in out.parents or out in source.parents:
        raise UsageError(f"--out {options.out} lies in --source {options.source} or around it; choose another --out")
    _refuse_boxes(options)
    jobs = jobs_or_cores(options.jobs)
    known = SourceOptions(first_label=options.first_label)
    with alone_in(options.out):
        sources: dict[Split, Source] = {
            split: open_source(options.kind, str(options.source), split, known) for split in _SPLITS
        }
        if sources["train"].classes != sources["val"].classes:
            raise BadData(f"{options.source}: its two splits number their classes differently; run `sightline check`")
        asked: dict[Split, int] = {"train": options.shards, "val": options.val_shards}
        shards = {split: asked[split] or -(-len(sources[split]) // _IMAGES_PER_SHARD) for split in _SPLITS}
        size = sum(map(_bytes_of, sources.values()))
        plan = LabelledImages(options.out, options.form, sources, shards, options.repair, size)
        return write_pieces(plan, jobs, progress)


def _refuse_boxes(options: ConvertOptions) -> None:
    path = str(options.source)
    if options.kind == "auto" and recognised("open_boxes", path):
        raise UsageError(
            f"{path} holds images with boxes; `prepare convert` writes images with a label. Training reads these as "
            f"they are; `sightline prepare coco --source {path} --out DIR` writes them as COCO's folders, with --form "
            "tfrecord as records"
        )


def _bytes_of(source: Source) -> int:
    """Return the bytes that the images of a split take."""
    if isinstance(source, ShardSource):
        return int(source.index.length.sum())
    if not isinstance(source, FolderSource | TableSource):
        return 0
    files = (source.root / source.name(index) for index in range(len(source)))
    return sum(os.stat(file).st_size for file in files if os.path.exists(file))  # a link may lead nowhere
