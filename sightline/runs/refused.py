"""A start that is refused leaves the run folder as it was: no new folder, and exit.json of the start before."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sightline.errors import BadCheckpoint, BadData, SightlineError, UsageError
from sightline.files.whole import replace_text
from sightline.hardware import launch
from sightline.runs.attempts import EXIT, read_exit

REFUSALS = (UsageError, BadData, BadCheckpoint)
CONFIG = "config.yaml"  # written once nothing is left to refuse
CHECKPOINTS = "checkpoints"
WRITTEN_BEFORE = {".lock", "log.jsonl", EXIT, CHECKPOINTS}


@contextlib.contextmanager
def as_before(folder: Path) -> Iterator[None]:
    """Undo what a refused start wrote. A launcher's restarts need exit.json, so under one nothing is undone."""
    if launch.detect(os.environ) is not None:
        yield
        return
    new = [path for path in (folder, *folder.parents) if not path.exists()]  # the deepest first
    ended = (folder / EXIT).read_text("utf-8") if read_exit(folder) else ""
    started = _stamp(folder / CONFIG)
    try:
        yield
    except REFUSALS as error:
        if _stamp(folder / CONFIG) == started and _wrote_exit(folder, error):
            if new:
                _remove(folder, new)
            elif ended and not isinstance(error, BadCheckpoint):  # that one is about what the run holds
                replace_text(folder / EXIT, ended)
        raise


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes if a file is replaced."""
    try:
        return path.stat().st_ino, path.stat().st_mtime_ns
    except OSError:
        return 0, 0


def _wrote_exit(folder: Path, error: SightlineError) -> bool:
    """Return whether exit.json is of this start, and not of another run at work in the folder."""
    told = read_exit(folder)
    return told.get("code") == error.exit_code and told.get("reason") == str(error)


def _remove(folder: Path, new: list[Path]) -> None:
    """Remove these folders, unless somebody else has begun to use them."""
    with contextlib.suppress(OSError), (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if {path.name for path in folder.iterdir()} <= WRITTEN_BEFORE:
            with contextlib.suppress(FileNotFoundError):
                (folder / CHECKPOINTS).rmdir()  # where it holds something, an OSError that leaves everything
            for path in folder.iterdir():
                path.unlink()
            for path in new:
                path.rmdir()
