"""TIFFs as Pillow writes them become the pixels of the same image as PNG; all others are refused by their header."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from sightline.data.decode import decode_rgb, decode_values, read_header
from sightline.data.formats import image_headers
from sightline.errors import BadSample

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 33, 3), dtype=np.uint8)
RGB = Image.fromarray(PIXELS)
DEEP = PIXELS[..., 0].astype(np.uint16) * 256 + 7
KINDS = [None, "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits"]
PACKINGS = pytest.mark.parametrize("packing", KINDS)


def tiff(image=RGB, **options):
    stream = io.BytesIO()
    image.save(stream, "TIFF", **options)
    return stream.getvalue()


def with_tag(tag, value, data=None, kind=None):
    """The same little-endian TIFF with another value of a tag, and with another type or number."""
    data = bytearray(data or tiff())
    (start,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, start)
    at = next(at for at in range(start + 2, start + 2 + 12 * count, 12) if data[at : at + 2] == struct.pack("<H", tag))
    struct.pack_into("<I", data, at + 8, value)
    if kind is not None:
        struct.pack_into("<HI", data, at + 2, *kind)
    return bytes(data)


@pytest.mark.parametrize(
    ("mode", "packing"),
    [*(("RGB", packing) for packing in KINDS), *((mode, "tiff_lzw") for mode in ("RGBA", "L", "LA", "P", "1", "CMYK"))],
)
def test_pixels_are_those_of_pillow(mode, packing):
    """Alpha is dropped, CMYK converted as that of a JPEG."""
    image = RGB.convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(PIXELS[..., 1]))
    data = tiff(image, compression=packing)
    expected = np.asarray(image.convert("RGBA").convert("RGB") if mode == "LA" else image.convert("RGB"))
    header = read_header(data, "a.tif")
    assert (header.format, header.shape, header.is_grey) == ("TIFF", (20, 33, 3), mode in ("1", "L", "LA"))
    np.testing.assert_array_equal(decode_rgb(data, "a.tif", header), expected)


def written(order, pixels, kind, packing=1, orientation=1, rows=20, tile=0):
    """A TIFF of 16 bits by hand: Pillow writes no such RGB, no tiles, and packs in this machine's order only."""
    height, width, samples = pixels.shape
    pieces = [pixels[top : top + rows] for top in range(0, height, rows)]
    if tile:
        padded = np.pad(pixels, ((0, -height % tile), (0, -width % tile), (0, 0)))
        corners = [(top, left) for top in range(0, height, tile) for left in range(0, width, tile)]
        pieces = [padded[top : top + tile, left : left + tile] for top, left in corners]
    parts = [piece.astype(f"{order}u2").tobytes() for piece in pieces]
    parts = [zlib.compress(part) if packing == 8 else part for part in parts]
    place = 8 + 2 + (11 if tile else 10) * 12 + 4
    starts = np.cumsum([place + 6 + 8 * len(parts), *map(len, parts)])[:-1].tolist()
    tables = struct.pack(f"{order}3H", 16, 16, 16) + struct.pack(f"{order}{2 * len(parts)}I", *starts, *map(len, parts))

    def entry(tag, *values, at=0):
        kind = "H" if tag in (258, 262, 274) else "I"
        body = struct.pack(f"{order}{len(values)}{kind}", *values) if not at else struct.pack(f"{order}I", at)
        return struct.pack(f"{order}HHI", tag, 3 if kind == "H" else 4, len(values)) + body.ljust(4, b"\0")

    many = len(parts) > 1
    begins = entry(324 if tile else 273, *starts, at=(place + 6) * many)
    counts = entry(325 if tile else 279, *map(len, parts), at=(place + 6 + 4 * len(parts)) * many)
    depths = entry(258, *[16] * samples, at=place if samples == 3 else 0)
    directory = [entry(256, width), entry(257, height), depths, entry(259, packing), entry(262, kind)]
    directory += [entry(274, orientation), entry(277, samples), begins, counts]
    directory += [entry(322, tile), entry(323, tile)] if tile else [entry(278, rows)]
    begin = struct.pack(f"{order}2sHIH", b"II" if order == "<" else b"MM", 42, 8, len(directory))
    return b"".join([begin, *directory, bytes(4), tables, *parts])


ORDERS = pytest.mark.parametrize("order", ["<", ">"])
PIECES = pytest.mark.parametrize("pieces", [{"rows": 20}, {"rows": 6}, {"tile": 16}, {"tile": 64}], ids=str)
BY_HAND = pytest.mark.parametrize("packing", [1, 8])


@ORDERS
def test_grey_of_16_bits_by_pillow(order):
    image = Image.frombytes("I;16" if order == "<" else "I;16B", (33, 20), DEEP.astype(f"{order}u2").tobytes())
    data = tiff(image)
    assert data[:2] == (b"II" if order == "<" else b"MM") and read_header(data, "a").depth == 16
    np.testing.assert_array_equal(decode_rgb(data, "a"), np.repeat(PIXELS[..., :1], 3, 2))
    np.testing.assert_array_equal(decode_values(data, "a"), DEEP)


@ORDERS
@BY_HAND
@PIECES
def test_grey_of_16_bits_keeps_its_high_byte_and_as_a_mask_all(order, packing, pieces):
    data = written(order, DEEP[..., None], 1, packing, **pieces)
    np.testing.assert_array_equal(decode_rgb(data, "a"), np.repeat(PIXELS[..., :1], 3, 2))
    np.testing.assert_array_equal(decode_values(data, "a"), DEEP)


@ORDERS
@BY_HAND
@PIECES
def test_colours_of_16_bits_keep_their_high_byte_and_are_turned_upright(order, packing, pieces):
    data = written(order, PIXELS.astype(np.uint16) * 256 + 9, 2, packing, 6, **pieces)
    np.testing.assert_array_equal(decode_rgb(data, "a"), np.rot90(PIXELS, -1))
    with pytest.raises(BadSample, match="colours of 16 bits"):
        decode_values(data, "a")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation):
    data = tiff(tiffinfo={274: orientation})
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(decode_rgb(data, "a"), np.asarray(image))


def test_strips_and_odd_lengths(monkeypatch):
    monkeypatch.setattr(TiffImagePlugin, "STRIP_SIZE", 300)
    data = tiff(compression="tiff_lzw", tiffinfo={270: "a text"})
    assert len(image_headers.tiff_tags(data)[1][273][1]) > 3
    for padded in (data, data + b"x"):
        np.testing.assert_array_equal(decode_rgb(padded, "a"), PIXELS)


def many_tiles():
    """A row of 300 tiles, which share one stream."""
    return written("<", np.zeros((1, 16 * 300, 1)), 1, 8, tile=16)


PACKED = tiff(compression="tiff_lzw")
REFUSED = {
    "pages": (
        tiff(save_all=True, append_images=[RGB]),
        "TIFF of several pages; save the page to use as a file of its own",
    ),
    "jpeg": (tiff(compression="jpeg"), "compressed by JPEG; save it uncompressed, or with LZW or Deflate"),
    "fax": (tiff(RGB.convert("1"), compression="group4"), "compressed by fax"),
    "floats": (tiff(Image.fromarray(PIXELS[..., 0].astype(np.float32))), "grey, 1 channel of 32 floating-point bits"),
    "signed": (tiff(Image.fromarray(PIXELS[..., 0].astype(np.int32))), "1 channel of 32 signed bits"),
    "lab": (tiff(Image.frombytes("LAB", (33, 20), PIXELS.tobytes())), "TIFF with Lab, 3 channels of 8 bits"),
    "white is 0": (with_tag(262, 0, tiff(RGB.convert("L"))), "grey in which white is 0, .*; save it as grey, RGB"),
    "planes": (with_tag(284, 2), "RGB, 3 channels of 8 bits, each stored apart"),
    "big": (b"II+\0" + bytes(50), "a BigTIFF file; JPEG, PNG, BMP, WebP and TIFF are read"),
    "cut": (tiff()[:-9], "cut off after"),
    "no directory": (b"II*\0" + struct.pack("<I", 10**6), "cut off after 8 bytes, inside its header"),
    "nothing": (b"MM\0*" + struct.pack(">IHI", 8, 0, 0), "TIFF without tag 256"),
    "lies": (
        with_tag(257, 10**6, with_tag(278, 10**6, kind=(4, 1)), (4, 1)),
        "TIFF with 1980 bytes of pixels cannot hold",
    ),
    "bomb": (with_tag(257, 2**31, with_tag(278, 2**31, PACKED, (4, 1)), (4, 1)), "more than the 178956970 allow"),
    "no rows": (with_tag(278, 0), "0 were expected"),
    "no pixel": (with_tag(256, 0), "0 were expected"),
    "pieces": (with_tag(278, 5), "1 pieces and 1 lengths of them, 4 were expected"),
    "values": (with_tag(273, 8, kind=(4, 2**31)), "TIFF with 2147483648 values of type 4"),
    "type": (with_tag(273, 8, kind=(12, 1)), "values of type 12"),
    "outside": (with_tag(273, 10**6, kind=(4, 40)), "inside its directory"),
    "in the header": (with_tag(258, 4), "directory entry at byte [0-9]+ points into its header"),
    "two widths": (with_tag(256, 8, kind=(4, 2)), "TIFF with 2 values of tag 256"),
    "alpha": (with_tag(338, 1, tiff(RGB.convert("LA"))), "grey and a channel that is no plain alpha; save it as grey"),
    "tiles": (
        with_tag(322, 16, with_tag(323, 60000, with_tag(256, 16 * 300, many_tiles()))),
        "TIFF with 300 tiles of 16x60000 pixels for 4800x1",
    ),
    "predictor": (with_tag(317, 3, tiff(compression="tiff_lzw", tiffinfo={317: 2})), "predictor 3; save it without"),
    "two tags": (with_tag(257, 0).replace(b"\x01\x01", b"\x00\x01", 1), "TIFF with two tags 256"),
    "palette": (with_tag(320, 8, tiff(RGB.convert("P")), kind=(3, 6)), "without its palette"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_by_its_header(case):
    data, message = REFUSED[case]
    with pytest.raises(BadSample, match=rf"^a\.tif: .*{message}"):
        read_header(data, "a.tif")


def test_a_tile_that_is_much_larger_than_its_image_is_refused():
    data = written("<", DEEP[..., None], 1, 8, tile=64)
    for tag in (322, 323):
        data = with_tag(tag, 60000, data)
    with pytest.raises(BadSample, match="tiles of 60000x60000 pixels, larger than the image"):
        read_header(data, "a.tif")


def test_tags_that_make_no_pixels_are_not_read():
    """Two hundred entries, each of all bytes of the file, which Pillow would copy for every one."""
    data = tiff()
    (start,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, start)
    entries, size = data[start + 2 : start + 2 + 12 * count], len(data) + 2**18
    more = b"".join(struct.pack("<HHII", 40000 + number, 1, size, 0) for number in range(200))
    directory = struct.pack("<H", count + 200) + entries + more + bytes(4)
    bomb = data[:4] + struct.pack("<I", size) + data[8:] + bytes(2**18) + directory
    tracemalloc.start()
    np.testing.assert_array_equal(decode_rgb(bomb, "a"), PIXELS)
    assert tracemalloc.get_traced_memory()[1] < 10 * size
    tracemalloc.stop()


def test_damage_in_packed_pixels():
    data = bytearray(tiff(compression="tiff_adobe_deflate"))
    data[60:90] = bytes(30)
    with pytest.raises(BadSample, match=r"^a\.tif: broken TIFF: .*; fetch the file again or remove it"):
        decode_rgb(bytes(data), "a.tif")
