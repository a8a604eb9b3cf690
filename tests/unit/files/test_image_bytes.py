"""Images as files."""

import io
import resource
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.files.image_bytes import read_bytes, write_image


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "BMP"])
def test_an_image_is_written_whole_or_not_at_all(tmp_path: Path, form: str):
    """A disk that fills up takes a part of the last bytes, as does one that allows files of no more bytes."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8))
    packed = io.BytesIO()
    image.save(packed, form)
    write_image(tmp_path / "a", image, format=form)
    assert read_bytes(tmp_path / "a", "a") == packed.getvalue()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(packed.getvalue()) - 1, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_image(tmp_path / "b", image, format=form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
