"""Indexes kept between runs: what a scan of the data found, as arrays in one checked file.

It lies beside the data (.sightline-index-...) or, where they are read-only, in $XDG_CACHE_HOME/sightline. One that is
stale, damaged or not ours counts as absent, one that cannot be kept costs the next run a scan: neither is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from sightline import terminal
from sightline.data.whole_files import replaced

Arrays = dict[str, np.ndarray]

_MAGIC = b"sightline-index-1\n"
_TYPES = ("|u1", "<i4", "<u4", "<i8")
_PREFIX = len(_MAGIC) + 32 + 4  # magic, sha256 of all that follows it, length of the JSON header
# A change within the resolution of a file system's clock (2 s on FAT) leaves the time as it was.
SETTLED_S = 2.0
PROGRESS_EVERY_S = 5.0


class Names:
    """A list of names as two arrays, not as a million Python strings."""

    def __init__(self, blob: bytes, ends: np.ndarray):
        self.blob = blob
        self.ends = ends

    @classmethod
    def of(cls, names: Sequence[bytes]) -> Names:
        return cls(b"".join(names), np.cumsum([len(name) for name in names], dtype=np.int64))

    @classmethod
    def loaded(cls, arrays: Arrays, key: str) -> Names:
        """The inverse of `arrays`; ValueError where the parts do not fit each other."""
        blob, ends = arrays[f"{key}_bytes"].tobytes(), arrays[f"{key}_ends"]
        steps = np.diff(ends, prepend=0)
        if np.any(steps < 0) or steps.sum() != len(blob):
            raise ValueError(f"{key}: the ends of {len(ends)} names do not fit {len(blob)} bytes")
        return cls(blob, ends)

    def arrays(self, key: str) -> Arrays:
        return {f"{key}_bytes": np.frombuffer(self.blob, np.uint8), f"{key}_ends": self.ends}

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.blob[self.ends[index - 1] if index else 0 : self.ends[index]])

    def all(self) -> list[bytes]:
        """Every name, as bytes."""
        ends = self.ends.tolist()
        return [self.blob[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def digest(*parts: object) -> str:
    """A key of what was scanned: it tells where one part ends and the next begins."""
    return hashlib.sha256("\0".join(repr(part) for part in parts).encode()).hexdigest()


def is_settled(changed_ns: Iterable[int]) -> bool:
    """Whether none of these changes is so young that another one could leave the same time."""
    now = time.time_ns()
    return all(abs(now - changed) > SETTLED_S * 1e9 for changed in changed_ns)


def load(root: Path, name: str, key: str) -> Arrays | None:
    """The arrays kept for the data at `root` under this key, if they are there and whole."""
    for place in _places(root, name):
        try:
            arrays = _decode(place.read_bytes(), key)
        except OSError:
            continue
        if arrays is not None:
            return arrays
    return None


def save(root: Path, name: str, key: str, arrays: Arrays) -> None:
    """Keeps the arrays where `load` finds them; a reader sees the old file or the new one, never a part."""
    data = _encode(key, arrays)
    for place in _places(root, name):
        try:
            if place.parent != root:
                place.parent.mkdir(parents=True, exist_ok=True)
            with replaced(place) as file:
                file.write(data)
            return
        except OSError:
            continue


class Progress:
    """Tells on stderr how far a long scan is; short ones stay silent."""

    def __init__(self, what: str, total: int, unit: str):
        self.what = what
        self.total = total
        self.unit = unit
        # Each rank scans for itself; one of them speaks.
        self._next = time.monotonic() + PROGRESS_EVERY_S if os.environ.get("RANK", "0") == "0" else float("inf")

    def __call__(self, done: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_EVERY_S
            message = f"indexing {self.what}: {done} of {self.total} {self.unit} (once; later runs use the index)"
            terminal.say(message, "stderr")


def _places(root: Path, name: str) -> list[Path]:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG rule for a relative one: ignore it
        cache = os.path.expanduser("~/.cache")
    places = [root / f".sightline-index-{name}"]
    if os.path.isabs(cache):  # else there is no home
        where = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]
        places.append(Path(cache, "sightline", f"index-{name}-{where}"))
    return places


def _encode(key: str, arrays: Arrays) -> bytes:
    plain = {name: np.ascontiguousarray(a, a.dtype.newbyteorder("<")) for name, a in arrays.items()}
    assert all(a.ndim == 1 and a.dtype.str in _TYPES for a in plain.values()), "an index holds plain lists of numbers"
    header = json.dumps({"key": key, "arrays": [[n, a.dtype.str, len(a)] for n, a in plain.items()]}).encode()
    body = b"".join([len(header).to_bytes(4, "little"), header, *(a.tobytes() for a in plain.values())])
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes, key: str) -> Arrays | None:
    body = memoryview(data)[_PREFIX - 4 :]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : _PREFIX - 4]:
        return None
    at = 4 + int.from_bytes(body[:4], "little")
    arrays: Arrays = {}
    try:
        header = json.loads(bytes(body[4:at]))
        if header["key"] != key:
            return None
        for name, kind, count in header["arrays"]:
            if kind not in _TYPES or count < 0:
                return None
            arrays[name] = np.frombuffer(body, kind, count, at)
            at += arrays[name].nbytes
    except (ValueError, TypeError, KeyError, RecursionError):  # a checksum is no promise of what was written
        return None
    return arrays if at == len(body) else None
