"""Mutated images: each ends as an array of the size that the guard has read, or as BadSample."""

import contextlib
import io
import runpy
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data import decode
from sightline.data.decode import decode_channels, decode_rgb, decode_values, read_header
from sightline.data.formats import image_headers
from sightline.errors import BadSample

fuzz = runpy.run_path(str(Path(__file__).with_name("mutate.py")))["fuzz"]
COUNTS = pytest.mark.parametrize("mutations", [20, pytest.param(3000, marks=pytest.mark.slow)])
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8))
SMOOTH = NOISE.resize((64, 48), Image.Resampling.BICUBIC)
JPEG_TOKENS = [bytes([0xFF, code]) for code in (*range(0xC0, 0xE3), 0x00, 0x01, 0xEE, 0xF0, 0xFE, 0xFF)]
PNG_TOKENS = b"IHDR PLTE IDAT IEND tRNS eXIf acTL fcTL fdAT iCCP zTXt iTXt".split()
WEBP_TOKENS = [b"VP8 ", *b"VP8L VP8X ALPH ANIM ANMF EXIF ICCP RIFF \x9d\x01\x2a \x2f".split()]


def encode(image, format, **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def read_image(data):
    """As training does, and the upper rows alone."""
    try:
        header = read_header(data, "fuzz")
        pixels = decode_rgb(data, "fuzz", header)
        upper = decode_rgb(data, "fuzz", header, rows=9)
    except BadSample as error:
        if "decoded to shape" in error.reason or "Pillow reads" in error.reason:
            raise AssertionError(f"guard and decoder read two sizes: {error}") from error
        raise
    assert pixels.dtype == np.uint8 and pixels.shape == header.shape
    assert upper.shape[1] == pixels.shape[1]
    if header.format in ("PNG", "BMP", "TIFF"):
        values = decode_values(data, "fuzz")  # as a mask
        assert values.dtype in (np.uint8, np.uint16) and values.shape in (header.shape, header.shape[:2])


def assert_clean(outcome, mutations):
    print(outcome)
    assert not outcome.foreign, outcome
    assert mutations < 1000 or min(outcome.accepted, outcome.refused) > 10, outcome


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
        assert decode._simplejpeg()
    else:
        monkeypatch.setattr(decode, "_simplejpeg", lambda: None)


@COUNTS
def test_baseline_jpeg(decoder, mutations):
    seeds = [
        encode(SMOOTH, "JPEG", exif=exif(6)),
        encode(NOISE, "JPEG", subsampling=0, comment=b"x" * 99),
        encode(SMOOTH.convert("L"), "JPEG"),
        encode(SMOOTH, "JPEG", restart_marker_blocks=2),
        encode(SMOOTH.convert("CMYK"), "JPEG"),
    ]
    assert_clean(fuzz(read_image, seeds, mutations, tokens=JPEG_TOKENS), mutations)


@COUNTS
def test_progressive_jpeg(decoder, mutations):
    seeds = [
        encode(SMOOTH, "JPEG", progressive=True),
        encode(NOISE.convert("L"), "JPEG", progressive=True),
        encode(SMOOTH, "JPEG", progressive=True, restart_marker_rows=1, exif=exif(3)),
    ]
    assert_clean(fuzz(read_image, seeds, mutations, tokens=JPEG_TOKENS), mutations)


def with_checksums(data):
    """The same PNG with right checksums, as far as its chunks can be followed: else most changes end there."""
    parts, at = [data[:8]], 8
    while at + 8 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        body = data[at + 4 : at + 8 + length]
        parts.append(data[at : at + 4] + body + struct.pack(">I", zlib.crc32(body)))
        at += 12 + length
    return b"".join(parts)


def read_png(data):
    with contextlib.suppress(BadSample):
        read_image(data)
    read_image(with_checksums(data))


@COUNTS
def test_png(mutations):
    frames = [NOISE, NOISE.transpose(Image.Transpose.ROTATE_180)]
    deep = Image.fromarray(np.asarray(NOISE.convert("L")).astype(np.uint16) * 257)
    seeds = [
        encode(SMOOTH, "PNG", exif=exif(6)),
        encode(SMOOTH.quantize(16), "PNG", transparency=bytes(16), bits=4),
        encode(SMOOTH.convert("RGBA"), "PNG", compress_level=0),
        encode(deep, "PNG"),
        encode(SMOOTH.convert("1"), "PNG"),
        encode(NOISE, "PNG", save_all=True, append_images=frames[1:]),
    ]
    assert_clean(fuzz(read_png, seeds, mutations, tokens=PNG_TOKENS), mutations)


def described(png):
    """A PNG in the form that `built` takes."""
    parts, at = [], 8
    while at < len(png):
        (length,), kind = struct.unpack_from(">I", png, at), png[at + 4 : at + 8]
        content = png[at + 8 : at + 8 + length]
        content = zlib.decompress(content) if kind == b"IDAT" else content
        parts.append(kind + struct.pack(">H", len(content)) + content)
        at += 12 + length
    return b"".join(parts)


def built(data):
    """The PNG of these chunks, right in all but their contents: pixels are compressed here, so that they can change."""
    parts, at = [b"\x89PNG\r\n\x1a\n"], 0
    while at + 6 <= len(data):
        kind, (length,) = data[at : at + 4], struct.unpack_from(">H", data, at + 4)
        content = data[at + 6 : at + 6 + length]
        content = zlib.compress(content, 1) if kind == b"IDAT" else content
        parts.append(struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content)))
        at += 6 + length
    return b"".join(parts)


@COUNTS
def test_png_of_whole_chunks(mutations):
    modes = ("RGB", "RGBA", "LA", "P", "1")
    seeds = [described(encode(NOISE.convert(mode), "PNG")) for mode in modes]
    assert_clean(fuzz(lambda data: read_image(built(data)), seeds, mutations, tokens=PNG_TOKENS), mutations)


def deep_rows(height, width, channels):
    """Noise of 16 bits, its rows filtered in every way."""
    rows = np.random.default_rng(height).integers(0, 256, (height, 1 + 2 * channels * width), dtype=np.uint8)
    rows[:, 0] = np.arange(height) % 5
    return rows.tobytes()


def deep(colour, channels, parts):
    """A PNG of 40x24 in the form that `built` takes, of these (height, width)."""
    rows = b"".join(deep_rows(height, width, channels) for height, width in parts)
    contents = (
        (b"IHDR", struct.pack(">IIBBBBB", 40, 24, 16, colour, 0, 0, len(parts) > 1)),
        (b"IDAT", rows),
        (b"IEND", b""),
    )
    return b"".join(kind + struct.pack(">H", len(content)) + content for kind, content in contents)


def read_deep(data):
    header = read_header(data, "fuzz")
    bits = 16 if header.depth == 16 else 8
    values = decode_channels(data, "fuzz", header, header.channels, bits)
    assert values.shape == (*header.shape[:2], header.channels) and values.dtype == f"u{bits // 8}"


@COUNTS
def test_png_of_deep_colours(mutations):
    adam7 = [(3, 5), (3, 5), (3, 10), (6, 10), (6, 20), (12, 20), (12, 40)]
    seeds = [deep(colour, channels, parts) for colour, channels in ((2, 3), (6, 4)) for parts in ([(24, 40)], adam7)]
    for seed in seeds:
        read_deep(built(seed))
    assert_clean(fuzz(lambda data: read_deep(built(data)), seeds, mutations, tokens=PNG_TOKENS), mutations)


@COUNTS
def test_webp(mutations):
    alpha = SMOOTH.copy()
    alpha.putalpha(SMOOTH.convert("L"))
    seeds = [
        encode(SMOOTH, "WEBP", quality=80),
        encode(SMOOTH, "WEBP", lossless=True),
        encode(alpha, "WEBP", quality=80, exif=exif(6)),
        encode(SMOOTH, "WEBP", save_all=True, append_images=[SMOOTH.rotate(180)], duration=50),
    ]
    assert_clean(fuzz(read_image, seeds, mutations, tokens=WEBP_TOKENS), mutations)


@COUNTS
def test_bmp(mutations):
    seeds = [encode(SMOOTH.convert(mode), "BMP") for mode in ("1", "L", "P", "RGB", "RGBA")]
    assert_clean(fuzz(read_image, seeds, mutations), mutations)


@COUNTS
def test_tiff(mutations):
    deep = Image.fromarray(np.asarray(NOISE.convert("L")).astype(np.uint16) * 257)
    packings = (None, "tiff_lzw", "tiff_adobe_deflate", "packbits")
    modes = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")
    seeds = [encode(NOISE.convert(mode), "TIFF", compression=packing) for mode in modes for packing in packings]
    seeds += [encode(deep, "TIFF", compression=packing, tiffinfo={274: 6}) for packing in packings]
    tokens = [struct.pack("<HHI", tag, kind, 1) for tag in image_headers.TIFF_KEPT for kind in (3, 4)]
    assert_clean(fuzz(read_image, seeds, mutations, tokens=tokens), mutations)
