"""Arrays in .npy files, mapped into memory: prepared volumes, and the probabilities that `predict` writes."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Literal

import numpy as np

from sightline.errors import BadSample
from sightline.files.regular import regular

_MAX_HEADER_BYTES = 4096
_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def map_array(path: Path, name: str, remedy: str) -> np.ndarray:
    """Map an array of numbers for reading; raise BadSample, with this remedy, for a damaged file.

    NumPy parses the header as Python text and computes with the sizes in it: damage raises a dozen types of error.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            start = io.BytesIO(file.read(_MAX_HEADER_BYTES))  # or NumPy would ask for as much as the file claims
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            version = np.lib.format.read_magic(start)
            if version not in _HEADER_READERS:
                raise ValueError(f"its format is {version}, 1.0 or 2.0 was expected")
            shape, is_fortran, dtype = _HEADER_READERS[version](start)
            if dtype.kind not in "fiu":
                raise ValueError(f"it holds {dtype}, numbers were expected")
            order: Literal["F", "C"] = "F" if is_fortran else "C"
            return np.memmap(path, dtype, "r", start.tell(), shape, order)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise BadSample(name, f"{path} cannot be read: {reason}; {remedy}") from error
