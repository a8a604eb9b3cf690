"""safetensors files that may be damaged or hostile, loaded after their header was found to fit the bytes behind it.

Written by engine/checkpoint.py; read there, by models/weights.py and data/loading/static.py.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sightline.files.regular import regular
from sightline.files.typed_json import loads, short

# ResNet-152 with LARS takes 100 kB. A tensor without values takes 45 bytes here and a kilobyte in torch.
MAX_HEADER_BYTES = 4 * 2**20
_MOST_VALUES = 2**48
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_BYTES |= {"U64": 8, "U32": 4, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8}

# Types in the order of the library, the last of which comes first in a file; a checkpoint holds no others.
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; OSError, or ValueError where it is not a whole safetensors file."""
    with open(path, "rb", opener=regular) as file:
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors of the host to a new file, with the bytes of `safetensors.torch.save`.

    The library copies all bytes twice while no other thread of Python runs: a fifth of an epoch of half a second. And
    its save_file() hides the errno of a full disk and makes files only their owner can read.
    """
    if sys.byteorder != "little" or any(tensor.dtype not in _NAMES for tensor in tensors.values()):
        path.write_bytes(save(dict(tensors)))
        return
    rows = sorted(tensors.items(), key=lambda named: (-_RANKS[named[1].dtype], named[0]))
    header, end = {}, 0
    for name, tensor in rows:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in rows:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


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
