"""Hands the pieces of a plan out to processes, and knows after a kill which of them are whole.

OUT/.prepare/ holds the plan and, for each piece that is done, what it wrote; when all are, OUT/prepared.json takes its
place. A piece that is not listed is written anew: equal input gives equal bytes, whoever writes them and when.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sightline.data.archive import check_room, clean_name, folder_below, written_whole
from sightline.data.prepare._forms import Plan, Written, check_names, room_for, split_folder, write_piece
from sightline.data.processes import Map, cores, over_processes
from sightline.data.progress import Progress
from sightline.errors import BadData, UsageError
from sightline.parts import Split

VERSION = 1  # goes up whenever the same options would give other files
_RECORD, _JOURNAL = "prepared.json", ".prepare"


def jobs_or_cores(jobs: int) -> int:
    """The processes to use: as asked for, or (0) one for each core, where more than 16 wait for the disk anyway."""
    if jobs < 0:
        raise UsageError(f"--jobs {jobs}: use 1 or more, or 0 for one process a core")
    return jobs or min(cores(), 16)


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Makes the folder; a second process that writes into it waits here, then finds the work done."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, a folder to write into was expected; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".prepare.lock").open("w")
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}; choose another --out") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # gone with its process
        yield


def write_all(plan: Plan, data_bytes: int, jobs: int, progress: Progress) -> dict[str, int]:
    """Writes what is missing of a plan; returns counts. `data_bytes` is how much the pictures take, all together."""
    decided = _decided(plan)
    found = _read_json(plan.out / _RECORD)
    if isinstance(found, dict) and "counts" in found:
        _check_same(found, decided, plan.out)
        shutil.rmtree(plan.out / _JOURNAL, ignore_errors=True)  # of a start that was killed at its very end
        return found["counts"]
    _check_classes(plan)
    for split in plan.sources:
        check_names(plan, split)
    is_resumed = _begin(plan.out, decided)
    done = {split: _done(plan, split) for split in plan.sources}
    written = sum(size for pieces in done.values() for piece in pieces.values() for _, size in piece.files)
    pictures = sum(len(source) for source in plan.sources.values())
    check_room(plan.out, room_for(plan.form, pictures, data_bytes) - written, f"{plan.out}")
    with over_processes(jobs, plan) as run:
        for split, pieces in done.items():
            _write_split(plan, split, pieces, run, progress)
    if is_resumed:
        _remove_leftovers(plan)
    counts: dict[str, int] = {split: len(source) for split, source in plan.sources.items()}
    if plan.repair:
        for what in ("repaired", "unreadable"):
            counts[what] = sum(getattr(piece, what) for pieces in done.values() for piece in pieces.values())
    if plan.form != "folder":
        _write_text(plan.out, "classes.txt", "".join(f"{name}\n" for name in next(iter(plan.sources.values())).classes))
    else:
        os.sync()  # shards were brought to the disk one by one; a million files are so in one go
    _write_text(plan.out, _RECORD, json.dumps({**decided, "counts": counts}, indent=1) + "\n")
    shutil.rmtree(plan.out / _JOURNAL)
    return counts


def _write_split(plan: Plan, split: Split, pieces: dict[int, Written], run: Map, progress: Progress) -> None:
    total = len(plan.sources[split])
    missing = [number for number in range(plan.pieces(split)) if number not in pieces]
    done = total - sum(plan.count(split, number) for number in missing)
    progress(f"writing {split}", done, total)
    for number, written in zip(missing, run(_write_and_note, [(split, number) for number in missing]), strict=True):
        pieces[number] = written
        done += plan.count(split, number)
        progress(f"writing {split}", done, total)


def _write_and_note(plan: Plan, job: tuple[Split, int]) -> Written:
    split, number = job
    written = write_piece(plan, split, number)
    _write_text(plan.out, f"{_JOURNAL}/{split}-{number:05d}", json.dumps(written))
    return written


# What an earlier start has left.


def _decided(plan: Plan) -> dict[str, Any]:
    shards = None if plan.form == "folder" else dict(plan.shards)
    inputs = {split: source.fingerprint for split, source in plan.sources.items()}
    return {"version": VERSION, "form": plan.form, "shards": shards, "repair": plan.repair, "inputs": inputs}


def _begin(out: Path, decided: dict[str, Any]) -> bool:
    """Notes the plan; True if an earlier start with the same plan has left something."""
    found = _read_json(out / _JOURNAL / "plan.json")
    if isinstance(found, dict):
        _check_same(found, decided, out)
        return True
    strangers = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith("."))
    if strangers:
        raise UsageError(
            f"{out} holds {', '.join(strangers[:3])}, not written by this command; choose another --out, or empty it"
        )
    (out / _JOURNAL).mkdir(exist_ok=True)
    _write_text(out, f"{_JOURNAL}/plan.json", json.dumps(decided))
    return False


def _done(plan: Plan, split: Split) -> dict[int, Written]:
    """The pieces that are noted as written and whose files are still there in full size."""
    done = {}
    for number in range(plan.pieces(split)):
        note = _read_json(plan.out / _JOURNAL / f"{split}-{number:05d}")
        if note is not None:
            written = Written([(path, size) for path, size in note[0]], *note[1:])
            if all(_size(plan.out / path) == size for path, size in written.files):
                done[number] = written
    return done


def _check_same(found: dict[str, Any], wanted: dict[str, Any], out: Path) -> None:
    differing = [key for key, value in wanted.items() if found.get(key) != value]
    if differing:
        key = differing[0]
        raise UsageError(
            f"{out} was begun with {key}={found.get(key)}, now it is {wanted[key]}; "
            f"choose another --out, or delete {out} to write it anew"
        )


def _check_classes(plan: Plan) -> None:
    """Class names become folders."""
    for source in plan.sources.values():
        for name in source.classes:
            if clean_name(name, str(plan.out)) != name or "/" in name or name.startswith("."):
                raise BadData(f"class {name!r} cannot be the name of a folder; rename it")


def _remove_leftovers(plan: Plan) -> None:
    """What processes were writing when they were killed."""
    written = (
        path for split in plan.sources for path in (plan.out / split_folder(plan.form, split)).rglob(".*.part-*")
    )
    for path in [*written, *plan.out.glob(".*.part-*")]:
        path.unlink()


def _read_json(path: Path) -> Any:
    """None if it is not there, or is not JSON any more after a power cut."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _write_text(out: Path, name: str, text: str) -> None:
    with folder_below(out, name) as (folder, last), written_whole(folder, last, str(out / name)) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
