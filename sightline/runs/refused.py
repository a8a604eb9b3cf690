"""A start that is refused leaves the run folder as it was: no new folder, and exit.json of the start before."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path

from sightline.errors import BadCheckpoint, BadData, RankFailed, SightlineError, UsageError
from sightline.files.whole import open_text, replace_text
from sightline.hardware.launch import among_ranks
from sightline.runs.attempts import EXIT, read_exit
from sightline.runs.folder import LOCK, LOG, is_at_work

REFUSALS = (UsageError, BadData, BadCheckpoint)
CONFIG = "config.yaml"  # written once nothing is left to refuse
CHECKPOINTS = "checkpoints"
WRITTEN_BEFORE = {LOCK, LOG, EXIT, CHECKPOINTS}
RANK_LOG = re.compile(r"rank_\d+\.log")
NO_FILE = 0, 0


@contextlib.contextmanager
def as_before(folder: Path) -> Iterator[None]:
    """Undo what a refused start wrote. A launcher's restarts need exit.json, so under one nothing is undone; the
    command that starts ranks on this host restarts nothing, and undoes it for them."""
    if among_ranks():
        yield
        return
    new = [path for path in (folder, *folder.parents) if not path.exists()]  # the deepest first
    ended = (folder / EXIT).read_text("utf-8") if read_exit(folder) else ""
    started = _stamp(folder / CONFIG)
    try:
        yield
    except (*REFUSALS, RankFailed) as error:
        if _stamp(folder / CONFIG) == started and _wrote_exit(folder, error, ended):
            if new:
                _remove(folder, new)
            elif error.exit_code == BadCheckpoint.exit_code:  # it is about what the run holds
                pass
            elif ended:
                replace_text(folder / EXIT, ended)
            elif started != NO_FILE:  # the run was killed
                (folder / EXIT).unlink()
        raise


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes if a file is replaced."""
    try:
        return path.stat().st_ino, path.stat().st_mtime_ns
    except OSError:
        return NO_FILE


def _wrote_exit(folder: Path, error: SightlineError, before: str) -> bool:
    """Return whether exit.json is of this start, and not of another run at work in the folder."""
    told = read_exit(folder)
    if told.get("code") != error.exit_code or error.exit_code not in {kind.exit_code for kind in REFUSALS}:
        return False
    if isinstance(error, RankFailed):  # its reason is that of the rank
        return (folder / EXIT).read_text("utf-8") != before and not is_at_work(folder)
    return told.get("reason") == str(error)


def _remove(folder: Path, new: list[Path]) -> None:
    """Remove these folders, unless somebody else has begun to use them."""
    with contextlib.suppress(OSError, UsageError), open_text(folder / LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if all(path.name in WRITTEN_BEFORE or RANK_LOG.fullmatch(path.name) for path in folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                (folder / CHECKPOINTS).rmdir()  # where it holds something, an OSError that leaves everything
            for path in folder.iterdir():
                path.unlink()
            for path in new:
                path.rmdir()
