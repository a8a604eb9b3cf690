"""`sightline prepare decathlon`: scans or images with labels, in any layout, become arrays that training maps into
memory.

Each case is cropped to its foreground, resampled for volumes, normalised and, for training, fitted to the patch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sightline import terminal
from sightline.data.loading.cache import available_bytes
from sightline.data.prepare.decathlon.cases import Work, groups, make_cases, note_of
from sightline.data.prepare.decathlon.fetched import check_asked, fetch_tar
from sightline.data.prepare.decathlon.raw import (
    RawCase,
    find_place,
    list_cases,
    refuse,
    refuse_lonely,
    resolve_task,
    unpack,
)
from sightline.data.prepare.decathlon.statistics import Measured, find_spec, is_ct, measure
from sightline.data.prepare.decathlon.survey import complete, write_description
from sightline.data.processes import over_processes
from sightline.data.sources.layouts import is_description, read_description
from sightline.data.volumes.inputs import expected_shape
from sightline.data.volumes.layouts import JSON, Raw, read_raw
from sightline.data.volumes.plan import OWN, PLAN, TASKS, Case, Mode, VolumePlan, read_plan, spec_of, write_plan
from sightline.data.writing.pieces import NOTES, Journal, alone_in, jobs_or_cores, refuse_unwritable
from sightline.errors import BadData, BadSample, UsageError
from sightline.files.download import Expected
from sightline.files.typed_json import read_json
from sightline.files.whole import write_text
from sightline.parts import DataSpec
from sightline.terminal.progress import Progress

_AUTO_MEMORY_SHARE = 0.75  # of what is available; the rest is for others on the machine
_VERSION = 1  # goes up whenever the same options would give other arrays
_MAX_NOTE_BYTES = 2**20  # of the tar or of the statistics
_TAR, _RAW, _STATISTICS = f"{NOTES}/tar.json", f"{NOTES}/raw", f"{NOTES}/statistics.json"


@dataclass(frozen=True)
class DecathlonOptions:
    """Prepare volumes or images with labels: a Medical Decathlon task, nnU-Net v2's layout, or two folders.

    Writes CASE_x.npy, CASE_y.npy (training) and, when all are there, plan.json. The ten tasks have their patch, spacing
    and CT numbers from a table; other data gets them from its training set.
    A start after a kill resumes with what is missing; the files are the same for any number of jobs.
    """

    source: Path = Path(".")
    """Folder with dataset.json or with images beside masks, a folder around it, a data.yaml, or the task's tar."""
    out: Path = Path("prepared")
    """Folder to write into."""
    task: Literal["auto", "own", "01", "02", "03", "04", "05", "06", "07", "08", "09", "10"] = "auto"
    """auto: found from the name of the folder or in dataset.json; own: other data, statistics from its training set."""
    dim: Literal[2, 3] = 2
    """2: for a network of slices, nothing is resampled; 3: of volumes, at the task's spacing."""
    mode: Mode = "training"
    """training: images and labels of the patch's size; val: the training images as they lie; test: the test images."""
    dilation: bool = False
    """Training: close gaps of one voxel in the labels of every slice."""
    download: bool = False
    """Fetch the tar of --task 01 to 10, or that of --url, into --source if it is not there."""
    url: str = ""
    """--download: https address of a tar, or of a mirror's folder of the tasks' tars; default: the public bucket."""
    sha256: str = ""
    """--download: of the tar; default: a task's known MD5 is compared, or the first download is recorded."""
    size_bytes: int = 0
    """--download: of the tar; default: what the server says."""
    jobs: int = 0
    """Processes; 0 takes one per core, at most 16."""
    memory_gb: float = 0.0
    """Memory for the cases processed at once; 0: three quarters of what is free. One case always runs."""

    def __post_init__(self) -> None:
        if not 0 <= self.memory_gb < 1e6:
            raise UsageError(
                f"memory_gb={self.memory_gb}: use a number above 0, or 0 for three quarters of what is free"
            )
        if self.dilation and self.mode != "training":
            raise UsageError(f"--dilation changes labels, which --mode {self.mode} does not write; leave it out")
        check_asked(self.download, self.task, self.url, self.sha256, self.size_bytes)


def prepare(options: DecathlonOptions, progress: Progress) -> dict[str, int]:
    """Write what is missing and return counts; progress(what, done, total) is called as work proceeds."""
    jobs = jobs_or_cores(options.jobs)
    if options.download:
        refuse_unwritable(options.out)
        expected = Expected(options.size_bytes or None, options.sha256.lower())
        source = fetch_tar(options.source, options.out, options.task, options.url, expected, progress)
        options = replace(options, source=source)
    place = find_place(options.source, options.task)
    _check_places(place, options)
    memory = int(options.memory_gb * 2**30) or int(_AUTO_MEMORY_SHARE * available_bytes())
    is_tar = place.is_file() and not is_description(str(place))
    raw = None if is_tar else _checked(read_raw(place), options)  # before a folder is made
    with alone_in(options.out):
        asked = {"version": _VERSION, "dim": options.dim, "mode": options.mode, "dilation": options.dilation}
        journal = Journal(options.out, "options.json")
        journal.begin({**asked, "task": options.task} if options.task in TASKS else asked)
        if raw is None:
            if counts := _finished(options, place, journal):
                return counts
            raw = _checked(read_raw(*unpack(place, options.out / _RAW, progress)), options)
        decided = ""
        if not raw.has_json:
            raw, decided = complete(raw, options.out, jobs, memory, progress)
        terminal.say(f"found {'; '.join(filter(None, [raw.describe(), decided]))}")
        task = resolve_task(options.task, raw)
        if task is None:
            spec = _own_spec(raw, options, jobs, memory, progress)
        else:
            spec = _known_spec(raw, task, options.dim)
        # The user may fix the data between two starts, which changes its statistics.
        may_change = () if (options.out / PLAN).is_file() else ("spec",)
        journal.begin({**asked, "task": task or OWN, "spec": spec.to_json()}, may_change)
        cases = list_cases(raw, options.mode, spec.channels, progress)
        refuse(_too_large(cases, spec), len(cases), raw)
        work = Work(journal, spec, options.mode, options.dilation)
        made, problems, count = make_cases(work, cases, jobs, memory, progress)
        refuse(problems, len(cases), raw)
        if raw.are_images:
            _tell_of_cut_images(made, spec)
        _warn_of_absent_classes(journal, made, spec)
        if not raw.has_json:
            write_description(raw, options.out)
        plan = VolumePlan(task or OWN, raw.name, options.dim, options.mode, spec, tuple(made), raw.root.name)
        if count or not (options.out / PLAN).is_file() or read_plan(options.out) != plan:
            write_plan(options.out, plan)
        if is_tar:
            write_text(options.out, _TAR, json.dumps(_tar_stamp(place)))
            shutil.rmtree(options.out / _RAW)
        return _counts(plan, count)


def _check_places(place: Path, options: DecathlonOptions) -> None:
    sources = [place]
    if is_description(str(place)) and (train := read_description(str(place)).train):
        sources += [path for path in (train.images, train.labels) if path]
    out = options.out.resolve()
    for each in sources:
        source = each.resolve()
        if source == out or source in out.parents or (source.is_dir() and out in source.parents):
            raise UsageError(f"--out {options.out} lies in {each} or around it; choose another --out")


def _checked(raw: Raw, options: DecathlonOptions) -> Raw:
    """Return the data; raise if the names of their files alone tell that they cannot be prepared."""
    if raw.are_images and options.dim == 3:
        raise UsageError(f"{raw.root} holds 2D images, which have no depth for --dim 3; leave it out")
    if options.mode != "test":
        refuse_lonely(raw)
    return raw


def _tar_stamp(place: Path) -> list[int]:
    info = place.stat()
    return [info.st_size, info.st_mtime_ns]


def _finished(options: DecathlonOptions, place: Path, journal: Journal) -> dict[str, int]:
    """Return the counts of an earlier start that made everything of this tar, without unpacking it again."""
    try:
        if read_json(options.out / _TAR, _MAX_NOTE_BYTES) != _tar_stamp(place):
            return {}
        plan = read_plan(options.out)
    except (OSError, ValueError, BadData):
        return {}
    is_whole = all(journal.done(note_of(case.name)) is not None for case in plan.cases)
    return _counts(plan, 0) if is_whole and options.task in ("auto", plan.task) else {}


def _counts(plan: VolumePlan, made: int) -> dict[str, int]:
    what = "cases" if plan.task == OWN else f"cases of task {plan.task}"
    return {what: len(plan.cases), "made now": made}


def describe(counts: Mapping[str, int], out: Path) -> str:
    """Say what was prepared, e.g. `prepared 30 cases in DIR`."""
    (what, cases), made = next(iter(counts.items())), counts["made now"]
    earlier = f"; {cases - made} of them were there already" if made < cases else ""
    what = what.replace("cases", "case") if cases == 1 else what
    return f"prepared {cases} {what} in {out}{earlier}"


def _known_spec(raw: Raw, task: str, dim: int) -> DataSpec:
    """Return the spec of the table, after a check that the data fits the table."""
    spec = spec_of(task, dim)
    for what, found, wanted in (
        ("modalities", raw.modalities, TASKS[task].modalities),
        ("labels", raw.classes, TASKS[task].classes),
    ):
        if len(found) != len(wanted):
            raise BadData(
                f"{raw.root / JSON if raw.has_json else raw.root} has {len(found)} {what} ({', '.join(found)}), task "
                f"{task} has {len(wanted)} ({', '.join(wanted)}); give another --task, or --task own for your own data"
            )
    return spec


def _tell_of_cut_images(made: Sequence[Case], spec: DataSpec) -> None:
    """Say how many images training does not see whole; `predict` and `evaluate --labels` see all of them."""
    cut = sum(height > spec.size[0] or width > spec.size[1] for _, height, width in (case.resampled for case in made))
    if cut and made[0].label:
        patch = " x ".join(map(str, spec.size))
        terminal.say(f"{cut} of {len(made)} images are larger than {patch} pixels: training sees their centre")


def _warn_of_absent_classes(journal: Journal, made: Sequence[Case], spec: DataSpec) -> None:
    """Warn of classes that no label has; not known of cases that an earlier version has made."""
    notes = [done.notes.get("classes") for case in made if (done := journal.done(note_of(case.name))) is not None]
    if not made[0].label or not all(isinstance(each, list) for each in notes):
        return
    present = {number for each in notes for number in each or ()}
    for number, name in enumerate(spec.classes):
        if number and number not in present:
            terminal.say(
                f"warning: no label has class {number} ({name}), so it cannot be learnt and its Dice says nothing; add "
                f"cases that have it, or remove it from {JSON}"
            )


def _too_large(cases: Sequence[RawCase], spec: DataSpec) -> list[str]:
    """Return the problems of cases whose headers claim voxels so large that resampled they would fill any memory."""
    problems = []
    for case in cases:
        try:
            expected_shape(case.header, spec, case.name)
        except BadSample as error:
            problems.append(str(error))
    return problems


def _own_spec(raw: Raw, options: DecathlonOptions, jobs: int, memory: int, progress: Progress) -> DataSpec:
    """Derive the spec from the training set, also for val and test; measured once."""
    cases = list_cases(raw, "training", len(raw.modalities), progress)
    stamps = hashlib.sha256(repr([case.stamps for case in cases]).encode("utf-8", "surrogateescape")).hexdigest()
    key = {"version": _VERSION, "files": stamps, "dim": options.dim, "modalities": list(raw.modalities)}
    kept = _read_statistics(options.out, key)
    if kept is not None:
        return kept
    found = _measured(cases, raw, options.dim, jobs, memory, progress)
    spec = find_spec(found, options.dim, raw.classes, raw.modalities, str(raw.root))
    write_text(options.out, _STATISTICS, json.dumps({**key, "spec": spec.to_json()}))
    return spec


def _measured(
    cases: Sequence[RawCase], raw: Raw, dim: int, jobs: int, memory: int, progress: Progress
) -> list[Measured]:
    found: list[Measured] = []
    problems: list[str] = []
    # Nothing is resampled here, so a case takes what it takes for slices.
    flat = DataSpec(raw.classes, len(raw.modalities), (1, 1), (), ())
    for processes, group in groups(cases, flat, jobs, memory):
        with over_processes(processes, is_ct(raw.modalities)) as run:
            for outcome in run(measure, group):
                if isinstance(outcome, str):
                    problems.append(outcome)
                else:
                    found.append(outcome)
                progress("measuring cases", len(found) + len(problems), len(cases))
    refuse(problems, len(cases), raw)
    return found


def _read_statistics(out: Path, key: dict[str, Any]) -> DataSpec | None:
    try:
        content = read_json(out / _STATISTICS, _MAX_NOTE_BYTES)
        return DataSpec.from_json(content["spec"]) if all(content[name] == key[name] for name in key) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
