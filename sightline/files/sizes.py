"""How much some files are: whether processes pay for loading them, and compiled kernels for predicting them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

FEW_BYTES = 2**23  # about 80 photos, or 100 volumes of 36 x 50 x 35 voxels
# Below, plain torch is done sooner. On an H200 it takes 11 s to import what compiles instance norm and to compile it,
# for 40 volumes of 10 MB that a U-Net then predicts in half a second; the resizing of decoded images takes 2.8, and
# saves 0.2 ms a photo.
MANY_BYTES = 2**30


def loads_here(given: Iterable[object]) -> bool:
    """Return whether files, those of folders too, and images in memory are so few bytes that starting loader processes
    takes longer than reading them."""
    return _is_within(FEW_BYTES, given)


def pays_compiling(given: Iterable[object]) -> bool:
    """Return whether predicting them takes so long that kernels save more than compiling them takes."""
    return not _is_within(MANY_BYTES, given)


def _is_within(most: int, given: Iterable[object]) -> bool:
    """Return whether files, those of folders too, and images in memory have no more bytes than these."""
    for each in given:
        for size in _sizes(each):
            most -= size
            if most < 0:
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
