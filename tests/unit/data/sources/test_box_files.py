"""Single images as a detector's evaluation sees them, without boxes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from sightline.data.detection import DetectionData
from sightline.errors import BadSample
from sightline.parts import DataSpec


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_seen_upright(tmp_path: Path, orientation: int):
    """Boxes are drawn into the upright image, so the network must see that one."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as image:
        ImageOps.exif_transpose(image).save(tmp_path / "upright.png", exif=Image.Exif())
    data = DetectionData(size=48)
    spec = data.spec_of(("ant", "bee"), (1, 90))
    files = {name: tmp_path / name for name in ("turned.png", "upright.png")}
    dataset = data.open_files(files, spec)
    assert isinstance(spec, DataSpec) and dataset.spec == spec and len(dataset) == 2
    turned, upright = dataset.load(0, 0), dataset.load(0, 1)
    assert (turned["image"] == upright["image"]).all() and turned["image"].shape == (48, 48, 3)
    assert (turned["height"], turned["width"]) == (upright["height"], upright["width"])
    assert not turned["labels"].any() and not turned["truth_labels"].any()
    batch = dataset.finish({"image": torch.from_numpy(upright["image"])[None]}, torch.float32)
    expected = (upright["image"][5, 7] / 255 - np.array(spec.mean)) / np.array(spec.std)
    assert batch["image"][0, :, 5, 7].numpy() == pytest.approx(expected, abs=1e-5)


def test_what_is_not_an_image_is_a_bad_sample(tmp_path: Path):
    (tmp_path / "no.jpg").write_text("no image")
    data = DetectionData(size=48)
    dataset = data.open_files({"no.jpg": tmp_path / "no.jpg"}, data.spec_of(("ant",), (1,)))
    with pytest.raises(BadSample, match="no.jpg"):
        dataset.load(0, 0)
