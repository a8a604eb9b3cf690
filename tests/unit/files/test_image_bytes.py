"""Images as files."""

import base64
import io
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.errors import BadSample
from sightline.files import image_bytes
from sightline.files.image_bytes import image_in, read_bytes, span_within, write_image


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


def test_an_image_file_has_a_limit(tmp_path, monkeypatch):
    file = tmp_path / "a.jpg"
    file.write_bytes(b"12345")
    monkeypatch.setattr(image_bytes, "MAX_BYTES", 5)
    assert read_bytes(file, "a") == read_bytes(str(file), "a") == b"12345"
    monkeypatch.setattr(image_bytes, "MAX_BYTES", 4)
    with pytest.raises(BadSample, match="^a: 5 bytes, more than the 4 allowed for one image; shrink it$"):
        read_bytes(file, "a")
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path / "pipe", "is not a regular file; remove it"), (tmp_path, "is not a regular file")):
        with pytest.raises(BadSample, match=said):
            read_bytes(path, "a")
    with pytest.raises(BadSample, match="^a: cannot be read: No such file or directory$"):
        read_bytes(tmp_path / "none", "a")


def test_a_file_that_comes_in_parts_or_ends_early(tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    read = os.read
    monkeypatch.setattr(image_bytes.os, "read", lambda descriptor, count: read(descriptor, min(count, 2)))
    assert read_bytes(file, "a") == b"12345"
    parts = [b"12", b"3", b""]
    monkeypatch.setattr(image_bytes.os, "read", lambda *_: parts.pop(0))
    assert read_bytes(file, "a") == b"123"


TEXT = base64.b64encode(b"image").decode()


@pytest.mark.parametrize(
    ("said", "inside"),
    [
        (f'{{"imageData": "{TEXT}", "x": "y"}}', TEXT),
        (f'{{"x": "y", "imageData" :\n "{TEXT}"}}', TEXT),
        (f'"imageData":"{TEXT}"', TEXT),
        ('{"imageData": ""}', ""),
        ('{"imageData": null, "x": "y"}', ""),
        ('{"imageData": 3}', ""),
        ('{"imageData": "cut of', ""),
        ('{"imageData"', ""),
        ('{"x": "imageDat"}', ""),
    ],
)
def test_where_the_image_lies_in_labelmes_json(said, inside, tmp_path):
    begin, end = span_within(said.encode())
    assert said.encode()[begin:end].decode() == inside
    file = tmp_path / "a.JSON"
    file.write_text(said)
    if inside:
        assert read_bytes(file, "a") == b"image"
        file.rename(tmp_path / "a.jpg")
        assert read_bytes(tmp_path / "a.jpg", "a") == said.encode()
    else:
        with pytest.raises(
            BadSample, match=r"a json file without an image in it \(imageData\); put the image beside it"
        ):
            read_bytes(file, "a")


def test_the_text_of_an_image_in_labelmes_json():
    data = bytes(range(256)) * 3
    text = base64.b64encode(data).decode()
    for same in (text, text.replace("/", "\\/"), text.replace("+", "\\u002b")):
        assert image_in(f'{{"imageData": "{same}"}}'.encode(), "a") == data
    for wrong in (text[:-1], text + "!", text[:5] + "\\n" + text[5:], "\\x"):
        with pytest.raises(
            BadSample, match=r"^a: the image in it \(imageData\) is not base64: .*; save it again in LabelMe$"
        ):
            image_in(f'{{"imageData": "{wrong}"}}'.encode(), "a")
