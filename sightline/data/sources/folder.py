"""Images in class folders: PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg, as ImageNet is unpacked.

The list of a large data set is kept between runs and used while no folder has changed. A file rewritten in place leaves
its folder's time as it was: it is read as it is now, but the kept fingerprint does not see its new size.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sightline.data.sources import DEFAULT_OPTIONS, Sample, Source, SourceOptions, index_files
from sightline.errors import BadData, BadSample
from sightline.parts import Split

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
# Below, listing again takes less than a second and sees every size; a million files on a slow disk take minutes.
MIN_KEPT = 20_000


def detect(path: str) -> bool:
    """Return whether PATH has a train or val folder with folders in it."""
    return any(entry.is_dir() for split in ("train", "val") for entry in Path(path, split).glob("[!.]*"))


class FolderSource(Source):
    """The file list is two arrays (one blob of names, one of offsets), not a million Python strings."""

    def __init__(self, root: Path, classes: tuple[str, ...], names: list[bytes], labels: list[int], sizes: list[int]):
        self.root = root
        self.classes = classes
        self._names = index_files.Names.of(names)
        self._labels = np.asarray(labels, dtype=np.int32)
        digest = hashlib.sha256("\0".join(classes).encode("utf-8", "surrogateescape"))
        digest.update(self._names.blob)
        digest.update(np.concatenate([[0], self._names.ends]).astype(np.int64).tobytes())
        digest.update(np.asarray(sizes, dtype=np.int64).tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        return self._names[index]

    def read(self, index: int) -> Sample:
        name = self.name(index)
        try:
            return Sample((self.root / name).read_bytes(), int(self._labels[index]))
        except OSError as error:
            raise BadSample(name, f"cannot be read: {error.strerror}") from error


def open_source(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> FolderSource:
    """List PATH/split. Classes are those of PATH/train, so both splits number them alike."""
    root = Path(path, split)
    if not root.is_dir():
        raise BadData(f"{root} does not exist; expected PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg")
    train = Path(path, "train")
    classes = _class_folders(train if train.is_dir() else root)
    unknown = sorted(set(_class_folders(root)) - set(classes))
    if unknown:
        raise BadData(f"{root} has class folders that {train} lacks: {', '.join(unknown[:5])}; remove or rename them")
    names, labels, sizes = _listed(Path(path), split, classes)
    return FolderSource(root, tuple(classes), names, labels, sizes)


Listing = tuple[list[bytes], list[int], list[int]]  # name, label, size of every image


def _listed(path: Path, split: Split, classes: list[str]) -> Listing:
    """Return the images of a split, from an earlier run where every folder below still has the time it had then."""
    key = index_files.digest("folder", 1, classes)
    kept = index_files.load(path, f"folder-{split}", key)
    if kept is not None:
        listing = _kept_listing(kept, path / split, len(classes))
        if listing is not None:
            return listing
    walk = Walk(path / split)
    names, labels, sizes = listing = walk.list(classes, is_training=split == "train")
    if len(names) >= MIN_KEPT and index_files.is_settled(walk.changed_ns):
        arrays: index_files.Arrays = {
            "labels": np.asarray(labels, np.int32),
            "sizes": np.asarray(sizes, np.int64),
            "changed_ns": np.asarray(walk.changed_ns, np.int64),
            **index_files.Names.of(names).arrays("names"),
            **index_files.Names.of([os.fsencode(folder) for folder in walk.folders]).arrays("folders"),
        }
        index_files.save(path, f"folder-{split}", key, arrays)
    return listing


def _kept_listing(kept: index_files.Arrays, root: Path, classes: int) -> Listing | None:
    try:
        names, folders = index_files.Names.loaded(kept, "names").all(), index_files.Names.loaded(kept, "folders").all()
        labels, sizes, changed_ns = (kept[key].tolist() for key in ("labels", "sizes", "changed_ns"))
        if not len(names) == len(labels) == len(sizes) or not set(labels) <= set(range(classes)):
            return None
        now = [os.stat(os.path.join(os.fsencode(root), folder)).st_mtime_ns for folder in folders]
    except (OSError, KeyError, ValueError):
        return None
    return (names, labels, sizes) if now == changed_ns else None


def _class_folders(root: Path) -> list[str]:
    found = sorted(e.name for e in os.scandir(root) if _is_folder(e) and not e.name.startswith("."))
    if not found:
        raise BadData(f"{root} holds no class folders; expected {root}/CLASS/*.jpg")
    return found


class Walk:
    """Lists class folders and remembers each folder it saw with the time of its last change."""

    def __init__(self, root: Path):
        self.root = root
        self.folders = [""]  # the time of the root shows class folders that come and go
        self.changed_ns = [root.stat().st_mtime_ns]

    def list(self, classes: list[str], is_training: bool) -> Listing:
        names: list[bytes] = []
        labels: list[int] = []
        sizes: list[int] = []
        progress = index_files.ScanProgress(str(self.root), len(classes), "class folders")
        for label, name in enumerate(classes):
            progress(label)
            before = len(names)
            for file_name, size in self.images(name, set()):
                names.append(os.fsencode(file_name))
                labels.append(label)
                sizes.append(size)
            if len(names) == before and is_training:
                raise BadData(
                    f"{self.root / name} holds no images ({', '.join(SUFFIXES)}); fill the class folder or remove it"
                )
        if not names:
            raise BadData(f"{self.root} holds no images ({', '.join(SUFFIXES)}) in its class folders")
        return names, labels, sizes

    def images(self, relative: str, seen: set[str]) -> Iterator[tuple[str, int]]:
        """Yield (relative path, size) of all images below, sorted; a link back to a folder already seen is not
        followed."""
        folder = self.root / relative
        real = os.path.realpath(folder)
        if real in seen or not folder.is_dir():
            return
        seen.add(real)
        self.folders.append(relative)
        self.changed_ns.append(folder.stat().st_mtime_ns)  # before it is listed: a change meanwhile shows next time
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            if entry.name.startswith("."):
                continue
            path = f"{relative}/{entry.name}"
            if _is_folder(entry):
                yield from self.images(path, seen)
            elif entry.name.lower().endswith(SUFFIXES):
                yield path, _size(entry)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _size(entry: os.DirEntry[str]) -> int:
    """Return 0 for a link that leads nowhere: it is listed, and the bad-sample policy decides about it."""
    try:
        return entry.stat().st_size
    except OSError:
        return 0
