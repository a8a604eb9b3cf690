"""Images with labels in the three forms they are stored in: class folders, tar shards, TFRecord shards.

`LabelledImages` writes one piece of a split (some files, or one shard) and says what it wrote; `pieces.py` hands the
pieces out. `prepare imagenet` and `prepare convert` write through it.
"""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import numpy as np

from sightline.data.decode import read_header
from sightline.data.formats.records import encode_example, frame
from sightline.data.sources import Source
from sightline.data.sources.folder import FolderSource
from sightline.data.sources.layouts import IMAGES
from sightline.data.sources.shards import ShardSource
from sightline.data.sources.table import TableSource
from sightline.data.sources.tar import TarSource
from sightline.data.writing.pieces import Written, in_pieces
from sightline.data.writing.repair import repair
from sightline.errors import BadData, BadSample, UsageError
from sightline.files.archive import clean_name
from sightline.files.whole import write_text, written_whole
from sightline.parts import Split

Form = Literal["folder", "tar", "tfrecord"]

_Files = list[tuple[str, int]]  # (path, bytes)
_FILES_PER_PIECE = 250  # of the folder form: a second of work or so, which is all a kill costs
_SHUFFLE_SEED = 0  # the original's
_QUOTED = {"%": "%25", ".": "%2E", "/": "%2F"}
# Bytes on disk beside an image, at most: file systems round up to 4 kB, tar to 512 bytes, and every form has headers.
_BESIDE = {"folder": 4096, "tar": 3072, "tfrecord": 512}


class Encoded(NamedTuple):
    """One sample on its way from a source to a form; `file` is its name there, without the class."""

    file: str
    label: int
    data: bytes


@dataclass(frozen=True)
class LabelledImages:
    """Everything that decides the files: what is written, from where, in which form. Pickled to every process once."""

    out: Path
    form: Form
    sources: dict[Split, Source]
    shards: dict[Split, int]
    repair: bool
    data_bytes: int  # what the images take, all together
    _orders: dict[str, np.ndarray] = field(default_factory=dict, compare=False)

    def decided(self) -> dict[str, Any]:
        shards = None if self.form == "folder" else dict(self.shards)
        inputs = {split: source.fingerprint for split, source in self.sources.items()}
        return {"form": self.form, "shards": shards, "repair": self.repair, "inputs": inputs}

    def check(self) -> None:
        for source in self.sources.values():
            if source.is_multi_label:
                raise UsageError(
                    f"images with several labels each cannot be written as {self.form}; train on the table"
                )
            for name in source.classes:  # they become folders
                if clean_name(name, str(self.out)) != name or "/" in name or name.startswith("."):
                    raise BadData(f"class {name!r} cannot be the name of a folder; rename it")
        for source in self.sources.values():
            _check_names(source, self.form)

    def pieces(self) -> dict[str, list[int]]:
        """Return all TFRecord shards that were asked for, the last ones empty where there are few images, as the
        original writes them: readers take the number from the names. Tar shards name no number, so empty ones are left
        out."""
        found: dict[str, list[int]] = {}
        for split, source in self.sources.items():
            per_piece = self._per_piece(split)
            count = self.shards[split] if self.form == "tfrecord" else -(-len(source) // per_piece)
            found[split] = in_pieces(len(source), per_piece, count)
        return found

    def room(self) -> int:
        return self.data_bytes + _BESIDE[self.form] * sum(map(len, self.sources.values()))

    def write(self, part: str, number: int) -> Written:
        """Write one piece; count the images that were repaired and those too broken for it."""
        split: Split = "train" if part == "train" else "val"
        counts = {"repaired": 0, "unreadable": 0}
        return Written(_WRITERS[self.form](self, split, number, self._images(split, number, counts)), counts)

    def finish(self, written: list[Written]) -> dict[str, int]:
        counts: dict[str, int] = {split: len(source) for split, source in self.sources.items()}
        if self.repair:
            for what in ("repaired", "unreadable"):
                counts[what] = sum(piece.notes[what] for piece in written)
        if self.form != "folder":
            classes = next(iter(self.sources.values())).classes
            write_text(self.out, "classes.txt", "".join(f"{name}\n" for name in classes))
        else:
            os.sync()  # shards were brought to the disk one by one; a million files are so in one go
        return counts

    def _images(self, split: Split, number: int, counts: dict[str, int]) -> Iterator[Encoded]:
        """Yield the images of one piece in its order, repaired where that is asked for and possible."""
        per_piece = self._per_piece(split)
        source = self.sources[split]
        for index in self._order(split)[number * per_piece : (number + 1) * per_piece].tolist():
            sample = source.read(index)
            if not isinstance(sample.data, bytes):
                raise BadData(f"{source.name(index)} is made from numbers; only images on disk are converted")
            assert isinstance(sample.label, int), "no form has several labels; `check` refuses them"
            image = Encoded(stored_name(self.form, _clean_file(source, index)), sample.label, sample.data)
            if self.repair:
                try:
                    image = image._replace(data=repair(image.data, image.file))
                    counts["repaired"] += image.data is not sample.data
                except BadSample:  # kept as it is: folders can be fixed, and `check` reports which
                    counts["unreadable"] += 1
            yield image

    def _per_piece(self, split: Split) -> int:
        if self.form == "folder":
            return _FILES_PER_PIECE
        return max(1, -(-len(self.sources[split]) // self.shards[split]))

    def _order(self, split: Split) -> np.ndarray:
        """Return the order of the samples. Sources are sorted by class and name; shards, for readers that go from front
        to back, are not.

        Training is shuffled. The original shuffled what glob gave, in an order no machine repeats; where that was
        sorted, ours is its order. Validation is sorted by file name alone.
        """
        if split not in self._orders:
            source = self.sources[split]
            order = list(range(len(source)))
            if self.form != "folder" and split == "train":
                random.Random(_SHUFFLE_SEED).shuffle(order)
            elif self.form != "folder":
                order.sort(key=lambda index: file_of(source, index))
            self._orders[split] = np.asarray(order, np.int64)
        return self._orders[split]


# Names. A sample's file name has to survive every form, and the samples their order, which follows from the names.


def file_of(source: Source, index: int) -> str:
    """Return the file name of a sample, without its class: what it has in a class folder, or would have."""
    if isinstance(source, TarSource):
        file = unquote(source.index.names[index].rpartition("/")[2], errors="surrogateescape")
    elif isinstance(source, ShardSource):
        file = source.index.names[index] or f"{index:08d}"  # records without names are in their own order
    elif isinstance(source, FolderSource):
        file = source.name(index).partition("/")[2]
    else:
        file = source.name(index)  # in no class folder, or, of a source of another package, perhaps in one
        above, _, below = file.partition("/")
        if not isinstance(source, TableSource) and above in source.classes:
            file = below
    return file


def _clean_file(source: Source, index: int) -> str:
    """Return a name that is safe: records and keys come from strangers, and become paths."""
    return clean_name(file_of(source, index), source.name(index))


def stored_name(form: Form, file: str) -> str:
    """Return the name of a file in this form.

    A key of WebDataset ends at the first dot, so in tar others are %2E; its images are KEY.jpg, be they .JPEG before.
    """
    stem, dot, suffix = file.rpartition(".")
    is_image = dot + suffix.lower() in IMAGES
    if form == "tfrecord":
        return file
    if form == "folder":
        return file if is_image else f"{file}.jpg"
    key = "".join(_QUOTED.get(letter, letter) for letter in (stem if is_image else file))
    return f"{key}.{suffix.lower().replace('jpeg', 'jpg') if is_image else 'jpg'}"


def _check_names(source: Source, form: Form) -> None:
    """Raise BadData if two samples of a class would get one name, or change places with each other, in the new form."""
    before, before_file = "", ""
    for index in range(len(source)):
        file = _clean_file(source, index)
        name = stored_name(form, file)
        if form != "tfrecord" and any(part.startswith(".") for part in name.split("/")):
            raise BadData(f"{source.name(index)}: a file whose name starts with a dot is hidden; rename it")
        is_behind = _place(form, name) > _place(form, before) and _key(form, name) != _key(form, before)
        # A new class starts the names again; few places look like one, and there the labels decide.
        if index and not is_behind and source.read(index - 1).label == source.read(index).label:
            raise BadData(
                f"{source.name(index)}: as {form}, {before_file} and {file} of one class would have one name or "
                "change places, and a run would see other batches; rename one of them"
            )
        before, before_file = name, file


def _place(form: Form, name: str) -> list[bytes]:
    """Return what a source sorts by: folders level by level, records and keys by the bytes of their names."""
    return [os.fsencode(part) for part in (name.split("/") if form == "folder" else [name])]


def _key(form: Form, name: str) -> str:
    return name.partition(".")[0] if form == "tar" else name


def _write_folder(plan: LabelledImages, split: Split, number: int, images: Iterator[Encoded]) -> _Files:
    files = []
    for image in images:
        path = f"{split}/{plan.sources[split].classes[image.label]}/{image.file}"
        with written_whole(plan.out, path) as out:
            out.write(image.data)
        files.append((path, len(image.data)))
    return files


def _write_tar(plan: LabelledImages, split: Split, number: int, images: Iterator[Encoded]) -> _Files:
    path = f"{split}/{split}-{number:06d}.tar"
    with written_whole(plan.out, path, durable=True) as out:
        with tarfile.open(fileobj=out, mode="w") as tar:
            for image in images:
                key, dot, suffix = image.file.partition(".")
                for end, data in ((dot + suffix, image.data), (".cls", b"%d" % image.label)):
                    # Time, user and group stay 0: equal input, equal bytes.
                    info = tarfile.TarInfo(f"{plan.sources[split].classes[image.label]}/{key}{end}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        size = out.tell()
    return [(path, size)]


def _write_tfrecord(plan: LabelledImages, split: Split, number: int, images: Iterator[Encoded]) -> _Files:
    named = "validation" if split == "val" else split  # as its readers expect it
    path = f"{named}/{named}-{number:05d}-of-{plan.shards[split]:05d}"
    with written_whole(plan.out, path, durable=True) as out:
        for image in images:
            out.write(frame(_example(image, plan.sources[split].classes)))
        size = out.tell()
    return [(path, size)]


def _example(image: Encoded, classes: tuple[str, ...]) -> bytes:
    """Encode the original's features, to the letter: grey images too count as three channels of RGB, labels start at
    1."""
    try:
        header = read_header(image.data, image.file)
    except BadSample as error:
        raise BadSample(
            f"{classes[image.label]}/{image.file}",
            f"{error.reason} (a record needs its width and height; write --form folder, fix it there, then convert)",
        ) from error
    return encode_example(
        {
            "image/height": header.height,
            "image/width": header.width,
            "image/colorspace": b"RGB",
            "image/channels": 3,
            "image/class/label": image.label + 1,
            "image/class/synset": os.fsencode(classes[image.label]),
            "image/format": header.format.encode(),
            "image/filename": os.fsencode(image.file),
            "image/encoded": image.data,
        }
    )


_WRITERS: dict[Form, Callable[[LabelledImages, Split, int, Iterator[Encoded]], _Files]] = {
    "folder": _write_folder,
    "tar": _write_tar,
    "tfrecord": _write_tfrecord,
}
