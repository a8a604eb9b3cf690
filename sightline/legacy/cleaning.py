"""`--clean` of the TensorFlow originals: delete an earlier run, and nothing that is not recognised as one."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from sightline.errors import UsageError, first_of
from sightline.legacy.table import Act

WORKER = re.compile(r"worker_\d+")
# What a run leaves; anything else is somebody's own and keeps the folder from being deleted.
ENTRIES = re.compile(
    r"config\.yaml|environment\.json|log\.jsonl|exit\.json|bad_samples\.jsonl|evaluation\.json|rank_\d+\.log|checkpoints"
    r"|data\.(yaml|json)|split\.json|report\.html|drawings\.json|samples\.(jpg|png)|tensorboard|profile|scores(-[\w.-]+)?\.json|predictions(-[\w.-]+)?|\.lock[\w.]*|metric\.log|benchmark_run\.log"
    r"|\.\w+\.part-\w+"
)
INSIDE = {
    "checkpoints": re.compile(
        r"ckpt-\d+(\.(old|corrupt\d*|abandoned\d*|tmp-\d+))?|best|latest|\w+\.tmp|\.\w+\.part-\w+"
    ),
    "tensorboard": re.compile(r"events\..+"),
    "profile": re.compile(r"trace\.json\.gz|time\.(json|txt)|\.part-\w+|\.\w+\.part-\w+"),
}
NOTHING_TO_KEEP = re.compile(r"rank_\d+\.log|\.lock[\w.]*")  # of a start that failed before it had a log


def clean(folder: str) -> Act:
    """Return the step that deletes `folder` if it is a run of ours, or holds only worker_N folders that are."""
    return Act(f"--clean: delete {folder} if it is a run", lambda: delete_run(Path(folder)))


def delete_run(folder: Path) -> None:
    """Delete a run folder; links are never followed, and an unknown file in it is an error that names it."""
    try:
        _delete(folder)
    except OSError as error:
        raise UsageError(
            f"--clean: {folder} cannot be deleted ({error}); delete it yourself, or choose another --model_dir"
        ) from error


def _delete(folder: Path) -> None:
    try:
        mode = folder.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise UsageError(f"--clean: {folder} is not a folder but a link or a file; delete it yourself")
    entries = sorted(folder.iterdir())
    if not entries:
        return
    folder = folder.resolve()  # `.` has no name
    here = Path.cwd()
    if folder == here or folder in here.parents:
        raise UsageError(
            f"--clean: {folder} is the current folder or above it; nothing was deleted: start from another folder, or "
            "choose another --model_dir"
        )
    runs = entries if all(WORKER.fullmatch(entry.name) for entry in entries) else [folder]
    for run in runs:
        _refuse_unless_run(run)
    # Renamed first: other ranks that start meanwhile make a folder of their own and lose nothing.
    doomed = folder.with_name(f".{folder.name}.cleaned-{os.getpid()}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _refuse_unless_run(run: Path) -> None:
    if run.is_symlink() or not run.is_dir():
        raise UsageError(f"--clean: {run} is not a folder but a link or a file; delete it yourself")
    names = {entry.name for entry in run.iterdir()}
    if unknown := sorted(_unknown(run)):
        raise UsageError(
            f"--clean: {run} holds {first_of(unknown)}, which no run writes; nothing was deleted: move it away, "
            "or choose another --model_dir"
        )
    if not names & {"log.jsonl", "exit.json"} and not all(NOTHING_TO_KEEP.fullmatch(name) for name in names):
        raise UsageError(
            f"--clean: {run} is not recognised as a run, which has a log.jsonl or an exit.json; nothing was deleted: "
            "delete it yourself, or choose another --model_dir"
        )
    if (run / ".lock").is_file():
        with (run / ".lock").open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"--clean: another run is using {run}; wait for it, or stop it") from None


def _unknown(run: Path) -> Iterator[str]:
    """Yield entries of a run, and of its folders, that no run writes; a link is deleted as one and not looked into."""
    for entry in run.iterdir():
        if not ENTRIES.fullmatch(entry.name):
            yield entry.name
        elif entry.name in INSIDE and entry.is_dir() and not entry.is_symlink():
            inside = INSIDE[entry.name]
            yield from (f"{entry.name}/{each.name}" for each in entry.iterdir() if not inside.fullmatch(each.name))
