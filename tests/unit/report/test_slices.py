"""Slices side by side: which ones, the right way up, with outlines in the colours of their classes."""

import numpy as np
import pytest
from PIL import Image

from sightline.report.slices import TILE, Look, contact_sheet, outline_colour, shown_slices

CLASSES = ("background", "one", "two")
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # as scanners store it: rows begin at the front, columns at the right
RAS = np.diag([1.0, 1.0, 1.0, 1.0])


def look(sides=(6, 40, 30), affine=LPS, spacing=(1.0, 1.0, 1.0), label=None, fill=None) -> Look:
    image = np.tile(np.linspace(1, 2, sides[2], dtype=np.float32), (*sides[:2], 1))
    mask = np.zeros(sides, np.uint8)
    if fill:
        for number, (rows, columns) in fill.items():
            mask[:, slice(*rows), slice(*columns)] = number
    return Look("case", image, spacing, affine, CLASSES, mask, label)


def share_of(image: Image.Image, colour: tuple[int, int, int], box=None) -> int:
    """Count the pixels close to a colour."""
    pixels = np.asarray(image.crop(box) if box else image).astype(int)
    return int((np.abs(pixels - colour).max(-1) < 24).sum())


def test_slices_go_evenly_through_what_was_found():
    mask = np.zeros((100, 4, 4), np.uint8)
    assert shown_slices(mask) == [25, 32, 39, 46, 53, 60, 67, 74]  # nothing found: the middle half
    mask[10:81] = 1
    assert shown_slices(mask) == [10, 20, 30, 40, 50, 60, 70, 80]
    mask[:] = 0
    mask[41:44, 2, 2] = 2
    assert shown_slices(mask) == [41, 42, 43]
    assert shown_slices(np.zeros((1, 4, 4))) == [0]


def test_outlines_are_lines_at_the_edge_of_their_class():
    image = contact_sheet(look(fill={1: ((10, 30), (10, 20))}))
    scale = TILE / 40
    one = outline_colour(1)
    left, top = 6 + 10 * scale, 6 + 10 * scale  # the first tile begins after a gap of 6
    edge = share_of(image, one, (round(left) - 2, round(top) + 20, round(left) + 6, round(top) + 120))
    middle = (round(left) + 10, round(top) + 10, round(left + 10 * scale) - 10, round(top + 20 * scale) - 10)
    assert 150 <= edge <= 300  # two pixels wide, a hundred high
    assert share_of(image, one, middle) == 0
    assert np.ptp(np.asarray(image.crop(middle)), axis=-1).max() == 0  # not filled: as grey as the scan
    tiles = (0, 0, image.width, 2 * TILE)
    assert share_of(image, outline_colour(2), tiles) == 0  # it stands in the legend only
    both = contact_sheet(look(fill={1: ((10, 30), (10, 20)), 2: ((12, 16), (12, 15))}))
    assert share_of(both, outline_colour(2), middle) > 100


def test_classes_have_colours_of_their_own():
    colours = np.array([outline_colour(number) for number in range(1, 12)])
    distances = np.abs(colours[:, None] - colours[None]).max(-1)
    assert distances[np.triu_indices(5, 1)].min() > 80 and distances[np.triu_indices(11, 1)].min() > 10


@pytest.mark.parametrize("affine", [LPS, RAS], ids=["LPS", "RAS"])
def test_front_lies_on_top_and_right_on_the_left(affine: np.ndarray):
    """Whatever way a file stores them: class 1 is at the patient's front and right."""
    low, high = ((2, 12), (2, 12)), ((28, 38), (18, 28))
    image = contact_sheet(look(affine=affine, fill={1: low if affine is LPS else high}))
    width, height = round(TILE * 30 / 40), TILE
    corner = (6, 6, 6 + width // 2, 6 + height // 2)
    assert share_of(image, outline_colour(1), corner) > 300
    rest = (6, 6 + height // 2, 6 + width, 6 + height)
    assert share_of(image, outline_colour(1), rest) == 0


def test_slices_have_the_proportions_of_the_patient():
    flat = contact_sheet(look(sides=(1, 40, 30), spacing=(5.0, 1.0, 2.0)))  # 40 by 60 mm, one slice
    tall = contact_sheet(look(sides=(1, 40, 30)))
    assert tall.height - flat.height == TILE - round(TILE * 40 / 60)


@pytest.mark.parametrize("sides", [(3, 5, 4), (2, 700, 600), (1, 3, 400)])
def test_small_ones_are_enlarged_and_large_ones_fit(sides: tuple[int, int, int]):
    image = contact_sheet(look(sides=sides, fill={1: ((1, 2), (1, 3))}))
    assert 480 <= image.width <= 4 * TILE + 40 and TILE // 10 < image.height < 3 * TILE
    assert share_of(image, outline_colour(1)) > 20  # two voxels of one class are seen in both


def test_a_label_is_a_thinner_line_of_its_own():
    mask = {1: ((10, 30), (10, 20))}
    label = np.zeros((6, 40, 30), np.uint8)
    label[:, 5:35, 5:25] = 1
    plain, compared = contact_sheet(look(fill=mask)), contact_sheet(look(fill=mask, label=label))
    tint = tuple(round(c + (255 - c) * 0.65) for c in outline_colour(1))
    scale = TILE / 40
    at = (round(6 + 4 * scale), round(6 + 8 * scale), round(6 + 6 * scale), round(6 + 20 * scale))
    lines = share_of(compared, tint, at)
    assert 60 <= lines <= 150 and share_of(plain, tint, at) == 0  # one pixel wide, 108 high
    assert compared.height > plain.height  # the legend says what it is


def test_what_was_missed_is_shown_too():
    found, label = np.zeros((2, 6, 40, 30), np.uint8)
    found[3, 10:20, 10:20] = 1
    label[0, 10:20, 10:20] = 1
    missed = Look("case", look().image, (1, 1, 1), LPS, CLASSES, found, label)
    alone = Look("case", look().image, (1, 1, 1), LPS, CLASSES, found)
    assert contact_sheet(missed).width > 3 * contact_sheet(alone).width / 2  # slices 0 to 3, not 3 alone


def test_a_volume_of_one_value_is_not_an_error():
    empty = look()
    image = contact_sheet(Look("flat", np.full_like(empty.image, 3), (1, 1, 1), LPS, CLASSES, empty.mask))
    assert image.width > 400
