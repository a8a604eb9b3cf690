"""The three forms that pictures with labels are stored in: class folders, tar shards, TFRecord shards.

Each writes one piece of a split (some files, or one shard) and says what it wrote; `_pieces.py` hands the pieces out.
"""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote

import numpy as np

from sightline.data.decode import read_header
from sightline.data.formats.records import encode_example, frame
from sightline.data.sources import Source
from sightline.data.sources.folder import SUFFIXES
from sightline.data.sources.shards import ShardSource
from sightline.data.sources.tar import TarSource
from sightline.data.writing.pieces import Written
from sightline.data.writing.repair import repair
from sightline.errors import BadData, BadSample
from sightline.files.archive import clean_name
from sightline.files.whole import folder_below, written_whole
from sightline.parts import Split

Form = Literal["folder", "tar", "tfrecord"]

_FILES_PER_PIECE = 250  # of the folder form: a second of work or so, which is all a kill costs
_SHUFFLE_SEED = 0  # the original's
_QUOTED = {"%": "%25", ".": "%2E", "/": "%2F"}


class Picture(NamedTuple):
    """One sample on its way from a source to a form; `file` is its name there, without the class."""

    file: str
    label: int
    data: bytes


@dataclass(frozen=True)
class Plan:
    """Everything that decides the files: what is written, from where, in which form. Pickled to every process once."""

    out: Path
    form: Form
    sources: dict[Split, Source]
    shards: dict[Split, int]
    repair: bool
    _orders: dict[Split, np.ndarray] = field(default_factory=dict, compare=False)

    def pieces(self, split: Split) -> int:
        """How many pieces a split has: hundreds of files, or shards.

        TFRecord has all shards that were asked for, the last ones empty where there are few pictures, as the original
        writes them: readers take the number from the names. Tar shards name no number, so empty ones are left out.
        """
        count = len(self.sources[split])
        return self.shards[split] if self.form == "tfrecord" else -(-count // self._per_piece(split))

    def count(self, split: Split, number: int) -> int:
        """How many pictures a piece has."""
        per_piece = self._per_piece(split)
        return max(0, min(per_piece, len(self.sources[split]) - number * per_piece))

    def pictures(self, split: Split, number: int) -> Iterator[Picture]:
        """The pictures of one piece, in its order."""
        per_piece = self._per_piece(split)
        source = self.sources[split]
        for index in self._order(split)[number * per_piece : (number + 1) * per_piece]:
            sample = source.read(int(index))
            if not isinstance(sample.data, bytes):
                raise BadData(f"{source.name(int(index))} is made from numbers; only pictures on disk are converted")
            yield Picture(stored_name(self.form, _clean_file(source, int(index))), sample.label, sample.data)

    def _per_piece(self, split: Split) -> int:
        if self.form == "folder":
            return _FILES_PER_PIECE
        return max(1, -(-len(self.sources[split]) // self.shards[split]))

    def _order(self, split: Split) -> np.ndarray:
        """Sources are sorted by class and name; shards, for readers that go from front to back, are not.

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
            self._orders[split] = np.asarray(order)
        return self._orders[split]


def write_piece(plan: Plan, split: Split, number: int) -> Written:
    """Writes one piece, and counts the pictures that were repaired and those too broken for it."""
    counts = {"repaired": 0, "unreadable": 0}

    def mended() -> Iterator[Picture]:
        for picture in plan.pictures(split, number):
            if plan.repair:
                try:
                    data = repair(picture.data, picture.file)
                except BadSample:  # kept as it is: folders can be mended, and `check` tells which
                    counts["unreadable"] += 1
                else:
                    counts["repaired"] += data is not picture.data
                    picture = picture._replace(data=data)
            yield picture

    files = _WRITERS[plan.form](plan, split, number, mended())
    return Written(files, counts)


# Names. A sample's file name has to survive every form, and the samples their order, which follows from the names.


def file_of(source: Source, index: int) -> str:
    """The file name of a sample, without its class: what it has in a class folder, or would have."""
    if isinstance(source, TarSource):
        file = unquote(source.index.names[index].rpartition("/")[2], errors="surrogateescape")
    elif isinstance(source, ShardSource):
        file = source.index.names[index] or f"{index:08d}"  # records without names are in their own order
    else:
        file = source.name(index).partition("/")[2]
    return file


def _clean_file(source: Source, index: int) -> str:
    """Records and keys come from strangers, and become paths."""
    return clean_name(file_of(source, index), source.name(index))


def stored_name(form: Form, file: str) -> str:
    """The name of a file in this form.

    A key of WebDataset ends at the first dot, so in tar others are %2E; its pictures are KEY.jpg, be they .JPEG before.
    """
    stem, dot, suffix = file.rpartition(".")
    is_picture = dot + suffix.lower() in SUFFIXES
    if form == "tfrecord":
        return file
    if form == "folder":
        return file if is_picture else f"{file}.jpg"
    key = "".join(_QUOTED.get(letter, letter) for letter in (stem if is_picture else file))
    return f"{key}.{suffix.lower().replace('jpeg', 'jpg') if is_picture else 'jpg'}"


def check_names(plan: Plan, split: Split) -> None:
    """BadData if two samples of a class would get one name, or change places with each other, in the new form."""
    source = plan.sources[split]
    before, before_file = "", ""
    for index in range(len(source)):
        file = _clean_file(source, index)
        name = stored_name(plan.form, file)
        if plan.form != "tfrecord" and any(part.startswith(".") for part in name.split("/")):
            raise BadData(f"{source.name(index)}: a file whose name starts with a dot is hidden; rename it")
        is_behind = _place(plan.form, name) > _place(plan.form, before) and _key(plan.form, name) != _key(
            plan.form, before
        )
        # A new class begins anew; few places look like one, and there the labels decide.
        if index and not is_behind and source.read(index - 1).label == source.read(index).label:
            raise BadData(
                f"{source.name(index)}: as {plan.form}, {before_file} and {file} of one class would have one name or "
                "change places, and a run would see other batches; rename one of them"
            )
        before, before_file = name, file


def _place(form: Form, name: str) -> list[bytes]:
    """What a source sorts by: folders level by level, records and keys by the bytes of their names."""
    return [os.fsencode(part) for part in (name.split("/") if form == "folder" else [name])]


def _key(form: Form, name: str) -> str:
    return name.partition(".")[0] if form == "tar" else name


def room_for(form: Form, pictures: int, data_bytes: int) -> int:
    """Bytes on disk, at most: file systems round up to 4 kB, tar to 512 bytes, and every form has headers."""
    return data_bytes + pictures * {"folder": 4096, "tar": 3072, "tfrecord": 512}[form]


def split_folder(form: Form, split: Split) -> str:
    """The folder of a split, as each form's readers expect it."""
    return "validation" if form == "tfrecord" and split == "val" else split


def _write_folder(plan: Plan, split: Split, number: int, pictures: Iterator[Picture]) -> list[tuple[str, int]]:
    files = []
    for picture in pictures:
        path = f"{split}/{plan.sources[split].classes[picture.label]}/{picture.file}"
        with folder_below(plan.out, path) as (folder, name), written_whole(folder, name, path) as out:
            out.write(picture.data)
        files.append((path, len(picture.data)))
    return files


def _write_tar(plan: Plan, split: Split, number: int, pictures: Iterator[Picture]) -> list[tuple[str, int]]:
    path = f"{split}/{split}-{number:06d}.tar"
    with folder_below(plan.out, path) as (folder, name), written_whole(folder, name, path, durable=True) as out:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for picture in pictures:
                key, dot, suffix = picture.file.partition(".")
                for end, data in ((dot + suffix, picture.data), (".cls", b"%d" % picture.label)):
                    # Time, user and group stay 0: equal input, equal bytes.
                    info = tarfile.TarInfo(f"{plan.sources[split].classes[picture.label]}/{key}{end}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        size = out.tell()
    return [(path, size)]


def _write_tfrecord(plan: Plan, split: Split, number: int, pictures: Iterator[Picture]) -> list[tuple[str, int]]:
    named = split_folder("tfrecord", split)
    path = f"{named}/{named}-{number:05d}-of-{plan.shards[split]:05d}"
    with folder_below(plan.out, path) as (folder, name), written_whole(folder, name, path, durable=True) as out:
        for picture in pictures:
            out.write(frame(_example(picture, plan.sources[split].classes)))
        size = out.tell()
    return [(path, size)]


def _example(picture: Picture, classes: tuple[str, ...]) -> bytes:
    """The original's features, to the letter: grey pictures too count as three channels of RGB, labels start at 1."""
    try:
        header = read_header(picture.data, picture.file)
    except BadSample as error:
        raise BadSample(
            f"{classes[picture.label]}/{picture.file}",
            f"{error.reason} (a record needs its width and height; write --form folder, mend it there, then convert)",
        ) from error
    return encode_example(
        {
            "image/height": header.height,
            "image/width": header.width,
            "image/colorspace": b"RGB",
            "image/channels": 3,
            "image/class/label": picture.label + 1,
            "image/class/synset": os.fsencode(classes[picture.label]),
            "image/format": header.format.encode(),
            "image/filename": os.fsencode(picture.file),
            "image/encoded": picture.data,
        }
    )


_WRITERS: dict[Form, Callable[[Plan, Split, int, Iterator[Picture]], list[tuple[str, int]]]] = {
    "folder": _write_folder,
    "tar": _write_tar,
    "tfrecord": _write_tfrecord,
}
