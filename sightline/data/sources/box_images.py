"""Images in folders whose boxes lie in files: the part that coco.py, yolo.py and voc.py share.

They list files, draw a val split where there is none, and hand out images of which some may be missing.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sightline.data.contents import PathsBelow
from sightline.data.formats.image_headers import MAX_BYTES, first_header, read_header
from sightline.data.sources import BoxSource, Objects, SourceOptions, index_files
from sightline.data.sources.annotations import Annotations
from sightline.data.sources.layouts import (
    ALL,
    IMAGES,
    Place,
    Splits,
    is_description,
    is_folder,
    no_test_split,
    suffix_of,
    validating,
)
from sightline.errors import BadData, BadSample
from sightline.files.image_bytes import image_in, read_bytes
from sightline.files.our_folders import is_result
from sightline.files.plain_yaml import read_yaml
from sightline.files.regular import regular
from sightline.parts import Split

_PUBLISHED = re.compile(r"(train|val)20\d\d")  # folders of COCO's zips
_BESIDE_IMAGES = (".txt", ".xml", ".json", ".jsonl", ".csv", ".yaml", ".yml", ".names")  # no unreadable images
_FIRST_BYTES = 2**16
UNKNOWN_SIDE = 1  # of an image that cannot be read: so its boxes, as shares, lie inside it


class BoxImages(BoxSource):
    """Image files of one folder, and the arrays of their annotations."""

    def __init__(self, kind: str, place: Place, annotations: Annotations, options: SourceOptions):
        self.kind = kind
        self.is_upright = kind == "yolo"  # its tools turn images when they read them
        self.folder = place.images
        self.annotations = annotations
        self.classes = annotations.classes
        self.class_ids = tuple(annotations.class_ids.tolist())
        self.most_objects = int(annotations.counts.max(initial=0))
        sizes, self.ignored = _sizes(self.folder, annotations.names)
        rows = np.flatnonzero(sizes < 0)
        self.missing = tuple(annotations.names[row] for row in rows.tolist())
        if self.missing and not options.skips_missing:
            raise BadData(missing_images(kind, place, annotations, rows, options))
        self.room = np.maximum(sizes, 0)
        self.fingerprint = index_files.digest(kind, 1, annotations.content(), self.room.tobytes())
        self.files = PathsBelow(self.folder, annotations.names)

    def __len__(self) -> int:
        return len(self.annotations)

    def name(self, index: int) -> str:
        return f"{self.folder.name}/{self.annotations.names[index]}"

    def image(self, index: int) -> bytes:
        path = self.folder / self.annotations.names[index]
        if path.suffix == ".txt":
            raise BadSample(self.name(index), "a label without an image; add the image or remove the label")
        return read_bytes(path, self.name(index))

    def objects(self, index: int) -> Objects:
        return self.annotations.objects(index)


def open_split(kind: str, layout: Splits, split: Split, annotations: Annotations, options: SourceOptions) -> BoxImages:
    """Open a split of these data; `annotations` are those of its place, of which a drawn split takes a part."""
    place = layout.place(split)
    file = str(place.labels or place.images)
    held_out = None
    if layout.draws(split):
        names = annotations.names.all()
        is_val = drawn(names, options, file, split)
        held_out = index_files.Names.of([names[row] for row in np.flatnonzero(is_val)])
        annotations = annotations.of_images(np.flatnonzero(is_val == (split == "val")))
    source = BoxImages(kind, place, chosen(annotations, split, file, kind, options), options)
    source.layout, source.held_out = layout, held_out
    return source


def drawn(names: list[bytes], options: SourceOptions, file: str, split: Split) -> np.ndarray:
    """Return which of the images validate."""
    if len(names) < 2 and options.split != ALL:
        raise BadData(f"{file} has {len(names)} images; at least 2 are needed to train on some and validate on others")
    return validating(names, [0] * len(names), options, split)


def chosen(annotations: Annotations, split: Split, file: str, kind: str, options: SourceOptions) -> Annotations:
    """Return what a split takes of its file: training leaves out boxes by rule and images without one. A test split
    without any box has no labels."""
    if split == "test" and not annotations.counts.any():
        raise no_test_split(kind, f"none of the {len(annotations)} images of {file} has a box")
    if split != "train" or options.keeps_all:
        return annotations
    kept = annotations.for_training()
    if not len(kept):
        raise BadData(f"{file}: none of its {len(annotations)} images has a box inside it; nothing can be trained on")
    return kept


def kind_described(path: str) -> str:
    """Return the kind that a description names; "" if the path is not a description. UsageError if it is not YAML."""
    kind = read_yaml(Path(path)).get("kind") if is_description(path) else ""
    return kind if isinstance(kind, str) else ""


@dataclass
class Listing:
    """Files below a folder by their paths from it, sorted: size and time of the last change of each."""

    files: dict[str, tuple[int, int]] = field(default_factory=dict)

    def key(self) -> list[object]:
        """Return what changes with any of the files, and not if the folder moves."""
        return list(self.files.items())

    def changed_ns(self) -> list[int]:
        """Return when each file was last changed."""
        return [changed for _, changed in self.files.values()]


def list_files(root: Path, suffixes: tuple[str, ...], deep: bool = True) -> Listing:
    """List files with these endings. A link back to a folder already seen is not followed, hidden files, runs and
    predictions are left out; BadData for a folder that cannot be read."""
    found = Listing()
    for name, entry in sorted(_walk(root, deep)):
        if name.lower().endswith(suffixes):
            found.files[name] = _size_and_time(entry)
    return found


def _walk(root: Path, deep: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
    seen: set[str] = set()
    waiting = [""]
    while waiting:
        below = waiting.pop()
        real = os.path.realpath(root / below)
        if real in seen:
            continue
        seen.add(real)
        for entry in _entries(root / below):
            if is_folder(entry):
                waiting += [f"{below}{entry.name}/"] if deep and not is_result(entry.path) else []
            else:
                yield f"{below}{entry.name}", entry


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise BadData(f"{folder} cannot be read: {error.strerror}; allow reading it or give another folder") from error


def _size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Return zeros for a link that leads nowhere, which reading reports."""
    try:
        found = entry.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def sides_of(path: Path) -> tuple[int, int]:
    """Return (height, width) of an image the right way up, out of its first bytes if they tell.

    Both are UNKNOWN_SIDE if it cannot be read, which happens again when its pixels are needed.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            data = file.read(_FIRST_BYTES)
            if (header := first_header(data)) and header.format == "JPEG":
                return header.shape[:2]
            data += file.read(MAX_BYTES)
            data = image_in(data, path.name) if path.suffix.lower() == ".json" else data
            return read_header(data, path.name).shape[:2]
    except (OSError, BadSample):
        return UNKNOWN_SIDE, UNKNOWN_SIDE


def _sizes(folder: Path, names: index_files.Names) -> tuple[np.ndarray, Counter[str]]:
    """Return the bytes of every image, -1 if it is missing, and how many other files lie beside them, by ending."""
    listed: dict[bytes, dict[bytes, int]] = {}
    sizes = np.empty(len(names), np.int64)
    for row, name in enumerate(names.all()):
        below, _, last = name.rpartition(b"/")
        if below not in listed:
            listed[below] = _listing(os.path.join(os.fsencode(folder), below))
        sizes[row] = listed[below].get(last, -1)
    endings = (suffix_of(os.fsdecode(name)) for files in listed.values() for name in files if name[:1] != b".")
    return sizes, Counter(ending for ending in endings if ending not in (*IMAGES, *_BESIDE_IMAGES, "no ending"))


def _listing(folder: bytes) -> dict[bytes, int]:
    """Return name -> bytes of the files in a folder; 0 for a link that leads nowhere, which reading reports."""
    found = {}
    try:
        for entry in os.scandir(folder):
            try:
                found[entry.name] = entry.stat().st_size
            except OSError:
                found[entry.name] = 0
    except OSError:  # no such folder: all of its images are missing, which is said
        return {}
    return found


def missing_images(kind: str, place: Place, annotations: Annotations, rows: np.ndarray, options: SourceOptions) -> str:
    """Return the error of images that are listed and not there."""
    name = annotations.names[rows[0]]
    first = f"that of {name}" if name.endswith(".txt") else f"{name} (image {annotations.image_ids[rows[0]]})"
    folder = place.images
    repair = f"unpack {folder.name}.zip again"
    if not _PUBLISHED.fullmatch(folder.name):
        repair = (
            f"put them into {folder}, or name their folder in a .yaml file given as --data.path, with the lines "
            f"`kind: {kind}` and `train: {{images: FOLDER, labels: {os.path.abspath(place.labels or folder)}}}`"
        )
    skip = "" if options.keeps_all else ", or leave them out with --data.on-bad-sample skip"
    return (
        f"{folder} lacks {len(rows)} of the {len(annotations)} images of {place.labels}, the first one {first}; "
        f"{repair}{skip}; `sightline check` lists all of them"
    )
