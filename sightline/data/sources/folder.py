"""Pictures in class folders: PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg, as ImageNet is unpacked."""

import hashlib
import os
from pathlib import Path

import numpy as np

from sightline.data.sources import Sample, Source
from sightline.errors import BadData, BadSample
from sightline.parts import Split

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def detect(path: str) -> bool:
    """Whether PATH has a train or val folder with folders in it."""
    return any(entry.is_dir() for split in ("train", "val") for entry in Path(path, split).glob("*"))


class FolderSource(Source):
    """The file list is two arrays (one blob of names, one of offsets), not a million Python strings."""

    def __init__(self, root: Path, classes: tuple[str, ...], names: list[bytes], labels: list[int], sizes: list[int]):
        self.root = root
        self.classes = classes
        self._blob = b"".join(names)
        self._offsets = np.concatenate([[0], np.cumsum([len(name) for name in names])]).astype(np.int64)
        self._labels = np.asarray(labels, dtype=np.int32)
        digest = hashlib.sha256("\0".join(classes).encode("utf-8", "surrogateescape"))
        digest.update(self._blob)
        digest.update(self._offsets.tobytes())
        digest.update(np.asarray(sizes, dtype=np.int64).tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._labels)

    def name(self, index: int) -> str:
        return os.fsdecode(self._blob[self._offsets[index] : self._offsets[index + 1]])

    def read(self, index: int) -> Sample:
        name = self.name(index)
        try:
            return Sample((self.root / name).read_bytes(), int(self._labels[index]))
        except OSError as error:
            raise BadSample(name, f"cannot be read: {error.strerror}") from error


def open_source(path: str, split: Split) -> FolderSource:
    """Lists PATH/split. Classes are those of PATH/train, so both splits number them alike."""
    root = Path(path, split)
    if not root.is_dir():
        raise BadData(f"{root} does not exist; expected PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg")
    train = Path(path, "train")
    classes = _class_folders(train if train.is_dir() else root)
    unknown = sorted(set(_class_folders(root)) - set(classes))
    if unknown:
        raise BadData(f"{root} has class folders that {train} has not: {', '.join(unknown[:5])}; remove or rename them")
    names: list[bytes] = []
    labels: list[int] = []
    sizes: list[int] = []
    for label, name in enumerate(classes):
        before = len(names)
        for file_name, size in _pictures(root / name, name, set()):
            names.append(os.fsencode(file_name))
            labels.append(label)
            sizes.append(size)
        if len(names) == before and split == "train":
            raise BadData(
                f"{root / name} holds no pictures ({', '.join(SUFFIXES)}); fill the class folder or remove it"
            )
    if not names:
        raise BadData(f"{root} holds no pictures ({', '.join(SUFFIXES)}) in its class folders")
    return FolderSource(root, tuple(classes), names, labels, sizes)


def _class_folders(root: Path) -> list[str]:
    found = sorted(e.name for e in os.scandir(root) if _is_folder(e) and not e.name.startswith("."))
    if not found:
        raise BadData(f"{root} holds no class folders; expected {root}/CLASS/*.jpg")
    return found


def _pictures(folder: Path, relative: str, seen: set[str]) -> list[tuple[str, int]]:
    """(relative path, size) of all pictures below, sorted; a link back to a folder already seen is not followed."""
    real = os.path.realpath(folder)
    if real in seen or not folder.is_dir():
        return []
    seen.add(real)
    found = []
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        if entry.name.startswith("."):
            continue
        path = f"{relative}/{entry.name}"
        if _is_folder(entry):
            found += _pictures(folder / entry.name, path, seen)
        elif entry.name.lower().endswith(SUFFIXES):
            found.append((path, _size(entry)))
    return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _size(entry: os.DirEntry[str]) -> int:
    """0 for a link that leads nowhere: it is listed, and the bad-sample policy decides about it."""
    try:
        return entry.stat().st_size
    except OSError:
        return 0
