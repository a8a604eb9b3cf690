"""Boxes and masks in tar shards of WebDataset's form: KEY.jpg with KEY.json that has `objects` (bbox and category), or
with a mask KEY.seg.png or KEY.mask.png. Shards lie and are split as those of tar.py; classes.txt names numbered
categories.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sightline.data.decode import MAX_BYTES
from sightline.data.formats.marked import Shape, WrongEntry
from sightline.data.sources import DEFAULT_OPTIONS, SourceOptions, index_files, packed, tar
from sightline.data.sources.metadata import boxes_of
from sightline.data.sources.packed import PackedBoxes, PackedMasks, What
from sightline.data.sources.shards import OpenFiles, Shard
from sightline.errors import BadData, BadSample
from sightline.files.positioned import read_at
from sightline.files.regular import regular
from sightline.files.typed_json import loads
from sightline.parts import Split

KIND = "tar_objects"
MASKS = ("seg", "mask", "masks", "segmentation", "annotation", "gt")  # before the ending of a mask's name
_MOST_JSON = 2**22  # bytes of one KEY.json
_LOOKED_AT = 8  # samples that tell whether a shard is of this kind
_COLUMNS = ("shard", "image", "image_bytes", "json", "json_bytes", "mask", "mask_bytes")


def detect(path: str) -> bool:
    """Return whether the first samples of a shard have boxes or a mask."""
    with suppress(BadData, OSError):
        root = Path(path)
        files = tar._shard_files(root, "train") or tar._shard_files(root, "val")
        for file in [each for each in files if each.name.endswith(".tar")][:1]:
            with open(file, "rb", opener=regular) as opened:
                for _, (members, _) in zip(range(_LOOKED_AT), _groups(opened, Shard.at(root, file)), strict=False):
                    if "mask" in members or ("json" in members and _objects(opened.fileno(), members["json"], "")):
                        return True
    return False


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> PackedBoxes:
    """Read the boxes of a split."""
    return packed.boxes_of_split(_of_split(path, options), path, split, options, "tar")


def open_masks(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> PackedMasks:
    """Read the masks of a split."""
    source = packed.masks_of_split(_of_split(path, options), path, split, options, "tar")
    names = source.packed.classes
    if names and len(names) >= len(source.classes) and not source.is_coloured and max(source.values) < len(names):
        source.classes = tuple(names[value] for value in source.values)
    return source


def _of_split(path: str, options: SourceOptions) -> packed.OfSplit:
    root = Path(path)

    def of_split(split: str) -> Members | None:
        if not tar._shard_files(root, split):
            return None
        return options.once((KIND, path, split), partial(Members.of, root, split))

    return of_split


def _groups(file: BinaryIO, shard: Shard) -> Iterator[tuple[dict[str, tar._Member], str]]:
    """Yield the image, json and mask of each key, and the key."""
    found: dict[str, tar._Member] = {}
    key = ""
    for member in tar._members(file, shard):
        if member.key != key:
            if "image" in found:
                yield found, key
            _refuse_apart(found, shard)
            found, key = {}, member.key
        before, _, ending = member.extension.rpartition(".")
        if member.extension == "json":
            found["json"] = member
        elif before in MASKS:
            found["mask"] = member
        elif not before and ending in tar.IMAGES:
            found.setdefault("image", member)
    if "image" in found:
        yield found, key
    _refuse_apart(found, shard)


def _refuse_apart(found: dict[str, tar._Member], shard: Shard) -> None:
    """Raise BadData for a json or mask without an image beside it: its objects would be lost without a word."""
    if found and "image" not in found:
        name = next(iter(found.values())).name
        raise BadData(
            f"{shard.name}: {name} has no image beside it ({', '.join(tar.IMAGES)}); pack the members of each key one "
            "after the other"
        )


def _objects(descriptor: int, member: tar._Member, where: str) -> Any:
    """Return what a KEY.json says of boxes; None if it says nothing."""
    if member.length > _MOST_JSON:
        raise BadData(f"{where} {member.name} has {member.length} bytes, more than the {_MOST_JSON} allowed for a json")
    return objects_in(read_at(descriptor, member.length, member.offset), f"{where} {member.name}")


def objects_in(data: bytes, where: str) -> Any:
    """Return the boxes of a json: `objects`, `annotations`, or `boxes` beside `labels`."""
    try:
        said = loads(data)
    except ValueError as error:
        raise BadData(f"{where} is not JSON: {error}; write it again") from None
    if not isinstance(said, dict):
        return None
    if "objects" in said or "annotations" in said:
        return said.get("objects", said.get("annotations"))
    return said if {"bbox", "boxes", "bboxes"} & said.keys() else None


class Members(packed.Packed):
    """The samples of some shards, in the order of their members."""

    kind, title = KIND, "tar shards"

    def __init__(self, root: Path, split: str, shards: Sequence[Shard], columns: np.ndarray, names: index_files.Names):
        self.root, self.split, self.shards = root, split, tuple(shards)
        self.columns, self.names = columns, names  # (n, 7): see _COLUMNS
        self.classes = tar._read_classes(root, list(shards))
        self._open = OpenFiles(self.shards)

    @classmethod
    def of(cls, root: Path, split: str) -> Members:
        """List the members of all shards, or take what an earlier run kept."""
        shards = tar._find_shards(root, split)  # type: ignore[arg-type]  # one of the three
        key = index_files.digest(KIND, 1, [(shard.name, shard.size, shard.changed_ns) for shard in shards])
        name = f"{KIND}-{split}"
        if kept := index_files.load(root, name, key):
            with suppress(ValueError, KeyError, IndexError):
                return cls(root, split, shards, _loaded(kept, shards), index_files.Names.loaded(kept, "names"))
        is_settled = index_files.is_settled(shard.changed_ns for shard in shards)
        columns, names = _listed(root, shards)
        if is_settled:
            index_files.save(root, name, key, {"columns": columns.ravel(), **names.arrays("names")})
        return cls(root, split, shards, columns, names)

    def read(self, row: int, what: What) -> bytes:
        at, length = self.columns[row, (1, 2) if what == "image" else (5, 6)].tolist()
        if not length:
            raise BadSample(self.names[row], "has no mask; add KEY.seg.png, or remove the sample")
        if length > MAX_BYTES:
            raise BadSample(self.names[row], f"{length} bytes, more than the {MAX_BYTES} allowed")
        return self._bytes(row, at, length)

    def _bytes(self, row: int, at: int, length: int) -> bytes:
        try:
            data = bytes(read_at(self._open.open(int(self.columns[row, 0])).descriptor, length, at))
        except OSError as error:
            raise BadSample(self.names[row], f"cannot be read: {error.strerror}") from error
        if len(data) < length:
            raise BadSample(self.names[row], f"member at byte {at}: the file ends in it; fetch the file again")
        return data

    def shapes(self, row: int) -> Iterable[Shape | None]:
        at, length = self.columns[row, 3:5].tolist()
        if not length:
            return ()
        if length > _MOST_JSON:
            raise WrongEntry(f"its json has {length} bytes, {_MOST_JSON} are allowed")
        said = objects_in(self._bytes(row, at, length), self.names[row])
        return boxes_of(packed.named(said, self.classes), self.names[row])


def _listed(root: Path, shards: Sequence[Shard]) -> tuple[np.ndarray, index_files.Names]:
    rows, names = array("q"), list[bytes]()
    progress = index_files.ScanProgress(str(root), len(shards), "files")
    for number, shard in enumerate(shards):
        progress(number)
        try:
            with open(shard.path, "rb", opener=regular) as opened:
                for found, _ in _groups(opened, shard):
                    places = [(each.offset, each.length) if each else (0, 0) for each in
                              (found["image"], found.get("json"), found.get("mask"))]  # fmt: skip
                    rows.extend((number, *(value for place in places for value in place)))
                    names.append(os.fsencode(f"{shard.name}:{found['image'].name}"))
        except OSError as error:
            raise BadData(f"{shard.path} cannot be read: {error.strerror}") from error
    if not names:
        raise BadData(f"{shards[0].path.parent} holds no images ({', '.join(tar.IMAGES)}) in its tar files")
    return np.asarray(rows, np.int64).reshape(-1, len(_COLUMNS)), index_files.Names.of(names)


def _loaded(kept: index_files.Arrays, shards: Sequence[Shard]) -> np.ndarray:
    """Return the columns of an index; ValueError where they cannot be those of these shards."""
    found = np.asarray(kept["columns"], np.int64).reshape(-1, len(_COLUMNS))
    if len(kept["names_ends"]) != len(found) or (found < 0).any() or (found[:, 0] >= len(shards)).any():
        raise ValueError("samples that are nowhere")
    sizes = np.asarray([shard.size for shard in shards], np.int64)[found[:, 0]]
    if any((found[:, at] > sizes - found[:, at + 1]).any() for at in (1, 3, 5)):
        raise ValueError("a member outside its shard")
    return found
