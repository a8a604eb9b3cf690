"""Images with what was found in them, looked at through their pixels."""

import itertools

import numpy as np
import pytest

from sightline.drawing.findings import LARGEST, SMALLEST, colour_of, draw, luminance
from sightline.parts import Finding

GREY = np.full((375, 500, 3), 128, np.uint8)


def pixels_of(colour, drawn: np.ndarray) -> np.ndarray:
    return (drawn == np.array(colour, np.uint8)).all(2)


def test_outlines_lie_on_their_box_and_the_inside_is_untouched():
    box = (0.2, 0.4, 0.6, 0.8)  # 100..300, 150..300
    drawn = np.asarray(draw(GREY, [Finding("cat", 17, 0.9, box)]))
    assert drawn.shape == GREY.shape
    own = pixels_of(colour_of(17), drawn)
    for inside in (own[150, 100:300], own[299, 100:300], own[150:300, 100], own[150:300, 299]):
        assert inside.all()
    assert (drawn[156:294, 106:294] == 128).all()
    label = own[150 - 14 : 149, 100:140]
    assert label.any() and (drawn[305:] == 128).all() and (drawn[:130] == 128).all()


@pytest.mark.parametrize("box", [(0, 0, 1, 1), (0.99, 0.99, 1, 1), (0, 0, 0.001, 0.001), (0.95, 0, 1, 0.02)], ids=str)
def test_labels_stay_inside_and_whole(box):
    """Wherever the box is, about as much of its colour as for one in the middle: a label cut off would lack some."""

    def coloured(box) -> int:
        return pixels_of(colour_of(24), np.asarray(draw(GREY, [Finding("zebra", 24, 0.87, box)]))).sum()

    assert coloured(box) >= 0.9 * coloured((0.5, 0.5, 0.501, 0.501))


def test_labels_do_not_lie_on_each_other():
    box = (0.3, 0.3, 0.5, 0.6)
    one = np.asarray(draw(GREY, [Finding("dog", 18, 0.9, box)]))
    three = np.asarray(
        draw(GREY, [Finding(name, number, 0.9, box) for name, number in (("dog", 18), ("cat", 2), ("x", 3))])
    )
    shown = [pixels_of(colour_of(number), three)[:, 152:].sum() for number in (18, 2, 3)]
    assert all(count > 100 for count in shown)
    assert pixels_of(colour_of(18), three)[90:112].sum() >= pixels_of(colour_of(18), one)[90:112].sum() * 0.9


def test_colours_differ_and_carry_dark_text():
    colours = [colour_of(number) for number in range(1, 91)]
    assert len(set(colours)) == 90 and all(colour_of(number) == colours[number - 1] for number in range(1, 91))
    # WCAG: (lighter + 0.05) / (darker + 0.05) of at least 4.5
    assert min((luminance(c) + 0.05) / (luminance((16, 16, 16)) + 0.05) for c in colours) >= 4.4
    near = [np.abs(np.subtract(a, b)).max() for a, b in itertools.pairwise(colours)]
    assert min(near) > 40


@pytest.mark.parametrize(
    ("colour", "value"), [((255, 255, 255), 1.0), ((0, 0, 0), 0.0), ((255, 0, 0), 0.2126), ((188, 188, 188), 0.503)]
)
def test_luminance_is_that_of_the_standard(colour, value: float):
    assert luminance(colour) == pytest.approx(value, abs=0.001)


def test_a_strip_of_classes_stands_below_the_image():
    photo = np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8)
    found = [Finding("tabby", 281, 0.8), Finding("tiger cat", 282, 0.1), Finding("lynx", 287, 0.0)]
    drawn = np.asarray(draw(photo, found))
    assert (drawn[:375] == photo).all()  # red stays red, and nothing is drawn over
    strip = drawn[375:]
    bars = pixels_of((66, 108, 170), strip).sum(1)
    rows = np.array_split(bars[len(bars) // 12 : -len(bars) // 12], 3)
    assert rows[0].max() > 6 * rows[1].max() > 6 * 2 * rows[2].max()
    text = (strip > 200).all(2)
    assert text.any() and not text[:, :4].any() and not text[:, -4:].any() and not text[-3:].any()


def test_nothing_found_is_said():
    drawn = np.asarray(draw(GREY, []))
    assert drawn.shape[0] > 375 and (drawn[375:] > 200).any()


def test_sizes_fit_a_screen():
    box = [Finding("cat", 17, 0.9, (0.25, 0.25, 0.75, 0.75))]
    assert draw(np.zeros((3000, 4000, 3), np.uint8), box).size == (LARGEST, LARGEST * 3 // 4)
    tiny = np.zeros((50, 64, 3), np.uint8)
    tiny[10, 20] = (255, 0, 0)
    enlarged = np.asarray(draw(tiny, [Finding("x", 1, 0.5)]))
    assert enlarged.shape[1] == SMALLEST and pixels_of((255, 0, 0), enlarged).sum() == 25  # whole pixels, five times
    assert draw(np.zeros((1, 9000, 3), np.uint8), box).size == (LARGEST, 1)
    assert draw(np.zeros((9000, 1, 3), np.uint8), []).size[0] == SMALLEST


@pytest.mark.parametrize(
    "name",
    ["", "two\nlines", "café\u202e", "猫", "\udcff", "a" * 100_000],
    ids=["empty", "two lines", "accent and mark", "not Latin", "no text", "long"],
)
def test_any_name_can_be_drawn(name: str):
    for finding in (Finding(name, 1, 0.5), Finding(name, 1, 0.5, (0.1, 0.1, 0.2, 0.2))):
        assert draw(GREY, [finding]).width == 500
