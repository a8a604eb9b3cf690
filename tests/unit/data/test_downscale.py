"""JPEGs decoded to a half, a quarter or an eighth: `--data.downscale dct`."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from sightline import config
from sightline.data import decode
from sightline.data.augment.classification import Params
from sightline.data.classification import ClassificationData
from sightline.data.decode import decode_rgb
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.recipe.store import diff, to_json


def jpeg(height: int, width: int, **options) -> bytes:
    """Soft noise: as coloured as a photo."""
    noise = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3)).save(stream, "JPEG", quality=92, **options)
    return stream.getvalue()


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch) -> None:
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(decode, "_simplejpeg", lambda: None)


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("sides", [(375, 500), (97, 131), (64, 64)])
def test_pixels_are_those_of_pillows_draft_and_near_the_mean_of_each_block(decoder, factor, sides):
    height, width = sides
    data = jpeg(height, width)
    found = decode_rgb(data, "x", downscale=factor)
    assert found.shape == (-(-height // factor), -(-width // factor), 3)
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (width // factor, height // factor))
    assert np.array_equal(found, np.asarray(image))
    whole = np.asarray(Image.open(io.BytesIO(data))).astype(float)
    down, across = height // factor, width // factor
    mean = whole[: down * factor, : across * factor].reshape(down, factor, across, factor, 3).mean((1, 3))
    distance = np.abs(found[:down, :across] - mean)
    assert distance.mean() < 1 and np.quantile(distance, 0.99) < 3


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_upper_rows_and_turned_images_come_smaller_too(decoder, factor):
    data = jpeg(375, 500)
    whole = decode_rgb(data, "x", downscale=factor)
    for least in range(90, 130):
        upper, rows = decode_rgb(data, "x", rows=least, downscale=factor), -(-least // factor)
        assert len(upper) >= rows and np.array_equal(upper[:rows], whole[:rows])
    narrow = jpeg(40, factor + 1, subsampling=0)
    first = decode_rgb(narrow, "x", rows=1, downscale=factor)[0]
    assert np.array_equal(first, decode_rgb(narrow, "x", downscale=factor)[0])
    tags = Image.Exif()
    tags[0x0112] = 6
    turned = decode_rgb(jpeg(375, 500, exif=tags.tobytes()), "x", downscale=factor)
    assert np.array_equal(turned, np.rot90(whole, -1))


def test_a_crop_is_decoded_smaller_only_where_it_is_that_many_times_larger():
    crop = Params(10, 20, 448, 448, 224, 224, 0, 0, size=224, flip=False)
    assert crop.most_downscale() == 2
    assert replace(crop, height=447).most_downscale() == 1
    assert replace(crop, height=1000, width=900).most_downscale() == 4
    assert replace(crop, height=9000, width=9000).most_downscale() == 8
    moved = crop.downscaled(2)
    assert (moved.top, moved.left, moved.height, moved.width) == (5, 10, 224, 224)
    odd = replace(crop, top=11, height=449).downscaled(2)
    assert (odd.top, odd.top + odd.height) == (6, 230)  # 5.5 and 230
    assert crop.downscaled(1) == crop


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for number in range(2):
            folder = tmp_path / split / f"c{number}"
            folder.mkdir(parents=True)
            (folder / "0.jpg").write_bytes(jpeg(300, 400 + number))
    return tmp_path


@pytest.mark.shows("data.downscale")
def test_samples_differ_little_and_only_where_it_is_asked_for(photos: Path):
    plain = ClassificationData(path=str(photos), size=32, eval_resize=40, eval_size=32, cache="off")
    for split in ("train", "val"):
        before = plain.open(split, 0).load(0, 1)["image"].astype(int)
        after = replace(plain, downscale="dct").open(split, 0).load(0, 1)["image"].astype(int)
        assert 0 < np.abs(after - before).mean() < 6  # edges of a crop move by half a pixel of the smaller image
        large = replace(plain, size=299, eval_resize=300, eval_size=299)
        same = [each.open(split, 0).load(0, 1)["image"] for each in (large, replace(large, downscale="dct"))]
        assert np.array_equal(*same)


def test_encoded_bytes_are_what_a_cache_keeps(photos: Path):
    bound = ClassificationData(path=str(photos), downscale="dct").open("train", 0).bind(devices.select("cpu"), 2)
    assert bound.notes[0].startswith("cache ON: 2 encoded images of train need")


def test_it_is_part_of_the_recipe(photos: Path):
    recipe, _ = config.load("resnet50", [f"--data.path={photos}", "--data.classes=0"])
    other = replace(recipe, data=replace(recipe.data, downscale="dct"))
    assert diff(to_json(recipe), other) == ["data.downscale: off -> dct"]
    with pytest.raises(UsageError, match="downscale='half' is unknown; use one of off, dct"):
        ClassificationData(downscale="half")
