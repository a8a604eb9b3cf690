"""The errors a user can meet, each with the exit code of the process that meets it.

A message says what came, what was expected and what to do. Raise them where the user's input enters.
"""

import errno
import signal
from collections.abc import Sequence

# Of an OSError.
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DISK_FAULTS = DISK_FULL | {errno.EIO, errno.ESTALE, errno.EROFS, errno.EXDEV}
DISK_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "your quota on this disk is used up: delete files, or have it raised",
    errno.EFBIG: "free some space, or raise the largest file that is allowed (`ulimit -f`, the file system)",
    errno.EIO: "the disk or its server has failed: look at `dmesg`, then use another disk",
    errno.ESTALE: "the file server has lost track of it: mount it again",
    errno.EROFS: "it is mounted read-only, perhaps after an error of the disk: see `dmesg`, then mount it writable",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.EXDEV: "a part of this folder is another mount: use a folder that is all on one file system",
    errno.ENOENT: "the folder was deleted or moved: bring it back",
    errno.EINVAL: "this file system cannot do it: use a folder on another one",
}
# Errors of a path that is wrong from the start, which another path avoids.
WRONG_PATH = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
WRONG_PATH |= {errno.ENAMETOOLONG, errno.ELOOP}


class SightlineError(Exception):
    """Base of every error that ends the process with a message instead of a traceback."""

    exit_code = 1


class UsageError(SightlineError):
    """A flag, a recipe name or a combination of fields that cannot work."""

    exit_code = 2


class BadData(SightlineError):
    """The data set is not what was declared, or holds more bad samples than allowed."""

    exit_code = 3


class BadSample(BadData):
    """One sample cannot be read; `--data.on-bad-sample` decides whether the run continues without it."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.name, self.reason)


class BadCheckpoint(SightlineError):
    """No checkpoint could be verified, or it does not fit what is being built."""

    exit_code = 4


class NotFinite(SightlineError):
    """The loss or a gradient became NaN or infinite and `--run.on-nan stop` is in force."""

    exit_code = 5


class Diverged(NotFinite):
    """The score of an evaluation is not above `--train.diverged-score`: finite, but learning nothing any more."""


class OutOfMemory(SightlineError):
    """The device ran out of memory."""

    exit_code = 6


class DiskError(SightlineError):
    """A file could not be written, for a reason that lies with the disk, its file server or its mount."""

    exit_code = 7


class DiskFull(DiskError):
    """There is no room for a file; a warning while a run can continue without it."""


class PeerLost(SightlineError):
    """A loader worker died, or a rank died or hangs."""

    exit_code = 8


class RankFailed(SightlineError):
    """A rank, or the launcher that it ran under, ended with an exit code, which becomes that of the starter."""

    def __init__(self, exit_code: int, message: str):
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(SightlineError):
    """A signal asked the run to save and leave; carries the signal number. `result` says what was done about it."""

    def __init__(self, signal_number: int, result: str = ""):
        cause = cause_of(signal_number)
        super().__init__(f"stopped by {cause}; {result}" if result else f"stopped by {cause}")
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


def disk_error(what: object, error: OSError, kept: str = "", not_done: str = "written") -> DiskError:
    """Return the error of a write that failed, with a remedy; `kept` says what is still there."""
    kind = DiskFull if error.errno in DISK_FULL else DiskError
    remedy = DISK_REMEDIES.get(error.errno or 0, "fix that, or use another disk")
    return kind(f"{what} could not be {not_done}: {error.strerror or error}; {kept}{remedy}")


def unforeseen_disk_error(error: BaseException) -> DiskError | None:
    """Return what to raise instead of an error of the disk that nobody met where it came up; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in DISK_FAULTS:
        return None
    return disk_error(error.filename2 or error.filename or "a file", error, not_done="read or written")


def cause_of(signal_number: int) -> str:
    """Name a signal for people."""
    if signal_number == signal.SIGINT:
        return "Ctrl-C"
    return f"{signal.Signals(signal_number).name} (signal {signal_number})"


def first_of(items: Sequence[object], shown: int = 4) -> str:
    """List the first few items for a message, and count the rest: `a, b, c, d and 3 more`."""
    rest = len(items) - shown
    return ", ".join(map(str, items[:shown])) + (f" and {rest} more" if rest > 0 else "")
