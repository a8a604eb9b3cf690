"""Hands the pieces of a plan out to processes, and knows after a kill which of them are whole.

OUT/.prepare/ holds the plan and, for each piece that is done, what it wrote; when all are, OUT/prepared.json takes its
place. A piece that is not listed is written anew: equal input gives equal bytes, whoever writes them and when.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sightline.data.processes import Map, cores, over_processes
from sightline.errors import UsageError
from sightline.files.typed_json import read_json, typed
from sightline.files.whole import check_room, folder_below, open_text, refuse_link, written_whole
from sightline.terminal.progress import Progress

VERSION = 1  # goes up whenever the same options would give other files
_RECORD, _JOURNAL = "prepared.json", ".prepare"
_MAX_NOTE_BYTES = 64 * 2**20  # a piece of class folders lists its files, 60 bytes each


class Written(NamedTuple):
    """What a piece has become: (path below the output folder, bytes) of each file; and what was met on the way."""

    files: list[tuple[str, int]]
    counts: dict[str, int]


class Pieces(Protocol):
    """What is to be written, in parts (a split, say) of numbered pieces. Pickled to every process once."""

    @property
    def out(self) -> Path: ...

    def decided(self) -> dict[str, Any]:
        """Everything that decides the files, as JSON holds it: what a second start is compared with."""

    def check(self) -> None:
        """BadData if the plan cannot be carried out; called before anything is written."""

    def pieces(self) -> dict[str, list[int]]:
        """part -> how many samples each of its pieces has."""

    def room(self) -> int:
        """Bytes on disk, at most."""

    def write(self, part: str, number: int) -> Written:
        """Writes one piece; files appear under their names when they are whole."""

    def finish(self, written: list[Written]) -> dict[str, int]:
        """The last small files; returns the counts to show."""


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
        lock = open_text(out / ".prepare.lock", "w")
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}; choose another --out") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # gone with its process
        yield


def write_pieces(plan: Pieces, jobs: int, progress: Progress) -> dict[str, int]:
    """Writes what is missing of a plan; returns counts."""
    decided = {"version": VERSION, **plan.decided()}
    found = _read_json(plan.out / _RECORD)
    if isinstance(found, dict) and "counts" in found:
        _check_same(found, decided, plan.out)
        shutil.rmtree(plan.out / _JOURNAL, ignore_errors=True)  # of a start that was killed at its very end
        return found["counts"]
    plan.check()
    is_resumed = _begin(plan.out, decided)
    pieces = plan.pieces()
    done = {part: _done(plan.out, part, len(samples)) for part, samples in pieces.items()}
    written = sum(size for some in done.values() for piece in some.values() for _, size in piece.files)
    check_room(plan.out, plan.room() - written, f"{plan.out}")
    with over_processes(jobs, plan) as run:
        for part, samples in pieces.items():
            _write_part(part, samples, done[part], run, progress)
    if is_resumed:
        for leftover in [path for path in plan.out.rglob(".*.part-*") if path.is_file()]:
            leftover.unlink()  # what processes were writing when they were killed
    counts = plan.finish([piece for some in done.values() for piece in some.values()])
    write_text(plan.out, _RECORD, json.dumps({**decided, "counts": counts}, indent=1) + "\n")
    shutil.rmtree(plan.out / _JOURNAL)
    return counts


def write_text(out: Path, name: str, text: str) -> None:
    """A small file below the output folder, whole or not at all."""
    with folder_below(out, name) as (folder, last), written_whole(folder, last, str(out / name)) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def _write_part(part: str, samples: list[int], done: dict[int, Written], run: Map, progress: Progress) -> None:
    missing = [number for number in range(len(samples)) if number not in done]
    total = sum(samples)
    finished = total - sum(samples[number] for number in missing)
    progress(f"writing {part}", finished, total)
    for number, written in zip(missing, run(_write_and_note, [(part, number) for number in missing]), strict=True):
        done[number] = written
        finished += samples[number]
        progress(f"writing {part}", finished, total)


def _write_and_note(plan: Pieces, job: tuple[str, int]) -> Written:
    part, number = job
    written = plan.write(part, number)
    write_text(plan.out, f"{_JOURNAL}/{part}-{number:05d}", json.dumps(written))
    return written


# What an earlier start has left.


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
    refuse_link(out / _JOURNAL)
    (out / _JOURNAL).mkdir(exist_ok=True)
    write_text(out, f"{_JOURNAL}/plan.json", json.dumps(decided))
    return False


def _done(out: Path, part: str, pieces: int) -> dict[int, Written]:
    """The pieces that are noted as written and whose files are still there in full size."""
    done = {}
    for number in range(pieces):
        note = _read_json(out / _JOURNAL / f"{part}-{number:05d}")
        try:
            files, counts = typed(note, tuple[list[tuple[str, int]], dict[str, int]])
        except ValueError:  # none, or half of one
            continue
        if all(_size(out / path) == size for path, size in files):
            done[number] = Written(files, counts)
    return done


def _check_same(found: dict[str, Any], wanted: dict[str, Any], out: Path) -> None:
    differing = [key for key, value in wanted.items() if found.get(key) != value]
    if differing:
        key = differing[0]
        raise UsageError(
            f"{out} was begun with {key}={found.get(key)}, now it is {wanted[key]}; "
            f"choose another --out, or delete {out} to write it anew"
        )


def _read_json(path: Path) -> Any:
    """None if it is not there, or is not JSON any more after a power cut."""
    try:
        return read_json(path, _MAX_NOTE_BYTES)
    except (FileNotFoundError, ValueError):
        return None


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
