"""Slices side by side: which ones, the right way up, with outlines in the colours of their classes."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from sightline.drawing.slices import TILE, Look, contact_sheet, outline_colour, outlined, outlined_image, shown_slices

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


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, float]]:
    """Every text that Pillow is asked to draw, and where."""
    found: list[tuple[str, float, float]] = []
    text = ImageDraw.ImageDraw.text

    def write(pen, place, words, **more) -> None:
        found.append((words, *place))
        text(pen, place, words, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", write)
    return found


def test_the_legend_names_the_volume_and_how_much_of_each_class_there_is(written):
    label = np.zeros((6, 40, 30), np.uint8)
    label[:, :20] = 2
    seen = look(spacing=(2.0, 0.5, 0.75), fill={1: ((10, 30), (10, 20))}, label=label)
    sheet = contact_sheet(seen)
    legend = [line for line in written if len(line[0]) > 10]
    assert [text for text, *_ in legend] == [
        "case  slices x rows x columns 6 x 40 x 30, voxels of 2 x 0.5 x 0.75 mm",
        "one  0.900 ml, label 0.000 ml",  # 6 * 20 * 10 voxels of 0.75 mm3
        "two  0.000 ml, label 2.700 ml",
        "bold: predicted, hairline: label",
    ]
    about, one, two, last = legend
    assert about[1] == one[1] - 26 == last[1] == 12 and one[2] == two[2] and one[1] < two[1], "one line has both"
    lines = [about[2], one[2], last[2]]
    assert lines[1] - lines[0] == pytest.approx(lines[2] - lines[1], abs=1) and 24 < lines[1] - lines[0] < 34
    assert lines[-1] + 9 < sheet.height
    for number, (_, x, y) in ((1, one), (2, two)):  # a square of its colour stands before each
        square = (round(x) - 26, round(y) - 9, round(x) - 8, round(y) + 10)
        assert share_of(sheet, outline_colour(number), square) > 100
        assert share_of(sheet, outline_colour(number), (0, round(y) - 9, square[0], round(y) + 10)) == 0


@pytest.mark.parametrize(("voxels", "text"), [(9999, "9.999 ml"), (10000, "10.0 ml"), (123456, "123.5 ml")])
def test_large_amounts_have_fewer_digits(written, voxels: int, text: str):
    mask = np.zeros(400 * 400, np.uint8)
    mask[:voxels] = 1
    image = np.ones((1, 400, 400), np.float32)
    contact_sheet(Look("case", image, (1.0, 1.0, 1.0), LPS, CLASSES[:2], mask.reshape(image.shape)))
    assert f"one  {text}" in [each for each, *_ in written]


def test_many_classes_take_as_many_lines_as_they_need(written):
    classes = ("background", *(f"a class of a long name {n}" for n in range(12)))
    image = np.ones((1, 40, 40), np.float32)
    drawn = contact_sheet(Look("case", image, (1.0, 1.0, 1.0), LPS, classes, np.zeros((1, 40, 40), np.uint8)))
    named = [line for line in written if "long name" in line[0]]
    assert len(named) == 12 and len({y for *_, y in named}) == 12, "each is wider than half of the sheet"
    assert drawn.width == 480 and max(y for *_, y in named) < drawn.height - 10


def test_tiles_stand_in_rows_of_four_in_the_middle(written):
    drawn = contact_sheet(look((8, 40, 40), fill={1: ((10, 30), (10, 20))}))
    numbers = {text: (x, y) for text, x, y in written if text.startswith("slice ") and text[6:].isdigit()}
    assert set(numbers) == {f"slice {n}" for n in range(8)}
    assert drawn.width == 4 * (TILE + 6) + 6
    background = np.asarray(drawn)[3, 3]
    pixels = (np.asarray(drawn) == background).all(-1)
    gaps = [x for x in range(drawn.width) if pixels[: 2 * TILE, x].all()]
    expected = [x for n in range(5) for x in range(n * (TILE + 6), n * (TILE + 6) + 6)]
    assert gaps == expected
    rows = [y for y in range(2 * TILE + 18) if pixels[y].all()]
    assert rows[:12] == [*range(6), *range(TILE + 6, TILE + 12)] and rows[12:18] == [
        *range(2 * TILE + 12, 2 * TILE + 18)
    ]


def test_an_image_has_shares_of_its_pixels(written):
    mask = np.zeros((1, 20, 50), np.uint8)
    mask[0, :5] = 1
    seen = Look("photo", np.zeros((1, 20, 50)), (1.0, 1.0, 1.0), LPS, CLASSES, mask)
    drawn = outlined_image(np.full((20, 50, 3), 90, np.uint8), seen)
    assert [text for text, *_ in written] == ["photo  50 x 20 pixels", "one  25.00 %", "two  0.00 %"]
    assert drawn.width == 480 and share_of(drawn, (90, 90, 90)) < TILE * TILE * 20 // 50, "as wide as a tile of slices"
    high = outlined_image(np.full((2000, 50, 3), 90, np.uint8), Look("a", mask, (1,) * 3, LPS, CLASSES, mask))
    assert 1600 < high.height < 1720 and high.width == 480


def test_empty_borders_are_cut_off_but_for_two_voxels():
    image, mask = np.zeros((1, 60, 80), np.float32), np.zeros((1, 60, 80), np.uint8)
    image[:, 20:40, 30:40] = np.linspace(1, 2, 10, dtype=np.float32)
    drawn = np.asarray(contact_sheet(Look("case", image, (1.0, 1.0, 1.0), LPS, CLASSES, mask)))
    tile = np.flatnonzero((drawn[6 : 6 + TILE] != drawn[2, 2]).any(-1).any(0))
    assert tile[-1] - tile[0] + 1 == round(14 * TILE / 24)  # 24 rows and 14 columns are left


def test_a_voxel_is_round_in_a_larger_picture_and_does_not_melt_away_in_a_smaller_one():
    one = np.zeros((4, 4), np.uint8)
    one[1, 1] = 1  # pixels 32 to 63 of 128
    large = outlined(Image.new("RGB", (128, 128), (90, 90, 90)), one, None)
    assert share_of(large, outline_colour(1)) > 60
    assert not any(share_of(large, outline_colour(1), (x, y, x + 4, y + 4)) for x in (32, 60) for y in (32, 60))
    third = (np.random.default_rng(0).random((1280, 1280)) < 0.3).astype(np.uint8)
    small = outlined(Image.new("RGB", (128, 128), (90, 90, 90)), third, None)
    assert share_of(small, outline_colour(1)) > 60  # the mean of a pixel has none of it


def test_captions_can_be_read_on_any_ground():
    """Letters are of one colour, each with a dark edge, so that they show on a white scan, too."""
    white = look(sides=(1, 40, 40))
    white.image[:] = 1.0
    sheet = contact_sheet(white)
    tile = (6, 6, 6 + TILE, 6 + TILE)
    assert share_of(sheet, (240, 242, 245), tile) > 60 and share_of(sheet, (24, 26, 30), tile) > 60
