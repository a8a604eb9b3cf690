"""A Decathlon download as it lies on disk: dataset.json, the files it names, and what their headers say of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sightline.data.formats.nifti import Header, read_header
from sightline.data.volumes.decathlon import TASKS, Mode, is_plain_name
from sightline.errors import BadData, BadSample, UsageError
from sightline.files.archive import BadArchive, Limits, clean_name, extract
from sightline.files.typed_json import read_json, short
from sightline.files.whole import refuse_link, replace_text
from sightline.terminal.progress import Progress

_MAX_JSON_BYTES = 16 * 2**20  # a case takes 100 bytes
_LIMITS = Limits(members=100_000)
_SAME_PLACE_VOXELS = 0.1  # how far the corners of a label may lie from those of its image
_SHOWN = 20  # problems in one message
# Two tasks whose names in dataset.json differ from their folders.
_ALIASES = {"brats": "01", "leftatrium": "02"}


@dataclass(frozen=True)
class Raw:
    """A folder with dataset.json."""

    root: Path
    name: str
    modalities: tuple[str, ...]
    classes: tuple[str, ...]
    training: tuple[tuple[str, str], ...]  # (image, label), relative
    test: tuple[str, ...]
    changed_ns: int | None = None  # of the archive that it was unpacked from: the files are as old as that

    def stamp(self, relative: str) -> tuple[str, int, int]:
        """Return (file, bytes, time of change): as long as these stay, what was made of it holds."""
        info = (self.root / relative).stat()
        return relative, info.st_size, info.st_mtime_ns if self.changed_ns is None else self.changed_ns


@dataclass(frozen=True)
class RawCase:
    """One case, its headers read."""

    name: str
    image: Path
    label: Path | None
    header: Header
    stamps: tuple[tuple[str, int, int], ...]


def find_place(source: Path, task: str) -> Path:
    """Return the folder with dataset.json, or the tar, that a user means by --source."""
    if source.is_file() or (source / "dataset.json").is_file():
        return source
    if not source.is_dir():
        raise UsageError(
            f"--source {source} is not there; give a Decathlon folder or its tar, or let --download fetch it"
        )
    folders = [TASKS[task].folder] if task in TASKS else [known.folder for known in TASKS.values()]
    # A tar beside what was unpacked from it is not looked at.
    both = ((source / name, source / f"{name}.tar") for name in folders)
    found = [place for pair in both if (place := next(filter(_is_place, pair), None)) is not None]
    if task not in TASKS:
        found += sorted(p.parent for p in source.glob("*/dataset.json") if p.parent.name not in folders)
    if not found:
        raise UsageError(f"--source {source} holds no dataset.json and no {folders[0]}; give the folder of one task")
    if task not in TASKS and len(found) > 1:
        raise UsageError(f"--source {source} holds {', '.join(p.name for p in found[:3])}; give one of them, or --task")
    return found[0]


def _is_place(path: Path) -> bool:
    return path.is_file() if path.suffix == ".tar" else (path / "dataset.json").is_file()


def unpack(archive: Path, work: Path, progress: Progress) -> tuple[Path, int]:
    """Unpack an archive once; return the folder with dataset.json below `work`, and the archive's time of change."""
    info = archive.stat()
    stamp = json.dumps([info.st_size, info.st_mtime_ns])
    done = work / ".unpacked"
    refuse_link(work)
    if not done.is_file() or done.read_bytes() != stamp.encode():
        extract(archive, work, progress, _LIMITS)
        replace_text(done, stamp)
    found = sorted(path.parent for path in (*work.glob("dataset.json"), *work.glob("*/dataset.json")))
    if len(found) != 1:
        raise BadArchive(f"{archive}: holds {len(found)} dataset.json at its top, one was expected")
    return found[0], info.st_mtime_ns


def read_raw(root: Path, changed_ns: int | None = None) -> Raw:
    """Read dataset.json and check it; BadData for anything that is not as the Decathlon writes it."""
    path = root / "dataset.json"
    try:
        content = read_json(path, _MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise BadData(f"{path} cannot be read: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise BadData(f"{path}: an object was expected, not {type(content).__name__}; fetch it again")
    training = content.get("training", [])
    test = content.get("test", [])
    if not isinstance(training, list) or not isinstance(test, list):
        raise BadData(f"{path}: training and test must be lists of files; fetch it again")
    pairs = []
    for entry in training:
        if not isinstance(entry, dict) or not {"image", "label"} <= entry.keys():
            raise BadData(f"{path}: {short(entry)} in training is not a pair of image and label; fetch it again")
        pairs.append((_file(entry["image"], path), _file(entry["label"], path)))
    images = [_file(entry.get("image") if isinstance(entry, dict) else entry, path) for entry in test]
    return Raw(
        root,
        str(content.get("name") or root.name)[:200],
        _numbered(content.get("modality"), "modality", path),
        _numbered(content.get("labels"), "labels", path),
        tuple(pairs),
        tuple(images),
        changed_ns,
    )


def _numbered(found: Any, what: str, path: Path) -> tuple[str, ...]:
    """Return the values of {"0": name, "1": name, ...}."""
    keys = [str(number) for number in range(len(found))] if isinstance(found, dict) else []
    if not keys or set(found) != set(keys) or not all(isinstance(name, str) and name for name in found.values()):
        raise BadData(f'{path}: {what} is {short(found)}; {{"0": name, "1": name, ...}} was expected')
    if what == "labels" and (len(keys) < 2 or len(keys) > 256 or len(set(found.values())) < len(keys)):
        raise BadData(f"{path}: {len(keys)} labels; 2 to 256 with a name of their own each were expected")
    return tuple(found[key] for key in keys)


def _file(entry: Any, path: Path) -> str:
    """Return a relative file, whoever wrote it: dataset.json comes from strangers, too."""
    if not isinstance(entry, str):
        raise BadData(f"{path}: {short(entry)} is not a file name; fetch it again")
    return clean_name(entry, str(path))


def resolve_task(asked: str, raw: Raw) -> str | None:
    """Return which of the ten this is; None for other data."""
    if asked in TASKS:
        return asked
    if asked == "auto":
        for number, known in TASKS.items():
            if raw.root.name == known.folder or raw.name.lower() == known.name.lower():
                return number
        return _ALIASES.get(raw.name.lower())
    return None


def list_cases(raw: Raw, mode: Mode, channels: int, progress: Progress) -> list[RawCase]:
    """Return the cases of a mode with their headers; BadData names all whose files or headers do not fit."""
    pairs: Sequence[tuple[str, str | None]] = raw.training if mode != "test" else [(image, None) for image in raw.test]
    if not pairs:
        raise BadData(f"{raw.root / 'dataset.json'} lists no {'test' if mode == 'test' else 'training'} cases")
    cases: dict[str, RawCase] = {}
    problems = []
    for done, (image, label) in enumerate(pairs, start=1):
        name = case_name(image)
        if not is_plain_name(name):
            problems.append(f"{image}: no name for a case")
        elif name in cases:
            problems.append(f"{name}: is listed twice")
        else:
            try:
                cases[name] = _case(raw, name, image, label if mode == "training" else None, channels)
            except BadSample as error:
                problems.append(str(error))
        progress("reading headers", done, len(pairs))
    refuse(problems, len(pairs), raw.root)
    return sorted(cases.values(), key=lambda case: f"{case.name}_x.npy")


def refuse(problems: Sequence[str], total: int, where: Path) -> None:
    """Raise BadData with the cases that cannot be used, if there are any."""
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        shown = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
        raise BadData(
            f"{where}: {len(problems)} of {total} cases cannot be prepared; fix them, or take them out of "
            f"dataset.json:{shown}{more}"
        )


def case_name(file: str) -> str:
    """Return hippocampus_001 of imagesTr/hippocampus_001.nii.gz."""
    return os.path.basename(file).removesuffix(".gz").removesuffix(".nii")


def _case(raw: Raw, name: str, image: str, label: str | None, channels: int) -> RawCase:
    header = read_header(raw.root / image, name)
    if header.shape[0] != channels:
        raise BadSample(name, f"{image} has {header.shape[0]} channels, {channels} modalities were expected")
    files = [image]
    if label is not None:
        truth = read_header(raw.root / label, name)
        if truth.shape != (1, *header.shape[1:]):
            raise BadSample(name, f"{label} has the shape {truth.shape}, its image {header.shape}")
        if (apart := _apart(header, truth)) > _SAME_PLACE_VOXELS:
            raise BadSample(name, f"{label} lies elsewhere than its image, by up to {apart:.3g} voxels (their affines)")
        files.append(label)
    path = None if label is None else raw.root / label
    return RawCase(name, raw.root / image, path, header, tuple(raw.stamp(file) for file in files))


def _apart(one: Header, other: Header) -> float:
    """Return the largest distance between the same corner of two volumes of one shape, in voxels."""
    depth, height, width = one.shape[1:]
    corners = np.array([(x, y, z, 1) for x in (0, width - 1) for y in (0, height - 1) for z in (0, depth - 1)])
    between = corners @ (one.affine - other.affine).T  # (8, 4) mm
    return float(np.linalg.norm(between, axis=1).max() / min(one.spacing))
