"""`sightline check` of prepared volumes: every array of both splits, and with `decode` every voxel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sightline.data.check.images import Report, spread
from sightline.data.processes import over_processes
from sightline.data.sources import VolumeSource
from sightline.errors import BadData, BadSample
from sightline.parts import Split
from sightline.terminal.progress import Progress

_SPLITS: tuple[Split, ...] = ("train", "val")
_WORTH_PROCESSES = 16  # volumes; below this, starting processes takes longer than looking


class SeenVolume(NamedTuple):
    """One volume as it was seen."""

    shape: tuple[int, int, int]
    voxels: tuple[int, ...]  # of each class; empty unless voxels were read
    problems: tuple[tuple[str, str], ...]  # kind and text


def check_volumes(
    open_split: Callable[[Split], VolumeSource], decode: bool, processes: int, progress: Progress
) -> Report:
    """Check both splits and report all that is wrong there."""
    report = Report()
    for split in _SPLITS:
        try:
            source = open_split(split)
        except BadData as error:
            report.add("cannot be opened", split, split, str(error))
            continue
        seen: list[SeenVolume] = []
        with over_processes(processes if len(source) >= _WORTH_PROCESSES else 1, (source, decode)) as run:
            for one in run(_look_at, range(len(source))):
                seen.append(one)
                progress(f"{'reading' if decode else 'opening'} {split}", len(seen), len(source))
        _describe(split, source, seen, report)
    return report


def _look_at(shared: tuple[VolumeSource, bool], index: int) -> SeenVolume:
    source, decode = shared
    shape, classes = source.shape(index), len(source.spec.classes)
    try:
        image, label = source.image(index), source.label(index)
    except BadSample as error:
        return SeenVolume(shape, (), (("unreadable", error.reason),))
    problems = []
    for what, found, expected in (("image", image, (source.spec.channels, *shape)), ("label", label, shape)):
        if found.shape != expected:
            problems.append(("shape", f"its {what} is {found.shape}, expected {expected}"))
    if not decode or problems:
        return SeenVolume(shape, (), tuple(problems))
    bad = sum(int(np.count_nonzero(~np.isfinite(channel))) for channel in image)  # one at a time: less memory
    if bad:
        problems.append(("not finite", f"{bad} voxels are NaN or infinite"))
    counts = np.bincount(label.ravel(), minlength=classes)
    if len(counts) > classes:
        text = f"its label holds class {len(counts) - 1}, expected 0 to {classes - 1}"
        problems.append(("label out of range", text))
    return SeenVolume(shape, tuple(counts[:classes].tolist()), tuple(problems))


def _describe(split: Split, source: VolumeSource, seen: list[SeenVolume], report: Report) -> None:
    looked_at = [each for each in seen if each.voxels]
    report.facts[split] = {
        "volumes": len(seen),
        "unreadable": sum(kind == "unreadable" for each in seen for kind, _ in each.problems),
        "channels": source.spec.channels,
        **{axis: spread([each.shape[i] for each in seen]) for i, axis in enumerate(("depth", "height", "width"))},
    }
    if not seen:
        report.add("no volumes", split, split, "the split is empty")
    for index, each in enumerate(seen):
        for kind, text in each.problems:
            report.add(kind, split, source.name(index), text)
    if not looked_at:
        return
    voxels = np.array([each.voxels for each in looked_at])
    having = (voxels > 0).sum(0)
    report.facts[split]["volumes with"] = dict(zip(source.spec.classes, having.tolist(), strict=True))
    for name, count in zip(source.spec.classes, having.tolist(), strict=True):
        if not count:
            kind = "class without training" if split == "train" else "class without validation"
            report.add(kind, split, name, f"no voxel of it in {len(looked_at)} volumes")
