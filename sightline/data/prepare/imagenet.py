"""`sightline prepare imagenet`: the two ILSVRC 2012 archives become class folders, tar shards or TFRecord shards.

The training archive is a tar of one tar per class. Both levels are read in place: nothing is unpacked on the way.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sightline.data.decode import MAX_BYTES
from sightline.data.processes import over_processes
from sightline.data.sources import Sample, Source
from sightline.data.sources.index_files import Names
from sightline.data.writing.forms import Form, LabelledImages
from sightline.data.writing.pieces import alone_in, jobs_or_cores, write_pieces
from sightline.errors import BadData, BadSample, UsageError, first_of
from sightline.files.archive import BadArchive, Limits, Member, read_member, tar_members
from sightline.parts import Split
from sightline.terminal.progress import Progress

_SYNSET = re.compile(r"[A-Za-z0-9_-]+")
_IMAGE = re.compile(r"[^/.][^/]*\.(jpe?g|png)", re.IGNORECASE)
_CLASS_TARS = Limits(members=100_000, member_bytes=2**40)
_IMAGES = Limits(members=10_000_000, member_bytes=MAX_BYTES)
_MAX_LABELS_BYTES = 4 * 2**20  # 50,000 synsets take 500,000; each becomes 60 in memory


@dataclass(frozen=True)
class ImagenetOptions:
    """Prepare ImageNet for training, from the archives as they are downloaded.

    folder: train/SYNSET/*.JPEG and val/SYNSET/*.JPEG. tar: train/train-000000.tar, which WebDataset reads too.
    tfrecord: train/train-00000-of-01024 and validation/validation-00000-of-00128 with labels from 1.
    A start after a kill resumes with what is missing; the files are the same for any number of jobs.
    """

    train: Path
    """ILSVRC2012_img_train.tar: a tar with one tar per class."""
    val: Path
    """ILSVRC2012_img_val.tar."""
    labels: Path
    """synset_labels.txt: the class of every validation image, one a line, in the order of the file names."""
    out: Path
    """Folder to write into."""
    form: Form = "folder"
    """folder: class folders; tar: WebDataset shards; tfrecord: TensorFlow's records."""
    shards: int = 1024
    """tar, tfrecord: training shards, of equally many images."""
    val_shards: int = 128
    """tar, tfrecord: validation shards."""
    jobs: int = 0
    """Processes; 0 takes one per core, at most 16."""

    def __post_init__(self) -> None:
        for name in ("shards", "val_shards"):
            if not 1 <= getattr(self, name) <= 99_999:
                raise UsageError(f"{name}={getattr(self, name)}: use 1 to 99999")


class ArchivedImages(Source):
    """Images that lie in one tar file, or in tars inside of it, sorted by class and name."""

    def __init__(self, path: Path, classes: tuple[str, ...], found: list[tuple[int, str, int, int]]):
        """`found`: (label, name within the class, offset, size) of each."""
        found.sort()
        self.path = path
        self.classes = classes
        names = [f"{classes[label]}/{name}" for label, name, *_ in found]
        self._names = Names.of([os.fsencode(name) for name in names])
        self.labels = np.asarray([label for label, *_ in found], dtype=np.int32)
        self._places = np.asarray([row[2:] for row in found], dtype=np.int64).reshape(-1, 2)  # (images, offset|size)
        digest = hashlib.sha256("\0".join(classes).encode())
        for part in (self._names.blob, self._names.ends.tobytes(), self.labels.tobytes(), self._places.tobytes()):
            digest.update(part)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def data_bytes(self) -> int:
        """Return the bytes of all images."""
        return int(self._places[:, 1].sum())

    def name(self, index: int) -> str:
        return self._names[index]

    def read(self, index: int) -> Sample:
        offset, size = map(int, self._places[index])
        name = self.name(index)
        try:
            with self.path.open("rb") as file:
                return Sample(read_member(file, Member(name, offset, size), str(self.path)), int(self.labels[index]))
        except OSError as error:
            raise BadSample(name, f"{self.path} cannot be read: {error.strerror}") from error


def prepare(options: ImagenetOptions, progress: Progress) -> dict[str, int]:
    """Write what is missing and return counts; progress(what, done, total) is called as work proceeds."""
    for path in (options.train, options.val, options.labels):
        if not path.is_file():
            found = "not a file" if path.exists() else "not there"
            raise UsageError(f"{path} is {found}; give --train and --val the two archives, --labels the synset list")
    jobs = jobs_or_cores(options.jobs)
    with alone_in(options.out):
        train = _list_train(options.train, jobs, progress)
        val = _list_val(options.val, options.labels, train.classes)
        sources: dict[Split, Source] = {"train": train, "val": val}
        shards: dict[Split, int] = {"train": options.shards, "val": options.val_shards}
        size = train.data_bytes + val.data_bytes
        return write_pieces(LabelledImages(options.out, options.form, sources, shards, True, size), jobs, progress)


def _list_train(path: Path, jobs: int, progress: Progress) -> ArchivedImages:
    tars: dict[str, Member] = {}
    with path.open("rb") as file:
        for member in tar_members(file, str(path), _CLASS_TARS):
            synset, _, suffix = member.name.partition(".")
            if not _SYNSET.fullmatch(synset) or suffix != "tar":
                raise BadArchive(f"{path}: '{member.name}' is not a SYNSET.tar; give --train ILSVRC2012_img_train.tar")
            tars[synset] = member
    if not tars:
        raise BadArchive(f"{path}: holds nothing; give --train ILSVRC2012_img_train.tar")
    classes = tuple(sorted(tars))
    found: list[tuple[int, str, int, int]] = []
    with over_processes(min(jobs, len(classes)), path) as run:
        work = [(label, tars[synset]) for label, synset in enumerate(classes)]
        for done, some in enumerate(run(_list_class, work), start=1):
            found += some
            progress("listing classes", done, len(classes))
    return ArchivedImages(path, classes, found)


def _list_class(path: Path, work: tuple[int, Member]) -> list[tuple[int, str, int, int]]:
    label, tar = work
    archive = f"{path}: {tar.name}"
    with path.open("rb") as file:
        members = list(tar_members(file, archive, _IMAGES, tar.offset, tar.offset + tar.size))
    if not members:
        raise BadArchive(f"{archive}: holds no images; fetch it again")
    return [(label, _image_name(member, archive), member.offset, member.size) for member in members]


def _list_val(path: Path, labels: Path, classes: tuple[str, ...]) -> ArchivedImages:
    with path.open("rb") as file:
        members = sorted(tar_members(file, str(path), _IMAGES), key=lambda member: member.name)
    synsets = _read_labels(labels)
    if len(synsets) != len(members):
        raise BadData(
            f"{labels} has {len(synsets)} lines, {path} has {len(members)} images; expected one synset per image, "
            "in the order of the file names"
        )
    number = {synset: label for label, synset in enumerate(classes)}
    for line, synset in enumerate(synsets, start=1):
        if synset not in number:
            raise BadData(
                f"{labels}:{line}: {synset[:40]!r} is not one of the {len(classes)} training classes "
                f"({first_of(classes)}); give the synset list that belongs to these archives"
            )
    pairs = zip(members, synsets, strict=True)
    found = [(number[synset], _image_name(m, str(path)), m.offset, m.size) for m, synset in pairs]
    return ArchivedImages(path, classes, found)


def _read_labels(path: Path) -> list[str]:
    if path.stat().st_size > _MAX_LABELS_BYTES:
        raise BadData(f"{path} has {path.stat().st_size} bytes; a list of 50,000 synsets has 500,000")
    try:
        return path.read_text("utf-8").split()
    except ValueError as error:
        raise BadData(f"{path} is not text: {error}; give --labels synset_labels.txt") from error


def _image_name(member: Member, archive: str) -> str:
    if not _IMAGE.fullmatch(member.name):
        raise BadArchive(f"{archive}: '{member.name}' is not an image (*.JPEG); make the archive without it")
    return member.name
