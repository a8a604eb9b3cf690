"""Read the --source of `prepare decathlon`: its layout, and its cases with their headers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sightline.data.formats.nifti import Header
from sightline.data.sources import foreign
from sightline.data.sources.layouts import contents, subfolders
from sightline.data.volumes.files import SAME_PLACE_VOXELS, apart, read_header, read_label_header
from sightline.data.volumes.layouts import JSON, Raw, is_raw
from sightline.data.volumes.plan import TASKS, Mode, is_plain_name
from sightline.errors import BadData, BadSample, UsageError, first_of
from sightline.files.archive import BadArchive, Limits, extract
from sightline.files.whole import refuse_link, replace_text
from sightline.terminal.progress import Progress

_LIMITS = Limits(members=100_000)
_SHOWN = 20  # problems in one message
# Two tasks whose names in dataset.json differ from their folders.
_ALIASES = {"brats": "01", "leftatrium": "02"}


@dataclass(frozen=True)
class RawCase:
    """One case, its headers read."""

    name: str
    image: Path
    label: Path | None
    header: Header
    stamps: tuple[tuple[str, int, int], ...]


def find_place(source: Path, task: str) -> Path:
    """Return the folder of raw data, the description of one, or the tar, that a user means by --source."""
    if source.is_file() or is_raw(source):
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
        found += [source / name for name in subfolders(source) if name not in folders and is_raw(source / name)]
    if not found and (known := foreign.said(source)):
        raise UsageError(f"--source {source} holds {known}")
    if not found:
        raise UsageError(
            f"--source {source} holds no {JSON} and no images beside labels (folders such as images and masks, or "
            f"imagesTr and labelsTr); found there: {contents(source)}. If they lie elsewhere, give a file data.yaml "
            "with `kind: volumes` and `train: {images: FOLDER, labels: FOLDER}`"
        )
    if task not in TASKS and len(found) > 1:
        raise UsageError(f"--source {source} holds {first_of([p.name for p in found])}; give one of them, or --task")
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


def resolve_task(asked: str, raw: Raw) -> str | None:
    """Return which of the ten this is; None for other data."""
    if asked in TASKS:
        return asked
    if asked == "auto":
        name = raw.name.lower() if raw.has_json else ""
        for number, known in TASKS.items():
            folders = (known.folder, f"Dataset{int(number):03d}_{known.name}")  # the second as nnU-Net converts it
            if raw.root.name in folders or name in (known.name.lower(), folders[1].lower()):
                return number
        return _ALIASES.get(name)
    return None


def list_cases(raw: Raw, mode: Mode, channels: int, progress: Progress) -> list[RawCase]:
    """Return the cases of a mode with their headers; BadData names all whose files or headers do not fit."""
    pairs = raw.training if mode != "test" else raw.test
    if not pairs:
        listing = raw.root / JSON if raw.has_json else raw.root
        raise BadData(f"{listing} lists no {'test' if mode == 'test' else 'training'} cases")
    cases: dict[str, RawCase] = {}
    problems = []
    for done, (name, image, label) in enumerate(pairs, start=1):
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
    refuse(problems, len(pairs), raw)
    return sorted(cases.values(), key=lambda case: f"{case.name}_x.npy")


def refuse_lonely(raw: Raw) -> None:
    """Raise BadData with the files that are not part of a pair, if there are any."""
    if raw.problems:
        raise BadData(
            f"{raw.root}: {len(raw.problems)} files are not part of a pair of an image and a label; add what is "
            f"missing, or move them out of their folder:{_listed(raw.problems)}"
        )


def refuse(problems: Sequence[str], total: int, raw: Raw) -> None:
    """Raise BadData with the cases that cannot be used, if there are any."""
    if problems:
        how = f"take them out of {JSON}" if raw.has_json else "move them out of their folders"
        raise BadData(
            f"{raw.root}: {len(problems)} of {total} cases cannot be prepared; fix them, or {how}:{_listed(problems)}"
        )


def _listed(problems: Sequence[str]) -> str:
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "".join(f"\n  {problem}" for problem in problems[:_SHOWN]) + more


def _case(raw: Raw, name: str, image: str, label: str | None, channels: int) -> RawCase:
    header = read_header(raw.root / image, name, channels)
    if header.shape[0] != channels:
        raise BadSample(name, f"{image} has {header.shape[0]} channels, {channels} modalities were expected")
    stamps = raw.stamps(image, raw.channels)
    if label is not None:
        truth = read_label_header(raw.root / label, name)
        if truth.shape != (1, *header.shape[1:]):
            raise BadSample(name, f"{label} has the shape {truth.shape}, its image {header.shape}")
        if (away := apart(header, truth)) > SAME_PLACE_VOXELS:
            raise BadSample(name, f"{label} lies elsewhere than its image, by up to {away:.3g} voxels (their affines)")
        stamps += raw.stamps(label, 1)
    path = None if label is None else raw.root / label
    return RawCase(name, raw.root / image, path, header, tuple(stamps))
