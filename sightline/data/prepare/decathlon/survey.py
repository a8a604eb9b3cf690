"""Classes and channels of data without a dataset.json, found in the files, and the dataset.json that says them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sightline.data.prepare.decathlon.cases import groups
from sightline.data.prepare.decathlon.raw import RawCase, list_cases, refuse
from sightline.data.processes import over_processes
from sightline.data.volumes.files import case_name, read_header, read_label, read_scan
from sightline.data.volumes.layouts import JSON, MAX_CLASSES, Raw
from sightline.data.writing.pieces import NOTES
from sightline.errors import BadData, BadSample, first_of
from sightline.files.typed_json import read_json
from sightline.files.whole import write_text
from sightline.parts import DataSpec
from sightline.terminal.progress import Progress

AIR_HU = -500  # in CT air is -1000; images of other kinds have no values as low as this
_FOR_CT = 8  # volumes whose values are looked at
_KEPT = f"{NOTES}/survey.json"
_MAX_NOTE_BYTES = 2**20
_COLOURS = ("red", "green", "blue")


class Seen(NamedTuple):
    """Values of one case."""

    values: tuple[int, ...]  # in the label
    lowest: float | None  # in the image, if it was looked at


def complete(raw: Raw, out: Path, jobs: int, memory: int, progress: Progress) -> tuple[Raw, str]:
    """Find what no dataset.json says; return the data with it, and how it was decided. Surveyed once."""
    channels = _channels(raw)
    cases = list_cases(raw, "training", channels, progress)
    stamps = hashlib.sha256(repr([case.stamps for case in cases]).encode("utf-8", "surrogateescape")).hexdigest()
    if (seen := _read(out, stamps)) is None:
        seen = _survey(cases, raw, jobs, memory, progress)
        write_text(out, _KEPT, json.dumps({"files": stamps, "seen": seen}))
    values = sorted({value for each in seen for value in each.values})
    classes, by_values = (raw.classes, "") if raw.classes else _classes(values, raw)
    lowest = [each.lowest for each in seen if each.lowest is not None]
    is_ct = bool(lowest) and max(lowest) <= AIR_HU
    if is_ct:
        modalities: tuple[str, ...] = ("CT",)
        scaling = f"CT (values of {AIR_HU} and below in all of the first {len(lowest)} volumes)"
    else:
        numbered = tuple(f"channel {number}" for number in range(channels)) if channels > 1 else ("image",)
        modalities = _COLOURS if raw.are_images and channels == 3 else numbered
        scaling = f"each {'image' if raw.are_images else 'volume'} is scaled by its own mean"
    written = f"{out / JSON} names the classes"
    return replace(raw, classes=classes, modalities=modalities), "; ".join(filter(None, [by_values, scaling, written]))


def write_description(raw: Raw, out: Path) -> None:
    """Write the dataset.json that the data lack into the prepared folder: copied beside the data and edited, it names
    their classes."""
    labels: dict[str, Any] = {str(number): name for number, name in enumerate(raw.classes)}
    pairs = [{"image": pair.image, "label": pair.label} for pair in raw.training]
    content: dict[str, Any] = {"name": raw.name, "modality": dict(_numbered(raw.modalities)), "labels": labels}
    content |= {"numTraining": len(pairs), "training": pairs, "test": []}
    if raw.channels > 1:  # nnU-Net v2's, which knows channels in files of their own
        first = raw.training[0].image
        content = {
            "name": raw.name,
            "channel_names": dict(_numbered(raw.modalities)),
            "labels": {name: number for number, name in enumerate(raw.classes)},
            "numTraining": len(pairs),
            "file_ending": first[len(case_name(first)) :],
        }
    write_text(out, JSON, json.dumps(content, indent=1) + "\n")


def _numbered(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(str(number), name) for number, name in enumerate(names)]


def _channels(raw: Raw) -> int:
    """Return the channels of the data: those of the first volume that can be read; 3 if any image is coloured."""
    if raw.channels > 1:
        return raw.channels
    found = 0
    for pair in raw.training:
        try:
            found = max(found, read_header(raw.root / pair.image, pair.name, 0).shape[0])
        except BadSample:  # listing the cases reports it
            continue
        if not raw.are_images or found == 3:
            break
    return found or 1


def _survey(cases: Sequence[RawCase], raw: Raw, jobs: int, memory: int, progress: Progress) -> list[Seen]:
    channels = cases[0].header.shape[0]
    for_ct = {case.name for case in cases[:_FOR_CT]} if channels == 1 and not raw.are_images else set()
    seen: list[Seen] = []
    problems: list[str] = []
    flat = DataSpec((), channels, (1, 1), (), ())
    for processes, group in groups(cases, flat, jobs if len(cases) > _FOR_CT else 1, memory):
        with over_processes(processes, for_ct) as run:
            for outcome in run(_look, group):
                if isinstance(outcome, str):
                    problems.append(outcome)
                else:
                    seen.append(outcome)
                progress("reading labels", len(seen) + len(problems), len(cases))
    refuse(problems, len(cases), raw)
    return seen


def _look(for_ct: set[str], case: RawCase) -> Seen | str:
    assert case.label is not None, "cases of the training set have labels"
    try:
        values = np.unique(read_label(case.label, case.name)[0]).tolist()
        lowest = float(read_scan(case.image, case.name, 1).voxels.min()) if case.name in for_ct else None
    except BadSample as error:
        return str(error)
    return Seen(tuple(values), lowest)


def _classes(values: Sequence[int], raw: Raw) -> tuple[tuple[str, ...], str]:
    """Return names for the classes that labels of these values have, and how they were found."""
    what = "masks" if raw.are_images else "labels"
    if set(values) <= {0, 255} and 255 in values:
        return ("background", "class 1"), f"2 classes, 0 and 255 in the {what}"
    highest = max(values)
    if highest < 1:
        raise BadData(f"{_labels_of(raw)}: all {what} are 0, so there is no class to learn; check them")
    if missing := sorted(set(range(1, highest)) - set(values)):
        raise BadData(
            f"{_labels_of(raw)}: the {what} contain the values {first_of(values, 8)}, but no {missing[0]}; classes "
            "must be numbered 0, 1, 2, ... without gaps (or 0 and 255): renumber them (values in between come from "
            "resized or lossy masks)"
        )
    assert highest < MAX_CLASSES, "labels are bytes"
    return ("background", *(f"class {number}" for number in range(1, highest + 1))), f"classes by the {what}' values"


def _labels_of(raw: Raw) -> Path:
    """Return the folder of the labels, as it was given."""
    folder = raw.root / Path(raw.training[0].label or "").parent
    return folder if folder.name else folder.absolute()


def _read(out: Path, stamps: str) -> list[Seen] | None:
    try:
        content = read_json(out / _KEPT, _MAX_NOTE_BYTES)
        if content["files"] != stamps:
            return None
        return [Seen(tuple(values), lowest) for values, lowest in content["seen"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
