"""Open files of strangers: nothing that makes the reader wait, whatever it is called or links to."""

from __future__ import annotations

import errno
import os
import stat


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
