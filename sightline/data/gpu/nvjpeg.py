"""nvJPEG's hardware decoder, called in the library that torchvision has loaded.

torchvision sets the decoder up again for every batch and allocates every image. Here a state stays, and images go where
the caller says: 11,900 instead of 8,300 img/s beside a training step, in an experiment (docs/input.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HARDWARE = 3  # nvjpegBackend_t
RGB_INTERLEAVED = 5  # nvjpegOutputFormat_t
MAPS = Path("/proc/self/maps")


class NvjpegError(RuntimeError):
    """nvJPEG refuses: no JPEG engines, or bytes that they do not take."""


class HardwareDecoder:
    """One decoder of one device; for one thread at a time. It lives as long as the process: nvJPEG may be unloaded
    before Python is done, so nothing is destroyed."""

    def __init__(self, device: torch.device):
        self._library = _library()
        self._handle, self._state, self._stream = (ctypes.c_void_p() for _ in range(3))
        self._batch = 0
        with torch.cuda.device(device):
            self._call("nvjpegCreateEx", HARDWARE, None, None, ctypes.c_uint(0), ctypes.byref(self._handle))
            self._call("nvjpegJpegStateCreate", self._handle, ctypes.byref(self._state))
            self._call("nvjpegJpegStreamCreate", self._handle, ctypes.byref(self._stream))

    def sizes(self, encoded: Sequence[Tensor]) -> np.ndarray:
        """Return (images, 2) int64, height and width; zeros for an image that the engines do not take (progressive,
        odd sampling). A batch with one that nvJPEG cannot read raises NvjpegError."""
        found = np.zeros((len(encoded), 2), np.int64)
        height, width, is_refused = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_int()
        for row, data in enumerate(encoded):
            length = ctypes.c_size_t(len(data))
            self._call("nvjpegJpegStreamParseHeader", self._handle, _at(data), length, self._stream)
            self._call("nvjpegDecodeBatchedSupported", self._handle, self._stream, ctypes.byref(is_refused))
            if not is_refused.value:
                sides = ctypes.byref(width), ctypes.byref(height)
                self._call("nvjpegJpegStreamGetFrameDimensions", self._stream, *sides)
                found[row] = height.value, width.value
        return found

    def decode(self, encoded: Sequence[Tensor], addresses: np.ndarray, pitches: np.ndarray, stream: int) -> None:
        """Queue the decoding of images to device memory, as RGB pixels in lines of `pitches` bytes.

        `stream` waits for it. It does not wait for `stream`: the memory must be free.
        """
        if len(encoded) != self._batch:
            size = (len(encoded), 1, RGB_INTERLEAVED)  # one thread of the CPU
            self._call("nvjpegDecodeBatchedInitialize", self._handle, self._state, *size)
            self._batch = len(encoded)
        data = np.asarray([tensor.data_ptr() for tensor in encoded], np.uint64)
        lengths = np.asarray([len(tensor) for tensor in encoded], np.uint64)
        images = np.zeros((len(encoded), 8), np.uint64)  # nvjpegImage_t: four channels, then their pitches
        images[:, 0], images[:, 4] = addresses, pitches
        arrays = (ctypes.c_void_p(array.ctypes.data) for array in (data, lengths, images))
        self._call("nvjpegDecodeBatched", self._handle, self._state, *arrays, ctypes.c_void_p(stream))

    def _call(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            self._batch = 0  # set up again
            raise NvjpegError(f"{function} gave status {status}")


def _at(data: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(data.data_ptr())


def _library() -> ctypes.CDLL:
    """Return the libnvjpeg of this process."""
    import torchvision.io  # noqa: F401  (loads it)

    try:
        names = sorted({line.split(maxsplit=5)[-1] for line in MAPS.read_text().splitlines() if "libnvjpeg" in line})
        return ctypes.CDLL(names[0])
    except (OSError, IndexError) as error:
        raise NvjpegError("torchvision has loaded no libnvjpeg") from error
