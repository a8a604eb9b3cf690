"""Encoded bytes -> RGB pixels, behind one header guard that knows the size before anything is allocated.

Comes after a source (bytes) and before an augmentation (pixels). Any bytes end as an array or as BadSample. The GPU's
decoder is behind the same `read_header`, which finds size and rotation, and whether it is a plain JPEG.
"""

from __future__ import annotations

import functools
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from PIL import (
    BmpImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from sightline.data.formats import deep_png
from sightline.data.formats.image_headers import (
    JPEG_SCAN,
    MAX_BYTES,
    MAX_PIXELS,
    PNG_SIGNATURE,
    TIFF_KEPT,
    Damaged,
    Header,
    jpeg_segments,
    number,
    png_chunks,
    read_header,
    tiff_tags,
)
from sightline.errors import BadSample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "MAX_BYTES",
    "MAX_PIXELS",
    "Header",
    "decode_channels",
    "decode_on_device",
    "decode_rgb",
    "decode_values",
    "decoded_shape",
    "is_grey",
    "pixels_of",
    "read_header",
    "why_not_on_device",
]

_JPEG_KEPT_FOR_PILLOW = frozenset({0xE0, 0xEE})  # JFIF and Adobe: they decide the colour space
# Without tRNS: transparency is dropped like alpha, and a palette's would warn in convert().
_PNG_KEPT_FOR_PILLOW = frozenset({b"IHDR", b"PLTE", b"IDAT", b"IEND"})
_UNWRITTEN = (3, 250, 7)  # a colour that few photos have; one that has it is decoded again
_DCT_SIDE = 8  # of a JPEG's block, in pixels
_ONE_SAMPLE = ("1", "L", "P")  # modes of Pillow; grey has more
_BAND_PIXELS = 2**22  # converted at once
JpegDecoder = Callable[..., np.ndarray]


def decode_rgb(
    data: bytes, name: str, header: Header | None = None, rows: int | None = None, downscale: int = 1
) -> np.ndarray:
    """Decode to (height, width, 3) uint8 RGB, EXIF rotation applied; raise BadSample for anything damaged.

    With `rows`, those below may be missing: a crop needs nothing under it, and stopping there makes JPEGs a seventh
    cheaper (random crops of ImageNet photos). The rows that are decoded have the same bits.
    With `downscale` 2, 4 or 8, a plain JPEG comes that many times smaller, sides rounded up: its cosines of high
    frequency are left out, which is within three grey levels of the mean of the pixels for 99 of 100 values.
    Alpha is dropped, not blended, as `convert("RGB")` does in the reference systems; 16-bit samples keep their high
    byte, grey and colour alike; animations give their first frame. Damage inside a JPEG's scan that leaves every
    marker in place cannot be distinguished from content: libjpeg fills the hole with grey and says so on stderr.
    """
    header = header or read_header(data, name)
    height = header.height
    with _as_bad_sample(name, header):
        if header.is_plain_jpeg and (decode := _simplejpeg()):
            stored, height = _decode_with_simplejpeg(decode, data, header, rows, downscale)
        else:
            stored = _decode_with_pillow(data, header, downscale)
    expected = (-(-height // downscale), -(-header.width // downscale), 3)
    if stored.shape != expected:
        raise BadSample(name, f"decoded to shape {stored.shape}, its header says {expected}; remove the file")
    return _turn_upright(stored, header.orientation)


def decoded_shape(data: bytes | np.ndarray, name: str) -> tuple[int, ...]:
    """Return the shape that an image has once it is decoded; pixels have it already. Raises BadSample."""
    return read_header(data, name).shape if isinstance(data, bytes) else data.shape


def decode_values(data: bytes, name: str) -> np.ndarray:
    """Decode to the numbers that the file stores, for masks: (height, width) of grey levels or palette indices, 8 or 16
    bits; (height, width, 3) uint8 for colours. Raises BadSample as `decode_rgb` does."""
    header = read_header(data, name)
    with _as_bad_sample(name, header), _opened_with_pillow(data, header) as image:
        if not header.is_grey and image.mode not in _ONE_SAMPLE:
            if header.depth == 16:
                raise Damaged("colours of 16 bits, of which only the high byte can be read; save it as grey")
            values = _to_rgb(image)
        elif image.mode == "1":
            values = np.asarray(image).astype(np.uint8)
        else:
            values = np.asarray(image.getchannel(0) if image.mode == "LA" else image)
            values = values.astype(np.uint8 if values.dtype == np.uint8 else np.uint16)
            if header.is_grey and header.depth in (2, 4):
                values //= 255 // (2**header.depth - 1)  # Pillow spreads them over all of a byte
    return _turn_upright(values, header.orientation)


def palette_of(data: bytes, name: str) -> np.ndarray | None:
    """Return the palette (colours, 3) uint8 of an image whose `decode_values` are indices; None of others."""
    header = read_header(data, name)
    if header.format == "JPEG" or header.is_grey:
        return None
    with _as_bad_sample(name, header), _opened_with_pillow(data, header, loads=False) as image:
        if image.mode != "P":
            return None
        colours = image.getpalette("RGB") or [0, 0, 0]
    return np.asarray(colours, np.uint8).reshape(-1, 3)


def decode_channels(data: bytes, name: str, header: Header, channels: int, bits: int) -> np.ndarray:
    """Decode to (height, width, channels) of 8 or 16 `bits`, alpha and all; `header` is that of `read_header`, perhaps
    with another orientation. Raises BadSample as `decode_rgb` does."""
    with _as_bad_sample(name, header):
        if header.depth == 16 and bits == 16 and not header.is_grey:
            values = _decode_deep(data, header)
        else:
            with _opened_with_pillow(data, header) as image:
                if channels == 1:
                    values = _grey_of(image)
                else:
                    values = np.asarray(image) if image.mode == "RGBA" and channels == 4 else _to_rgb(image)
    values = values.astype(np.uint16 if bits == 16 else np.uint8, copy=False)
    values = values[..., None] if values.ndim == 2 else values
    if values.shape[2] < channels:
        raise BadSample(name, f"has {values.shape[2]} channels, the other images {channels}; store all alike")
    return _turn_upright(np.ascontiguousarray(values[..., :channels]), header.orientation)


def _decode_deep(data: bytes, header: Header) -> np.ndarray:
    """Decode colours of 16 bits, of which Pillow reads the high byte only."""
    if header.format != "PNG":
        raise Damaged("colours of 16 bits, which are read from PNG only", "save it as PNG")
    return deep_png.read(_strip_png(data), header.width, header.height, header.channels)


def pixels_of(image: Image.Image, name: str, grey: bool = False) -> np.ndarray:
    """Return the pixels of an image in memory, as `decode_rgb` does for its file: (height, width, 3) uint8, upright.
    With `grey` those that a grey image holds, (height, width, 1), 8 or 16 bits."""
    try:
        upright = ImageOps.exif_transpose(image)
        upright.info.pop("transparency", None)  # of a copy: dropped like alpha
        if not grey:
            return _to_rgb(upright)
        values = _grey_of(upright)
    except (OSError, SyntaxError, ValueError) as error:  # its file is read only now
        raise BadSample(name, f"cannot be read: {error}; fetch it again or leave it out") from error
    return values.astype(np.uint16 if values.dtype.itemsize > 1 else np.uint8)[..., None]


def _grey_of(image: Image.Image) -> np.ndarray:
    """Return the grey levels of an image, without alpha; one of two colours has 0 and 255, as `decode_rgb` gives."""
    if image.mode == "1":
        image = image.convert("L")
    return np.asarray(image.getchannel(0) if image.mode == "LA" else image)


def is_grey(image: Image.Image) -> bool:
    """Return whether an image in memory has one grey level per pixel."""
    return image.mode in ("1", "L", "LA") or image.mode.startswith("I")


@contextmanager
def _as_bad_sample(name: str, header: Header) -> Iterator[None]:
    """Raise BadSample with the reason for anything that a decoder raises."""
    try:
        yield
    except Damaged as damage:
        raise BadSample(name, str(damage)) from None
    except MemoryError as error:  # the image may be good
        needed = f"no memory for the {header.decoding_bytes} bytes that decoding takes"
        raise BadSample(name, f"{needed}; use fewer --run.workers, or shrink the image") from error
    except Exception as error:  # damaged bytes make decoders raise a dozen types
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise BadSample(name, f"broken {header.format}: {reason}; fetch the file again or remove it") from error


def _without_rows_below(data: bytes, header: Header, rows: int, downscale: int) -> tuple[bytes | bytearray, int]:
    """Return the JPEG with a smaller height in its header, and that height: libjpeg reads from the top and stops there.
    All is left as it is unless that spares a row of blocks."""
    # Chroma is interpolated between a row and the next, in the image that is decoded. Fewer rows than a block has may
    # be as many at another scale, which TurboJPEG may then take.
    height = max(_DCT_SIDE, rows + header.row_block // _DCT_SIDE * downscale)
    if not header.height_at or height + header.row_block > header.height:
        return data, header.height
    cut = bytearray(data)
    cut[header.height_at : header.height_at + 2] = height.to_bytes(2, "big")
    return cut, height


def _turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation == 1:
        return pixels
    turned = {
        2: lambda: pixels[:, ::-1],
        3: lambda: pixels[::-1, ::-1],
        4: lambda: pixels[::-1],
        5: lambda: pixels.swapaxes(0, 1),
        6: lambda: np.rot90(pixels, -1),
        7: lambda: pixels[::-1, ::-1].swapaxes(0, 1),
        8: lambda: np.rot90(pixels, 1),
    }[orientation]()
    return np.ascontiguousarray(turned)


@functools.cache
def _simplejpeg() -> JpegDecoder | None:
    """Return simplejpeg's decoder if it is installed and works: libjpeg-turbo, with Pillow's pixels (tests compare
    them), without Pillow's copies into and out of an image, and able to stop early."""
    sample = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 100, 50)).save(sample, "JPEG")
    try:
        import simplejpeg

        decode = functools.partial(simplejpeg.decode_jpeg, colorspace="RGB")
        return decode if decode(sample.getvalue()).shape == (16, 16, 3) else None
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError):  # Pillow then decodes
        return None


def _decode_with_simplejpeg(
    decode: JpegDecoder, data: bytes, header: Header, rows: int | None, downscale: int
) -> tuple[np.ndarray, int]:
    """Decode strictly; pass what it refuses to Pillow, which decides whether it is an image. Return also the height
    that was decoded, before it was downscaled.

    TurboJPEG does not know odd sampling, treats a warning in a header as an error, and an error after a warning as a
    warning: without `strict` such an image would come back as uninitialised memory.
    """
    cut, height = (data, header.height) if rows is None else _without_rows_below(data, header, rows, downscale)
    shape = (-(-height // downscale), -(-header.width // downscale), 3)
    # It takes the smallest size that is no smaller than this. 0: all of the image.
    least = {"min_height": shape[0], "min_width": shape[1]} if downscale > 1 else {}
    try:
        if cut is data:
            return decode(data, strict=True, **least), height
        # Bytes after the last row are a warning, so this cannot be strict. Rows are written from the top: damage that
        # stops the decoder leaves the last one as it was.
        pixels = np.empty(shape, np.uint8)
        pixels[-1, 0] = _UNWRITTEN
        stored = decode(cut, strict=False, buffer=pixels, **least)
        if stored.shape == shape and tuple(stored[-1, 0].tolist()) != _UNWRITTEN:
            return stored, height
        return _decode_with_simplejpeg(decode, data, header, None, downscale)
    except ValueError:
        return _decode_with_pillow(data, header, downscale), header.height


def decode_on_device(encoded: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Decode plain JPEGs (1-d uint8 on the host) to RGB planes (3, height, width) on the device, all at once.

    CUDA uses the GPU's JPEG engines. They interpolate chroma differently from libjpeg, so pixels differ: for 4:2:0
    photos, after crop and resize, by less than 3 levels on average and 16 in 99 of 100 values (tests/device). The CPU
    decodes one after the other, as `decode_rgb` does.
    """
    if device.type == "cpu":
        return [_decode_on_host(data) for data in encoded]
    from sightline.data.gpu import nvjpeg

    return nvjpeg.decode(encoded, device)


def _decode_on_host(encoded: Tensor) -> Tensor:
    import torch

    try:
        return torch.from_numpy(decode_rgb(encoded.numpy().tobytes(), "image")).permute(2, 0, 1)
    except BadSample as error:
        raise RuntimeError(error) from error


def why_not_on_device(device: torch.device) -> str:
    """Return why this device cannot decode JPEGs; "" if it decodes a small one."""
    if device.type != "cuda":
        return f"{device.type} has no JPEG engine that we know to use"
    import torch

    sample = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 100, 50)).save(sample, "JPEG")
    try:
        (planes,) = decode_on_device([torch.frombuffer(bytearray(sample.getvalue()), dtype=torch.uint8)], device)
    except (RuntimeError, AttributeError, ImportError, OSError) as error:
        return f"nvJPEG does not work here ({str(error).partition(chr(10))[0][:120]})"
    return "" if planes.shape == (3, 32, 32) else f"nvJPEG gave {tuple(planes.shape)}"


def _decode_with_pillow(data: bytes, header: Header, downscale: int) -> np.ndarray:
    """Decode any allowed image, as stored; with `downscale`, a JPEG that many times smaller."""
    with _opened_with_pillow(data, header, loads=downscale == 1) as image:
        if downscale > 1:
            image.draft("RGB", (header.width // downscale, header.height // downscale))
        return _to_rgb(image)


def _opened_with_pillow(data: bytes, header: Header, loads: bool = True) -> ImageFile.ImageFile:
    """Open any allowed image, and load its pixels if that is asked for. Pillow may not guess the format, and gets no
    metadata to warn about."""
    if header.format == "JPEG":
        image: ImageFile.ImageFile = JpegImagePlugin.JpegImageFile(io.BytesIO(_strip_jpeg(data)))
    elif header.format == "PNG":
        image = PngImagePlugin.PngImageFile(io.BytesIO(_strip_png(data)))
    elif header.format == "BMP":
        image = BmpImagePlugin.BmpImageFile(io.BytesIO(data))
    elif header.format == "TIFF":
        image = TiffImagePlugin.TiffImageFile(io.BytesIO(_strip_tiff(data)))
    else:
        image = WebPImagePlugin.WebPImageFile(io.BytesIO(data))
    if image.size != (header.width, header.height):  # nothing of this size is allocated yet
        raise Damaged(f"{header.format} of {header.width}x{header.height} pixels, which Pillow reads as {image.size}")
    if loads:
        image.load()
    return image


def _to_rgb(image: Image.Image) -> np.ndarray:
    """Convert to (height, width, 3), a large image in bands of rows: whole copies would double the memory."""
    width, height = image.size
    rows = max(1, _BAND_PIXELS // width)
    if rows >= height:
        return _band_to_rgb(image)
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, rows):
        pixels[top : top + rows] = _band_to_rgb(image.crop((0, top, width, min(top + rows, height))))
    return pixels


def _band_to_rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip to white
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _strip_jpeg(data: bytes) -> bytes:
    parts = [data[:2]]
    for marker, at, end in jpeg_segments(data):
        if marker == JPEG_SCAN:
            return b"".join([*parts, data[at:]])
        if marker < 0xE0 or marker in _JPEG_KEPT_FOR_PILLOW:
            parts.append(data[at:end])
    raise Damaged("JPEG without a scan: it holds no image")


def _strip_png(data: bytes) -> bytes:
    """Keep the chunks that make the pixels, and verify them: Pillow skips the checksum of pixel data."""
    parts = [PNG_SIGNATURE]
    for kind, start, end in png_chunks(data):
        if kind in _PNG_KEPT_FOR_PILLOW:
            if zlib.crc32(data[start - 4 : end]) != number(data, end, 4, "big"):
                raise Damaged(f"PNG whose {kind.decode()} chunk at byte {start - 8} fails its checksum")
            parts.append(data[start - 8 : end + 4])
    return b"".join(parts)


def _strip_tiff(data: bytes) -> bytes:
    """Put a directory of only what makes the pixels at the end. Pillow would read all values of thousands of tags, and
    turn the image by itself."""
    order, tags = tiff_tags(data)
    kept = [entry for tag, (entry, _) in sorted(tags.items()) if tag in TIFF_KEPT]
    padding = bytes(len(data) % 2)
    place = (len(data) + len(padding)).to_bytes(4, order)
    directory = [len(kept).to_bytes(2, order), *kept, bytes(4)]
    return b"".join([data[:4], place, data[8:], padding, *directory])
