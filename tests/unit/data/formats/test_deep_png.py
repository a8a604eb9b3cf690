"""PNGs of 16 bits a colour, written here: every filter, interlaced or not, in bands or whole."""

import itertools
import struct
import zlib

import numpy as np
import pytest

from sightline.data.decode import decode_channels, read_header
from sightline.data.formats import deep_png
from sightline.errors import BadSample

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
FILTERS = (4, 3, 2, 1, 0, 3, 4)


def filtered(values: np.ndarray, kinds=FILTERS) -> bytes:
    """The rows of an image as a PNG stores them, by the formulas of its specification."""
    lines, above = [], bytes(values[0].nbytes)
    step = 2 * values.shape[2]
    for row, kind in zip(values.astype(">u2"), itertools.cycle(kinds)):
        line = row.tobytes()
        coded = bytearray([kind])
        for at, value in enumerate(line):
            left, up = (line[at - step] if at >= step else 0), above[at]
            corner = above[at - step] if at >= step else 0
            paeth = min((left, up, corner), key=lambda near: abs(left + up - corner - near))
            coded.append((value - (0, left, up, (left + up) // 2, paeth)[kind]) % 256)
        lines.append(bytes(coded))
        above = line
    return b"".join(lines)


def png(values: np.ndarray, interlaced=False, rows: bytes | None = None) -> bytes:
    height, width, channels = values.shape
    if rows is None:
        parts = [values[top::down, left::across] for left, top, across, down in ADAM7] if interlaced else [values]
        rows = b"".join(filtered(part) for part in parts if part.size)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, interlaced)
    coded = zlib.compress(rows)
    contents = [(b"IHDR", header), (b"IDAT", coded[:5]), (b"IDAT", coded[5:]), (b"IEND", b"")]
    chunks = [(kind + data, len(data)) for kind, data in contents]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", size) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk, size in chunks
    )


def noise(height: int, width: int, channels: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 65536, (height, width, channels), dtype=np.uint16)


def read(data: bytes, channels: int) -> np.ndarray:
    return decode_channels(data, "deep.png", read_header(data, "deep.png"), channels, 16)


@pytest.mark.parametrize("band", [1, 40, 2**22])
@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("channels", [3, 4])
def test_all_bits_come_back(monkeypatch, channels: int, interlaced: bool, band: int):
    monkeypatch.setattr(deep_png, "_BAND_PIXELS", band)
    for height, width in ((1, 1), (2, 5), (13, 9), (30, 17)):
        values = noise(height, width, channels)
        assert np.array_equal(read(png(values, interlaced), channels), values)


@pytest.mark.parametrize(
    ("rows", "reason"), [(bytes(100), "end before its last row"), (b"\x05" * 1000, "broken PNG"), (b"", "before its")]
)
def test_missing_pixels_and_unknown_filters_are_damage(rows: bytes, reason: str):
    with pytest.raises(BadSample, match=reason):
        read(png(noise(12, 12, 3), rows=rows), 3)
