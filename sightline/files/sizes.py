"""Whether some files are so small that loading them needs no processes of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

FEW_BYTES = 2**23  # about 80 photos, or 100 volumes of 36 x 50 x 35 voxels


def loads_here(given: Iterable[object]) -> bool:
    """Return whether files, those of folders too, and images in memory are so few bytes that starting loader processes
    takes longer than reading them."""
    left = FEW_BYTES
    for each in given:
        for size in _sizes(each):
            left -= size
            if left < 0:
                return False
    return True


def _sizes(given: object) -> Iterator[int]:
    """Yield the bytes of a file, or of those in a folder, or of an array or image in memory."""
    if not isinstance(given, Path):
        yield int(getattr(given, "nbytes", 0)) or getattr(given, "width", 0) * getattr(given, "height", 0)
        return
    for top, _, names in os.walk(given):
        yield from (_size(os.path.join(top, name)) for name in names)
    yield _size(given)


def _size(path: str | Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # reported by who reads it
        return 0
