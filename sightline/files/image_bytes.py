"""The bytes of one image file: what training, prediction and checks read every image by, and results are written by."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.errors import BadSample

if TYPE_CHECKING:
    from PIL import Image

# A photo of as many pixels as a header may have, at 0.7 bytes a pixel, takes half of this. Sources should compare
# st_size before they read.
MAX_BYTES = 256 * 2**20
_HOW_TO_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # without it, opening a pipe waits for its writer


def read_bytes(path: Path | str, name: str) -> bytes:
    """Return the bytes of an image file; raise BadSample if it cannot be read or is too large."""
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
            return data
        finally:
            os.close(file)
    except OSError as error:
        raise BadSample(name, f"cannot be read: {error.strerror}") from error


def write_image(path: Path, image: Image.Image, **how: Any) -> None:
    """Write an image as Pillow's `save` does, but by Python: Pillow takes a write for whole of which a full disk has
    taken a part, and leaves half an image without an error."""
    packed = io.BytesIO()
    image.save(packed, **how)
    path.write_bytes(packed.getbuffer())
