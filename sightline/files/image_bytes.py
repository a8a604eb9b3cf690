"""The bytes of one image file: what training, prediction and checks read every image by, and results are written by."""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.errors import BadSample
from sightline.files.typed_json import loads

if TYPE_CHECKING:
    from PIL import Image

# A photo of as many pixels as a header may have, at 0.7 bytes a pixel, takes half of this. Sources should compare
# st_size before they read.
MAX_BYTES = 256 * 2**20
_KEY = b'"imageData"'  # of LabelMe's json
_HOW_TO_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # without it, opening a pipe waits for its writer


def read_bytes(path: Path | str, name: str) -> bytes:
    """Return the bytes of an image file, or of the image in LabelMe's json; raise BadSample if it cannot be read or is
    too large."""
    try:
        file = os.open(path, _HOW_TO_OPEN)  # twice as fast as Path.read_bytes()
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode):  # reading a pipe would block
                raise BadSample(name, "is not a regular file; remove it")
            if info.st_size > MAX_BYTES:
                raise BadSample(
                    name, f"{info.st_size} bytes, more than the {MAX_BYTES} allowed for one image; shrink it"
                )
            data = os.read(file, info.st_size)
            while len(data) < info.st_size and (more := os.read(file, info.st_size - len(data))):
                data += more  # network drives may give a part
            return image_in(data, name) if os.fspath(path)[-5:].lower() == ".json" else data
        finally:
            os.close(file)
    except OSError as error:
        raise BadSample(name, f"cannot be read: {error.strerror}") from error


def span_within(data: bytes) -> tuple[int, int]:
    """Return where in LabelMe's json the text of its image begins and ends, without quotes; equal where there is none.
    The text has no quote in it."""
    at = data.find(_KEY)
    begin = data.find(b'"', at + len(_KEY)) + 1 if at >= 0 else 0
    if not begin or data[at + len(_KEY) : begin - 1].strip() != b":":  # null, or nothing
        return 0, 0
    return begin, max(begin, data.find(b'"', begin))


def image_in(data: bytes, name: str) -> bytes:
    """Return the image that lies in LabelMe's json, as base64; raise BadSample if there is none."""
    begin, end = span_within(data)
    if begin == end:
        raise BadSample(name, "a json file without an image in it (imageData); put the image beside it")
    text = data[begin:end]
    try:
        return base64.b64decode(loads(b'"%b"' % text) if b"\\" in text else text, validate=True)  # some write \\/ for /
    except (binascii.Error, ValueError) as error:
        raise BadSample(name, f"the image in it (imageData) is not base64: {error}; save it again in LabelMe") from None


def write_image(path: Path, image: Image.Image, **how: Any) -> None:
    """Write an image as Pillow's `save` does, but by Python: Pillow takes a write for whole of which a full disk has
    taken a part, and leaves half an image without an error."""
    packed = io.BytesIO()
    image.save(packed, **how)
    path.write_bytes(packed.getbuffer())
