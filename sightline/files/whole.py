"""Atomic writes that cannot leave their folder, for folders that other users may write into too.

A link that somebody planted under one of our names is replaced or refused, never followed.
"""

from __future__ import annotations

import errno
import functools
import grp
import hashlib
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, Literal

from sightline import terminal
from sightline.errors import WRONG_PATH, BadData, DiskFull, SightlineError, UsageError, disk_error

_KEPT_FREE = 64 * 2**20  # bytes that a disk must have left after writing
_NO_FILE = "is a pipe or a device, expected a file; delete it, or choose another folder"
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP}


def user_cache() -> Path | None:
    """Return the folder of files that can be made or fetched again; None where the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG rule for a relative one: ignore it
        cache = os.path.expanduser("~/.cache")
    return Path(cache, "sightline") if os.path.isabs(cache) else None


def cache_folder(name: str) -> Path | None:
    """Return a folder of the user's cache that can be written; None if there is none, or one that others may write to:
    what lies there is taken for our own, compiled code too."""
    cache = user_cache()
    if cache is None:
        return None
    try:
        cache.mkdir(0o700, parents=True, exist_ok=True)
        cache = cache.resolve()  # what is checked is what is used: a link may lead elsewhere later
        folder = (cache / name).resolve()
        folder.mkdir(0o700, exist_ok=True)
        for place in (folder, *folder.parents):
            if not _is_ours(place, above=place not in (folder, cache)):
                _say_unused(place)
                return None
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _is_ours(place: Path, above: bool) -> bool:
    """Return whether nobody but this user (and root) can write to a folder or, of one above it, replace what it
    holds: where the sticky bit is set, owners alone may."""
    info = place.stat()
    is_private = any(_is_private(info.st_gid, user) for user in (info.st_uid, os.geteuid()))
    shared = info.st_mode & stat.S_IWOTH or (info.st_mode & stat.S_IWGRP and not is_private)
    return info.st_uid in (os.geteuid(), 0) and not (shared and not (above and info.st_mode & stat.S_ISVTX))


def _is_private(group: int, user: int) -> bool:
    """Return whether a group is a user's own, as on systems with umask 002: of the same name, without other members. In
    a pod neither need have a name; its volumes have the user's number as their group's."""
    try:
        found, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except KeyError:
        return group == user
    return found.gr_name == name and set(found.gr_mem) <= {name}


@functools.cache  # once per process
def _say_unused(place: Path) -> None:
    if os.environ.get("RANK", "0") == "0":  # the others find the same
        terminal.say(
            f"the cache is not used: {place} belongs to another user, or others may write to it; take it over with "
            "chown and chmod go-w, or set XDG_CACHE_HOME to a folder of your own",
            "stderr",
        )


def nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists; one that cannot be looked into hides what is in it."""
    while not os.path.exists(folder):
        folder = folder.parent
    return folder


def check_room(folder: Path, wanted: int, what: str) -> None:
    """Raise DiskFull unless `wanted` bytes fit on the disk of `folder` (or of its nearest parent that exists)."""
    folder = nearest(folder)
    free = shutil.disk_usage(folder).free
    if wanted + _KEPT_FREE > free:
        raise DiskFull(
            f"{what} needs {wanted / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free; "
            "make room or choose a folder on another disk"
        )


def sync(descriptor: int) -> bool:
    """Flush a file or a folder to the disk; return False where its file system cannot, as some of FUSE and CIFS."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
        return False
    return True


def rename(source: str | Path, target: str | Path, folder: int | None = None) -> None:
    """Rename a file or a folder. A file server whose answer was lost is asked again and reports an error about a rename
    that it has done: where the target is what the source was, all is well. `folder`: where relative paths begin."""
    before = os.lstat(source, dir_fd=folder)
    try:
        os.rename(source, target, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            if _is_gone(source, folder) and os.path.samestat(before, os.lstat(target, dir_fd=folder)):
                return
        raise


def _is_gone(path: str | Path, folder: int | None) -> bool:
    try:
        os.lstat(path, dir_fd=folder)
    except FileNotFoundError:
        return True
    return False


@contextmanager
def _folder_below(target: Path, name: str) -> Iterator[tuple[int, str]]:
    """Yield the open folder that `name` lies in below `target`, and the last part of the name."""
    *folders, last = name.split("/")
    flags = os.O_RDONLY | os.O_DIRECTORY
    at = os.open(target, flags)
    try:
        for depth, part in enumerate(folders, start=1):
            where = target.joinpath(*folders[:depth])
            with suppress(FileExistsError), reporting_disk_errors(str(where)):
                os.mkdir(part, dir_fd=at)
            try:
                below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=at)
            except OSError as error:
                raise BadData(f"{where} is a link or a file, a folder was expected; remove it") from error
            os.close(at)
            at = below
        yield at, last
    finally:
        os.close(at)


@contextmanager
def replaced(path: str | Path, folder: int | None = None, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` when the block ends well, and leaves nothing behind when it does not.

    Until then it has a name that nobody can guess, so no link can wait there. `folder`: where a relative path begins.
    """
    head, name = os.path.split(path)
    # Hashed, because a name may use all of a file system's 255 bytes.
    beside = f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}.part-{secrets.token_hex(8)}"
    beside = os.path.join(head, beside)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as out:
            yield out
            if durable:
                out.flush()
                sync(out.fileno())
        rename(beside, path, folder)
    except BaseException:
        with suppress(OSError):  # a disk that fails must not hide why
            os.unlink(beside, dir_fd=folder)
        raise


def replace_text(path: Path, text: str, durable: bool = False) -> None:
    """Write a small file as a whole."""
    with replaced(path, durable=durable) as out:
        out.write(text.encode())


@contextmanager
def written_whole(target: Path, name: str, what: str = "", durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a file as `replaced` does, for `name` below `target`, and create the folders on the way.

    A disk that is full or fails raises DiskError, naming `what`. No link on the way is followed, whoever put it there.
    """
    with (
        _folder_below(target, name) as (folder, last),
        reporting_disk_errors(what or name),
        replaced(last, folder, durable) as out,
    ):
        yield out


def write_text(target: Path, name: str, text: str, durable: bool = False) -> None:
    """Write a small file below `target` as `written_whole` does."""
    with written_whole(target, name, str(target / name), durable) as out:
        out.write(text.encode("utf-8", "surrogateescape"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a file by its name, whole or not at all; a link at `path` is replaced, not followed."""
    if path.exists() and not (path.is_symlink() or path.is_file() or path.is_dir()):  # root could replace a device
        raise UsageError(f"{path} is a device or a pipe; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder of our own, in which the file has its own name, whose ending some writers go by.
        with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as folder:
            write(Path(folder, path.name))
            rename(Path(folder, path.name), path)
    except OSError as error:
        raise unwritable(path, error, "give another folder for results") from error


def refuse_link(path: str | Path) -> None:
    """Raise UsageError if `path` is a symbolic link, whatever it leads to."""
    if os.path.islink(path):
        raise UsageError(f"{path} is a symbolic link, which is not followed; delete it, or choose another folder")


def open_text(path: Path, mode: Literal["a", "a+", "w"]) -> IO[str]:
    """Open a file that has to keep its name, such as a lock or a log; a link, a pipe or a device in its place is
    refused."""
    return open(path, mode, encoding="utf-8", errors="backslashreplace", opener=no_link)


def no_link(path: str, flags: int) -> int:
    """Return a descriptor as os.open does; UsageError if `path` is a symbolic link, or a pipe, which would be waited
    for."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        refuse_link(path)
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise UsageError(f"{path} {_NO_FILE}") from error
        raise
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # Python refuses a folder itself
        os.close(descriptor)
        raise UsageError(f"{path} {_NO_FILE}")
    return descriptor


def unwritable(what: object, error: OSError, remedy: str) -> SightlineError:
    """Return UsageError with a remedy for a path that is wrong, DiskError for a disk that is full or fails."""
    if error.errno in WRONG_PATH:
        return UsageError(f"{what} cannot be written: {error.strerror}; {remedy}")
    return disk_error(what, error)


@contextmanager
def reporting_disk_errors(what: str) -> Iterator[None]:
    """Raise DiskError instead of the system's own error, but not for a path that is wrong."""
    try:
        yield
    except OSError as error:
        if error.errno in WRONG_PATH:
            raise
        raise disk_error(what, error, "finished files are kept; ") from error
