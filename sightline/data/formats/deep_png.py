"""PNGs with colours of 16 bits, of which Pillow keeps the high bytes only: both are read as images of 8 bits.

A PNG's filters work on every byte of a pixel by itself. High and low bytes are therefore two images of 8 bits, whose
filters Pillow undoes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from sightline.data.formats.image_headers import Damaged, png_chunks

# First column and row of each of Adam7's images, and the distance to the next.
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_BAND_PIXELS = 2**22  # read at once
_MODES = {3: "RGB", 4: "RGBA"}


def read(data: bytes, width: int, height: int, channels: int) -> np.ndarray:
    """Return (height, width, channels) uint16 of a PNG that `read_header` has passed; raise Damaged if pixels lack."""
    values = np.empty((height, width, channels), np.uint16)
    pixels = _Pixels(data)
    for left, top, across, down in _ADAM7 if pixels.are_interlaced else ((0, 0, 1, 1),):
        part = values[top::down, left::across]
        if part.size:
            _fill(part, pixels)
    return values


class _Pixels:
    """The decompressed pixels of a PNG, piece by piece."""

    def __init__(self, data: bytes):
        chunks = list(png_chunks(data))
        self.are_interlaced = bool(data[chunks[0][1] + 12])
        self._coded = b"".join(data[start:end] for kind, start, end in chunks if kind == b"IDAT")
        self._unpack = zlib.decompressobj()

    def take(self, size: int) -> bytes:
        taken = self._unpack.decompress(self._coded, size)
        self._coded = self._unpack.unconsumed_tail
        if len(taken) < size:
            raise Damaged("PNG whose pixels end before its last row")
        return taken


def _fill(part: np.ndarray, pixels: _Pixels) -> None:
    """Read one image, all or every few rows and columns of the whole, into its place."""
    height, width, channels = part.shape
    size, before = width * channels, np.zeros((2, width * channels), np.uint8)
    for start, stop in _bands(height, width):
        rows = np.frombuffer(pixels.take((stop - start) * (1 + 2 * size)), np.uint8).reshape(stop - start, -1)
        both = np.zeros((2, 1 + stop - start, 1 + size), np.uint8)  # high and low bytes
        both[:, 0, 1:] = before  # unfiltered, on top: the first row's filter may refer to it
        both[:, 1:, 0] = rows[:, 0]  # how each row is filtered
        both[:, 1:, 1:] = rows[:, 1:].reshape(stop - start, size, 2).transpose(2, 0, 1)
        shape = (width, 2 * (1 + stop - start))
        image = Image.frombytes(_MODES[channels], shape, zlib.compress(both.data, 0), "zip", _MODES[channels], 0)
        high, low = np.asarray(image).reshape(2, 1 + stop - start, width, channels)[:, 1:]
        band = high.astype(np.uint16)
        band <<= 8
        band |= low
        part[start:stop] = band
        before = np.stack([high[-1], low[-1]]).reshape(2, size)


def _bands(height: int, width: int) -> Iterator[tuple[int, int]]:
    rows = max(1, _BAND_PIXELS // width)
    return ((start, min(start + rows, height)) for start in range(0, height, rows))
