"""Images in class folders: PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg, PATH/train alone, or PATH/CLASS/*.jpg.
Other names of splits count if they differ in the split alone: PATH/img_train/CLASS/*.jpg, PATH/img_val/CLASS/*.jpg.

The list of a large data set is kept between runs and used while every folder is the one that was listed, unchanged. The
kept fingerprint does not see the size of a file rewritten in place, which is read as it is now.
"""

from __future__ import annotations

import hashlib
import operator
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sightline.data.contents import PathsBelow
from sightline.data.sources import (
    DEFAULT_OPTIONS,
    Sample,
    Source,
    SourceOptions,
    cvat,
    index_files,
    labelme,
    labelstudio,
    layouts,
    metadata,
    table,
    tfrecord,
    via,
)
from sightline.data.sources.index_files import Names
from sightline.data.sources.layouts import IMAGES, Place, Splits
from sightline.errors import BadData, first_of
from sightline.files.image_bytes import read_bytes
from sightline.files.our_folders import is_result
from sightline.parts import Split

# Below, listing again takes less than a second and sees every size; a million files on a slow disk take minutes.
MIN_KEPT = 20_000
# Folders of other layouts: where one of these lies beside images, `auto` does not take its neighbours for classes.
_FOREIGN = {"annotations", "images", "labels", "masks", "imagesets", "jpegimages", "imagestr", "labelstr"}
_SPLIT_NAMES = {name for names in layouts.NAMES.values() for name in names}
_INDEX_KEY = index_files.digest("folder", 5)
_name_of = operator.attrgetter("name")
_DEPTH = 3  # of folders within a class in which `detect` looks for a first image


def detect(path: str) -> bool:
    """Return whether PATH has class folders with images, or a train or val folder with folders in it. Also if its
    folders are called like splits but cannot be used as such: opening it says why."""
    root = Path(path)
    if layouts.is_description(path) or _below_splits(root):
        return find(path) is not None
    named = _named_splits(root)
    if find(path) is None and named is not None:
        return False
    if any(each.detect(path) for each in (table, cvat, labelme, labelstudio, metadata, via)) or _FOREIGN & {
        name.lower() for name in layouts.subfolders(root)
    }:
        return False
    return named == {} or not tfrecord.detect(path)  # records beside the images that they were made of


def find(path: str) -> Splits | None:
    """Return where the class folders of both splits are: below PATH/train and PATH/val, below folders such as
    PATH/img_train and PATH/img_val, or in PATH itself."""
    if layouts.is_description(path):
        found = layouts.read_description(path)
        return found if found.kind == "folder" else None
    root = Path(path)
    if splits := _below_splits(root):
        return splits
    named = _named_splits(root)
    if named != {}:
        return _usable(named) if named else None
    if not _may_be_classes(root) or sum(_holds_image(root / name) for name in layouts.subfolders(root)) < 2:
        return None
    return Splits("folder", Place(root), None)


def _below_splits(root: Path) -> Splits | None:
    """Return the splits below folders called train and val, or another of `layouts.NAMES`."""
    named = layouts.split_folders(root)
    test = layouts.test_folder(root)
    return _usable({**named, "test": test} if test else named)


def _usable(named: Mapping[Split, Path]) -> Splits | None:
    splits = {split: Place(at) for split, at in named.items() if split != "test" and _may_be_classes(at)}
    if "val" in named and "val" not in splits and layouts.split_in(named["val"].name)[0] != "test" and splits:
        splits["val"] = Place(named["val"])  # listing it says what is missing; an unsorted test set is of no use here
    if not splits:
        return None
    test, no_test = None, ""
    if "test" in named and _may_be_classes(named["test"]):
        test = Place(named["test"])
    elif "test" in named:
        no_test = f"{named['test']} has no class folders, so its images have no labels"
    return Splits("folder", splits.get("train"), splits.get("val"), test=test, no_test=no_test)


def _named_splits(root: Path) -> dict[Split, Path] | None:
    """Return the splits if all folders with images are called like one, e.g. img_train and img_val, which differ in
    that word alone, and train has class folders. {} if the folders may be classes: bullet_train and car. None if they
    are called like splits and cannot be used as such."""
    spoken = {name: layouts.split_in(name) for name in layouts.subfolders(root)}
    if len({split for split, _ in spoken.values() if split}) < 2:
        return None if _test_beside_classes(root, spoken) else {}  # without a look into a thousand class folders
    alike: dict[str, dict[str, Path]] = {}
    others = False
    for name, (split, rest) in spoken.items():
        if _holds_image(root / name):
            others = others or not split
            if split:
                alike.setdefault(rest, {}).setdefault(split, root / name)
    pairs = [splits for splits in alike.values() if "train" in splits and len(splits) > 1]
    if others:
        # training_certificate and test_certificate may be classes beside invoice; img_train and img_val are not.
        is_split = any("val" in splits or all(map(_may_be_classes, splits.values())) for splits in pairs)
        return None if is_split else {}
    if len({split for splits in alike.values() for split in splits}) < 2:
        return {}
    if len(alike) > 1 or not pairs or not _may_be_classes(pairs[0]["train"]):
        return None
    named: dict[Split, Path] = {"train": pairs[0]["train"], "val": pairs[0].get("val") or pairs[0]["test"]}
    return {**named, "test": pairs[0]["test"]} if "test" in pairs[0] else named


def _test_beside_classes(root: Path, names: Iterable[str]) -> bool:
    """Return whether a folder called test holds images and lies beside folders that do: it is no class of theirs."""
    tests = [name for name in names if name.lower() in layouts.TEST and _holds_image(root / name, depth=1)]
    return bool(tests) and any(_holds_image(root / name) for name in names if name not in tests)


def _may_be_classes(folder: Path) -> bool:
    """Return whether there are folders, and not only such as other layouts have (train/images and train/labels)."""
    return any(name.lower() not in _FOREIGN | _SPLIT_NAMES for name in layouts.each_subfolder(folder))


def _holds_image(folder: Path, depth: int = _DEPTH) -> bool:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return False
    if any(entry.name.lower().endswith(IMAGES) for entry in entries if not entry.name.startswith(".")):
        return True
    return depth > 1 and any(_holds_image(folder / name, depth - 1) for name in layouts.subfolders(folder))


class FolderSource(Source):
    """The file list is two arrays (one blob of names, one of offsets), not a million Python strings."""

    def __init__(self, root: Path, classes: tuple[str, ...], names: Names, labels: np.ndarray, sizes: np.ndarray):
        self.root = root
        self.classes = classes
        self._names = names
        self.labels = labels.astype(np.int32)
        digest = hashlib.sha256("\0".join(classes).encode("utf-8", "surrogateescape"))
        digest.update(self._names.blob)
        digest.update(np.concatenate([[0], self._names.ends]).astype(np.int64).tobytes())
        digest.update(sizes.astype(np.int64).tobytes())
        self.fingerprint = digest.hexdigest()
        self.files = PathsBelow(root, self._names)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return self._names[index]

    def read(self, index: int) -> Sample:
        name = self.name(index)
        return Sample(read_bytes(os.path.join(self.root, name), name), int(self.labels[index]))


def open_source(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> FolderSource:
    """List the images of a split. Classes are those of train, so both splits number them alike."""
    layout = find(path)
    if layout is None and _named_splits(Path(path)) is None:
        raise BadData(_names_of_splits(Path(path)))
    if layout is None:
        raise BadData(
            f"{path} holds no class folders with images, found there: {layouts.contents(Path(path))}; expected "
            f"PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg, or PATH/CLASS/*.jpg"
        )
    root = layout.place(split).images
    training = layout.train.images if layout.train else root
    wants_all = layout.train is not None and root == training

    def kept_of(place: Path) -> Kept | None:
        return options.once(("kept", place), lambda: _kept(path, place))

    def classes_of(place: Path) -> list[str]:
        kept = kept_of(place)
        return kept.classes if kept else options.once(("classes", place), lambda: class_folders(place))

    classes, own = classes_of(training), classes_of(root)
    if unknown := sorted(set(own) - set(classes)):
        raise BadData(f"{root} has class folders that {training} lacks: {first_of(unknown)}; remove or rename them")
    kept = kept_of(root)
    if kept and (not wants_all or len(np.unique(kept.listing.labels)) == len(own)):
        listing = kept.listing
    else:  # a part of one folder validates where there is no val split
        listing = options.once(("folder", root, wants_all), lambda: _listed(path, root, own, wants_all))
    if own != classes:
        numbers = {name: number for number, name in enumerate(classes)}
        listing = listing._replace(labels=np.asarray([numbers[name] for name in own])[listing.labels])
    return split_of(listing, root, tuple(classes), layout, split, options)


def _names_of_splits(root: Path) -> str:
    """Say why folders that are called like splits are not taken for classes, and what to do."""
    whole = os.path.abspath(root)
    return (
        f"{root} holds {layouts.contents(root)}; some are called like splits, not like classes. Expected class folders "
        f"in each of them, as in PATH/train/CLASS/*.jpg and PATH/val/CLASS/*.jpg. To choose the folders yourself, give "
        f"a .yaml file as --data.path with the lines `kind: folder`, `train: FOLDER` and `val: FOLDER`; if they are "
        f"classes, with `kind: folder` and `train: {whole}`"
    )


def split_of(
    listing: Listing, root: Path, classes: tuple[str, ...], layout: Splits, split: Split, options: SourceOptions
) -> FolderSource:
    """Return the source of a split: all that is listed, or a part of it if the split is drawn."""
    names, labels, sizes = listing[:3]
    held_out = None
    if layout.draws(split):
        validates = layouts.validating(names.each(), labels, options, split)
        held_out = names.take(np.flatnonzero(validates))
        chosen = np.flatnonzero(validates == (split == "val"))
        names, labels, sizes = names.take(chosen), labels[chosen], sizes[chosen]
    source = FolderSource(root, classes, names, labels, sizes)
    source.layout, source.held_out, source.ignored = layout, held_out, listing.ignored
    return source


class Listing(NamedTuple):
    """The images of a folder, and how many other files there are of each ending."""

    names: Names
    labels: np.ndarray
    sizes: np.ndarray
    ignored: Counter[str]


class Kept(NamedTuple):
    """What an earlier run listed, labelled by the class folders that it found."""

    listing: Listing
    classes: list[str]


def _listed(path: str, root: Path, classes: list[str], wants_all: bool) -> Listing:
    """List the images below `root`, all of whose class folders are given, and keep the list of many."""
    walk = Walk(root)
    listing = walk.list(classes, wants_all)
    if len(listing.names) >= MIN_KEPT and not walk.leads_nowhere and walk.is_settled():
        texts = {"classes": classes, "folders": walk.folders, "ignored": list(walk.ignored)}
        arrays: index_files.Arrays = {
            "labels": listing.labels.astype(np.int32),
            "sizes": listing.sizes.astype(np.int64),
            "states": np.asarray(walk.states, np.int64).ravel(),
            "ignored_counts": np.asarray(list(walk.ignored.values()), np.int64),
            **listing.names.arrays("names"),
        }
        for key, values in texts.items():
            arrays |= Names.of([os.fsencode(value) for value in values]).arrays(key)
        place, name = _place_of_index(path, root)
        index_files.save(place, name, _INDEX_KEY, arrays, beside=place != root)
    return listing


def _place_of_index(path: str, root: Path) -> tuple[Path, str]:
    """Return folder and name: beside the data, under the name of the split; a description may name folders anywhere."""
    return (Path(path), f"folder-{root.name}") if root.parent == Path(path) else (root, "folder")


def _kept(path: str, root: Path) -> Kept | None:
    """Return what an earlier run listed, if every folder below `root` is still in the state it had then."""
    kept = index_files.load(*_place_of_index(path, root), _INDEX_KEY)
    if kept is None:
        return None
    try:
        names, folders, found = (Names.loaded(kept, key).below() for key in ("names", "folders", "classes"))
        kinds = Names.loaded(kept, "ignored").all()
        labels, sizes, states = (kept[key] for key in ("labels", "sizes", "states"))
        classes = [os.fsdecode(name) for name in found.all()]
        is_whole = len(names) == len(labels) == len(sizes) > 0 and sorted(set(classes)) == classes
        # The root comes first, whose change time nobody sets: a list that came with the data is never believed.
        is_whole = is_whole and folders.all()[:1] == [b""]
        if not is_whole or labels.min() < 0 or labels.max() >= len(classes):
            return None
        above = os.fsencode(root)
        now = [_state(os.stat(b"%b/%b" % (above, folder))) for folder in folders.all()]
        if states.tolist() != [number for state in now for number in state] or class_folders(root) != classes:
            return None
        ignored = Counter(dict(zip(map(os.fsdecode, kinds), kept["ignored_counts"].tolist(), strict=True)))
    except (OSError, KeyError, ValueError):
        return None
    return Kept(Listing(names, labels, sizes, ignored), classes)


def _state(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return what shows that a folder was changed or replaced. The time of its content alone does not: tar, rsync and
    images of file systems set it. No number of its device, which may be another one after each mount."""
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino & (2**63 - 1), status.st_size


def class_folders(root: Path) -> list[str]:
    """Return the names of the class folders in a folder, sorted; BadData if there is none."""
    try:
        found = sorted(e.name for e in os.scandir(root) if layouts.is_data_folder(e))
    except OSError as error:
        raise BadData(f"{root} cannot be read: {error.strerror}; make it readable or give another path") from error
    if not found:
        raise BadData(f"{root} holds no class folders; expected {root}/CLASS/*.jpg")
    return found


def inner_classes(root: Path, classes: Sequence[str]) -> list[str]:
    """Return the folders that every class folder has, where all have the same ones and no image beside them: these may
    be the classes. One alone, as CLASS/images, is none."""
    inner: list[str] = []
    for name in classes:
        here = layouts.subfolders(root / name)
        if len(here) < 2 or here != (inner or here) or _holds_image(root / name, depth=1):
            return []
        inner = here
    return inner


class Walk:
    """Lists class folders and remembers each folder it saw and its state."""

    def __init__(self, root: Path):
        self.root = root
        self.folders = [""]  # the state of the root shows class folders that come and go
        self.states = [_state(root.stat())]
        self.ignored: Counter[str] = Counter()
        self.leads_nowhere = False  # a link beside the classes, which may become one while no folder changes
        self._above = os.fspath(root)
        self._sizes: list[int] = []  # in bytes, of all images so far

    def list(self, classes: Sequence[str], wants_all: bool) -> Listing:
        """List the images of these classes; with `wants_all` a class without one is an error."""
        self._note_beside(set(classes))
        progress = index_files.ScanProgress(str(self.root), len(classes), "class folders")
        names: list[bytes] = []
        counts: list[int] = []
        for label, name in enumerate(classes):
            progress(label)
            before, others = len(names), sum(self.ignored.values())
            names += map(os.fsencode, self._images(name, set()))
            counts.append(len(names) - before)
            if not counts[-1] and wants_all:
                raise BadData(
                    f"{self.root / name} holds no images ({', '.join(IMAGES)}); fill the class folder or remove it"
                    + (f"; it has {self._others_in(name)}" if sum(self.ignored.values()) > others else "")
                )
        if not names:
            raise BadData(f"{self.root} holds no images ({', '.join(IMAGES)}) in its class folders")
        labels = np.repeat(np.arange(len(classes)), counts)
        return Listing(Names.of(names), labels, np.asarray(self._sizes, np.int64), self.ignored)

    def is_settled(self) -> bool:
        """Return whether no folder has changed so lately that another change could leave it in the same state."""
        return index_files.is_settled(time for state in self.states for time in state[:2])

    def _others_in(self, name: str) -> str:
        """Say what a class folder without images holds."""
        alone = Walk(self.root)
        list(alone._images(name, set()))
        return layouts.counted(alone.ignored)

    def _note_beside(self, classes: set[str]) -> None:
        """Note images and folders of results beside the class folders among what is ignored."""
        for entry in os.scandir(self.root):
            if entry.name in classes or entry.name.startswith("."):
                continue
            if layouts.is_folder(entry):
                if self._is_result(entry, entry.name):  # it becomes a class where images are put into it
                    self.folders.append(entry.name)
                    self.states.append(_state(os.stat(entry.path)))
            elif entry.is_symlink() and not os.path.exists(entry.path):
                self.leads_nowhere = True
            elif entry.name.lower().endswith(IMAGES):
                self.ignored[f"{layouts.suffix_of(entry.name)} outside class folders"] += 1

    def _images(self, relative: str, seen: set[tuple[int, int]]) -> Iterator[str]:
        """Yield relative paths of all images below, sorted, and note their sizes; a link back to a folder already seen
        is not followed. Millions of files come through here."""
        folder, sizes = f"{self._above}/{relative}", self._sizes
        try:
            status = os.stat(folder)  # before it is listed: a change meanwhile shows next time
            if not stat.S_ISDIR(status.st_mode) or (status.st_dev, status.st_ino) in seen:
                return
            with os.scandir(folder) as found:
                entries = sorted(found, key=_name_of)
        except OSError as error:
            if not os.path.isdir(folder):
                return
            raise BadData(f"{folder} cannot be read: {error.strerror}; make it readable or remove it") from error
        seen.add((status.st_dev, status.st_ino))
        self.folders.append(relative)
        self.states.append(_state(status))
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            if layouts.is_folder(entry):
                if not self._is_result(entry, path := f"{relative}/{name}"):
                    yield from self._images(path, seen)
            elif name.endswith(IMAGES) or name.lower().endswith(IMAGES):
                try:
                    sizes.append(entry.stat().st_size)
                except OSError:  # a link that leads nowhere is listed, and the bad-sample policy decides about it
                    sizes.append(0)
                yield f"{relative}/{name}"
            else:
                self.ignored[layouts.suffix_of(name)] += 1

    def _is_result(self, entry: os.DirEntry[str], path: str) -> bool:
        """Return whether a folder is a run or predictions, and note it among what is ignored."""
        found = is_result(entry.path)
        if found:
            self.ignored[f"folder of results ({path})"] += 1
        return found
