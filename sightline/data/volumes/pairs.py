"""Images and labels of two folders, paired by their names: CASE.nii.gz with CASE.nii.gz or CASE_seg.nii.gz, CASE.jpg
with CASE.png, or several channels CASE_0000.nii.gz, CASE_0001.nii.gz, ... with CASE.nii.gz. Reads names alone.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sightline.data.sources.layouts import IMAGES, contents, counted, is_folder, suffix_of
from sightline.data.volumes.files import SUFFIXES, case_name
from sightline.errors import UsageError, first_of

LABEL_ENDS = ("seg", "mask", "label", "segmentation", "labels", "masks")  # of CASE_seg.nii.gz, also after - and .
_CHANNEL = re.compile(r"(.+)_(\d{4})")


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
