"""safetensors files that may be damaged or hostile, loaded after their header was found to fit the bytes behind it.

Read by train/checkpoint.py, models/weights.py and data/loading/static.py.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sightline.files.typed_json import loads, short

# ResNet-152 with LARS takes 100 kB. A tensor without values takes 45 bytes here and a kilobyte in torch.
MAX_HEADER_BYTES = 4 * 2**20
_MOST_VALUES = 2**48
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_BYTES |= {"U64": 8, "U32": 4, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; OSError, or ValueError where it is not a whole safetensors file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its {size} bytes begin with a header of {length}, at most {MAX_HEADER_BYTES} are read")
        header = loads(file.read(length), refuse_twice=True)
    if not isinstance(header, dict):
        raise ValueError(f"its header is {short(header)}, expected names of tensors")
    for name, entry in header.items():
        if name != "__metadata__":
            _check_entry(name, entry, size - 8 - length)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _check_entry(name: str, entry: Any, end: int) -> None:
    """Check what the library allocates by, or lets torch stumble over."""
    found: dict[str, Any] = entry if isinstance(entry, dict) else {}
    facts: list[Any] = [found.get(key) for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, place = facts
    if not (isinstance(dtype, str) and dtype in _BYTES and _are_sizes(shape, 64) and _are_sizes(place, 2)):
        raise ValueError(f"tensor {short(name)} is {short(entry)}, expected dtype, shape and data_offsets")
    values = math.prod(max(side, 1) for side in shape)
    if values > _MOST_VALUES or len(place) != 2 or not place[0] <= place[1] <= end:
        raise ValueError(f"tensor {short(name)} of shape {short(shape)} at bytes {short(place)} of {end}")
    if math.prod(shape) * _BYTES[dtype] != place[1] - place[0]:
        raise ValueError(f"tensor {short(name)}, {dtype} of shape {short(shape)}, has {place[1] - place[0]} bytes")


def _are_sizes(values: Any, most: int) -> bool:
    return isinstance(values, list) and len(values) <= most and all(type(v) is int and 0 <= v < 2**60 for v in values)
