"""Tiles that stand beside each other: the pixels of the image, boxes and outlines where they belong."""

import base64
import io

import numpy as np
from PIL import Image

from sightline.drawing.findings import colour_of
from sightline.drawing.slices import outline_colour
from sightline.parts import DataSpec, Finding
from sightline.report.tiles import BOXES_SIDE, boxes_beside, image_alone, mask_colours, masks_beside

SPEC = DataSpec(("cat", "dog"), 3, (8, 8), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), (1, 2))


def decoded(tile: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(tile))), np.int64)


def normalised(colour: tuple[int, int, int], side: int = 8) -> np.ndarray:
    """The network's input (3, side, side) for an image of one colour."""
    values = (np.array(colour) / 255 - SPEC.mean) / SPEC.std
    return np.broadcast_to(values[:, None, None], (3, side, side)).astype(np.float32)


def has_colour(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return (np.abs(pixels - colour) < 40).all(-1)


def test_an_image_has_its_colours_back():
    pixels = decoded(image_alone(normalised((200, 40, 90)), SPEC)["image"])
    assert np.abs(pixels - (200, 40, 90)).max() < 6
    values = normalised((10, 10, 10)).copy()
    values[:, 0] = np.nan
    assert decoded(image_alone(values, SPEC)["image"]).shape == pixels.shape


def test_boxes_lie_in_the_proportions_of_the_file():
    """An image twice as wide as high, which the network sees as a square."""
    truth = [Finding("dog", 2, 1.0, (0.25, 0.5, 0.5, 0.9))]
    drawn = boxes_beside(normalised((128, 128, 128)), (100, 200), truth, [], SPEC)
    marked, plain = (decoded(drawn[name]) for name in ("truth", "prediction"))
    assert marked.shape == plain.shape == (BOXES_SIDE // 2, BOXES_SIDE, 3)
    assert np.abs(plain - 128).max() < 6
    rows, columns = np.nonzero(has_colour(marked, colour_of(2)))
    assert abs(columns.min() - BOXES_SIDE / 4) <= 2 and abs(rows.max() - BOXES_SIDE / 2 * 0.9) <= 2
    found = decoded(boxes_beside(normalised((128, 128, 128)), (100, 200), [], truth, SPEC)["prediction"])
    assert has_colour(found, colour_of(2)).sum() >= has_colour(marked, colour_of(2)).sum()  # its label has a score


def test_outlines_follow_masks():
    image = np.linspace(-1, 1, 40 * 30, dtype=np.float32).reshape(40, 30)
    truth, found = np.zeros((40, 30), np.uint8), np.zeros((40, 30), np.uint8)
    truth[10:20, 5:15], found[25:35, 5:15] = 1, 2
    drawn = {name: decoded(tile) for name, tile in masks_beside(image, truth, found).items()}
    assert list(drawn) == ["image", "truth", "prediction"]
    assert len({tile.shape for tile in drawn.values()}) == 1
    scale = drawn["image"].shape[0] / 40
    assert np.ptp(drawn["image"], axis=-1).max() < 6  # grey
    for name, number, first in (("truth", 1, 10), ("prediction", 2, 25)):
        rows, columns = np.nonzero(has_colour(drawn[name], outline_colour(number)))
        assert abs(rows.min() - first * scale) < scale and abs(rows.max() - (first + 10) * scale) < scale
        assert abs(columns.min() - 5 * scale) < scale and abs(columns.max() - 15 * scale) < scale
    red, green, blue = outline_colour(1)
    assert mask_colours(("background", "lung")) == {"lung": f"#{red:02x}{green:02x}{blue:02x}"}
