"""Reads at a place of an open file, by several threads at once: archives, shards and records."""

import os


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """Return `count` bytes from `offset`, or fewer where the file ends; compare `count` with the file before."""
    data = os.pread(descriptor, count, offset)
    while len(data) < count:  # network file systems hand out parts
        more = os.pread(descriptor, count - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
