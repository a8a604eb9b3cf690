"""Time contenders on the device, and keep what won in the user's cache folder: engine and knobs, as JSON.

One file for each operation, shape, device and version of cuDNN, so that ranks and runs can write at the same time. What
won on machines that we had comes with the package, in known.jsonl (`python benchmarks/cudnn_records.py` adds to it).
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sightline.files.typed_json import loads, read_json, typed
from sightline.files.whole import cache_folder, replace_text
from sightline.kernels.cudnn.plans import Engine

KNOWN = Path(__file__).with_name("known.jsonl")
FORMAT = 1
MOST_BYTES = 1 << 16
REPEATS = 7
FLUSHED = 256 << 20  # bytes written before each launch, more than any L2 holds: the step finds it cold too
# Times they are written, about 0.6 ms: the device is still busy when the host has launched what is timed, so that its
# own time is not measured. In a captured step the host has none.
FLUSHES = 10


@dataclass(frozen=True)
class Record:
    """What won: the engine of each fused part, None for plain torch; and the milliseconds of everything timed."""

    key: str
    engines: dict[str, Engine | None]
    times_ms: dict[str, float]


def key_of(device: torch.device, operation: object) -> str:
    """Return what a record depends on, in words."""
    return f"{operation} on {torch.cuda.get_device_name(device)} with cuDNN {torch.backends.cudnn.version()}"


def _name(key: str) -> str:
    return f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"


def read(key: str) -> Record | None:
    """Return the record of an operation, what this machine measured before what we did; None if there is none that can
    be used."""
    return _own(key) or known().get(key)


def _own(key: str) -> Record | None:
    folder = cache_folder("cudnn")
    if folder is None or not (folder / _name(key)).exists():
        return None
    try:
        found = read_json(folder / _name(key), MOST_BYTES)
        return _record(found) if found["format"] == FORMAT and found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damaged: measured again, and replaced


@functools.cache
def known() -> dict[str, Record]:
    """Return the records that come with the package, by key."""
    lines = KNOWN.read_bytes().splitlines()
    return {record.key: record for record in (_record(loads(line)) for line in lines)}


def _record(found: dict[str, Any]) -> Record:
    engines = {part: _engine(engine) for part, engine in typed(found["engines"], dict[str, Any]).items()}
    return Record(found["key"], engines, typed(found["times_ms"], dict[str, float]))


def _engine(found: dict[str, Any] | None) -> Engine | None:
    if found is None:
        return None
    knobs = typed(found["knobs"], dict[str, int])
    return Engine(typed(found["number"], int), {int(kind): value for kind, value in knobs.items()})


def write(record: Record) -> None:
    """Keep a record; a cache that cannot be written is not an error."""
    folder = cache_folder("cudnn")
    if folder is None:
        return
    text = json.dumps({"format": FORMAT, **asdict(record)}, indent=1)
    try:
        replace_text(folder / _name(record.key), f"{text}\n")
    except OSError:
        return  # a full disk: the next start measures again


def time_ms(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of `work` on the current stream, with a cold L2."""
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
    for _ in range(2):
        work()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(FLUSHES):
            flushed.zero_()
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
