"""Names of the drawings of `predict`: the image's own where Pillow writes that format, and never one name for two."""

from pathlib import Path

import pytest

from sightline.inference.predictions import _drawing_names


@pytest.mark.parametrize(
    ("names", "drawn"),
    [
        (["a.jpg", "sub/B.PNG", "c.jpeg"], ["a.jpg", "sub/B.PNG", "c.jpeg"]),
        (["a.jpg", "b.tif", "c"], ["a.jpg", "b.tif.png", "c.png"]),
        (["x", "x.png", "y.jpg"], ["x.png", "x.png.png", "y.jpg.png"]),
    ],
)
def test_every_image_has_a_drawing_of_its_own_name(names: list[str], drawn: list[str]):
    assert _drawing_names({name: Path(name) for name in names}) == dict(zip(names, drawn, strict=True))
