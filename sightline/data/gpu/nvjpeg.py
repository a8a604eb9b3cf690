"""nvJPEG's hardware decoder, called in the library that torchvision has loaded.

torchvision sets the decoder up again for every batch and allocates every image. Here a state stays, and images go where
the caller says: 11,900 instead of 8,300 img/s beside a training step, in an experiment (docs/why/input.md).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch

HARDWARE = 3  # nvjpegBackend_t
RGB_INTERLEAVED = 5  # nvjpegOutputFormat_t
# nvJPEG's NVJPEG_FLAGS_HW_DECODE_NO_PIPELINE: one stream for each JPEG engine instead of two. With more streams than
# CUDA_DEVICE_MAX_CONNECTIONS some would wait for the step's kernels.
NO_PIPELINE = 1
MAPS = Path("/proc/self/maps")


class NvjpegError(RuntimeError):
    """nvJPEG refuses: no JPEG engines, or bytes that they do not take."""


class HardwareDecoder:
    """One decoder of one device; for one thread at a time. It lives as long as the process: nvJPEG may be unloaded
    before Python is done, so nothing is destroyed."""

    def __init__(self, device: torch.device):
        # The second is called with Python's lock held. To give it back for a few microseconds costs more: another
        # thread takes it, and this one queues.
        self._library, self._short = _libraries()
        self._handle, self._state, self._stream = (ctypes.c_void_p() for _ in range(3))
        self._batch = 0
        with torch.cuda.device(device):
            self._call("nvjpegCreateEx", HARDWARE, None, None, ctypes.c_uint(NO_PIPELINE), ctypes.byref(self._handle))
            self._call("nvjpegJpegStateCreate", self._handle, ctypes.byref(self._state))
            self._call("nvjpegJpegStreamCreate", self._handle, ctypes.byref(self._stream))

    def sizes(self, addresses: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return (images, 2) int64, height and width, of JPEGs in host memory; zeros for one that the engines do not
        take (progressive, odd sampling). A batch with one that nvJPEG cannot read raises NvjpegError."""
        found = np.zeros((len(addresses), 2), np.int64)
        height, width, is_refused = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_int()
        sides, refused, short = (ctypes.byref(width), ctypes.byref(height)), ctypes.byref(is_refused), self._short
        for row, (address, length) in enumerate(zip(addresses.tolist(), lengths.tolist(), strict=True)):
            data = ctypes.c_void_p(address), ctypes.c_size_t(length)
            status = short.nvjpegJpegStreamParseHeader(self._handle, *data, self._stream)
            status = status or short.nvjpegDecodeBatchedSupported(self._handle, self._stream, refused)
            if not status and not is_refused.value:
                status = short.nvjpegJpegStreamGetFrameDimensions(self._stream, *sides)
                found[row] = height.value, width.value
            if status:
                raise NvjpegError(f"nvJPEG gave status {status} for the header of an image")
        return found

    def decode(
        self, addresses: np.ndarray, lengths: np.ndarray, targets: np.ndarray, pitches: np.ndarray, stream: int
    ) -> None:
        """Queue the decoding of JPEGs to device memory at `targets`, as RGB pixels in lines of `pitches` bytes.

        `stream` waits for it. It does not wait for `stream`: the memory must be free.
        """
        if len(addresses) != self._batch:
            size = (len(addresses), 1, RGB_INTERLEAVED)  # one thread of the CPU
            self._call("nvjpegDecodeBatchedInitialize", self._handle, self._state, *size)
            self._batch = len(addresses)
        given = [np.ascontiguousarray(each, np.uint64) for each in (addresses, lengths)]
        images = np.zeros((len(addresses), 8), np.uint64)  # nvjpegImage_t: four channels, then their pitches
        images[:, 0], images[:, 4] = targets, pitches
        arrays = (ctypes.c_void_p(array.ctypes.data) for array in (*given, images))
        self._call("nvjpegDecodeBatched", self._handle, self._state, *arrays, ctypes.c_void_p(stream))

    def _call(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            self._batch = 0  # set up again
            raise NvjpegError(f"{function} gave status {status}")


def _libraries() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """Return the libnvjpeg of this process, to be called without and with Python's lock."""
    import torchvision.io  # noqa: F401  (loads it)

    try:
        names = sorted(
            {line.split(maxsplit=5)[-1] for line in MAPS.read_text("utf-8").splitlines() if "libnvjpeg" in line}
        )
        return ctypes.CDLL(names[0]), ctypes.PyDLL(names[0])
    except (OSError, IndexError) as error:
        raise NvjpegError("torchvision has loaded no libnvjpeg") from error
