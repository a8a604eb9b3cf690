"""Encoded bytes -> RGB pixels, behind one header guard that knows the size before anything is allocated.

Sits between a source (bytes) and an augmentation (pixels). Any bytes end as an array or as BadSample, nothing else.
The GPU's decoder sits behind the same `read_header`: it tells size, rotation and plainness.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import BmpImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from sightline.errors import BadSample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Pillow's refusal line (twice its MAX_IMAGE_PIXELS), applied to every decoder: 178.9 Mpix are 537 MB of RGB.
MAX_PIXELS = 178_956_970
# A MAX_PIXELS photo at 0.7 bytes a pixel takes half of this. Sources should compare st_size before they read.
MAX_BYTES = 256 * 2**20
# Entropy-coded JPEG spends at least one bit on an 8x8 block, 512 pixels a byte; four times that for odd subsampling.
MAX_PIXELS_PER_JPEG_BYTE = 2048
# Encoders write about ten; each costs a pass over the whole picture for a few bytes, so thousands are an attack.
MAX_JPEG_SCANS = 100
# Segments and chunks are walked in Python: this many take some 50 ms; a 256 MB PNG in 8 kB chunks has 33,000.
MAX_SEGMENTS = 100_000

# A marker is 0xFF and a code; 0xFF 0x00 is a data byte, 0xFF 0xFF is padding, 0xFF 0xD0-0xD7 restart inside a scan.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_PLAIN_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended and progressive Huffman
_JPEG_PROGRESSIVE = 0xC2
_JPEG_EXIF, _JPEG_SCAN, _JPEG_END = 0xE1, 0xDA, 0xD9
_JPEG_KEPT_FOR_PILLOW = frozenset({0xE0, 0xEE})  # JFIF and Adobe: they decide the colour space
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT_FOR_PILLOW = frozenset({b"IHDR", b"PLTE", b"IDAT", b"IEND"})
_SOURCE_LINE = re.compile(r"^\S+, \S+\.cpp:\d+, ")  # torch operators put their own place before the reason
_KNOWN_BUT_REFUSED = {b"GIF8": "GIF", b"II*\x00": "TIFF", b"MM\x00*": "TIFF", b"%PDF": "PDF", b"\x1f\x8b": "gzip"}
JpegDecoder = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Header:
    """What the first bytes say of a picture, size as stored: the right way up it may be `width` high."""

    format: Literal["JPEG", "PNG", "BMP", "WEBP"]
    width: int
    height: int
    orientation: int = 1  # EXIF: 1 is upright, 2-4 flip or turn by half, 5-8 swap the sides
    is_plain_jpeg: bool = False  # 8-bit Huffman JPEG of 1 or 3 components: what every JPEG decoder, GPU ones too, takes
    height_at: int = 0  # byte of a one-scan JPEG's height, for a decoder that stops early; 0: decode it all
    row_block: int = 0  # rows that such a JPEG codes together

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the decoded array, the picture turned the right way up."""
        sides = (self.height, self.width) if self.orientation < 5 else (self.width, self.height)
        return (*sides, 3)


def read_header(data: bytes, name: str) -> Header:
    """Check what can be checked without decoding a pixel; raise BadSample for what must not reach a decoder.

    JPEG and PNG are what ImageNet and COCO hold (one of ImageNet's .JPEG files is a PNG: names are not trusted); BMP
    and WebP are common in users' own folders. GIF and TIFF stay out: rare, and their decoders are the attacked ones.
    """
    if not data:
        raise BadSample(name, "empty file (0 bytes); fetch it again or remove it")
    if len(data) > MAX_BYTES:
        raise BadSample(name, f"{len(data)} bytes, more than the {MAX_BYTES} allowed for one picture; shrink it")
    parse = _parser(data)
    if parse is None:
        raise BadSample(name, _describe_unknown(data))
    try:
        header = parse(data)
    except _Damaged as damage:
        raise BadSample(name, f"{damage}; fetch the file again or remove it") from None
    if header.width < 1 or header.height < 1:
        raise BadSample(name, f"{header.format} of {header.width}x{header.height} pixels has no pixel; remove it")
    if header.width * header.height > MAX_PIXELS:
        size = f"{header.width}x{header.height}"
        raise BadSample(name, f"{header.format} of {size} pixels, more than the {MAX_PIXELS} allowed; shrink it")
    return header


def decode_rgb(data: bytes, name: str, header: Header | None = None, rows: int | None = None) -> np.ndarray:
    """Decode to (height, width, 3) uint8 RGB, EXIF rotation applied; raise BadSample for anything damaged.

    With `rows` those below may be missing: whoever cuts a box needs nothing under it, and a JPEG that is decoded from
    the top costs a seventh less so (random crops of ImageNet photos). The rows that come are the same bits.
    Alpha is dropped, not blended, as `convert("RGB")` does in the reference systems; 16-bit samples keep their high
    byte, grey and colour alike; animations give their first frame. Damage inside a JPEG's scan that leaves every
    marker in place cannot be told from content: libjpeg fills the hole with grey and notes it on stderr.
    """
    header = header or read_header(data, name)
    try:
        decode_fast = _fast_jpeg_decoder() if header.is_plain_jpeg else None
        if decode_fast and decode_fast is _simplejpeg():
            stored, header = _decode_with_simplejpeg(decode_fast, data, header, rows)
        else:
            stored = decode_fast(data) if decode_fast else _decode_with_pillow(data, header)
    except _Damaged as damage:
        raise BadSample(name, f"{damage}; fetch the file again or remove it") from None
    except Exception as error:  # damaged bytes make decoders raise a dozen types; all mean one thing to the caller
        reason = _SOURCE_LINE.sub("", str(error).partition("\n")[0]) or type(error).__name__
        raise BadSample(name, f"broken {header.format}: {reason}; fetch the file again or remove it") from error
    pixels = _turn_upright(stored, header.orientation)
    if pixels.shape != header.shape:
        raise BadSample(name, f"decoded to shape {pixels.shape}, its header says {header.shape}; remove the file")
    return pixels


class _Damaged(Exception):
    """A header or container that contradicts itself; the public functions add the file's name."""


def _parser(data: bytes) -> Callable[[bytes], Header] | None:
    if data.startswith(b"\xff\xd8\xff"):
        return _read_jpeg_header
    if data.startswith(_PNG_SIGNATURE):
        return _read_png_header
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _read_webp_header
    if data.startswith(b"BM"):
        return _read_bmp_header
    return None


def _describe_unknown(data: bytes) -> str:
    start = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")):
        return "an HTML or XML page, not a picture (an expired link answers so); fetch it again or remove it"
    for magic, kind in _KNOWN_BUT_REFUSED.items():
        if data.startswith(magic):
            return f"a {kind} file; JPEG, PNG, BMP and WebP are read; convert or remove it"
    return f"starts with {data[:8]!r}, which is no JPEG, PNG, BMP or WebP picture; convert or remove it"


def _number(data: bytes, start: int, size: int, order: Literal["big", "little"], signed: bool = False) -> int:
    """An integer field of a header; a field that lies beyond the end is damage, not a smaller number."""
    field = data[start : start + size]
    if len(field) < size:
        raise _Damaged(f"cut off after {len(data)} bytes, inside its header")
    return int.from_bytes(field, order, signed=signed)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, payload start, end) up to and including the end marker, found as libjpeg finds them.

    A file that was cut, or whose tail is zeros, has no end marker. Walking there makes up most of the guard's cost:
    48 us, 4 % of the 1.2 ms that decoding an ImageNet photo takes on one core (150 photos, Python 3.11).
    """
    position = 2
    for _ in range(MAX_SEGMENTS):
        match = _JPEG_MARKER.search(data, position)
        if match is None:
            raise _Damaged(f"JPEG without its end marker: cut off, or overwritten, within its {len(data)} bytes")
        marker, start = data[match.end() - 1], match.end()
        if marker == _JPEG_END:
            yield marker, start, start
            return
        length = _number(data, start, 2, "big")
        position = start + length
        if length < 2 or position > len(data):
            raise _Damaged(f"JPEG segment 0xFF{marker:02X} at byte {start - 2} claims {length} bytes")
        yield marker, start + 2, position
    raise _Damaged(f"JPEG of more than {MAX_SEGMENTS} segments")


def _read_jpeg_header(data: bytes) -> Header:
    frame, orientation, scans, scanned = None, None, 0, 0
    for marker, start, end in _jpeg_segments(data):
        if marker in _JPEG_FRAMES:
            if frame is not None or end - start < 6 or end - start < 6 + 3 * data[start + 5]:
                raise _Damaged(f"JPEG with a second or a short frame header at byte {start - 4}")
            frame = (marker, start)
        elif marker == _JPEG_EXIF and orientation is None and data.startswith(b"Exif\x00\x00", start):
            orientation = _exif_orientation(data[start + 6 : end])
        elif marker == _JPEG_SCAN:
            scans += 1
            scanned = data[start] if end > start else 0  # components
    if frame is None or scans == 0:
        raise _Damaged("JPEG without a frame or without a scan: it holds no picture")
    if scans > MAX_JPEG_SCANS:
        raise _Damaged(f"JPEG of {scans} scans, more than the {MAX_JPEG_SCANS} allowed")
    marker, start = frame
    height, width = _number(data, start + 1, 2, "big"), _number(data, start + 3, 2, "big")
    if marker in _JPEG_PLAIN_FRAMES and width * height > MAX_PIXELS_PER_JPEG_BYTE * len(data):
        raise _Damaged(f"JPEG of {len(data)} bytes cannot hold the {width}x{height} pixels it claims")
    components = data[start + 5]
    is_plain = marker in _JPEG_PLAIN_FRAMES and data[start] == 8 and components in (1, 3)
    # Progressive files code the whole picture several times over; a turned one would lose columns instead of rows.
    # A scan that lacks a component is read to its end before the first row comes.
    is_row_by_row = marker != _JPEG_PROGRESSIVE and scans == 1 and scanned == components
    if not is_plain or not is_row_by_row or (orientation or 1) != 1:
        return Header("JPEG", width, height, orientation or 1, is_plain)
    block = 8 * max(data[start + 7 + 3 * component] & 15 for component in range(components))
    return Header("JPEG", width, height, 1, is_plain, height_at=start + 1, row_block=block)


def _without_rows_below(data: bytes, header: Header, rows: int) -> tuple[bytes, Header]:
    """The same JPEG, said to be only as high as needed: libjpeg reads from the top and stops there."""
    if not header.height_at or not header.row_block:
        return data, header
    # One block more, because chroma is interpolated between a row and the next.
    height = (-(-rows // header.row_block) + 1) * header.row_block
    if height >= header.height:
        return data, header
    at = header.height_at
    return data[:at] + height.to_bytes(2, "big") + data[at + 2 :], replace(header, height=height)


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, payload start, payload end) up to and including IEND."""
    position = len(_PNG_SIGNATURE)
    for _ in range(MAX_SEGMENTS):
        length = _number(data, position, 4, "big")
        kind, start = data[position + 4 : position + 8], position + 8
        position = start + length + 4
        if position > len(data):
            raise _Damaged(f"PNG cut off after {len(data)} bytes, inside its {kind!r} chunk")
        yield kind, start, start + length
        if kind == b"IEND":
            return
    raise _Damaged(f"PNG of more than {MAX_SEGMENTS} chunks")


def _read_png_header(data: bytes) -> Header:
    size, orientation = None, None
    for kind, start, end in _png_chunks(data):
        if size is None:
            if kind != b"IHDR" or end - start != 13:
                raise _Damaged(f"PNG that starts with a {kind!r} chunk of {end - start} bytes instead of its header")
            size = _number(data, start, 4, "big"), _number(data, start + 4, 4, "big")
        elif kind == b"eXIf" and orientation is None:
            orientation = _exif_orientation(data[start:end])
    if size is None:
        raise _Damaged("PNG without a chunk")
    return Header("PNG", *size, orientation or 1)


def _read_bmp_header(data: bytes) -> Header:
    if _number(data, 14, 4, "little") == 12:  # the OS/2 header of 1987, still written by some tools
        return Header("BMP", _number(data, 18, 2, "little"), _number(data, 20, 2, "little"))
    # A negative height only says that the rows run from top to bottom.
    return Header("BMP", _number(data, 18, 4, "little", True), abs(_number(data, 22, 4, "little", True)))


def _read_webp_header(data: bytes) -> Header:
    if _number(data, 4, 4, "little") + 8 > len(data):
        raise _Damaged(f"WebP cut off after {len(data)} bytes")
    kind = data[12:16]
    if kind == b"VP8 ":
        return Header("WEBP", _number(data, 26, 2, "little") & 0x3FFF, _number(data, 28, 2, "little") & 0x3FFF)
    if kind == b"VP8L":
        bits = _number(data, 21, 4, "little")
        return Header("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        width, height = _number(data, 24, 3, "little") + 1, _number(data, 27, 3, "little") + 1
        return Header("WEBP", width, height, _webp_orientation(data))
    raise _Damaged(f"WebP that starts with a {kind!r} chunk")


def _webp_orientation(data: bytes) -> int:
    position = 12
    for _ in range(MAX_SEGMENTS):
        if position + 8 > len(data):
            return 1
        start, length = position + 8, _number(data, position + 4, 4, "little")
        if data.startswith(b"EXIF", position):
            return _exif_orientation(data[start : start + length].removeprefix(b"Exif\x00\x00"))
        position = start + length + length % 2
    raise _Damaged(f"WebP of more than {MAX_SEGMENTS} chunks")


def _exif_orientation(tiff: bytes) -> int:
    """The orientation tag of the first directory, or 1: broken metadata does not make a picture bad."""
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


def _turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation == 1:
        return pixels
    turned = {
        2: lambda: pixels[:, ::-1],
        3: lambda: pixels[::-1, ::-1],
        4: lambda: pixels[::-1],
        5: lambda: pixels.transpose(1, 0, 2),
        6: lambda: np.rot90(pixels, -1),
        7: lambda: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: lambda: np.rot90(pixels, 1),
    }[orientation]()
    return np.ascontiguousarray(turned)


def _fast_jpeg_decoder() -> JpegDecoder | None:
    """The fastest JPEG decoder that is installed and works; found out at the first JPEG.

    All are libjpeg-turbo with equal pixels (tests compare them), without Pillow's copies into and out of a picture.
    """
    return _first_that_works(_simplejpeg, _torchvision_decoder)


@functools.cache
def _first_that_works(*finders: Callable[[], JpegDecoder | None]) -> JpegDecoder | None:
    sample = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 100, 50)).save(sample, "JPEG")
    for find in finders:
        try:
            decode = find()
            if decode and decode(sample.getvalue()).shape == (16, 16, 3):
                return decode
        except (ImportError, OSError, AttributeError, RuntimeError, ValueError):
            continue
    return None


@functools.cache
def _simplejpeg() -> JpegDecoder | None:
    """simplejpeg, the `fast` extra: a sixteenth faster than torchvision's, and the one that may stop early."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return functools.partial(simplejpeg.decode_jpeg, colorspace="RGB")


def _decode_with_simplejpeg(
    decode: JpegDecoder, data: bytes, header: Header, rows: int | None
) -> tuple[np.ndarray, Header]:
    """Strictly; what it does not take goes to the next decoder, which says whether it is a picture.

    TurboJPEG knows no odd sampling, takes a warning in a header for an error, and an error after a warning for a
    warning: without `strict` such a picture comes back as memory that nobody has written.
    """
    cut, cut_header = (data, header) if rows is None else _without_rows_below(data, header, rows)
    try:
        # Bytes after the last row are a warning. Up to there every row is written, whatever its bits are.
        return decode(cut, strict=cut is data), cut_header
    except ValueError:
        second = _first_that_works(_torchvision_decoder)
        return second(data) if second else _decode_with_pillow(data, header), header


@functools.cache
def _torchvision_decoder() -> JpegDecoder:
    """torchvision's operator itself, because its Python wrapper warns of deprecation on every call since 0.29."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a build without libjpeg says so on import; Pillow then takes over
        import torch
        import torchvision.io  # noqa: F401  (registers the operator)
    operator = torch.ops.image.decode_jpeg

    def decode(data: bytes) -> np.ndarray:
        # bytearray: torch warns of the read-only buffer that bytes are. 3 is ImageReadMode.RGB.
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return operator(encoded, 3, False).permute(1, 2, 0).contiguous().numpy()  # (height, width, 3)

    return decode


def decode_on_device(encoded: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Plain JPEGs (1-d uint8 on the host) to RGB planes (3, height, width) on the device, all at once.

    On CUDA by the GPU's JPEG engines; there chroma is interpolated otherwise than by libjpeg, so pixels differ: for
    4:2:0 photos, after crop and resize, by less than 3 levels on average and 16 in 99 of 100 values (tests/device). On
    the CPU one after the other, as `decode_rgb` does.
    """
    import torch
    import torchvision.io  # noqa: F401  (registers the operators)

    if device.type == "cpu":
        return [torch.ops.image.decode_jpeg(data, 3, False) for data in encoded]
    return torch.ops.image.decode_jpegs_cuda(list(encoded), 3, device)


def why_not_on_device(device: torch.device) -> str:
    """Why this device cannot decode JPEGs, in words; "" if it can, which a small one proves."""
    if device.type != "cuda":
        return f"{device.type} has no JPEG engine that we know to use"
    import torch

    sample = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 100, 50)).save(sample, "JPEG")
    try:
        (planes,) = decode_on_device([torch.frombuffer(bytearray(sample.getvalue()), dtype=torch.uint8)], device)
    except (RuntimeError, AttributeError, ImportError, OSError) as error:
        return f"torchvision's decoder for CUDA does not work here ({str(error).partition(chr(10))[0][:120]})"
    return "" if planes.shape == (3, 32, 32) else f"torchvision's decoder for CUDA gave {tuple(planes.shape)}"


def _decode_with_pillow(data: bytes, header: Header) -> np.ndarray:
    """Any allowed picture, as stored. Pillow gets no metadata, whose parsing warns, and no choice of its own format."""
    if header.format == "JPEG":
        picture: ImageFile.ImageFile = JpegImagePlugin.JpegImageFile(io.BytesIO(_strip_jpeg(data)))
    elif header.format == "PNG":
        picture = PngImagePlugin.PngImageFile(io.BytesIO(_strip_png(data)))
    elif header.format == "BMP":
        picture = BmpImagePlugin.BmpImageFile(io.BytesIO(data))
    else:
        picture = WebPImagePlugin.WebPImageFile(io.BytesIO(data))
    with picture:
        if picture.mode.startswith("I"):  # 16-bit grey, which convert() would clip to white
            grey = (np.asarray(picture) >> 8).astype(np.uint8)
            return np.repeat(grey[:, :, None], 3, axis=2)
        picture.load()
        picture.info.pop("transparency", None)  # dropped like alpha; a palette's would warn in convert()
        return np.array(picture if picture.mode == "RGB" else picture.convert("RGB"))


def _strip_jpeg(data: bytes) -> bytes:
    parts = [data[:2]]
    for marker, start, end in _jpeg_segments(data):
        if marker == _JPEG_SCAN:
            return b"".join([*parts, data[start - 4 :]])
        if marker < 0xE0 or marker in _JPEG_KEPT_FOR_PILLOW:
            parts.append(data[start - 4 : end])
    raise _Damaged("JPEG without a scan: it holds no picture")


def _strip_png(data: bytes) -> bytes:
    """The chunks that make the pixels, each checked here: Pillow skips the checksum of pixel data."""
    parts = [_PNG_SIGNATURE]
    for kind, start, end in _png_chunks(data):
        if kind in _PNG_KEPT_FOR_PILLOW:
            if zlib.crc32(data[start - 4 : end]) != _number(data, end, 4, "big"):
                raise _Damaged(f"PNG whose {kind.decode()} chunk at byte {start - 8} fails its checksum")
            parts.append(data[start - 8 : end + 4])
    return b"".join(parts)
