"""`sightline prepare shapes`: a drawn world in the real formats of the three tasks, from nothing but a seed.

Each part (classification, detection, segmentation) is drawn into a hidden folder and renamed when complete, so a part
that exists is whole. `shapes.json`, in every part and summed up in the output folder, says what was drawn.
"""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sightline.data.prepare.shapes.formats import FORMATS, VERSION, Job, Record
from sightline.errors import DiskFull, PeerLost, UsageError
from sightline.files.typed_json import read_json, typed
from sightline.files.whole import open_text, refuse_link, replace_text

_RECORD = "shapes.json"
_MAX_RECORD_BYTES = 2**16
# The two options that say how much of each part is drawn, in the order of its splits.
_AMOUNTS: dict[str, tuple[str, str]] = {
    "classification": ("train_per_class", "val_per_class"),
    "detection": ("train_pictures", "val_pictures"),
    "segmentation": ("train_volumes", "test_volumes"),
}
_WORTH_PROCESSES = 300  # items; below this, starting processes takes longer than drawing

Part = Literal["classification", "detection", "segmentation"]
Progress = Callable[[str, int, int], None]
Map = Callable[[Callable[[Job], list[Record]], list[Job]], Iterable[list[Record]]]


@dataclass(frozen=True)
class Options:
    """Draws a small data set for each task: shapes to classify, to detect, and lesions in volumes to segment.

    classification/{train,val}/CLASS/*.jpg, detection/ as COCO 2017, segmentation/Task01_Shapes as Medical Decathlon.
    The same seed gives the same files on the same NumPy and Pillow, however many processes draw them.
    """

    out: Path
    """Folder to write into; parts that are already there are kept."""
    seed: int = 0
    """Everything drawn follows from this number."""
    only: tuple[Part, ...] = ("classification", "detection", "segmentation")
    """The parts to draw."""
    train_per_class: int = 400
    """Classification: training pictures of each of the ten classes."""
    val_per_class: int = 100
    """Classification: held-out pictures of each class."""
    train_pictures: int = 400
    """Detection: training pictures."""
    val_pictures: int = 100
    """Detection: held-out pictures."""
    train_volumes: int = 20
    """Segmentation: labelled volumes."""
    test_volumes: int = 4
    """Segmentation: volumes without labels."""

    def __post_init__(self) -> None:
        for part in self.only:
            if part not in _AMOUNTS:
                raise UsageError(f"only={part!r} is no part; known: {', '.join(_AMOUNTS)}")
        if not self.only:
            raise UsageError(f"only is empty, so there is nothing to draw; name one or more of {', '.join(_AMOUNTS)}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed} is out of range; use 0 or a positive number below 2**63")
        for field in (field for fields in _AMOUNTS.values() for field in fields):
            if getattr(self, field) < 1:
                raise UsageError(f"{field}={getattr(self, field)} draws nothing; use 1 or more")


def prepare(options: Options, progress: Progress) -> dict[str, int]:
    """Draws what is missing and returns counts; progress(what, done, total) is called as work proceeds."""
    wanted = sum(job.items for part in options.only for job in _jobs(part, options, Path(options.out)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return draw_parts(options, progress, processes=min(cores, 16) if wanted >= _WORTH_PROCESSES else 1)


def draw_parts(options: Options, progress: Progress, processes: int) -> dict[str, int]:
    """`prepare` with a chosen number of processes, which changes the time it takes and nothing else."""
    out = Path(options.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, a folder to draw into was expected; choose another --out")
    parts: list[str] = [part for part in _AMOUNTS if part in options.only]
    if not _missing(options, parts) and _is_tidy(out):
        return _counts(out, parts)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _only_one_drawing(out):
            for part in _AMOUNTS:
                shutil.rmtree(_unfinished(out, part), ignore_errors=True)
            missing = _missing(options, parts)
            with _workers(processes if missing else 1) as run:
                for part in missing:
                    _draw_part(part, options, run, progress)
            if not _is_tidy(out):
                _write_json(out / _RECORD, _summary(out))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"{out}: {error.strerror}; the default set takes 30 MB, make room or choose another --out"
            ) from error
        raise
    return _counts(out, parts)


def _draw_part(part: str, options: Options, run: Map, progress: Progress) -> None:
    out = Path(options.out)
    folder = _unfinished(out, part)
    jobs = _jobs(part, options, folder)
    refuse_link(folder)
    folder.mkdir()
    for directory in sorted({job.folder for job in jobs}):
        directory.mkdir(parents=True, exist_ok=True)
    done, total = 0, sum(job.items for job in jobs)
    drawn: list[Record] = []
    progress(part, done, total)
    for job, result in zip(jobs, run(FORMATS[part].draw, jobs), strict=True):
        drawn += result
        done += job.items
        progress(part, done, total)
    counts = FORMATS[part].finish(folder, drawn)
    _write_json(folder / _RECORD, {**_decided_by(options, part), "counts": counts})
    folder.rename(out / part)


def _jobs(part: str, options: Options, folder: Path) -> list[Job]:
    first, second = (getattr(options, field) for field in _AMOUNTS[part])
    return FORMATS[part].jobs(options.seed, first, second, folder)


# What was drawn before, and whether it is what is wanted now.


def _decided_by(options: Options, part: str) -> Record:
    """Everything that decides the files of a part: another value here would mean other files."""
    fields = {field: getattr(options, field) for field in _AMOUNTS[part]}
    return {"version": VERSION, "seed": options.seed, "options": fields}


def _missing(options: Options, parts: list[str]) -> list[str]:
    """The parts still to be drawn; a part that was drawn otherwise, or by someone else, is an error."""
    missing = []
    for part in parts:
        folder = Path(options.out) / part
        record = folder / _RECORD
        if not folder.exists():
            missing.append(part)
        elif not record.exists():
            raise UsageError(
                f"{folder} is there without the {record.name} that `prepare shapes` leaves in it; choose another --out"
            )
        else:
            _check_same(_read_record(record), _decided_by(options, part), record)
    return missing


def _read_record(path: Path) -> Record:
    try:
        record = read_json(path, _MAX_RECORD_BYTES)
        typed({key: record[key] for key in ("options", "counts")}, dict[str, dict[str, int]])
    except (ValueError, KeyError, TypeError):
        record = None
    if not isinstance(record, dict) or not {"version", "seed"} <= record.keys():
        raise UsageError(
            f"{path} is not what `prepare shapes` writes there; "
            f"choose another --out, or delete {path.parent} to draw it anew"
        )
    return record


def _check_same(found: Record, wanted: Record, record: Path) -> None:
    was, now = ({"version": r["version"], "seed": r["seed"], **r["options"]} for r in (found, wanted))
    differing = [f"{key}={was.get(key)} (now {value})" for key, value in now.items() if was.get(key) != value]
    if differing:
        raise UsageError(
            f"{record} says the pictures there were drawn with {', '.join(differing)}; "
            f"choose another --out, or delete {record.parent} to draw it anew"
        )


def _records(out: Path) -> dict[str, Record]:
    paths = {part: out / part / _RECORD for part in _AMOUNTS}
    return {part: _read_record(path) for part, path in paths.items() if path.exists()}


def _counts(out: Path, parts: list[str]) -> dict[str, int]:
    records = _records(out)
    return {f"{part}/{what}": n for part in parts for what, n in records[part]["counts"].items()}


def _summary(out: Path) -> Record:
    return {"version": VERSION, "parts": _records(out)}


def _is_tidy(out: Path) -> bool:
    """Nothing unfinished lies about, and the summary says what is there."""
    unfinished = any(_unfinished(out, part).exists() for part in _AMOUNTS)
    path = out / _RECORD
    return not unfinished and path.exists() and path.read_text() == _as_text(_summary(out))


def _as_text(content: Record) -> str:
    return json.dumps(content, indent=1) + "\n"


def _write_json(path: Path, content: Record) -> None:
    """Through a second name, so that a reader never meets half a file."""
    replace_text(path, _as_text(content))


# Processes and folders.


def _unfinished(out: Path, part: str) -> Path:
    return out / f".{part}.drawing"


@contextmanager
def _only_one_drawing(out: Path) -> Iterator[None]:
    """A second process drawing into the same folder waits here, then finds the work done.

    Without it each would take the other's unfinished folder for a stale one. The lock dies with its process.
    """
    with open_text(out / ".shapes.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _workers(processes: int) -> Iterator[Map]:
    """Yields a `map` that keeps the order of its jobs, over this many processes."""
    if processes == 1:
        yield map
        return
    # Spawned, not forked: the caller may hold threads and a GPU by now.
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool.map
    except BrokenProcessPool as error:
        raise PeerLost(
            "a drawing process died; a script that calls prepare() must do so under `if __name__ == '__main__':`, "
            "otherwise look for the kernel's out-of-memory messages and call again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
