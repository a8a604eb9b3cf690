"""Annotated objects of all images of a split as arrays: what the sources of boxes read into, keep and hand out.

A COCO training set has 860,001 objects on 118,287 images; as arrays they take 60 MB, as Python objects gigabytes. What
was read of the files is kept as an index, by their sizes and times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from sightline.data.formats.coco import MAX_SIDE, Instances, read_instances, usable
from sightline.data.sources import Objects, index_files
from sightline.errors import BadData, first_of
from sightline.files.json_lists import BLOCK
from sightline.files.regular import regular

_FLOATS = ("boxes", "area")  # kept as their bits: an index holds whole numbers


@dataclass(frozen=True)
class Annotations:
    """One row per image, in the order of their ids; one row per object, in the order of its image."""

    image_ids: np.ndarray
    heights: np.ndarray
    widths: np.ndarray
    names: index_files.Names  # of the image files
    ends: np.ndarray  # of each image's objects
    boxes: np.ndarray  # x, y, width, height of one object after the other
    area: np.ndarray
    crowd: np.ndarray
    categories: np.ndarray  # of each object: the files' own id
    class_ids: np.ndarray  # ascending
    class_names: index_files.Names

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes in the order of their ids: the first one is label 1."""
        return tuple(name.decode() for name in self.class_names.all())

    @property
    def counts(self) -> np.ndarray:
        """Return how many objects each image has."""
        return np.diff(self.ends, prepend=0)

    def objects(self, row: int) -> Objects:
        """Return the annotations of one image."""
        start, end = int(self.ends[row - 1]) if row else 0, int(self.ends[row])
        return Objects(
            int(self.image_ids[row]),
            int(self.heights[row]),
            int(self.widths[row]),
            self.boxes[4 * start : 4 * end].reshape(-1, 4),
            np.searchsorted(self.class_ids, self.categories[start:end]).astype(np.int64) + 1,
            self.area[start:end],
            self.crowd[start:end].astype(bool),
        )

    def for_training(self) -> Annotations:
        """Leave out boxes that cannot be trained on, then images without a box."""
        of_image = np.repeat(np.arange(len(self)), self.counts)
        kept = usable(self.boxes.reshape(-1, 4), self.heights[of_image], self.widths[of_image])
        counts = np.bincount(of_image[kept], minlength=len(self))
        without = replace(
            self,
            boxes=self.boxes.reshape(-1, 4)[kept].ravel(),
            area=self.area[kept],
            crowd=self.crowd[kept],
            categories=self.categories[kept],
            ends=np.cumsum(counts),
        )
        return without.of_images(np.flatnonzero(counts))

    def of_images(self, rows: np.ndarray) -> Annotations:
        """Return those of some images, in this order."""
        starts = self.ends[rows] - self.counts[rows]
        counts = self.counts[rows]
        ends = np.cumsum(counts)
        chosen = np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts)
        names = self.names.all()
        return replace(
            self,
            image_ids=self.image_ids[rows],
            heights=self.heights[rows],
            widths=self.widths[rows],
            names=index_files.Names.of([names[row] for row in rows]),
            ends=ends,
            boxes=self.boxes.reshape(-1, 4)[chosen].ravel(),
            area=self.area[chosen],
            crowd=self.crowd[chosen],
            categories=self.categories[chosen],
        )

    def named_classes(self) -> list[tuple[int, str]]:
        """Return (id, name) of every class."""
        return list(zip(self.class_ids.tolist(), self.classes, strict=True))

    def of_classes(self, classes: Mapping[int, str]) -> Annotations:
        """Return them with these classes, which have all of ours among them."""
        ids = sorted(classes)
        names = index_files.Names.of([classes[number].encode() for number in ids])
        return replace(self, class_ids=np.asarray(ids, np.int64), class_names=names)

    def renumbered(self, classes: tuple[str, ...]) -> Annotations:
        """Return them with these classes, numbered from 1 on; they have all of ours among them."""
        numbers = {name: number for number, name in enumerate(classes, 1)}
        new = np.asarray([numbers[name] for name in self.classes], np.int64)
        categories = new[np.searchsorted(self.class_ids, self.categories)] if len(new) else self.categories
        return replace(self, categories=categories).of_classes({n: name for name, n in numbers.items()})

    def check_classes(self, other: Annotations, here: str, there: str) -> None:
        """Raise BadData unless both splits number their classes alike."""
        if self.classes != other.classes or not np.array_equal(self.class_ids, other.class_ids):
            mine, others = set(self.named_classes()), set(other.named_classes())
            differing = [f"{name} ({number})" for number, name in sorted(mine ^ others)]
            raise BadData(
                f"{here} has {len(mine)} categories, {there} {len(others)}, and they differ: "
                f"{first_of(differing)}; both splits need the same categories"
            )

    def content(self) -> str:
        """Return a digest of all of it."""
        digest = hashlib.sha256()
        for name, array in self.arrays().items():
            digest.update(f"{name} {len(array)}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def arrays(self) -> index_files.Arrays:
        """Return them as an index keeps them."""
        plain: index_files.Arrays = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, index_files.Names):
                plain |= value.arrays(each.name)
            else:
                plain[each.name] = np.ascontiguousarray(value).view(np.int64) if each.name in _FLOATS else value
        return plain

    @classmethod
    def loaded(cls, arrays: index_files.Arrays) -> Annotations:
        """Invert `arrays`; ValueError or KeyError where the parts do not fit each other."""
        names, class_names = (index_files.Names.loaded(arrays, key) for key in ("names", "class_names"))
        plain = {each.name: arrays[each.name] for each in fields(cls) if each.name not in ("names", "class_names")}
        plain |= {name: plain[name].view(np.float64) for name in _FLOATS}
        found = cls(names=names, class_names=class_names, **plain)
        objects = int(found.ends[-1]) if len(found) else 0
        rows = {len(found.heights), len(found.widths), len(found.ends), len(names)}
        per_object = {len(found.boxes) / 4, len(found.area), len(found.crowd), len(found.categories)}
        if rows != {len(found)} or per_object != {objects} or len(found.class_ids) != len(class_names):
            raise ValueError("columns of different lengths")
        if np.any(found.counts < 0) or not np.isin(found.categories, found.class_ids).all():
            raise ValueError("an object without an image or a class")
        sides = np.concatenate([found.heights, found.widths])
        if (
            not (np.isfinite(found.boxes).all() and np.isfinite(found.area).all())
            or np.any(sides < 0)
            or np.any(sides > MAX_SIDE)
        ):
            raise ValueError("a number that no file of boxes may hold")
        return found


def assembled(
    images: Mapping[int, tuple[int, int, bytes]],
    classes: Mapping[int, str],
    image_of: np.ndarray,
    boxes: np.ndarray,
    area: np.ndarray,
    crowd: np.ndarray,
    categories: np.ndarray,
) -> Annotations:
    """Build from images (id -> height, width, file name) and objects as they came, each with the id of its image."""
    ids = np.asarray(sorted(images), np.int64)
    rows = np.searchsorted(ids, image_of)
    order = np.argsort(rows, kind="stable")
    facts = [images[number] for number in ids.tolist()]
    class_ids = sorted(classes)
    return Annotations(
        image_ids=ids,
        heights=np.asarray([fact[0] for fact in facts], np.int64),
        widths=np.asarray([fact[1] for fact in facts], np.int64),
        names=index_files.Names.of([fact[2] for fact in facts]),
        ends=np.cumsum(np.bincount(rows, minlength=len(ids)), dtype=np.int64),
        boxes=boxes.reshape(-1, 4)[order].ravel(),
        area=area[order],
        crowd=crowd[order].astype(np.uint8),
        categories=categories[order],
        class_ids=np.asarray(class_ids, np.int64),
        class_names=index_files.Names.of([classes[number].encode() for number in class_ids]),
    )


def read_annotations(file: Path, root: Path) -> Annotations:
    """Read all of a json file, or what an earlier run kept if size and time are the same. `root` is the data path."""
    try:
        found = file.stat()
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}; unpack annotations_trainval2017.zip") from error
    key = index_files.digest("coco annotations", 2, file.name, found.st_size, found.st_mtime_ns)
    return kept_or_read(root, f"coco-{file.stem}", key, [found.st_mtime_ns], lambda: _read_json(file))


def kept_or_read(
    root: Path,
    name: str,
    key: str,
    changed_ns: Iterable[int],
    read: Callable[[], Annotations],
    are_anywhere: bool = False,
) -> Annotations:
    """Return what an earlier run kept at `root` under this key, or read it and keep it; files changed at these times.
    `are_anywhere`: a list of the user's names the images, which need not lie below the data."""

    def loaded(kept: index_files.Arrays) -> Annotations:
        found = Annotations.loaded(kept)
        if not are_anywhere:
            found.names.below()
        return found

    return index_files.kept_or_read(root, name, key, changed_ns, loaded, read)


def _read_json(file: Path) -> Annotations:
    return of_instances(read_instances(chunks_of(file), str(file)))


def of_instances(found: Instances) -> Annotations:
    """Return the lists of a file as arrays."""
    ids = np.asarray([image.id for image in found.images], np.int64)
    return assembled(
        # Names of files may hold bytes that are not UTF-8.
        {i.id: (i.height, i.width, i.file.encode("utf-8", "surrogateescape")) for i in found.images},
        found.categories,
        ids[found.rows],
        found.boxes,
        found.area,
        found.crowd,
        found.labels,
    )


def chunks_of(file: Path) -> Iterator[bytes]:
    """Yield the bytes of a file. Raises BadData if it cannot be read."""
    try:
        with open(file, "rb", opener=regular) as handle:
            progress = index_files.ScanProgress(str(file), max(1, file.stat().st_size >> 20), "MiB")
            while chunk := handle.read(BLOCK):
                yield chunk
                progress(handle.tell() >> 20)
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}") from error
