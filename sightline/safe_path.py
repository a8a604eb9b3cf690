"""What child processes may import: nothing from the folder in which a command was typed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

SAFE_PATH = "PYTHONSAFEPATH"


@contextlib.contextmanager
def folder_off_path() -> Iterator[None]:
    """Let processes that this one starts import nothing from the current folder, unless this one does: ranks, started
    as `python -m sightline`, would run a json.py that lies beside somebody's images."""
    before = os.environ.get(SAFE_PATH, "")
    with contextlib.suppress(FileNotFoundError):  # the folder was removed
        if not {"", os.getcwd()} & set(sys.path):
            os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ[SAFE_PATH] = before  # empty is off
