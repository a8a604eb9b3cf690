"""The header guard: what an encoded image is, known before anything is allocated for it.

It reads what every decoder behind it reads (Pillow, libjpeg, nvJPEG, libwebp). Whatever two of them could understand
differently is refused here: a guard that knows one size while a decoder believes another guards nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sightline.errors import BadSample
from sightline.files.image_bytes import MAX_BYTES

# Pillow's refusal line (twice its MAX_IMAGE_PIXELS), applied to every decoder: 178.9 Mpix are 537 MB of RGB.
MAX_PIXELS = 178_956_970
# What the decoder holds and the pixels it returns, together. Reached by PNGs of 153 Mpix and WebPs of 53 Mpix; a plain
# JPEG never reaches it.
MAX_DECODING_BYTES = 2**30
# Entropy-coded JPEG spends at least one bit on an 8x8 block, 512 pixels a byte; four times that for odd subsampling.
# PNG takes as much for grey; 40 bytes of WebP can be blank pixels of any number, so that many need no bytes.
MAX_PIXELS_PER_BYTE = 2048
_BLANK_PIXELS = 2**24  # 25 times as many bytes, and nothing takes more, are within MAX_DECODING_BYTES
# Encoders write about ten; each costs a pass over the whole image for a few bytes, so thousands are an attack.
MAX_JPEG_SCANS = 100
MAX_JPEG_SCANNED_PIXELS = 2**31  # scans times pixels: twelve over MAX_PIXELS, 1.4 s of blank ones on one core
# Segments and chunks are walked in Python: this many take some 50 ms; a 256 MB PNG in 8 kB chunks has 33,000.
MAX_SEGMENTS = 100_000

# A marker is 0xFF and a code; 0xFF 0x00 is a data byte, 0xFF 0xFF is padding, 0xFF 0xD0-0xD7 restart inside a scan.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]")
_JPEG_MARKER_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_LEAST_LOOKED_AT = 2**15  # bytes of a scan from which on NumPy finds its end faster than a regular expression
_LOOKED_AT = 2**18  # most bytes in which it looks; it allocates three times as many
_JPEG_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA})  # those that libjpeg decodes
_JPEG_PLAIN_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended and progressive Huffman
_JPEG_PROGRESSIVE = frozenset({0xC2, 0xCA})
_JPEG_EXIF, JPEG_SCAN, _JPEG_END = 0xE1, 0xDA, 0xD9
# A scan after one of these holds restarts, or others follow it: each would cost another look at the same bytes.
_JPEG_MANY_MARKERS = _JPEG_PROGRESSIVE | {0xDD, JPEG_SCAN}
# Frames, tables, scan, number of lines, restart interval, application data, comment: all have a length. What has none
# (restarts out of a scan, TEM, a second start) is skipped by libjpeg and taken for a segment by nvJPEG.
_JPEG_SEGMENTS = _JPEG_FRAMES | {0xC4, 0xCC, JPEG_SCAN, 0xDB, 0xDC, 0xDD, 0xFE} | set(range(0xE0, 0xF0))
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by colour type
_PNG_ONE_SAMPLE = (0, 3)  # grey and palette
_PNG_GREY = (0, 4)  # without and with alpha
_PNG_RGBA = 6
_BMP_HEADERS = (40, 52, 56, 64, 108, 124)
_BMP_RLE = (1, 2)
_KNOWN_BUT_REFUSED = {b"GIF8": "GIF", b"II+\x00": "BigTIFF", b"MM\x00+": "BigTIFF", b"%PDF": "PDF", b"\x1f\x8b": "gzip"}
_TIFF_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\x00": "little", b"MM\x00*": "big"}
_TIFF_DEPTHS = {  # by (photometric, samples): grey, with alpha, RGB, with alpha, palette, CMYK
    (1, 1): (1, 8, 16),
    (1, 2): (8,),
    (2, 3): (8, 16),
    (2, 4): (8, 16),
    (3, 1): (8,),
    (5, 4): (8, 16),
}
_TIFF_PACKED = (1, 5, 8, 32773, 32946)  # not at all, LZW, Deflate, PackBits, Deflate by its old number
_TIFF_PACKINGS = {2: "fax", 3: "fax", 4: "fax", 6: "JPEG", 7: "JPEG", 34925: "LZMA", 50000: "ZSTD", 50001: "WebP"}
_TIFF_KINDS = {0: "grey in which white is 0", 1: "grey", 2: "RGB", 3: "palette", 5: "CMYK", 6: "YCbCr", 8: "Lab"}
_TIFF_NUMBERS = {1: "", 2: "signed ", 3: "floating-point "}
_TIFF_VALUES = {3: 2, 4: 4}  # bytes of a value, by the number of its type
# Tags that make the pixels: size, depth, compression, kind, pieces, predictor, palette, alpha. Pillow gets no others.
TIFF_KEPT = frozenset({256, 257, 258, 259, 262, 273, 277, 278, 279, 317, 320, 322, 323, 324, 325, 338})
_TIFF_CHECKED = frozenset({266, 274, 284, 339})  # order of bits, orientation, planes, kind of numbers
_TIFF_SINGLE = (256, 257, 259, 262, 266, 274, 277, 278, 284, 317, 322, 323)  # tags of one value
_TIFF_TILE = 2**20  # pixels that the tile of a small image may have
_TIFF_TILES = 2**24  # pixels that all tiles of a small image may have: each is unpacked, whatever it adds

_RGB = 3  # bytes of a pixel that is returned
_IN_PILLOW = 4  # of one that Pillow holds, whatever it was stored as; 1 where it has one sample of 8 bits
_IN_WEBP = 16  # two canvases of libwebp, the frame it hands over, and Pillow's


@dataclass(frozen=True)
class Header:
    """The size of an image as its first bytes give it, as stored: the right way up it may be `width` high."""

    format: Literal["JPEG", "PNG", "BMP", "WEBP", "TIFF"]
    width: int
    height: int
    orientation: int = 1  # EXIF: 1 is upright, 2-4 flip or turn by half, 5-8 swap the sides
    is_plain_jpeg: bool = False  # 8-bit Huffman JPEG of 1 or 3 components: what every JPEG decoder, GPU ones too, takes
    height_at: int = 0  # byte of a one-scan JPEG's height, for a decoder that stops early; 0: decode it all
    row_block: int = 0  # rows that such a JPEG codes together
    bytes_per_pixel: float = _RGB  # while it is decoded
    is_grey: bool = False  # stored with one value a pixel, and perhaps alpha; a palette is not grey
    depth: int = 8  # bits of a sample, of a PNG or TIFF
    has_fourth: bool = False  # colours and a fourth value, of a PNG or TIFF
    is_sampled_grey: bool = False  # a grey JPEG that claims sampling, which means nothing; nvJPEG adds others' colours

    @property
    def channels(self) -> int:
        """Return how many values a pixel has: 1, 3 or 4. Alpha beside grey does not count."""
        return 1 if self.is_grey else 4 if self.has_fourth else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the decoded array, the image turned the right way up."""
        sides = (self.height, self.width) if self.orientation < 5 else (self.width, self.height)
        return (*sides, 3)

    @property
    def decoding_bytes(self) -> int:
        """Return the memory that decoding takes, the result included; turning the image makes a copy."""
        return int(self.width * self.height * (self.bytes_per_pixel + (_RGB if self.orientation != 1 else 0)))


class Damaged(Exception):
    """The reason why bytes must not reach a decoder, and what to do about it; the public functions add the file's
    name."""

    def __init__(self, what: str, remedy: str = "fetch the file again or remove it"):
        super().__init__(f"{what}; {remedy}")


def read_header(data: bytes, name: str) -> Header:
    """Check what can be checked without decoding a pixel; raise BadSample for what must not reach a decoder.

    JPEG and PNG are what ImageNet and COCO hold (one of ImageNet's .JPEG files is a PNG: names are not trusted); BMP
    and WebP are common in users' own folders. libtiff is attacked more than the others: of a TIFF it gets a directory
    that was checked, with the plain compressions only. GIF stays out.
    """
    if not data:
        raise BadSample(name, "empty file (0 bytes); fetch it again or remove it")
    if len(data) > MAX_BYTES:
        raise BadSample(name, f"{len(data)} bytes, more than the {MAX_BYTES} allowed for one image; shrink it")
    parse = _parser(data)
    if parse is None:
        raise BadSample(name, _describe_unknown(data))
    try:
        header = parse(data)
    except Damaged as damage:
        raise BadSample(name, str(damage)) from None
    pixels = header.width * header.height
    if 0 < pixels <= _BLANK_PIXELS:  # within every bound
        return header
    if header.width < 1 or header.height < 1:
        reason = "has no pixel; remove it"
    elif pixels > MAX_PIXELS:
        reason = f"is more than the {MAX_PIXELS} allowed; shrink it"
    elif pixels > MAX_PIXELS_PER_BYTE * len(data):
        reason = f"in {len(data)} bytes, which cannot hold an image; fetch it again or remove it"
    elif header.decoding_bytes > MAX_DECODING_BYTES:
        reason = (
            f"takes {header.decoding_bytes} bytes to decode, more than the {MAX_DECODING_BYTES} allowed; shrink it, or "
            "store it as a baseline JPEG"
        )
    else:
        return header
    raise BadSample(name, f"{header.format} of {header.width}x{header.height} pixels {reason}")


def _parser(data: bytes) -> Callable[[bytes], Header] | None:
    if data.startswith(b"\xff\xd8\xff"):
        return _read_jpeg_header
    if data.startswith(PNG_SIGNATURE):
        return _read_png_header
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _read_webp_header
    if data.startswith(b"BM"):
        return _read_bmp_header
    if data[:4] in _TIFF_ORDERS:
        return _read_tiff_header
    return None


def _describe_unknown(data: bytes) -> str:
    start = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")):
        return "an HTML or XML page, not an image (an expired link answers so); fetch it again or remove it"
    for magic, kind in _KNOWN_BUT_REFUSED.items():
        if data.startswith(magic):
            return f"a {kind} file; JPEG, PNG, BMP, WebP and TIFF are read; convert or remove it"
    return f"starts with {data[:8]!r}, which is not a JPEG, PNG, BMP, WebP or TIFF image; convert or remove it"


def number(data: bytes, start: int, size: int, order: Literal["big", "little"], signed: bool = False) -> int:
    """Return an integer field of a header; a field that lies beyond the end is damage, not a smaller number."""
    field = data[start : start + size]
    if len(field) < size:
        raise Damaged(f"cut off after {len(data)} bytes, inside its header")
    return int.from_bytes(field, order, signed=signed)


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, its place, end of its segment) up to and including the end marker, found as decoders find them.

    A file that was cut, or whose tail is zeros, has no end marker. Walking there makes up most of the guard's cost:
    25 us, 2 % of the 1.2 ms that decoding an ImageNet photo takes on one core (150 photos, Python 3.11).
    """
    position, pattern, is_one_run = 2, _JPEG_MARKER, True
    for _ in range(MAX_SEGMENTS):
        match = pattern.search(data, position)
        if match is None:
            raise Damaged(f"JPEG without its end marker: cut off, or overwritten, within its {len(data)} bytes")
        at = match.start()
        marker = data[at + 1]
        if marker == _JPEG_END:
            yield marker, at, at + 2
            return
        if marker not in _JPEG_SEGMENTS:
            raise Damaged(f"JPEG with marker 0xFF{marker:02X} at byte {at}, on which decoders disagree")
        if at + 4 > len(data):
            raise Damaged(f"JPEG cut off after {len(data)} bytes, inside a segment's header")
        length = data[at + 2] << 8 | data[at + 3]
        position = at + 2 + length
        if length < 2 or position > len(data):
            raise Damaged(f"JPEG segment 0xFF{marker:02X} at byte {at} claims {length} bytes")
        yield marker, at, position
        if marker in _JPEG_MANY_MARKERS:
            if marker == JPEG_SCAN and is_one_run:
                position += _bytes_before_marker(data, position)
            is_one_run = False
        pattern = _JPEG_MARKER_AFTER_SCAN if marker == JPEG_SCAN else _JPEG_MARKER
    raise Damaged(f"JPEG of more than {MAX_SEGMENTS} segments")


def _bytes_before_marker(data: bytes, start: int) -> int:
    """Return how many bytes of a scan, at least, come before its next marker. NumPy takes less than half of
    the time of a regular expression, which halts at each 0xFF of the data."""
    if len(data) - start < _LEAST_LOOKED_AT:
        return 0
    codes = np.frombuffer(data, np.uint8)[start : start + _LOOKED_AT]
    is_marker = (codes[:-1] == 0xFF) & (codes[1:] != 0)  # or padding, or a restart
    return int(is_marker.argmax()) if is_marker.any() else max(0, len(codes) - 1)


def first_header(data: bytes) -> Header | None:
    """Return the size and the channels of an image out of its first bytes; None if they do not tell. Nothing else is
    checked, and a PNG's orientation may come later: what is decoded needs `read_header`."""
    if data.startswith(PNG_SIGNATURE) and data[12:16] == b"IHDR" and len(data) > 25:
        width, height, (depth, colour) = number(data, 16, 4, "big"), number(data, 20, 4, "big"), data[24:26]
        return Header("PNG", width, height, is_grey=colour in _PNG_GREY, depth=depth, has_fourth=colour == _PNG_RGBA)
    frame = orientation = None
    try:
        for marker, at, end in jpeg_segments(data) if data.startswith(b"\xff\xd8\xff") else ():
            if marker in _JPEG_FRAMES and end - at > 9:
                frame = (data[at + 7] << 8 | data[at + 8], data[at + 5] << 8 | data[at + 6], data[at + 9] == 1)
            elif marker == _JPEG_EXIF and orientation is None and data.startswith(b"Exif\x00\x00", at + 4):
                orientation = _exif_orientation(data[at + 10 : end])
            elif marker == JPEG_SCAN:  # a frame and its orientation come before
                return frame and Header("JPEG", frame[0], frame[1], orientation or 1, is_grey=frame[2])
    except Damaged:  # more likely cut off than damaged
        return None
    return None


def _read_jpeg_header(data: bytes) -> Header:
    frame = orientation = None
    scans = scanned = coded = scan_end = 0
    for marker, at, end in jpeg_segments(data):
        if scan_end:
            coded += at - scan_end
            scan_end = 0
        if marker in _JPEG_FRAMES:
            if frame is not None:
                raise Damaged(f"JPEG with a second frame header at byte {at}")
            frame = (marker, at + 4, end)
        elif marker == _JPEG_EXIF and orientation is None and data.startswith(b"Exif\x00\x00", at + 4):
            orientation = _exif_orientation(data[at + 10 : end])
        elif marker == JPEG_SCAN:
            if frame is None:
                break
            scans += 1
            scanned = data[at + 4] if end > at + 4 else 0  # components
            scan_end = end
    if frame is None or scans == 0:
        raise Damaged("JPEG without a frame or without a scan: it holds no image")
    return _jpeg_header(data, frame, orientation or 1, scans, scanned, coded)


def _jpeg_header(
    data: bytes, frame: tuple[int, int, int], orientation: int, scans: int, scanned: int, coded: int
) -> Header:
    """Build a header from the one frame (marker, start, end) and its scans: `coded` bytes, the last of `scanned`."""
    marker, start, end = frame
    components = data[start + 5] if end - start > 5 else 0
    if end - start != 6 + 3 * components or components not in (1, 3, 4):
        raise Damaged(
            f"JPEG with a frame header of {end - start} bytes for {components} components at byte {start - 4}"
        )
    if data[start] != 8:
        raise Damaged(f"JPEG of {data[start]} bits a sample, 8 are read", "convert or remove it")
    height, width = data[start + 1] << 8 | data[start + 2], data[start + 3] << 8 | data[start + 4]
    if width * height > MAX_PIXELS_PER_BYTE * coded:  # metadata does not count: it pads a file to any size
        raise Damaged(f"JPEG with {coded} bytes of scans cannot hold the {width}x{height} pixels it claims")
    most = min(MAX_JPEG_SCANS, max(1, MAX_JPEG_SCANNED_PIXELS // max(1, width * height)))
    if scans > most:
        what = f"JPEG of {scans} scans, more than the {most} allowed for {width}x{height} pixels"
        raise Damaged(what, "store it as a baseline JPEG")
    is_plain = marker in _JPEG_PLAIN_FRAMES and components in (1, 3)
    # Progressive files code the whole image several times over. A scan that lacks a component is read to its end before
    # the first row comes.
    is_row_by_row = marker not in _JPEG_PROGRESSIVE and scans == 1 and scanned == components
    factors = [data[start + 7 + 3 * component] for component in range(components)]
    per_pixel = float(_RGB if is_plain else _RGB + _IN_PILLOW)
    if not is_row_by_row:
        per_pixel += _coefficient_bytes(factors)
    is_grey = components == 1
    found = Header(
        "JPEG",
        width,
        height,
        orientation,
        is_plain,
        bytes_per_pixel=per_pixel,
        is_grey=is_grey,
        is_sampled_grey=is_grey and factors != [0x11],
    )
    # A turned image would lose columns instead of rows.
    if not is_plain or not is_row_by_row or orientation != 1:
        return found
    return replace(found, height_at=start + 1, row_block=8 * max(factor & 15 for factor in factors))


def _coefficient_bytes(factors: list[int]) -> float:
    """Return two bytes for every sample that a pixel has on average: libjpeg keeps all until the last scan was read."""
    across, down = max(factor >> 4 for factor in factors), max(factor & 15 for factor in factors)
    return 2 * sum((factor >> 4) * (factor & 15) for factor in factors) / max(1, across * down)


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, payload start, payload end) up to and including IEND; the first, and no other, is IHDR."""
    position = len(PNG_SIGNATURE)
    for count in range(MAX_SEGMENTS):
        length = number(data, position, 4, "big")
        kind, start = data[position + 4 : position + 8], position + 8
        position = start + length + 4
        if position > len(data):
            raise Damaged(f"PNG cut off after {len(data)} bytes, inside its {kind!r} chunk")
        if count == 0 and (kind != b"IHDR" or length != 13):
            raise Damaged(f"PNG that starts with a {kind!r} chunk of {length} bytes instead of its header")
        if count > 0 and kind == b"IHDR":  # Pillow believes the last one
            raise Damaged(f"PNG with a second header at byte {start - 8}")
        yield kind, start, start + length
        if kind == b"IEND":
            return
    raise Damaged(f"PNG of more than {MAX_SEGMENTS} chunks")


def _read_png_header(data: bytes) -> Header:
    chunks = png_chunks(data)
    _, start, end = next(chunks)
    width, height = number(data, start, 4, "big"), number(data, start + 4, 4, "big")
    depth, colour, compression, filtering, interlace = data[start + 8 : end]
    if depth not in _PNG_DEPTHS.get(colour, ()) or compression or filtering or interlace > 1:
        raise Damaged(f"PNG of an unknown kind: {tuple(data[start + 8 : end])}")
    per_pixel = _RGB + (depth // 16 + 1 if colour in _PNG_ONE_SAMPLE else _IN_PILLOW)
    orientation = None
    for kind, start, end in chunks:
        if kind == b"eXIf" and orientation is None:
            orientation = _exif_orientation(data[start:end])
    is_grey = colour in _PNG_GREY
    return Header(
        "PNG", width, height, orientation or 1, False, 0, 0, per_pixel, is_grey, depth, has_fourth=colour == _PNG_RGBA
    )


def _read_bmp_header(data: bytes) -> Header:
    size = number(data, 14, 4, "little")
    if size == 12:  # the OS/2 header of 1987, still written by some tools
        width, height, bits = (number(data, at, 2, "little") for at in (18, 20, 24))
    elif size in _BMP_HEADERS:
        width, height = number(data, 18, 4, "little", signed=True), number(data, 22, 4, "little", signed=True)
        height = abs(height)  # a negative one only says that the rows run from top to bottom
        bits = number(data, 28, 2, "little")
        if number(data, 30, 4, "little") in _BMP_RLE:  # unpacked byte by byte in Python
            raise Damaged("BMP compressed by runs (RLE), which is not read", "convert it to PNG")
    else:
        raise Damaged(f"BMP with a header of {size} bytes")
    if max(width, 0) * height * bits // 8 > len(data):
        raise Damaged(f"BMP of {len(data)} bytes cannot hold the {width}x{height} pixels of {bits} bits it claims")
    per_pixel = _RGB + (1 if bits <= 8 else _IN_PILLOW)
    return Header("BMP", width, height, bytes_per_pixel=per_pixel)


def _read_webp_header(data: bytes) -> Header:
    if number(data, 4, 4, "little") + 8 > len(data):
        raise Damaged(f"WebP cut off after {len(data)} bytes")
    kind, orientation = data[12:16], 1
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = number(data, 26, 2, "little") & 0x3FFF, number(data, 28, 2, "little") & 0x3FFF
    elif kind == b"VP8L" and data[20:21] == b"\x2f":
        bits = number(data, 21, 4, "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8X":
        width, height = number(data, 24, 3, "little") + 1, number(data, 27, 3, "little") + 1
        orientation = _webp_orientation(data)
    else:
        raise Damaged(f"WebP that starts with a {kind!r} chunk of {data[20:26]!r}")
    return Header("WEBP", width, height, orientation, bytes_per_pixel=_RGB + _IN_WEBP)


def _webp_orientation(data: bytes) -> int:
    position = 12
    for _ in range(MAX_SEGMENTS):
        if position + 8 > len(data):
            return 1
        start, length = position + 8, number(data, position + 4, 4, "little")
        if data.startswith(b"EXIF", position):
            return _exif_orientation(data[start : start + length].removeprefix(b"Exif\x00\x00"))
        position = start + length + length % 2
    raise Damaged(f"WebP of more than {MAX_SEGMENTS} chunks")


def tiff_tags(data: bytes) -> tuple[Literal["little", "big"], dict[int, tuple[bytes, list[int]]]]:
    """Return the order of bytes, and the tags that matter: the entry of the directory, and its values."""
    order = _TIFF_ORDERS[data[:4]]
    start = number(data, 4, 4, order) + 2
    end = start + 12 * number(data, start - 2, 2, order)
    if number(data, end, 4, order):
        raise Damaged("TIFF of several pages", "save the page to use as a file of its own")
    found: dict[int, tuple[bytes, list[int]]] = {}
    for at in range(start, end, 12):
        if (tag := number(data, at, 2, order)) in TIFF_KEPT | _TIFF_CHECKED:
            if tag in found:  # two readers may take one each
                raise Damaged(f"TIFF with two tags {tag}")
            found[tag] = data[at : at + 12], _tiff_values(data, at, order)
    return order, found


def _tiff_values(data: bytes, entry: int, order: Literal["little", "big"]) -> list[int]:
    kind, count = number(data, entry + 2, 2, order), number(data, entry + 4, 4, order)
    size = _TIFF_VALUES.get(kind)
    if size is None or not 0 < count <= MAX_SEGMENTS:
        raise Damaged(f"TIFF with {count} values of type {kind} in the directory entry at byte {entry}")
    start = entry + 8 if size * count <= 4 else number(data, entry + 8, 4, order)
    if start < 8:  # of the header, which is written anew for Pillow
        raise Damaged(f"TIFF whose directory entry at byte {entry} points into its header")
    if start + size * count > len(data):
        raise Damaged(f"TIFF cut off after {len(data)} bytes, inside its directory")
    return np.frombuffer(data, f"{'<' if order == 'little' else '>'}u{size}", count, start).tolist()


def _read_tiff_header(data: bytes) -> Header:
    tags = {tag: values for tag, (_, values) in tiff_tags(data)[1].items()}
    if missing := [tag for tag in (256, 257, 262) if tag not in tags]:
        raise Damaged(f"TIFF without tag {missing[0]}")
    if several := [tag for tag in _TIFF_SINGLE if len(tags.get(tag, [1])) > 1]:
        raise Damaged(f"TIFF with {len(tags[several[0]])} values of tag {several[0]}")
    width, height, kind = (tags[tag][0] for tag in (256, 257, 262))
    packing, samples, planes, bit_order = (tags.get(tag, [1])[0] for tag in (259, 277, 284, 266))
    depths, numbers = tags.get(258, [1]), tags.get(339, [1])
    if packing not in _TIFF_PACKED:
        how = _TIFF_PACKINGS.get(packing, f"method {packing}")
        raise Damaged(f"TIFF compressed by {how}", "save it uncompressed, or with LZW or Deflate")
    colours = _TIFF_KINDS.get(kind, f"colours of kind {kind}")
    channels = f"{samples} channel{'s' * (samples > 1)}"
    what = f"{colours}, {channels} of {depths[0]} {_TIFF_NUMBERS.get(numbers[0], 'unknown ')}bits"
    what += ", each stored apart" if planes != 1 else ", bits in reversed order" if bit_order != 1 else ""
    is_known = depths[0] in _TIFF_DEPTHS.get((kind, samples), ()) and len(set(depths)) == len(set(numbers)) == 1
    if not is_known or (numbers[0], planes, bit_order) != (1, 1, 1) or len(depths) not in (1, samples):
        raise Damaged(f"TIFF with {what}", "save it as grey, RGB, palette or CMYK of 8 bits, channels together")
    if samples == 2 and tags.get(338) not in ([0], [2]):  # Pillow knows no other
        raise Damaged("TIFF of grey and a channel that is no plain alpha", "save it as grey")
    if tags.get(317, [1])[0] not in (1, 2):
        raise Damaged(f"TIFF with predictor {tags[317][0]}", "save it without, or uncompressed")
    if kind == 3 and len(tags.get(320, ())) != 3 * 256:
        raise Damaged("TIFF without its palette")
    row_bytes = -(-width * samples * depths[0] // 8)
    coded = _tiff_coded_bytes(data, tags, width, height)
    if packing == 1 and coded < height * row_bytes:
        raise Damaged(f"TIFF with {coded} bytes of pixels cannot hold the {width}x{height} that it claims")
    # All rows may be one piece, which libtiff unpacks before Pillow takes it.
    per_pixel = _RGB + (depths[0] // 16 + 1 if samples == 1 else _IN_PILLOW) + samples * depths[0] / 8
    orientation = tags.get(274, [1])[0]
    orientation = orientation if 1 <= orientation <= 8 else 1
    return Header(
        "TIFF", width, height, orientation, False, 0, 0, per_pixel, kind == 1, depths[0], (kind, samples) == (2, 4)
    )


def _tiff_coded_bytes(data: bytes, tags: dict[int, list[int]], width: int, height: int) -> int:
    """Return the bytes of all strips or tiles; raise Damaged unless they cover the image and lie in the file."""
    if 322 in tags or 324 in tags:
        across, down = (tags.get(tag, [0])[0] for tag in (322, 323))
        if across * down > max(width * height, _TIFF_TILE):
            raise Damaged(f"TIFF with tiles of {across}x{down} pixels, larger than the image")
    else:
        across, down = width, min(tags.get(278, [height])[0], height)
    pieces = -(-width // across) * -(-height // down) if across and down else 0
    if pieces * across * down > max(4 * width * height, _TIFF_TILES):
        raise Damaged(f"TIFF with {pieces} tiles of {across}x{down} pixels for {width}x{height}")
    starts, counts = (tags.get(strip, tags.get(tile, [])) for strip, tile in ((273, 324), (279, 325)))
    if not pieces or len(starts) != pieces or len(counts) != pieces:
        raise Damaged(f"TIFF with {len(starts)} pieces and {len(counts)} lengths of them, {pieces} were expected")
    if max(start + count for start, count in zip(starts, counts, strict=True)) > len(data):
        raise Damaged(f"TIFF cut off after {len(data)} bytes, inside its pixels")
    return sum(counts)


def _exif_orientation(tiff: bytes) -> int:
    """Return the orientation tag of the first directory, or 1: broken metadata does not make an image bad."""
    order: Literal["big", "little"] = "little" if tiff.startswith(b"II") else "big"
    directory = int.from_bytes(tiff[4:8], order)
    for entry in range(int.from_bytes(tiff[directory : directory + 2], order)):
        start = directory + 2 + 12 * entry
        field = tiff[start : start + 12]
        if len(field) < 12:
            return 1
        if int.from_bytes(field[:2], order) == 0x0112:
            value = int.from_bytes(field[8:10], order)
            return value if 1 <= value <= 8 else 1
    return 1
