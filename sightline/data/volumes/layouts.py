"""Data for segmentation as they lie on disk before `sightline prepare decathlon`: the Decathlon's layout, nnU-Net v2's,
two folders of images and labels, or a description file that names two folders. Reads names and dataset.json alone.

In two folders CASE.nii.gz goes with CASE.nii.gz or CASE_seg.nii.gz, CASE.jpg with CASE.png, and several channels
CASE_0000.nii.gz, CASE_0001.nii.gz, ... with CASE.nii.gz.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sightline.data.sources.layouts import (
    IMAGES,
    contents,
    counted,
    is_description,
    is_folder,
    read_description,
    subfolders,
    suffix_of,
)
from sightline.data.volumes.files import SUFFIXES, case_name, channel_files
from sightline.data.writing.pieces import NOTES
from sightline.errors import BadData, UsageError, first_of
from sightline.files.archive import clean_name
from sightline.files.regular import is_file
from sightline.files.typed_json import read_json, short

JSON = "dataset.json"
KIND = "volumes"  # in a description file
MAX_CLASSES = 256  # a label is a byte
_MAX_JSON_BYTES = 16 * 2**20  # a case takes 100 bytes
# In any case, the preferred first.
IMAGE_FOLDERS = ("imagestr", "images", "image", "imgs", "img")
LABEL_FOLDERS = ("labelstr", "labels", "masks", "segmentations", "label", "mask", "segmentation")
LABEL_ENDS = ("seg", "mask", "label", "segmentation", "labels", "masks")  # of CASE_seg.nii.gz, also after - and .
_CHANNEL = re.compile(r"(.+)_(\d{4})")


@dataclass(frozen=True)
class Raw:
    """Images and labels of one dataset."""

    root: Path  # what files count from
    name: str
    modalities: tuple[str, ...]  # one per channel; empty: only the files tell
    classes: tuple[str, ...]  # background first; empty: only the labels tell
    training: tuple[Pair, ...]
    test: tuple[Pair, ...]
    layout: str  # for people
    channels: int  # in files of their own
    are_images: bool  # 2D images, not volumes
    has_json: bool = True  # dataset.json names classes and modalities
    problems: tuple[str, ...] = ()  # cases that cannot be used, by their names alone
    ignored: str = ""  # files of other kinds, for people
    changed_ns: int | None = None  # of the archive that it was unpacked from: the files are as old as that

    def stamps(self, file: str, channels: int) -> list[tuple[str, int, int]]:
        """Return (file, bytes, time of change) of a file and of its other channels: as long as these stay, what was
        made of it holds."""
        found = []
        for path in channel_files(self.root / file, channels):
            info = path.stat()
            changed = info.st_mtime_ns if self.changed_ns is None else self.changed_ns
            found.append((os.path.join(os.path.dirname(file), path.name), info.st_size, changed))
        return found

    def describe(self) -> str:
        """Say what was found, in one phrase."""
        what = f"{'image' if self.are_images else 'volume'}{'s' if len(self.training) != 1 else ''}"
        count = f"{len(self.training)} {what} with labels" + (f" and {len(self.test)} for testing" if self.test else "")
        problems = f"{len(self.problems)} files without a partner" if self.problems else ""
        tells = self.has_json or len(self.modalities) > 1
        channels = f"channels {', '.join(self.modalities)}" if self.modalities and tells else ""
        classes = f"classes {first_of(self.classes)}" if self.classes else ""
        ignored = f"ignored: {self.ignored}" if self.ignored else ""
        return ", ".join(filter(None, [f"{self.layout}: {count}", problems, channels, classes, ignored]))


def is_raw(path: Path) -> bool:
    """Return whether a path holds data that can be prepared, by names alone."""
    if is_description(str(path)):
        return read_description(str(path)).kind == KIND
    if (path / NOTES).is_dir():  # written by `prepare`, and not finished if it has no plan
        return False
    return path.is_dir() and (is_file(path / JSON) or has_folders(path))


def find_raw(path: Path) -> Path | None:
    """Return the path itself if it holds raw data, or the one folder in it that does."""
    if is_raw(path):
        return path
    return next((path / name for name in subfolders(path) if is_raw(path / name)), None)


def read_raw(path: Path, changed_ns: int | None = None) -> Raw:
    """Read any layout; raise BadData for a dataset.json that is not as its format says, UsageError for odd folders."""
    if is_description(str(path)):
        return _read_described(path)
    if not is_file(path / JSON) and (folders := find_folders(path)):
        return _from_folders(path, path.name, *folders)
    file = path / JSON
    try:
        content = read_json(file, _MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise BadData(f"{file} cannot be read: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise BadData(f"{file}: an object was expected, not {type(content).__name__}; fetch it again")
    name = str(content.get("name") or path.name)[:200]
    if "channel_names" in content and "training" not in content:
        raw = _read_nnunet(path, name, content)
    else:
        raw = _read_decathlon(path, name, content)
    return replace(raw, changed_ns=changed_ns)


def describe_raw(path: Path) -> str:
    """Say in one phrase what lies in the folder of raw data, also if it must be fixed before it can be prepared."""
    try:
        return read_raw(path).describe()
    except (BadData, UsageError) as error:
        return f"data that must be fixed first: {error}"


def are_images(path: Path) -> bool:
    """Return whether raw data are 2D images, which need not be prepared."""
    try:
        return read_raw(path).are_images
    except (BadData, UsageError):
        return False


def remedy(path: Path, dim: int, recipe: str = "unet2d") -> str:
    """Return the two commands that prepare raw data and train on them."""
    out = f"{path.with_suffix('') if is_description(str(path)) else path}-prepared"
    flags = " --dim 3" if dim == 3 else ""
    prepare = f"sightline prepare decathlon --source {shlex.quote(str(path))} --out {shlex.quote(out)}{flags}"
    train = f"sightline train {recipe} --data.path {shlex.quote(out)}" + (" --data.dim 3" if dim == 3 else "")
    return f"`{prepare}`, then train with `{train}`"


def label_files(place: Path) -> dict[str, Path]:
    """Return the label of every case of raw data; none of a path that does not hold any."""
    if not is_raw(place):
        return {}
    raw = read_raw(place)
    return {pair.name: raw.root / pair.label for pair in raw.training if pair.label}


def labelled_files(cases: Sequence[str], folder: Path) -> dict[str, tuple[Path, Path]]:
    """Find the image and the label of each case in the data that they were prepared from; `folder` may also be the
    folder of the labels."""
    place = find_raw(folder) or (find_raw(folder.parent) if folder.name.lower() in LABEL_FOLDERS else None)
    if place is None:
        raise UsageError(
            f"{folder} holds no dataset.json and no images beside labels (such as imagesTr and labelsTr); give with "
            "--labels what the data were prepared from"
        )
    raw = read_raw(place)
    pairs = {pair.name: (raw.root / pair.image, raw.root / (pair.label or "")) for pair in raw.training}
    missing = [case for case in cases if case not in pairs or not all(map(os.path.isfile, pairs[case]))]
    if missing:
        raise BadData(
            f"{place} lacks the image or the label of {len(missing)} of the {len(cases)} cases of the val split: "
            f"{first_of(missing)}; give the folder that the data were prepared from"
        )
    return {case: pairs[case] for case in cases}


def _read_decathlon(root: Path, name: str, content: Mapping[str, Any]) -> Raw:
    path = root / JSON
    training = content.get("training", [])
    test = content.get("test", [])
    if not isinstance(training, list) or not isinstance(test, list):
        raise BadData(f"{path}: training and test must be lists of files; fetch it again")
    pairs = []
    for entry in training:
        if not isinstance(entry, dict) or not {"image", "label"} <= entry.keys():
            raise BadData(f"{path}: {short(entry)} in training is not a pair of image and label; fetch it again")
        image = _file(entry["image"], path)
        name_of_case = case_name(os.path.basename(image))
        pairs.append(Pair(name_of_case, _first_channel(root, image), _file(entry["label"], path)))
    images = [_file(entry.get("image") if isinstance(entry, dict) else entry, path) for entry in test]
    files = [pair.image for pair in pairs] or images
    modalities = _numbered(content.get("modality"), "modality", path)
    is_nnunet = any(case_name(os.path.basename(pair.image)) != pair.name for pair in pairs)
    return Raw(
        root,
        name,
        modalities,
        _numbered(content.get("labels"), "labels", path),
        tuple(pairs),
        tuple(Pair(case_name(os.path.basename(image)), _first_channel(root, image), None) for image in images),
        layout="nnU-Net v1's layout" if is_nnunet else "the Decathlon's layout",
        channels=len(modalities) if is_nnunet else 1,
        are_images=bool(files) and all(file.lower().endswith(IMAGES) for file in files),
    )


def _first_channel(root: Path, image: str) -> str:
    """Return CASE_0000.nii.gz for CASE.nii.gz if only that exists: nnU-Net v1 lists its cases so."""
    stem = case_name(image)
    first = f"{stem}_0000{image[len(stem) :]}"
    return first if not os.path.exists(root / image) and os.path.exists(root / first) else image


def _read_nnunet(root: Path, name: str, content: Mapping[str, Any]) -> Raw:
    path = root / JSON
    channels = _numbered(content["channel_names"], "channel_names", path)
    classes = _by_value(content.get("labels"), path)
    ending = content.get("file_ending", SUFFIXES[0])
    if ending not in (*SUFFIXES, *IMAGES):
        raise BadData(
            f"{path}: file_ending is {short(ending)}; {', '.join((*SUFFIXES, *IMAGES))} are read, so convert the files"
        )
    for part in ("imagesTr", "labelsTr"):
        if not (root / part).is_dir():
            raise BadData(f"{path} is nnU-Net v2's, but {root / part} is not a folder; fetch it again")
    found = pair_files(root / "imagesTr", root / "labelsTr", root, len(channels))
    count = content.get("numTraining", len(found.cases))
    if not found.problems and count != len(found.cases):
        raise BadData(
            f"{path}: numTraining is {short(count)}, but imagesTr and labelsTr hold {len(found.cases)} cases; add the "
            "missing ones or correct the number"
        )
    test = _test_images(root, ending)
    return _raw(root, name, "nnU-Net v2's layout", found, channels, classes, test)


def _test_images(root: Path, ending: str) -> tuple[Pair, ...]:
    if not (root / "imagesTs").is_dir():
        return ()
    first = f"_0000{ending}"
    names = sorted(each.name for each in (root / "imagesTs").iterdir() if each.name.endswith(first))
    return tuple(Pair(name.removesuffix(first), f"imagesTs/{name}", None) for name in names if name[0] != ".")


def _read_described(path: Path) -> Raw:
    layout = read_description(str(path))
    if layout.kind != KIND:
        raise UsageError(f"{path}: kind is '{layout.kind}'; images with labels for every voxel are `kind: {KIND}`")
    place = layout.train
    if place is None or place.labels is None or layout.val is not None:
        raise UsageError(
            f"{path}: expected `train: {{images: FOLDER, labels: FOLDER}}` and no val (--data.fold chooses what "
            "validates)"
        )
    raw = _from_folders(path.parent, path.stem, place.images, place.labels)
    return replace(raw, classes=layout.classes)


def _from_folders(root: Path, name: str, images: Path, labels: Path) -> Raw:
    for folder in (images, labels):
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder; give one of images and one of labels")
    if images.resolve() == labels.resolve():
        raise UsageError(f"{images} is given for images and for labels; move the labels into a folder of their own")
    found = pair_files(images, labels, root)
    layout = f"pairs of the same name in {images.name} and {labels.name}"
    return replace(_raw(root, name, layout, found), has_json=False)


def _raw(
    root: Path,
    name: str,
    layout: str,
    found: Paired,
    modalities: tuple[str, ...] = (),
    classes: tuple[str, ...] = (),
    test: tuple[Pair, ...] = (),
) -> Raw:
    return Raw(
        root,
        name,
        modalities,
        classes,
        found.cases,
        test,
        layout,
        channels=found.channels,
        are_images=found.are_images,
        problems=found.problems,
        ignored=found.ignored,
    )


def _numbered(found: Any, what: str, path: Path) -> tuple[str, ...]:
    """Return the values of {"0": name, "1": name, ...}."""
    keys = [str(number) for number in range(len(found))] if isinstance(found, dict) else []
    if not keys or set(found) != set(keys) or not all(isinstance(name, str) and name for name in found.values()):
        raise BadData(f'{path}: {what} is {short(found)}; {{"0": name, "1": name, ...}} was expected')
    if what == "labels":
        _check_classes(list(found.values()), path)
    return tuple(found[key] for key in keys)


def _by_value(found: Any, path: Path) -> tuple[str, ...]:
    """Return the names of {"background": 0, name: 1, ...}, as nnU-Net v2 writes them."""
    labels = found if isinstance(found, dict) else {}
    if regions := [name for name, value in labels.items() if isinstance(value, list)]:
        raise BadData(
            f"{path}: '{regions[0]}' is a region of several numbers ({short(labels[regions[0]])}), which is not "
            f'supported; give every number a name of its own: {{"background": 0, "a": 1, "b": 2}}'
        )
    if "ignore" in labels:
        raise BadData(f"{path}: the label 'ignore' is not supported; label these voxels, or make them background")
    values = list(labels.values())
    if not all(type(value) is int for value in values) or sorted(values) != list(range(len(values))) or not values:
        raise BadData(f'{path}: labels is {short(found)}; {{"background": 0, name: 1, ...}} without gaps was expected')
    names = sorted(labels, key=lambda name: labels[name])
    _check_classes(names, path)
    return tuple(names)


def _check_classes(names: list[str], path: Path) -> None:
    if not 2 <= len(names) <= MAX_CLASSES or len(set(names)) < len(names):
        raise BadData(f"{path}: {len(names)} labels; 2 to {MAX_CLASSES} with a name of their own each were expected")


def _file(entry: Any, path: Path) -> str:
    """Return a relative file, whoever wrote it: dataset.json comes from strangers, too."""
    if not isinstance(entry, str):
        raise BadData(f"{path}: {short(entry)} is not a file name; fetch it again")
    return clean_name(entry, str(path))


def has_folders(root: Path) -> bool:
    """Return whether there are folders of images and of labels below `root`."""
    return all(_called(root))


def images_beside_labels(root: Path) -> str:
    """Return the name of the folder of images if there are folders of both kinds below `root`, else ""."""
    images, labels = _called(root)
    return images[0].name if images and labels else ""


def find_folders(root: Path) -> tuple[Path, Path] | None:
    """Return the folders of images and labels below `root`; None if there are not both. UsageError if there are
    several of one kind."""
    images, labels = _called(root)
    if not images or not labels:
        return None
    for what, found in (("images", images), ("labels", labels)):
        if len(found) > 1:
            raise UsageError(
                f"{root} has several folders of {what}: {', '.join(path.name for path in found)}; name one in a file "
                f"data.yaml (`kind: volumes`, `train: {{images: {images[0].name}, labels: {labels[0].name}}}`) and "
                "give that instead"
            )
    return images[0], labels[0]


def _called(root: Path) -> tuple[list[Path], list[Path]]:
    below = {name.lower(): root / name for name in subfolders(root)}
    images, labels = ([below[n] for n in names if n in below] for names in (IMAGE_FOLDERS, LABEL_FOLDERS))
    return images, labels


class Pair(NamedTuple):
    """One case; files count from the root of the data. The first channel's file stands for all of them."""

    name: str
    image: str
    label: str | None


@dataclass(frozen=True)
class Paired:
    """Cases found in two folders."""

    cases: tuple[Pair, ...]  # sorted by name
    channels: int  # in files of their own; 1: those of each file
    are_images: bool  # 2D images, not volumes
    problems: tuple[str, ...]  # files without a partner, and the like
    ignored: str  # files of other kinds, for people; "": none


def pair_files(images: Path, labels: Path, root: Path, channels: int = 0) -> Paired:
    """Pair the files of two folders. With `channels` all images are called as nnU-Net calls them, and have as many."""
    names, label_names = _files(images), _files(labels)
    are_images = not any(name.lower().endswith(SUFFIXES) for name in names)
    suffixes = IMAGES if are_images else SUFFIXES
    by_stem, other = _by_stem(names, suffixes)
    if not by_stem:
        endings = ", ".join((*SUFFIXES, *IMAGES))
        raise UsageError(f"{images} holds no images ({endings}); found there: {contents(images)}")
    labels_by_stem, other_labels = _by_stem(label_names, suffixes)
    if not labels_by_stem:
        raise UsageError(
            f"{labels} holds no labels ({', '.join(suffixes)}) for the {'images' if are_images else 'volumes'} of "
            f"{images}; found there: {contents(labels)}"
        )
    problems = [
        f"{folder.name}: {' and '.join(sorted(files))} have one name; remove all but one"
        for folder, stems in ((images, by_stem), (labels, labels_by_stem))
        for files in stems.values()
        if len(files) > 1
    ]
    cases, channels, missing = _grouped(by_stem, labels_by_stem, channels, are_images)
    label_of, lonely = _matched(cases, labels_by_stem, labels)
    pairs = [
        Pair(case, _below(root, images / cases[case]), _below(root, labels / label_of[case]))
        for case in sorted(cases)
        if case in label_of
    ]
    without = [
        f"{images.name}/{cases[case]} has no label in {labels}" for case in sorted(cases) if case not in label_of
    ]
    return Paired(
        tuple(pairs),
        channels,
        are_images,
        (*problems, *missing, *without, *lonely),
        counted(other + other_labels) if other or other_labels else "",
    )


def labels_in(folder: Path) -> list[Path]:
    """Return all labels in a folder of labels."""
    return [folder / name for name in _files(folder) if name.lower().endswith((*SUFFIXES, *IMAGES))]


def label_of_case(folder: Path, case: str) -> Path | None:
    """Return the label of a case in a folder of labels."""
    stems, _ = _by_stem(_files(folder), (*SUFFIXES, *IMAGES))
    found = _matched({case: case}, stems, folder)[0]
    return folder / found[case] if case in found else None


def _files(folder: Path) -> list[str]:
    """Return the names in a folder that are neither hidden nor folders; a link to itself is reported when read."""
    try:
        return sorted(e.name for e in os.scandir(folder) if not e.name.startswith(".") and not is_folder(e))
    except OSError as error:
        raise UsageError(f"{folder} cannot be listed: {error.strerror}; fix that, or give another folder") from error


def _by_stem(names: Sequence[str], suffixes: tuple[str, ...]) -> tuple[dict[str, list[str]], Counter[str]]:
    """Return the files with these endings by their names without them, and how many others there are."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name.lower().endswith(suffixes):
            found.setdefault(case_name(name), []).append(name)
    others = Counter(suffix_of(name) for name in names if not name.lower().endswith(suffixes))
    return found, others


def _grouped(
    images: Mapping[str, list[str]], labels: Mapping[str, list[str]], channels: int, are_images: bool
) -> tuple[dict[str, str], int, list[str]]:
    """Return the (first) file of each case, the number of channels in files of their own, and what is missing."""
    matches = {stem: _CHANNEL.fullmatch(stem) for stem in images}
    by_name = {match[1] for match in matches.values() if match}
    if not channels and not (all(matches.values()) and by_name & labels.keys() and not images.keys() & labels.keys()):
        return {stem: files[0] for stem, files in images.items()}, 1, []
    found: dict[str, dict[int, str]] = {}
    problems = []
    for stem, match in matches.items():
        if match:
            found.setdefault(match[1], {})[int(match[2])] = images[stem][0]
        else:
            problems.append(f"{images[stem][0]}: the name of a channel was expected, such as {stem}_0000")
    count = channels or 1 + max(number for numbers in found.values() for number in numbers)
    # A colour image holds its three channels in one file.
    wanted = {0} if are_images and channels == 3 and all(set(each) == {0} for each in found.values()) else range(count)
    cases = {}
    for case, files in found.items():
        if lacking := [f"{case}_{number:04d}" for number in wanted if number not in files]:
            shown = first_of(lacking)
            problems.append(f"{case}: {shown} of its {count} channels is missing; add it or remove the case")
        elif unknown := [files[number] for number in files if number not in wanted]:
            problems.append(f"{case}: {', '.join(unknown)} is beyond the {count} channels of dataset.json; remove it")
        cases[case] = files[min(files)]
    return cases, len(wanted), problems


def _matched(
    cases: Mapping[str, str], labels: Mapping[str, list[str]], folder: Path
) -> tuple[dict[str, str], list[str]]:
    """Return the label of each case, and what is wrong with the others. A label of the case's own name comes first."""
    found = {case: labels[case][0] for case in cases if case in labels}
    problems = []
    for stem, files in labels.items():
        if stem in found:
            continue
        case = without_end(stem)
        if case not in cases:
            problems.append(f"{folder.name}/{files[0]} has no image")
        elif case in found:
            problems.append(f"{folder.name}: {found[case]} and {files[0]} are both labels of {case}; remove one")
        else:
            found[case] = files[0]
    return found, problems


def without_end(stem: str) -> str:
    """Return CASE of CASE_seg, CASE-mask or CASE.label; other names as they are."""
    for end in LABEL_ENDS:
        if len(stem) > len(end) + 1 and stem.lower().endswith(end) and stem[-len(end) - 1] in "_-.":
            return stem[: -len(end) - 1]
    return stem


def _below(root: Path, path: Path) -> str:
    """Return a path from the root; an absolute one if it lies elsewhere."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else os.path.abspath(path)
