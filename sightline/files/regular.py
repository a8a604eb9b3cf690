"""Open files of strangers: nothing that makes the reader wait, whatever it is called or links to. What is meant to be a
file and cannot be read as one does not count as missing."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from sightline.errors import UsageError


def regular(path: str, flags: int) -> int:
    """Return a descriptor as os.open does, for `open(path, opener=regular)`; OSError for a pipe, a socket or a device.

    Opening a pipe waits for its writer. A file of 0 bytes is read as empty: some in /proc claim that and then wait for
    news, as kmsg does.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # Python refuses a folder itself
            raise OSError(errno.ENODEV, "a pipe or a device, expected a file; remove it", path)
    except BaseException:
        os.close(descriptor)
        raise
    if stat.S_ISREG(found.st_mode) and not found.st_size:
        os.close(descriptor)
        return os.open(os.devnull, flags)
    return descriptor


def is_file(path: str | Path) -> bool:
    """Return whether a file is there. UsageError for a pipe, a device or a link that leads nowhere: without its list of
    classes or of a split, data would still be read, but mean something else."""
    try:
        kind = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise UsageError(f"{path} is a link that leads nowhere; fix the link or remove it") from None
        return False
    except ValueError:  # a name with NUL
        return False
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; allow reading it or remove it") from error
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
        return stat.S_ISREG(kind)
    raise UsageError(f"{path} is a pipe or a device, expected a file; remove it")
