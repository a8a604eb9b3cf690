"""Indexes kept between runs: what a scan of the data found, as arrays in one checked file.

It lies beside the data (.sightline-index-...) or, where it cannot, in $XDG_CACHE_HOME/sightline. One that is
stale, damaged or not ours counts as absent, one that cannot be kept costs the next run a scan: neither is an error.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from sightline import terminal
from sightline.files.regular import regular
from sightline.files.typed_json import loads, typed
from sightline.files.whole import replaced, user_cache
from sightline.hardware.launch.place import is_rank_0

Arrays = dict[str, np.ndarray]

_MAGIC = b"sightline-index-1\n"
_TYPES = ("|u1", "<i4", "<u4", "<i8")
_PREFIX = len(_MAGIC) + 32 + 4  # magic, sha256 of all that follows it, length of the JSON header
_MAX_HEADER_BYTES = 2**16
_MAX_BYTES = 2**31  # ImageNet takes 80 MB
# A change within the resolution of a file system's clock (2 s on FAT) leaves the time as it was.
SETTLED_S = 2.0
PROGRESS_EVERY_S = 5.0
_AT_ONCE = 2**14


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
        """Invert `arrays`; ValueError where the parts do not fit each other."""
        blob, ends = arrays[f"{key}_bytes"].tobytes(), arrays[f"{key}_ends"]
        steps = np.diff(ends, prepend=0)
        if np.any(steps < 0) or steps.sum() != len(blob):
            raise ValueError(f"{key}: the ends of {len(ends)} names do not fit {len(blob)} bytes")
        return cls(blob, ends)

    def below(self) -> Names:
        """Return these names of files below a folder; ValueError if one leads out of it: an index may come with data of
        strangers."""
        starts = np.concatenate([[0], self.ends[:-1]])[np.diff(self.ends, prepend=0) > 0]
        is_absolute = np.frombuffer(self.blob, np.uint8)[starts] == ord("/")
        climbs = b".." in self.blob and any(b".." in name.split(b"/") for name in self.each())
        if climbs or is_absolute.any() or b"\0" in self.blob:
            raise ValueError("a name that leads out of its folder")
        return self

    def arrays(self, key: str) -> Arrays:
        return {f"{key}_bytes": np.frombuffer(self.blob, np.uint8), f"{key}_ends": self.ends}

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.blob[self.ends[index - 1] if index else 0 : self.ends[index]])

    def each(self, places: np.ndarray | None = None) -> Iterator[bytes]:
        """Yield every name, or some of them, as bytes."""
        places = np.arange(len(self)) if places is None else places
        for first in range(0, len(places), _AT_ONCE):  # a million Python numbers take more than the names
            some = places[first : first + _AT_ONCE]
            ends = self.ends[some]
            starts = np.where(some > 0, self.ends[some - 1], 0)
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                yield self.blob[start:end]

    def take(self, places: np.ndarray) -> Names:
        """Return some of the names, in another order."""
        ends, starts = self.ends[places], self.ends[places - 1]
        starts[places == 0] = 0
        ends -= starts
        del starts
        blob = io.BytesIO()  # hands its bytes over, where a bytearray copies them
        blob.writelines(self.each(places))
        return Names(blob.getvalue(), np.cumsum(ends, out=ends))

    def all(self) -> list[bytes]:
        """Return every name, as bytes."""
        ends = self.ends.tolist()
        return [self.blob[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def digest(*parts: object) -> str:
    """Return a key of what was scanned; parts are separated, so ("ab", "c") and ("a", "bc") differ."""
    return hashlib.sha256("\0".join(repr(part) for part in parts).encode()).hexdigest()


class Kept(Protocol):
    """What a scan found, and is kept as arrays."""

    def arrays(self) -> Arrays: ...


Found = TypeVar("Found", bound=Kept)


def kept_or_read(
    root: Path,
    name: str,
    key: str,
    changed_ns: Iterable[int],
    loaded: Callable[[Arrays], Found],
    read: Callable[[], Found],
) -> Found:
    """Return what an earlier run kept for the data at `root` under this key, or read it and keep it; files changed at
    these times. `loaded` makes it of its arrays; ValueError, KeyError or IndexError where they are not whole."""
    if kept := load(root, name, key):
        try:
            return loaded(kept)
        except (ValueError, KeyError, IndexError):
            pass
    was_settled = is_settled(changed_ns)  # before it is read
    found = read()
    if was_settled:
        save(root, name, key, found.arrays())
    return found


def is_settled(changed_ns: Iterable[int]) -> bool:
    """Return whether none of these changes is so young that another one could leave the same time."""
    now = time.time_ns()
    return all(abs(now - changed) > SETTLED_S * 1e9 for changed in changed_ns)


def load(root: Path, name: str, key: str) -> Arrays | None:
    """Return the arrays kept for the data at `root` under this key, if they are there and whole."""
    for place in _places(root, name):
        try:
            arrays = _read(place, key)
        except OSError:
            continue
        if arrays is not None:
            return arrays
    return None


def save(root: Path, name: str, key: str, arrays: Arrays, beside: bool = True) -> None:
    """Keep the arrays where `load` finds them; a reader sees the old file or the new one, never a part. `beside`: in
    the folder of the data, where it can be written; not where the index tells when that folder was last changed."""
    data = _encode(key, arrays)
    for place in _places(root, name)[not beside :]:
        try:
            if place.parent != root:
                place.parent.mkdir(parents=True, exist_ok=True)
            with replaced(place) as file:
                file.write(data)
            return
        except OSError:
            continue


class ScanProgress:
    """Reports the progress of a long scan on stderr; short ones stay silent."""

    def __init__(self, what: str, total: int, unit: str):
        self.what = what
        self.total = total
        self.unit = unit
        # Every rank scans; only rank 0 reports.
        self._next = time.monotonic() + PROGRESS_EVERY_S if is_rank_0() else float("inf")

    def __call__(self, done: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_EVERY_S
            message = f"indexing {self.what}: {done} of {self.total} {self.unit} (once; later runs use the index)"
            terminal.say(message, "stderr")


def _places(root: Path, name: str) -> list[Path]:
    places = [root / f".sightline-index-{name}"]
    if cache := user_cache():
        where = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]
        places.append(cache / f"index-{name}-{where}")
    return places


def _encode(key: str, arrays: Arrays) -> bytes:
    plain = {name: np.ascontiguousarray(a, a.dtype.newbyteorder("<")) for name, a in arrays.items()}
    assert all(a.ndim == 1 and a.dtype.str in _TYPES for a in plain.values()), "an index holds plain lists of numbers"
    header = json.dumps({"key": key, "arrays": [[n, a.dtype.str, len(a)] for n, a in plain.items()]}).encode()
    body = b"".join([len(header).to_bytes(4, "little"), header, *(a.tobytes() for a in plain.values())])
    return _MAGIC + hashlib.sha256(body).digest() + body


def _read(place: Path, key: str) -> Arrays | None:
    """Read the header first: what is not ours may be of any size."""
    with open(place, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(_PREFIX)
        length = int.from_bytes(begin[-4:], "little")
        if not begin.startswith(_MAGIC) or len(begin) < _PREFIX or length > _MAX_HEADER_BYTES:
            return None
        header = file.read(length)
        found = _described(header, key, size - _PREFIX - length)
        if found is None:
            return None
        body = file.read(size - _PREFIX - length)
    digest = hashlib.sha256(begin[-4:])
    digest.update(header)
    digest.update(body)
    if digest.digest() != begin[len(_MAGIC) : -4] or len(body) != size - _PREFIX - length:
        return None
    arrays, at = {}, 0
    for name, kind, count in found:
        arrays[name] = np.frombuffer(body, kind, count, at) if count else np.empty(0, kind)
        at += arrays[name].nbytes
    return arrays


def _described(header: bytes, key: str, length: int) -> list[tuple[str, str, int]] | None:
    """Return (name, type, length) of the arrays of an index with this key, if they take so many bytes together."""
    try:
        said = typed(loads(header), dict[str, Any])
        arrays = typed(said.get("arrays"), list[tuple[str, Literal[_TYPES], int]])  # type: ignore[valid-type]
    except ValueError:  # a correct checksum does not make the content valid
        return None
    sizes = [np.dtype(kind).itemsize * count if 0 <= count <= length else -1 for _, kind, count in arrays]
    is_whole = min(sizes, default=0) >= 0 and sum(sizes) == length <= _MAX_BYTES
    return arrays if is_whole and said.get("key") == key else None
