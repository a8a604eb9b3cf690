"""Find the splits of a dataset, and choose the samples that validate if the data have no split of their own.

A dataset that needs more than one path is named by a description, a small YAML file given as --data.path. A run writes
what it found into data.yaml of its folder, and the names of the validation samples it chose into split.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.errors import BadData, UsageError, first_of
from sightline.files.our_folders import is_result
from sightline.files.plain_yaml import read_yaml, to_text
from sightline.files.regular import is_file
from sightline.files.typed_json import read_json, short
from sightline.parts import DataConfig, Split

if TYPE_CHECKING:
    from sightline.data.sources import Images, SourceOptions

DESCRIPTION = "data.yaml"  # in a run folder
SPLIT = "split.json"
ALL = "all"  # instead of a split file: every sample validates
SPLITS: tuple[Split, ...] = ("train", "val")
NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}  # of folders, by preference
TEST = ("test", "testing")  # names of a test split
IMAGES = DataConfig.file_suffixes
_SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training", "trainset", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "valset", "dev", "eval"), "val"),
    **dict.fromkeys(("test", "testing", "testset"), "test"),
}
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+")  # of a folder's name: train and Images of trainImages_2017
_KEYS = ("kind", "train", "val", "test", "classes")
_TEST_PLACES = {
    "folder": "a folder test or testing beside train, with class folders in it",
    "table": "test.csv with the columns of train.csv, or rows whose column split is test",
    "tar": "test/*.tar or test-000000.tar",
    "tfrecord": "test/test-00000-of-00008",
    "coco": "a json file with test in its name or in that of its folder, e.g. annotations/instances_test2017.json",
    "yolo": "an entry test in data.yaml, or test/images with test/labels",
    "voc": "ImageSets/Main/test.txt, or a folder test with xml files",
    "masks": "a folder test beside train, test_masks beside train_masks, or ImageSets/Segmentation/test.txt",
    "coco_tfrecord": "test-00000-of-00008.tfrecord",
    "parquet": "test-00000-of-00001.parquet, or a folder test",
    **dict.fromkeys(
        ("labelme", "via", "labelstudio", "metadata"),
        "a folder test beside train, or an export with test in its name",
    ),
    "cvat": "a folder test beside train, an export with test in its name, or a subset Test beside Train",
}
_SHOWN = 5
_MAX_SPLIT_BYTES = 2**30
_UNWRITABLE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # JSON can spell these; no file can be called so


@dataclass(frozen=True)
class Place:
    """The files of one split."""

    images: Path  # a folder
    labels: Path | None = None  # the file or folder of the labels; None: images lie in class folders


class NoTestSplit(UsageError):
    """The data have no test split, or none with labels."""


def no_test_split(kind: str, why: str = "") -> NoTestSplit:
    """Return the error of data of this kind without a test split: what was looked for, or why it is not one."""
    if kind not in _TEST_PLACES:
        return NoTestSplit("data that are drawn have no test split; leave out --split")
    looked = why or f"looked for {_TEST_PLACES[kind]}, or `test:` in a description"
    return NoTestSplit(
        f"the data have no test split ({looked}); to score other data whole, give their folder as --data.path, without "
        "--split"
    )


@dataclass(frozen=True)
class Splits:
    """The splits of a dataset. Without `val`, a part of `train` validates; without `train`, only evaluation works."""

    kind: str  # the source that reads it
    train: Place | None
    val: Place | None
    classes: tuple[str, ...] = ()  # where the files only number them
    test: Place | None = None  # that of `val` if the test split validates
    no_test: str = ""  # why what is called test is not a split

    def place(self, split: Split) -> Place:
        """Return the place of a split: that of train if a part of it validates. Raises BadData if there is none,
        NoTestSplit if that is missing."""
        if split == "test":
            if self.test is None:
                raise no_test_split(self.kind, self.no_test)
            return self.test
        place = self.train if split == "train" else self.val or self.train
        if place is None:
            raise BadData(f"{self.val.images if self.val else self.kind} is a val split without a train split")
        return place

    @property
    def is_drawn(self) -> bool:
        """True if the validation samples are chosen among those of `train`."""
        return self.val is None

    def draws(self, split: Split) -> bool:
        """Return whether a split is a drawn part of `train`."""
        return self.is_drawn and split != "test"

    @property
    def own_test(self) -> Place | None:
        """The test split, unless it validates."""
        return None if self.test == self.val != self.train else self.test

    @property
    def other_val(self) -> str:
        """The name of a val split that is not called so, e.g. test; "" if it is, or if one file lists both."""
        place = self.val
        if place is None or place == self.train:
            return ""
        if place.labels is None:
            return "" if place.images.name.lower() in NAMES["val"][:-1] else place.images.name
        # images/test, test/images, test.json or test.csv
        return next((name for name in (*place.labels.parts[-2:], place.images.name) if Path(name).stem == "test"), "")

    def as_values(self) -> dict[str, Any]:
        """Return what a description holds, with absolute paths."""
        values: dict[str, Any] = {"kind": self.kind}
        for split, place in (("train", self.train), ("val", self.val), ("test", self.own_test)):
            if place:
                paths = {"images": place.images, "labels": place.labels}
                values[split] = {name: os.path.abspath(path) for name, path in paths.items() if path}
        return values | ({"classes": list(self.classes)} if self.classes else {})


# A description, here of COCO's form. Paths count from the folder of the file; without `val` a part of train validates.
#     kind: coco
#     train: {images: photos, labels: train.json}
#     val: {images: photos, labels: val.json}


def is_description(path: str) -> bool:
    """Return whether a path names a YAML file."""
    return path.lower().endswith((".yaml", ".yml")) and os.path.isfile(path)


def read_description(path: str) -> Splits:
    """Read a description; UsageError if it is not one."""
    values = {"val" if key in NAMES["val"][:-1] else key: value for key, value in read_yaml(Path(path)).items()}
    example = "e.g. `kind: coco`, `train: {images: photos, labels: train.json}`; docs/reference/data.md"
    if unknown := [str(key) for key in values if key not in _KEYS]:
        raise UsageError(f"{path} has unknown entries {first_of(unknown)}; expected {', '.join(_KEYS)}, {example}")
    kind, classes = values.get("kind"), values.get("classes", [])
    if not isinstance(kind, str):
        raise UsageError(f"{path}: kind is {short(kind)}, expected the name of a source, {example}")
    if not isinstance(classes, list) or not all(isinstance(name, str) and name for name in classes):
        raise UsageError(f"{path}: classes is {short(classes)}, expected a list of names")
    splits: tuple[Split, ...] = (*SPLITS, "test")
    places = {split: _read_place(path, split, values[split]) for split in splits if split in values}
    if not places.keys() & {*SPLITS}:
        raise UsageError(f"{path} names no train and no val, {example}")
    return Splits(kind, places.get("train"), places.get("val"), tuple(classes), places.get("test"))


def with_labels_beside(layout: Splits) -> Splits:
    """Return the splits with labels in the folder of the images where the description names no other."""
    train, val, test = (
        place and Place(place.images, place.labels or place.images) for place in (layout.train, layout.val, layout.test)
    )
    return replace(layout, train=train, val=val, test=test)


def _read_place(file: str, split: Split, values: Any) -> Place:
    values = {"images": values} if isinstance(values, str) else values
    if not isinstance(values, dict) or "images" not in values or not set(values) <= {"images", "labels"}:
        raise UsageError(f"{file}: {split} is {short(values)}, expected a folder, or {{images: FOLDER, labels: PATH}}")
    paths = {}
    for name, text in values.items():
        if not isinstance(text, str) or not text or "\0" in text:
            raise UsageError(f"{file}: {name} of {split} is {short(text)}, expected a path")
        paths[name] = Path(file).parent / text
        if not (paths[name].is_file() or paths[name].is_dir()):
            raise UsageError(
                f"{file}: {name} of {split} is {paths[name]}, which does not exist; paths count from {file}"
            )
    return Place(paths["images"], paths.get("labels"))


def split_folders(root: Path) -> dict[Split, Path]:
    """Return the folders below `root` that are called like a split; of several the first in NAMES."""
    folders = {name.lower(): root / name for name in sorted(subfolders(root))}  # of Train and train the latter
    found: dict[Split, Path] = {}
    for split in SPLITS:
        if name := next((name for name in NAMES[split] if name in folders), ""):
            found[split] = folders[name]
    return found


def test_folder(root: Path) -> Path | None:
    """Return the folder below `root` that is called like a test split, also if it validates."""
    folders = {name.lower(): root / name for name in sorted(subfolders(root))}
    return next((folders[name] for name in TEST if name in folders), None)


def split_in(name: str) -> tuple[str, str]:
    """Return the split whose word is in a folder's name, and the name without it: train and `img_*` of img_train. Both
    are "" if there is no such word."""
    spoken = {_SPLIT_OF_WORD.get(word.lower()) for word in _WORD.findall(name)}
    split = next((split for split in ("train", "val", "test") if split in spoken), "")
    rest = _WORD.sub(lambda word: "*" if _SPLIT_OF_WORD.get(word[0].lower()) == split else word[0].lower(), name)
    return (split, rest) if split else ("", "")


def subfolders(root: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones; none if it cannot be read."""
    return sorted(each_subfolder(root))


def each_subfolder(root: Path) -> Iterator[str]:
    """Yield the same unsorted, looking into no more of them than are asked for: there may be 100,000."""
    with suppress(OSError), os.scandir(root) as entries:
        yield from (entry.name for entry in entries if is_data_folder(entry))


def has_subfolders(root: Path, *names: str) -> bool:
    """Return whether a folder has folders of all these names that may hold data."""
    return all(os.path.isdir(root / name) and not is_result(root / name) for name in names)


def is_data_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder that may hold data: not hidden, and not a run or predictions."""
    return not entry.name.startswith(".") and is_folder(entry) and not is_result(entry.path)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder; a link to itself is not one."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def contents(path: Path) -> str:
    """Say what a folder holds: `folders a, b and 3 more; 12 .txt files`."""
    try:
        entries = sorted((e for e in os.scandir(path) if not e.name.startswith(".")), key=lambda e: e.name)
    except NotADirectoryError:
        return f"a {path.suffix or 'plain'} file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    folders = [e.name for e in entries if is_folder(e)]
    kinds = Counter(suffix_of(e.name) for e in entries if not is_folder(e))
    shown = first_of(folders, _SHOWN)
    inside = Counter(suffix_of(name) for folder in folders[:_SHOWN] for name in _files_in(path / folder))
    shown += f" (with {counted(inside)} files)" if inside else ""
    parts = ([f"folders {shown}"] if folders else []) + ([f"files: {counted(kinds)}"] if kinds else [])
    return "; ".join(parts) or "nothing"


def _files_in(folder: Path) -> list[str]:
    try:
        return [e.name for e in os.scandir(folder) if not e.name.startswith(".") and not is_folder(e)]
    except OSError:
        return []


def suffix_of(name: str) -> str:
    """Return the ending of a file name in lower case; `name without an ending` has none."""
    return os.path.splitext(name)[1].lower() or "no ending"


def counted(kinds: Counter[str]) -> str:
    """Say how many files there are of each ending: `12 .heic, 3 .txt`."""
    shown = [f"{count} {kind}" for kind, count in kinds.most_common(_SHOWN)]
    return ", ".join(shown) + (" and others" if len(kinds) > _SHOWN else "")


def validating(
    names: Iterable[bytes], groups: Sequence[int] | np.ndarray, options: SourceOptions, split: Split
) -> np.ndarray:
    """Return which samples validate where the data have no val split: those a split file lists, or drawn ones. All do
    if `all` is given instead, or if the file knows none of them; to open `train` is then an error."""
    if options.split == ALL:
        if split == "train":
            raise UsageError(f"--data.split {ALL} leaves no samples to train on; it is for `evaluate` only")
        return np.ones(len(groups), bool)
    if options.split:
        chosen = kept_for_val(names, Path(options.split))
        if chosen.any():
            return chosen
        if split == "train":
            raise BadData(
                f"{options.split} lists none of the {len(groups)} samples: its run belongs to other data; give the "
                f"data of that run, or choose another --run.out"
            )
        return np.ones(len(groups), bool)
    chosen = chosen_for_val(names, groups, options.val_fraction)
    if not chosen.any():
        raise BadData(f"none of the {len(groups)} samples can validate: no class has two; add samples, or a val split")
    return chosen


def chosen_for_val(
    names: Iterable[bytes], groups: Sequence[int] | np.ndarray, fraction: float, seed: int = 0
) -> np.ndarray:
    """Return which samples validate: `fraction` of every group, at least one of a group of two or more, never all.

    The smallest hashes of the names are chosen, so neither the order nor other groups matter, and a new file moves at
    most one other file of its group.
    """
    if not len(groups):
        return np.zeros(0, bool)
    group_of = np.asarray(groups)  # not copied: a table may have a million rows
    digests = (hashlib.sha256(b"%d\0%b" % (seed, name)).digest() for name in names)
    hashes = np.fromiter((int.from_bytes(digest[:8], "big") for digest in digests), np.uint64, len(group_of))
    order = np.lexsort((hashes, group_of))
    del hashes
    chosen = np.zeros(len(group_of), bool)
    sorted_groups = group_of[order]
    starts = [0, *(np.flatnonzero(sorted_groups[1:] != sorted_groups[:-1]) + 1).tolist()]
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        count = min(max(1, round((end - start) * fraction)), end - start - 1)
        chosen[order[start : start + count]] = True
    return chosen


def kept_of(source: Images) -> dict[str, str]:
    """Return what a run keeps of its data: data.yaml says where they are, split.json which samples validate."""
    kept = {DESCRIPTION: to_text(source.layout.as_values())} if source.layout else {}
    if source.held_out is not None:
        names = [os.fsdecode(name) for name in source.held_out.all()]
        kept[SPLIT] = json.dumps({"val": names}, indent=0) + "\n"
    return kept


def kept_split(run: Path) -> str:
    """Return the split file of a run that has a checkpoint; "" if there is none. One that failed before decides
    nothing."""
    return str(run / SPLIT) if is_file(run / SPLIT) and any(run.glob("checkpoints/ckpt-*")) else ""


def kept_for_val(names: Iterable[bytes], file: Path) -> np.ndarray:
    """Return which samples a split file lists; BadData if it lists all of them."""
    try:
        content = read_json(file, _MAX_SPLIT_BYTES)
    except (OSError, ValueError) as error:
        raise BadData(f"{file} cannot be read: {error}; give split.json of a run, or leave out --data.split") from error
    listed = content.get("val") if isinstance(content, dict) else None
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise BadData(f'{file} is not a split; expected {{"val": [names of samples]}} as split.json of a run has it')
    wanted = {name.encode("utf-8", "surrogateescape") for name in listed if not _UNWRITABLE.search(name)}
    chosen = np.fromiter((name in wanted for name in names), bool)
    if len(chosen) and chosen.all():
        raise BadData(f"{file} lists all of the {len(chosen)} samples for validation; give the split of these data")
    return chosen
