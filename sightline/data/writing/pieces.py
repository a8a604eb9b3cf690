"""The one way to write a prepared folder: piece by piece, over processes, resumed after a kill.

OUT/.prepare/ holds what decides the files and, for each finished piece, the files it wrote; when all are finished, a
record replaces it. A piece without a note is written again: equal input gives equal bytes, whoever writes them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sightline.data.processes import Map, over_processes
from sightline.errors import UsageError, first_of
from sightline.files.typed_json import read_json, typed
from sightline.files.whole import check_room, open_text, refuse_link, write_text
from sightline.hardware.limits import usable_cores
from sightline.terminal.progress import Progress

VERSION = 1  # goes up whenever the same options would give other files
RECORD, NOTES = "prepared.json", ".prepare"
_MAX_NOTE_BYTES = 64 * 2**20  # a piece of class folders lists its files, 60 bytes each


class Written(NamedTuple):
    """The result of a piece: (path below the output folder, bytes) of each file; and notes about it."""

    files: list[tuple[str, int]]
    notes: dict[str, Any]  # as JSON holds it


def in_pieces(samples: int, per_piece: int, count: int) -> list[int]:
    """Return how many samples each of so many pieces has; the last ones may be empty."""
    return [max(0, min(per_piece, samples - number * per_piece)) for number in range(count)]


class Pieces(Protocol):
    """The files to write, in parts (a split, say) of numbered pieces. Pickled to every process once."""

    @property
    def out(self) -> Path: ...

    def decided(self) -> dict[str, Any]:
        """Return everything that decides the files, as JSON holds it: what a second start is compared with."""

    def check(self) -> None:
        """Raise BadData if it cannot be written; called before the first piece."""

    def pieces(self) -> dict[str, list[int]]:
        """Return part -> how many samples each of its pieces has."""

    def room(self) -> int:
        """Return the bytes on disk, at most."""

    def write(self, part: str, number: int) -> Written:
        """Write one piece; files appear under their names when they are whole."""

    def finish(self, written: list[Written]) -> dict[str, int]:
        """Write the last small files; return the counts to show. `written` is in the order of the pieces."""


def jobs_or_cores(jobs: int) -> int:
    """Return the processes to use: as asked for, or (0) one for each core, where more than 16 wait for the disk."""
    if jobs < 0:
        raise UsageError(f"--jobs {jobs}: use 1 or more, or 0 for one process per core")
    return jobs or min(usable_cores(), 16)


def refuse_unwritable(out: Path) -> None:
    """Raise UsageError if `out` cannot be made or written, or holds other files; leave nothing behind. For a command
    that downloads first.

    Folders are made on trial beside those of other starts, not as theirs: one that is removed again would be missed.
    """
    _refuse_file(out)
    whole = out.absolute()
    nearest = next(folder for folder in (whole, *whole.parents) if os.path.lexists(folder))
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=nearest) as trial:
            (trial / whole.relative_to(nearest)).mkdir(parents=True, exist_ok=True)
        if nearest == whole and not any((out / name).exists() for name in (NOTES, RECORD)):
            _refuse_strangers(out)
    except OSError as error:
        raise _unwritable(out, error) from error


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Make the folder; a second process that writes into it waits here, then finds the work done."""
    _refuse_file(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open_text(out / ".prepare.lock", "w")
    except OSError as error:
        raise _unwritable(out, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with its process
        yield


def _refuse_file(out: Path) -> None:
    if os.path.exists(out) and not out.is_dir():
        raise UsageError(f"{out} is a file, a folder to write into was expected; choose another --out")


def _unwritable(out: Path, error: OSError) -> UsageError:
    return UsageError(f"{out} cannot be written: {error.strerror}; choose another --out")


def finished(plan: Pieces, record: str = RECORD) -> dict[str, int] | None:
    """Return the counts of an earlier start that wrote all of it, or None; UsageError if it wrote something else."""
    found = _read_json(plan.out / record)
    try:
        counts = typed(found["counts"], dict[str, int])
    except (TypeError, KeyError, ValueError):  # none, or not one of ours
        return None
    _check_same(found, _decided(plan), plan.out)
    return counts


def write_pieces(plan: Pieces, jobs: int, progress: Progress, record: str = RECORD) -> dict[str, int]:
    """Write what is missing of a plan; return counts."""
    journal = Journal(plan.out)
    if (counts := finished(plan, record)) is not None:
        journal.close()  # of a start that was killed at its very end
        return counts
    plan.check()
    is_resumed = journal.begin(_decided(plan))
    pieces = plan.pieces()
    done = {part: _done(journal, part, len(samples)) for part, samples in pieces.items()}
    size = sum(size for some in done.values() for piece in some.values() for _, size in piece.files)
    check_room(plan.out, plan.room() - size, f"{plan.out}")
    with over_processes(jobs, plan) as run:
        for part, samples in pieces.items():
            _write_part(part, samples, done[part], run, progress)
    if is_resumed:
        journal.sweep()
    counts = plan.finish([some[number] for some in done.values() for number in sorted(some)])
    write_text(plan.out, record, json.dumps({**_decided(plan), "counts": counts}, indent=1) + "\n")
    journal.close()
    return counts


def _decided(plan: Pieces) -> dict[str, Any]:
    return {"version": VERSION, **plan.decided()}


def _done(journal: Journal, part: str, pieces: int) -> dict[int, Written]:
    found = {number: journal.done(_note(part, number)) for number in range(pieces)}
    return {number: written for number, written in found.items() if written is not None}


def _write_part(part: str, samples: list[int], done: dict[int, Written], run: Map, progress: Progress) -> None:
    missing = [number for number in range(len(samples)) if number not in done]
    total = sum(samples)
    completed = total - sum(samples[number] for number in missing)
    progress(f"writing {part}", completed, total)
    for number, written in zip(missing, run(_write_and_note, [(part, number) for number in missing]), strict=True):
        done[number] = written
        completed += samples[number]
        progress(f"writing {part}", completed, total)


def _write_and_note(plan: Pieces, job: tuple[str, int]) -> Written:
    part, number = job
    written = plan.write(part, number)
    Journal(plan.out).note(_note(part, number), written)
    return written


def _note(part: str, number: int) -> str:
    return f"{part}-{number:05d}"


class Journal:
    """The record of what earlier starts and this one have done in a folder; survives a kill at any time."""

    def __init__(self, out: Path, begun: str = "plan.json"):
        """`begun`: the file below .prepare that holds what decides the folder's files."""
        self.out = out
        self._begun = f"{NOTES}/{begun}"

    def begin(self, decided: dict[str, Any], may_change: Sequence[str] = ()) -> bool:
        """Note what decides the files, as far as it is known; return whether an earlier start has left something.

        Raises UsageError if it was begun with something else, or if the folder is not ours. If a value named in
        `may_change` has changed, all pieces are written again.
        """
        found = _read_json(self.out / self._begun)
        is_resumed = isinstance(found, dict)
        if not is_resumed:
            found = {}
            self._take_folder()
        if any(key in found and found[key] != decided.get(key) for key in may_change):
            for note in (self.out / NOTES).glob("*-*"):
                note.unlink()
            found = {key: value for key, value in found.items() if key not in may_change}
        _check_same({**decided, **found}, decided, self.out)
        if {**found, **decided} != found:
            write_text(self.out, self._begun, json.dumps({**found, **decided}))
        return is_resumed

    def note(self, name: str, written: Written) -> None:
        """Note a piece whose files are whole."""
        write_text(self.out, f"{NOTES}/{name}", json.dumps({"files": written.files, **written.notes}))

    def done(self, name: str) -> Written | None:
        """Return what was noted of a piece, if its files are still there in full size."""
        try:
            notes = typed(_read_json(self.out / NOTES / name), dict[str, Any])
            files = typed(notes.pop("files", None), list[tuple[str, int]])
        except ValueError:  # none, half of one, or one of an earlier version
            return None
        return Written(files, notes) if all(_size(self.out / path) == size for path, size in files) else None

    def sweep(self) -> None:
        """Remove partial files of killed processes; at the end, when the last of them has exited."""
        for leftover in [path for path in self.out.rglob(".*.part-*") if path.is_file()]:
            leftover.unlink()

    def close(self) -> None:
        """Forget all notes: the folder is complete."""
        shutil.rmtree(self.out / NOTES, ignore_errors=True)

    def _take_folder(self) -> None:
        self.out.mkdir(exist_ok=True)
        _refuse_strangers(self.out)
        refuse_link(self.out / NOTES)
        (self.out / NOTES).mkdir(exist_ok=True)


def _refuse_strangers(out: Path) -> None:
    strangers = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith("."))
    if strangers:
        raise UsageError(
            f"{out} holds {first_of(strangers)}, not written by this command; choose another --out, or empty it"
        )


def _check_same(found: dict[str, Any], wanted: dict[str, Any], out: Path) -> None:
    for key, now in wanted.items():
        was = found.get(key)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            inner = next(name for name in (*now, *was) if was.get(name, "nothing") != now.get(name, "nothing"))
            if key == "inputs":  # digests, which tell nobody anything
                raise UsageError(
                    f"{out} was begun with other data: its {inner} came from other files; choose another --out, or "
                    f"delete {out} to start again"
                )
            key, was, now = f"{key}.{inner}", was.get(inner, "nothing"), now.get(inner, "nothing")
        raise UsageError(
            f"{out} was begun with {key}={was}, now it is {now}; choose another --out, or delete {out} to start again"
        )


def _read_json(path: Path) -> Any:
    """Return None if it is not there, or is not JSON any more after a power cut."""
    try:
        return read_json(path, _MAX_NOTE_BYTES)
    except (FileNotFoundError, ValueError):
        return None


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
