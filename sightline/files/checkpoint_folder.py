"""Folders that hold checkpoints: the one a run calls best or latest, and whether its files are as they were written.

engine/checkpoint.py writes and reads them whole; models/weights.py takes the weights alone.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sightline.errors import BadCheckpoint
from sightline.files.regular import regular
from sightline.files.typed_json import UnknownField, read_json, short, typed

MANIFEST = "manifest.json"
STATE = "state.json"
NAME = re.compile(r"ckpt-([0-9]{8,18})")
MAX_MANIFEST_BYTES = 2**16  # a file takes 150 bytes
_FILE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class NotDamaged(BadCheckpoint):
    """A checkpoint that cannot be used now but may be whole (another format, a disk that fails); it stays in place."""


def names_in(folder: Path) -> list[str]:
    """Return the names of finished checkpoints, newest first, valid or not."""
    if not folder.is_dir():
        return []
    try:
        found = [NAME.fullmatch(name) for name in os.listdir(folder)]
    except OSError as error:
        raise NotDamaged(f"{folder} cannot be listed: {error.strerror}; fix that and start again") from error
    return [match.group() for match in sorted(filter(None, found), key=lambda m: -int(m.group(1)))]


def run_of(path: Path) -> Path:
    """Return the run folder of a checkpoint; the path itself where it lies alone, or is a run; the folder of a file."""
    if path.is_file():
        return path.parent
    return path.parent.parent if path.parent.name == "checkpoints" else path


def nearest_run(run: Path) -> str:
    """Return what to say after the name of a run that does not exist."""
    beside = [path.name for path in run.parent.iterdir()] if run.parent.is_dir() else []
    near = difflib.get_close_matches(run.name, beside, n=1)
    return f"; did you mean {run.parent / near[0]}?" if near else "; `sightline runs` lists those in runs/"


def folder_of_runs(folder: Path) -> str:
    """Say what a folder is that holds run folders instead of being one, as that of all folds does; "" if it is not."""
    runs = sorted(path.parent for path in folder.glob("*/checkpoints"))
    return f"a folder of {len(runs)} run{'s' * (len(runs) > 1)}; give one of them, e.g. {runs[0]}" if runs else ""


def find(run: Path, which: str) -> Path:
    """Return the checkpoint of a run folder that `which` names: best, latest, or a folder name; or `run` itself."""
    if (run / MANIFEST).is_file():
        return run
    folder = run / "checkpoints"
    if not run.exists():
        raise BadCheckpoint(f"{run} does not exist{nearest_run(run)}")
    if not folder.is_dir():
        what = f"neither a run folder nor a checkpoint: it has no checkpoints/ and no {MANIFEST}"
        raise BadCheckpoint(f"{run} is {folder_of_runs(run) or what}")
    names = names_in(folder)
    if not names:
        raise BadCheckpoint(f"{folder} holds no checkpoint; has the run reached its first save?")
    if which in ("best", "latest"):
        pointer = folder / which
        named = pointed_at(pointer)
        return folder / (named if named in names else names[0])
    if which not in names:
        raise BadCheckpoint(f"{folder} holds no '{which}'; there are {', '.join(names)}")
    return folder / which


def verify(path: Path) -> list[str]:
    """Return the files of a checkpoint; raise BadCheckpoint with file and reason unless all are as written."""
    with damage_is_reported(path, MANIFEST):
        manifest = read_json(path / MANIFEST, MAX_MANIFEST_BYTES, refuse_twice=True)
        entries = typed(manifest.get("files") if isinstance(manifest, dict) else manifest, dict[str, dict[str, Any]])
        for name, entry in entries.items():
            file = path / name
            if not _FILE.fullmatch(name) or len(name) > 100 or not file.is_file():
                raise BadCheckpoint(f"{path} is damaged: {name[:100]} is missing")
            if file.stat().st_size != entry.get("bytes"):
                size = short(entry.get("bytes"))
                raise BadCheckpoint(f"{file} is damaged: {file.stat().st_size} bytes instead of {size}")
            if sha256_of(file) != entry.get("sha256"):
                raise BadCheckpoint(f"{file} is damaged: its sha256 is not the one in {MANIFEST}")
        if STATE not in entries or "model.safetensors" not in entries:
            raise BadCheckpoint(f"{path} is damaged: {MANIFEST} lists no {STATE} or no model")
        return sorted(entries)


@contextlib.contextmanager
def damage_is_reported(path: Path, name: str) -> Iterator[None]:
    """Turn errors of reading a checkpoint's file into our own."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise BadCheckpoint(f"{path} is damaged: {name} is missing") from None
    except OSError as error:  # too many open files, a stale mount: the checkpoint may be whole
        raise NotDamaged(f"{path} cannot be read: {error.strerror}; fix that and start again") from error
    except (MemoryError, RuntimeError) as error:  # RuntimeError: torch cannot map the file
        raise NotDamaged(f"{path / name} cannot be loaded: {error}; make room in memory and start again") from error
    except UnknownField as error:
        raise NotDamaged(f"{path / name} holds {error}; use the version that wrote it") from error
    except ValueError as error:
        raise BadCheckpoint(f"{path} is damaged: {name} cannot be read ({error})") from error


def pointed_at(path: Path) -> str:
    """Read the name in a pointer file; "" where there is none."""
    if not path.is_file():
        return ""
    with open(path, "rb", opener=regular) as file:
        return file.read(100).decode("utf-8", "replace").strip()


def sha256_of(path: Path) -> str:
    """Return the checksum of a file."""
    with open(path, "rb", opener=regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
