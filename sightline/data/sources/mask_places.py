"""Find images and their masks: in two folders, in one folder by an ending of the masks' names, or as VOC's lists say;
each also below train/, val/ and test/. Files are paired by their names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sightline.data.sources import metadata
from sightline.data.sources.box_images import Listing, kind_described, list_files
from sightline.data.sources.layouts import (
    IMAGES,
    NAMES,
    SPLITS,
    TEST,
    Place,
    Splits,
    read_description,
    split_folders,
    subfolders,
    test_folder,
    with_labels_beside,
)
from sightline.data.volumes.layouts import IMAGE_FOLDERS, LABEL_ENDS, LABEL_FOLDERS
from sightline.errors import BadData, UsageError
from sightline.files.regular import is_file, regular
from sightline.parts import Split

# In lower case, the preferred first.
_IMAGES_IN = ("jpegimages", *IMAGE_FOLDERS, "leftimg8bit", "photos", "inputs", "input", "originals", "rgb")
_MASKS_IN = (
    *("segmentationclasspng", "segmentationclass", *LABEL_FOLDERS, "annotations", "annotation", "annot"),
    *("gtfine", "ground_truth", "groundtruth", "gt", "targets", "target", "png_masks"),
)
_IMAGE_WORDS = ("im", "image", "images", "photo", "photos", "pic", "orig", "rgb", "input")  # in names of other folders
_MASK_WORDS = ("mask", "masks", "label", "labels", "seg", "annot", "gt", "ground", "truth", "target")
_OF_SOME = "segmentationclass"  # VOC has masks of some of its images only
_MASK_ENDS = (*LABEL_ENDS, "gt", "annotation")  # of X_mask.png
_IN_FOLDER = (*_MASK_ENDS, "l")  # of masks in a folder of their own: CamVid has X_L.png
_KNOWN = ("{}_gtFine_labelTrainIds", "{}_gtFine_labelIds")  # Cityscapes: several files for each image
_SEPARATORS = "_-. "
_LISTS = Path("ImageSets", "Segmentation")
_YEAR = re.compile(r"VOC\d+")
_MAX_LIST_BYTES = 2**28
_MOST_FOLDERS = 4  # of one kind that are looked into


def detect(path: str) -> bool:
    """Return whether PATH is a description of such data, or a folder with images and masks."""
    if kind_described(path):
        return kind_described(path) == "masks"
    try:
        return find(Path(path)) is not None
    except BadData:  # a folder that cannot be read
        return False


def layout_at(path: str, pattern: str = "") -> Splits:
    """Return where the splits lie; BadData if there are no images with masks."""
    if kind_described(path):
        return with_labels_beside(read_description(path))
    if found := find(Path(path), pattern):
        return found
    raise BadData(
        f"{path} has no images with masks; expected images/ and masks/, or X.jpg with X_mask.png in one folder (give "
        "other names with --data.mask-pattern); docs/reference/data_masks.md shows the layouts"
    )


def find(root: Path, pattern: str = "") -> Splits | None:
    """Return where the splits lie below a folder; None if it has no images with masks."""
    below = {split: _place(folder, pattern) for split, folder in {**split_folders(root), **_test(root)}.items()}
    in_splits = _layout({split: place for split, place in below.items() if place})
    if in_splits and in_splits.val:  # also if all images lie beside them once more
        return in_splits
    devkits = [kit / name for kit in (root, root / "VOCdevkit") for name in subfolders(kit) if _YEAR.fullmatch(name)]
    for top in (root, *devkits[:1]) if len(devkits) == 1 else (root,):
        if (place := _two_folders(top)) is None:
            continue
        if lists := _split_lists(top / _LISTS, place):
            return lists
        images, masks = ({**split_folders(each), **_test(each)} for each in (place.images, place.labels or top))
        return _layout({s: Place(images[s], masks[s]) for s in images if s in masks}) or Splits("masks", place, None)
    if found := _layout(_named_folders(root)) or in_splits:
        return found
    return Splits("masks", Place(root, root), None) if _has_pairs(root, pattern) else None


def _test(root: Path) -> dict[Split, Path]:
    folder = test_folder(root)
    return {"test": folder} if folder else {}


def _layout(places: Mapping[Split, Place]) -> Splits | None:
    """Return the layout of splits in folders; None without a train split, unless all else is there."""
    if "train" not in places:
        return None
    return Splits("masks", places["train"], places.get("val"), test=places.get("test"))


def _place(folder: Path, pattern: str) -> Place | None:
    """Return where the images and masks of a split lie."""
    return _two_folders(folder) or (Place(folder, folder) if _has_pairs(folder, pattern) else None)


def _two_folders(root: Path) -> Place | None:
    """Return the folders of images and of masks below a folder, of several the first by their names."""
    below = {name.lower(): root / name for name in reversed(subfolders(root))}
    images, masks = (
        [below[name] for name in names if name in below and _has_images(below[name])][:_MOST_FOLDERS]
        for names in (_IMAGES_IN, _MASKS_IN)
    )
    return Place(images[0], masks[0]) if images and masks else _alike(below)


def _alike(folders: Mapping[str, Path]) -> Place | None:
    """Return the folders of images and masks with other names, such as original_image and segmentation_image: one
    alone has a word for masks in its name, one alone of the others has a word for images or is the only one, and their
    files pair."""
    split_names = {*NAMES["train"], *NAMES["val"], *TEST}
    found = {name: folder for name, folder in folders.items() if name not in split_names and _has_images(folder)}
    masks = [folder for name, folder in found.items() if _has_word(name, _MASK_WORDS)]
    others = {name: folder for name, folder in found.items() if folder not in masks}
    images = [folder for name, folder in others.items() if _has_word(name, _IMAGE_WORDS)] or list(others.values())
    if [len(masks), len(images)] != [1, 1]:
        return None
    of_images, of_masks = (list(list_files(folder, IMAGES).files) for folder in (images[0], masks[0]))
    return Place(images[0], masks[0]) if paired(of_images, of_masks).masks else None


def _has_word(name: str, words: tuple[str, ...]) -> bool:
    """Return whether a part of a name begins with one of some words, or ends with a longer one, as ManualMask does."""
    long = tuple(word for word in words if len(word) > 3)
    return any(part.startswith(words) or part.endswith(long) for part in re.split(r"[\W\d_]+", name))


def _named_folders(root: Path) -> dict[Split, Place]:
    """Return the splits of folders beside each other: train/ and train_labels/, or train_images/ and train_masks/."""
    found: dict[Split, Place] = {}
    names = {name.lower(): root / name for name in reversed(subfolders(root))}
    splits: tuple[tuple[Split, tuple[str, ...]], ...] = (
        ("train", NAMES["train"]),
        ("val", NAMES["val"]),
        ("test", TEST),
    )
    for split, words in splits:
        for word in words:
            rest = {
                name.replace(word, "", 1).strip("_- "): folder
                for name, folder in names.items()
                if name.startswith(word) or name.endswith(word)
            }
            images = next((rest[each] for each in ("", *_IMAGES_IN) if each in rest), None)
            masks = next((rest[each] for each in _MASKS_IN if each in rest and _has_images(rest[each])), None)
            if images and masks:
                found.setdefault(split, Place(images, masks))
    return found


def _has_images(folder: Path) -> bool:
    return next(_image_files(folder), None) is not None


def _image_files(folder: Path) -> Iterator[str]:
    """Yield the names of images in a folder or below it, the nearest first, without listing all of a large one."""
    waiting = [folder]
    while waiting:
        here = waiting.pop(0)
        try:
            with os.scandir(here) as entries:
                yield from (e.name for e in entries if e.name.lower().endswith(IMAGES) and not e.name.startswith("."))
        except OSError:
            continue
        waiting += [here / name for name in subfolders(here)]


def _has_pairs(folder: Path, pattern: str) -> bool:
    """Return whether a folder has an image with its mask beside it."""
    if not os.path.isdir(folder):
        return False
    names = list(list_files(folder, IMAGES, deep=False).files)
    return bool(paired(names, None, pattern).masks)


def _split_lists(folder: Path, place: Place) -> Splits | None:
    """Return the splits that lists in ImageSets/Segmentation name; trainval alone is all of the data."""
    lists: dict[Split, Path] = {}
    for split in SPLITS:
        files = [folder / f"{name}.txt" for name in NAMES[split]]
        if file := next((file for file in files if is_file(file)), None):
            lists[split] = file
    if "train" not in lists and is_file(folder / "trainval.txt"):
        lists["train"] = folder / "trainval.txt"
    if "train" not in lists:
        return None
    found = {split: Place(place.images, file) for split, file in lists.items()}
    file = next((folder / f"{name}.txt" for name in TEST if is_file(folder / f"{name}.txt")), None)
    test = Place(place.images, file) if file else None
    layout = Splits("masks", found["train"], found.get("val"), test=test)
    if test and test != layout.val and not any(_mask_of(place, name) for name in _listed(test.labels or folder)):
        return replace(layout, test=None, no_test=f"none of the images that {file} names has a mask")
    return layout


def _mask_of(place: Place, name: str) -> bool:
    folder = place.labels or place.images
    return any(os.path.isfile(folder / f"{name}{suffix}") for suffix in (".png", ".tif", ".bmp"))


def _listed(file: Path) -> list[str]:
    """Return the names that a list has, sorted."""
    try:
        with open(file, "rb", opener=regular) as opened:
            text = opened.read(_MAX_LIST_BYTES).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}") from error
    return sorted({line.split()[0] for line in text.splitlines() if line.strip()})


@dataclass
class Paired:
    """Names of images with the names of their masks, and what is wrong: (kind, file, text)."""

    masks: dict[str, str] = field(default_factory=dict)  # by image
    alone: list[str] = field(default_factory=list)  # images without a mask
    problems: list[tuple[str, str, str]] = field(default_factory=list)


def paired(images: Sequence[str], masks: Sequence[str] | None, pattern: str = "") -> Paired:
    """Pair files by their names; without `masks` they are among the images, which only their names tell. `pattern` is
    the name of a mask without its ending, with {} for the name of its image, or the part of it that both share."""
    if masks is None:
        keys = {name: key for name in images if (key := _key(name, pattern, _MASK_ENDS)) not in (None, _stem(name))}
        images = [name for name in images if name not in keys]
    else:
        known = pattern or next((each for each in _KNOWN if any(_key(name, each) is not None for name in masks)), "")
        keys = {name: key for name in masks if (key := _key(name, known)) is not None}
    found = Paired()
    for folders in (True, False):  # by their paths, or by their names alone
        found = _matched(images, keys, folders)
        if found.masks or not any("/" in name for name in (*images, *keys)):
            break
    return found


def _matched(images: Sequence[str], keys: Mapping[str, str], with_folders: bool) -> Paired:
    def plain(stem: str) -> str:
        return stem if with_folders else os.path.basename(stem)

    found = Paired()
    by_stem: dict[str, list[str]] = {}
    for name in images:
        by_stem.setdefault(plain(_stem(name)), []).append(name)
    parts: dict[str, list[str]] | None = None
    of_image: dict[str, list[str]] = {}
    for mask, key in sorted(keys.items()):
        stem = plain(_stem(mask))
        there = by_stem.get(stem) or by_stem.get(plain(key))
        if there is None:
            parts = _parts(by_stem) if parts is None else parts
            there = parts.get(plain(key), [])
        if not there:
            found.problems.append(("mask without an image", mask, "no image has its name"))
        elif len(there) > 1:
            found.problems.append(("several images of one mask", mask, f"could be of {' and '.join(there[:3])}"))
        else:
            of_image.setdefault(there[0], []).append(mask)
    for name in images:
        masks = of_image.get(name, [])
        if len(masks) > 1:
            same = [mask for mask in masks if plain(_stem(mask)) == plain(_stem(name))]
            masks = same or masks
        if len(masks) > 1:
            text = f"{' and '.join(masks[:3])} could be its mask; say which with --data.mask-pattern"
            found.problems.append(("several masks of one image", name, text))
        elif masks:
            found.masks[name] = masks[0]
        elif name not in of_image:
            found.alone.append(name)
    return found


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _key(name: str, pattern: str, ends: Sequence[str] = _IN_FOLDER) -> str | None:
    """Return what a mask's name says of its image's: all but what a pattern adds, or but an ending such as _mask. None
    if it does not have the form of the pattern."""
    stem = _stem(name)
    if pattern:
        before, _, after = pattern.partition("{}")
        below, slash, last = stem.rpartition("/")
        if not (last.startswith(before) and last.endswith(after) and len(last) > len(before) + len(after)):
            return None
        return below + slash + last[len(before) : len(last) - len(after)]
    for end in ends:
        if len(stem) > len(end) + 1 and stem.lower().endswith(end) and stem[-len(end) - 1] in _SEPARATORS:
            return stem[: -len(end) - 1]
    return stem


def _parts(by_stem: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the images by the beginnings and ends of their names: 855 of 855_sat.jpg and of image_855.jpg."""
    found: dict[str, list[str]] = {}
    for stem, names in by_stem.items():
        below, slash, last = stem.rpartition("/")
        places = [at for at, letter in enumerate(last) if letter in _SEPARATORS]
        for part in {each for at in places for each in (last[:at], last[at + 1 :]) if each}:
            found.setdefault(below + slash + part, []).extend(names)
    return found


@dataclass(frozen=True)
class MaskFiles:
    """The images of a place with their masks, in the order of their names."""

    images: Path
    masks: Path
    name: str  # of the list, or of the folder of the images
    pairs: dict[str, str]  # mask of each image, both from their folders; "": none
    problems: list[tuple[str, str, str]]  # (kind, file, what is wrong)
    left_out: int  # images without a mask, where only some have one
    listings: tuple[Listing, Listing]  # of images and masks
    key: list[object]  # changes with any of the files
    changed_ns: list[int]

    @classmethod
    def at(cls, place: Place, pattern: str) -> MaskFiles:
        """List and pair the files of a place."""
        if pattern and pattern.count("{}") != 1:
            text = "expected the name of a mask without its ending, with one {}, e.g. {}_mask"
            raise UsageError(f"--data.mask-pattern '{pattern}': {text}")
        if named := metadata.labels_of(place):
            return cls._named(place, named)
        file = place.labels if place.labels and os.path.isfile(place.labels) else None
        folder = _masks_beside(file, place) if file else place.labels or place.images
        is_one = folder == place.images
        images = list_files(place.images, IMAGES, deep=not is_one)
        masks = images if is_one else list_files(folder, IMAGES)
        found = paired(list(images.files), None if is_one else list(masks.files), pattern)
        listed = _listed(file) if file else None
        problems, alone = found.problems, found.alone
        if listed is not None:
            stems = {os.path.splitext(name)[0]: name for name in images.files}
            wanted = {stems[name]: name for name in listed if name in stems}
            missing = [name for name in listed if name not in stems]
            problems = [each for each in problems if each[1] in wanted]
            problems += [("missing image", name, f"{file} names it, {place.images} lacks it") for name in missing]
            found.masks = {image: mask for image, mask in found.masks.items() if image in wanted}
            alone = [name for name in alone if name in wanted]
        left_out = len(alone) if listed is None and folder.name.lower().startswith(_OF_SOME) and found.masks else 0
        pairs = {**found.masks, **dict.fromkeys([] if left_out else alone, "")}
        listing = [images.key(), [] if is_one else masks.key(), listed or [], pattern]
        return cls(
            place.images,
            folder,
            file.stem if file else place.images.name,
            {name: pairs[name] for name in sorted(pairs)},
            problems,
            left_out,
            (images, masks),
            [os.path.relpath(place.images, folder), *listing],
            [*images.changed_ns(), *([] if is_one else masks.changed_ns())],
        )

    @classmethod
    def _named(cls, place: Place, file: Path) -> MaskFiles:
        """List the images and masks that a file names by their paths from its folder."""
        listing = list_files(file.parent, IMAGES)
        pairs: dict[str, str] = {}
        problems = []
        for image, mask in sorted(metadata.masks_of(file).items()):
            image, mask = (os.path.normpath(each.replace("\\", "/")) for each in (image, mask))
            if image not in listing.files:
                problems.append(("missing image", image, f"{file} names it, {file.parent} lacks it"))
                continue
            if mask not in listing.files:
                problems.append(("image without a mask", image, f"{file.parent} lacks its mask {mask}"))
            pairs[image] = mask if mask in listing.files else ""
        key = [listing.key(), sorted(pairs.items())]
        name = f"{file.parent.name}-{file.stem}"
        root = file.parent
        return cls(root, root, name, pairs, problems, 0, (listing, listing), key, listing.changed_ns())


def _masks_beside(file: Path, place: Place) -> Path:
    """Return the folder of the masks of VOC's lists."""
    found = _two_folders(file.parents[2])
    return found.labels if found and found.labels else place.images
