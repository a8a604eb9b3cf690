"""Texts that messages are made of."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from sightline import errors
from sightline.errors import DiskError, DiskFull, Interrupted, disk_error, first_of, unforeseen_disk_error


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([], ""),
        (["one"], "one"),
        (["one", "two", "three"], "one, two, three"),
        ((1, 2, 3, 4), "1, 2, 3 and 1 more"),
        (range(12), "0, 1, 2 and 9 more"),
    ],
)
def test_a_message_lists_the_first_items_and_counts_the_rest(items, text):
    assert first_of(items, 3) == text


def test_a_message_lists_four_items_where_nobody_says_how_many():
    assert first_of(range(6)) == "0, 1, 2, 3 and 2 more"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, None])
def test_an_error_of_the_disk_says_what_failed_why_and_what_to_do(number: int | None):
    reason = os.strerror(number) if number else "odd"
    told = disk_error("a.txt", OSError(number, reason) if number else OSError(reason), "b.txt is kept; ")
    assert str(told).startswith(f"a.txt could not be written: {reason}; b.txt is kept; ")
    remedy = str(told).rpartition("; ")[2]
    assert (remedy == "fix that, or use another disk") is (number is None) and told.exit_code == 7
    assert (type(told) is DiskFull) is (number in (errno.ENOSPC, errno.EDQUOT))


def test_an_error_of_the_disk_that_nobody_met_names_its_file():
    told = unforeseen_disk_error(OSError(errno.EIO, "Input/output error", "a.txt", None, "b.txt"))
    assert type(told) is DiskError and str(told).startswith("b.txt could not be read or written: Input/output error")
    assert str(unforeseen_disk_error(OSError(errno.EIO, "x", "a.txt"))).startswith("a.txt could not be")
    assert str(unforeseen_disk_error(OSError(errno.EIO, "x"))).startswith("a file could not be")
    assert unforeseen_disk_error(ValueError("x")) is None
    assert unforeseen_disk_error(FileNotFoundError(errno.ENOENT, "x", "a.txt")) is None


@pytest.mark.parametrize(
    ("number", "result", "text", "code"),
    [
        (signal.SIGINT, "", "stopped by Ctrl-C", 130),
        (signal.SIGTERM, "step 7 is saved", "stopped by SIGTERM (signal 15); step 7 is saved", 143),
    ],
)
def test_a_stop_names_its_signal_and_ends_with_its_code(number: int, result: str, text: str, code: int):
    told = Interrupted(number, result)
    assert (str(told), told.exit_code, told.signal_number) == (text, code, number)


def test_every_kind_of_error_keeps_its_exit_code():
    """Scripts and launchers read them: they stay as they are."""
    codes = {errors.SightlineError: 1, errors.UsageError: 2, errors.BadData: 3, errors.BadSample: 3}
    codes |= {errors.BadCheckpoint: 4, errors.NotFinite: 5, errors.Diverged: 5, errors.OutOfMemory: 6}
    codes |= {errors.DiskError: 7, errors.DiskFull: 7, errors.PeerLost: 8}
    assert {kind: kind.exit_code for kind in codes} == codes
