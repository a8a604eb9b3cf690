"""Which files a user means: files and folders from the command line -> names that no two of them share, and bytes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from sightline.data.decode import MAX_BYTES
from sightline.errors import BadSample, UsageError


def list_files(inputs: Sequence[Path], suffixes: tuple[str, ...], leave_out: Path) -> dict[str, Path]:
    """Files by name: a file by its own, one below a folder by its path from there. Where two would be called alike,
    all are called by their path from the folder that they have in common.

    Folders are searched to the bottom, in sorted order, for these suffixes; hidden entries, links that lead in a
    circle and the folder `leave_out`, into which results go, are not entered. A file named twice counts once.
    """
    named: dict[str, str] = {}  # absolute path -> name
    for given in inputs:
        if given.is_dir():
            before = len(named)
            for relative in _below(given, "", suffixes, {os.path.realpath(leave_out)}):
                named.setdefault(os.path.abspath(given / relative), relative)
            if len(named) == before and not any(Path(path).is_relative_to(given.absolute()) for path in named):
                raise UsageError(f"{given} holds no file that ends in {', '.join(suffixes)}")
        elif given.is_file():
            named.setdefault(os.path.abspath(given), given.name)
        else:
            what = "is neither a file nor a folder" if given.exists() else "does not exist"
            raise UsageError(f"{given} {what}; give files, or folders of {', '.join(suffixes)}")
    if len(set(named.values())) < len(named):
        root = os.path.commonpath([os.path.dirname(path) for path in named])
        named = {path: os.path.relpath(path, root) for path in named}
    return {name: Path(path) for path, name in named.items()}


def read_bytes(path: Path, name: str) -> bytes:
    """The bytes of a picture; raises BadSample for what cannot be read or is too large to be one."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # reading a pipe would wait for ever
            raise BadSample(name, "is no regular file; remove it")
        if info.st_size > MAX_BYTES:
            raise BadSample(name, f"{info.st_size} bytes, more than the {MAX_BYTES} allowed for one picture; shrink it")
        return path.read_bytes()
    except OSError as error:
        raise BadSample(name, f"cannot be read: {error.strerror}") from error


def _below(root: Path, relative: str, suffixes: tuple[str, ...], seen: set[str]) -> Iterator[str]:
    """Paths from `root` on, sorted; a folder already seen is not entered again."""
    real = os.path.realpath(root / relative)
    if real in seen:
        return
    seen.add(real)
    try:
        entries = sorted(os.scandir(root / relative), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"{root / relative} cannot be listed: {error.strerror}; mend that or leave it out") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = os.path.join(relative, entry.name)
        if _is_folder(entry):
            yield from _below(root, path, suffixes, seen)
        elif entry.name.lower().endswith(suffixes):
            yield path  # also a link that leads nowhere: it is told as unreadable, not passed over


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
