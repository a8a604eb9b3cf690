"""Prepare cases, several at once within a memory budget, and reuse those of an earlier start.

The notes in OUT/.prepare stay, one for each case: what it was made from and what it became. A case whose files are
whole and whose sources are as they were is not made again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sightline.data.prepare.decathlon.raw import RawCase
from sightline.data.processes import over_processes
from sightline.data.volumes.files import read_label, read_scan
from sightline.data.volumes.geometry import close_gaps, fit_patch, new_shape, prepare_image, prepare_label
from sightline.data.volumes.plan import PLAN, Case, Mode, Triple, read_case
from sightline.data.writing.pieces import Journal, Written
from sightline.errors import BadSample
from sightline.files.whole import check_room, written_whole
from sightline.parts import DataSpec
from sightline.terminal.progress import Progress


@dataclass(frozen=True)
class Work:
    """The part that all cases share; pickled to every process once."""

    journal: Journal
    spec: DataSpec
    mode: Mode
    dilation: bool

    @property
    def out(self) -> Path:
        return self.journal.out


def make_cases(
    work: Work, cases: Sequence[RawCase], jobs: int, memory: int, progress: Progress
) -> tuple[list[Case], list[str], int]:
    """Return the cases in their order, the problems of those that cannot be made, and how many were made now."""
    done = {case.name: kept for case in cases if (kept := _kept(work.journal, case)) is not None}
    missing = [case for case in cases if case.name not in done]
    problems = []
    if missing:
        # The plan is valid until a case is made again.
        (work.out / PLAN).unlink(missing_ok=True)
        check_room(work.out, sum(stored_bytes(case, work) for case in missing), f"{work.out}")
    finished = len(done)
    progress("preparing cases", finished, len(cases))
    for processes, group in groups(missing, work.spec, jobs, memory):
        with over_processes(processes, work) as run:
            for raw, outcome in zip(group, run(_make, group), strict=True):
                finished += 1
                progress("preparing cases", finished, len(cases))
                if isinstance(outcome, str):
                    problems.append(outcome)
                else:
                    done[raw.name] = outcome
    if missing:
        work.journal.sweep()
    return [done[case.name] for case in cases if case.name in done], problems, len(missing) - len(problems)


def groups(cases: Iterable[RawCase], spec: DataSpec, jobs: int, memory: int) -> Iterator[tuple[int, list[RawCase]]]:
    """Yield (processes, cases): the largest cases first, in as many processes as `memory` bytes allow for them."""
    shared: dict[int, list[RawCase]] = {}
    for case in cases:
        fitting = max(1, min(jobs, memory // working_bytes(case, spec)))
        # Halves of the processes asked for: a pool a size would start too many pools.
        processes = next(jobs >> by for by in range(jobs.bit_length()) if jobs >> by <= fitting)
        shared.setdefault(processes, []).append(case)
    for processes in sorted(shared):
        yield min(processes, len(shared[processes])), shared[processes]


def working_bytes(case: RawCase, spec: DataSpec) -> int:
    """Return the bytes held at once for a case, at most: the file, its floats, what it becomes, and masks."""
    channels, depth, height, width = case.header.shape
    voxels = depth * height * width
    held = channels * voxels * (case.header.dtype.itemsize + 2 * 4) + 4 * voxels
    if len(spec.size) == 2:
        return held + 4 * channels * depth * math.prod(map(max, (height, width), spec.size))
    sides = _resampled(case, spec)
    grown = math.prod(sides)
    held += 4 * channels * (2 * grown + math.prod(map(max, sides, spec.size)))
    return held + 2 * 8 * max(voxels, grown)  # splines are computed in double


def stored_bytes(case: RawCase, work: Work) -> int:
    """Return the bytes that the files of a case take, at most."""
    channels, depth, height, width = case.header.shape
    size, patch = (depth, height, width), work.spec.size
    if len(patch) == 3:
        size = _resampled(case, work.spec)
    if work.mode == "training":
        wanted = (depth, *patch) if len(patch) == 2 else tuple(map(max, size, patch))
        size = (wanted[0], wanted[1], wanted[2])
    return (4 * channels + 1) * math.prod(size) + 4096


def _resampled(case: RawCase, spec: DataSpec) -> Triple:
    _, depth, height, width = case.header.shape
    return new_shape((depth, height, width), case.header.spacing, spec.spacing)


def _make(work: Work, raw: RawCase) -> Case | str:
    """Write a case and note it; return the reason if its voxels cannot be used."""
    try:
        case, arrays = _prepared(work, raw)
        classes = np.unique(arrays[case.label]).tolist() if case.label else []
    except BadSample as error:
        return str(error)
    files = []
    for name, array in arrays.items():
        with written_whole(work.out, name, durable=True) as file:
            np.save(file, array, allow_pickle=False)
        files.append((name, (work.out / name).stat().st_size))
    notes = {"sources": raw.stamps, "case": asdict(case), "classes": classes}
    work.journal.note(note_of(raw.name), Written(files, notes))
    return case


def _prepared(work: Work, raw: RawCase) -> tuple[Case, dict[str, np.ndarray]]:
    scan = read_scan(raw.image, raw.name, work.spec.channels)
    image, geometry = prepare_image(scan, work.spec, raw.name)
    names: tuple[str, str | None] = (f"{raw.name}_x.npy", None)
    arrays = {}
    if raw.label is not None:
        label, _ = read_label(raw.label, raw.name, len(work.spec.classes))
        if (highest := int(label.max())) >= len(work.spec.classes):
            known = ", ".join(f"{number} {name}" for number, name in enumerate(work.spec.classes))
            raise BadSample(raw.name, f"a label of {highest}; the classes are {known}")
        label = fit_patch(prepare_label(label, geometry, scan.spacing, work.spec), work.spec.size)
        names = (names[0], f"{raw.name}_y.npy")
        arrays[f"{raw.name}_y.npy"] = close_gaps(label) if work.dilation else label
        image = fit_patch(image, work.spec.size)
    arrays[names[0]] = image
    _, depth, height, width = image.shape
    case = Case(
        raw.name,
        (depth, height, width),
        geometry.original,
        geometry.start,
        geometry.end,
        geometry.shape,
        scan.spacing,
        *names,
    )
    return case, arrays


def _kept(journal: Journal, raw: RawCase) -> Case | None:
    """Return the case as an earlier start has made it, if that still holds."""
    done = journal.done(note_of(raw.name))
    try:
        if done is None or [tuple(stamp) for stamp in done.notes["sources"]] != list(raw.stamps):
            return None
        return read_case(done.notes["case"], "val" if raw.label is None else "training")
    except (TypeError, KeyError, ValueError):  # half a note
        return None


def note_of(name: str) -> str:
    """Return the name of a case's note."""
    return f"case-{name}.json"
