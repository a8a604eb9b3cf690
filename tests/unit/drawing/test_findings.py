"""Images with what was found in them, looked at through their pixels."""

import itertools

import numpy as np
import pytest
from PIL import Image, ImageDraw

from sightline.drawing import findings
from sightline.drawing.findings import LARGEST, SMALLEST, colour_of, draw, draw_boxes, luminance
from sightline.drawing.letters import Letters, letters_of
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


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Rectangles and texts as they are drawn, with their places."""
    seen: list[tuple] = []
    rectangle, write = ImageDraw.ImageDraw.rectangle, Letters.write

    def note(pen, box, fill=None, outline=None, width=1) -> None:
        seen.append((tuple(box), outline or fill, width if outline else 0))
        rectangle(pen, box, fill=fill, outline=outline, width=width)

    def note_text(self, pen, place, text, anchor, **ink) -> None:
        seen.append((self.size, place, text, anchor, ink["fill"]))
        write(self, pen, place, text, anchor, **ink)

    monkeypatch.setattr(ImageDraw.ImageDraw, "rectangle", note)
    monkeypatch.setattr(Letters, "write", note_text)
    return seen


def test_every_line_and_label_of_boxes_has_its_place(drawn):
    cat, dog = Finding("cat", 17, 0.917, (0.2, 0.4, 0.6, 0.8)), Finding("dog", 18, 0.5, (0.5, 0.5, 0.501, 0.501))
    dark, letters = (16, 16, 16), letters_of(11)  # the 45th part of 500
    widths = [round(letters.length(text)) + 5 for text in ("cat 0.92", "dog 0.50")]
    image = draw(GREY, [cat, dog])
    right = 250 + widths[1]
    assert drawn == [
        ((249, 187, 253, 191), dark, 4),  # the last one first; 3 pixels at least, at round(187.5)
        ((250, 188, 252, 190), colour_of(18), 2),
        ((99, 149, 300, 300), dark, 4),
        ((100, 150, 299, 299), colour_of(17), 2),
        ((250, 174, right - 1, 187), colour_of(18), 0),
        (11, (252, 181.0), "dog 0.50", "lm", dark),
        ((100, 136, 100 + widths[0] - 1, 149), colour_of(17), 0),  # the surest lies on top
        (11, (102, 143.0), "cat 0.92", "lm", dark),
    ]
    assert image.size == (500, 375)
    drawn.clear()
    draw_boxes(Image.fromarray(GREY), [cat, dog], letters_px=28, has_scores=False, labelled=1)
    assert drawn[:4:2] == [((249, 187, 253, 191), dark, 6), ((99, 149, 300, 300), dark, 6)]  # a seventh of the letters
    assert drawn[4:] == [
        ((100, 114, 100 + round(letters_of(28).length("cat")) + 14 - 1, 149), colour_of(17), 0),
        (28, (107, 132.0), "cat", "lm", dark),
    ]


def test_every_bar_and_name_of_a_strip_has_its_place(drawn):
    letters = letters_of(14)  # the 36th part of 500
    room = 500 - 3 * 8 - round(letters.length("100.0%"))
    white, blue = (240, 242, 245), (66, 108, 170)
    image = draw(GREY, [Finding("tabby", 281, 0.8), Finding("x" * 300, 282, 0.1234)])
    assert image.size == (500, 375 + 2 * 22 + 2 * 8)
    long = drawn[4][2]
    assert drawn == [
        ((8, 384, 8 + round(room * 0.8), 402), blue, 0),
        (14, (12, 393.0), "tabby", "lm", white),
        (14, (492, 393.0), "80.0%", "rm", white),
        ((8, 406, 8 + round(room * 0.1234), 424), blue, 0),
        (14, (12, 415.0), long, "lm", white),
        (14, (492, 415.0), "12.3%", "rm", white),
    ]
    one, dots = letters.length("x"), letters.length("...")
    assert "..." in long and room - 8 - 2 * one < letters.length(long) <= room - 8 and dots
    drawn.clear()
    narrow = draw(np.full((400, 201, 3), 9, np.uint8), [])
    assert narrow.size == (320, 400 + 21 + 2 * 8)  # letters of 13 at least
    assert drawn == [(13, (8, 418.5), "nothing found", "lm", white)]
    columns = (np.asarray(narrow)[:400] == 9).all(2).all(0)
    assert np.flatnonzero(columns).tolist() == [*range(59, 260)]  # in the middle


def test_a_label_goes_where_it_covers_least():
    def place(box, *placed, sides=(200, 100)) -> tuple:
        return findings._place(box, 40, 10, sides, placed)

    box = (50, 30, 150, 70)
    tried = [(50, 20), (110, 20), (50, 30), (110, 30), (50, 70), (110, 70), (50, 60), (110, 60)]
    tried += [(50, 40), (110, 40), (50, 50), (110, 50)]
    taken: list[tuple] = []
    for x, y in tried:  # on it, in it, below it, at its lower edge, then in rows
        assert place(box, *taken) == (x, y, x + 40, y + 10)
        taken.append((x, y, x + 40, y + 10))
    less = (110, 40, 149, 50)
    assert place(box, *[each if each != (110, 40, 150, 50) else less for each in taken]) == (110, 40, 150, 50)
    assert place(box, *taken) == (50, 20, 90, 30), "of equal ones the first"
    assert place((180, 3, 199, 50)) == (160, 0, 200, 10) and place((-5, 95, 20, 99)) == (0, 85, 40, 95)
    assert findings._common_area((0, 0, 4, 5), (2, 3, 9, 9)) == 4
    assert not findings._common_area((0, 0, 2, 2), (2, 0, 4, 2))


def test_a_text_loses_its_middle():
    letters = letters_of(14)
    assert findings.fitting("short 0.50", letters, 1000.0) == "short 0.50"
    assert findings.fitting("abcdefgh", letters, letters.length("abcdefgh")) == "abcdefgh"
    text = "abcdefghijklmnop 0.50"
    assert findings.fitting(text, letters, letters.length("abcd... 0.50") + 0.1) == "abcd... 0.50"
    assert findings.fitting(text, letters, 0.0) == "a...0" and findings.fitting("ab", letters, 0.0) == "ab"
    assert findings.fitting("i" * 200, letters, 1e9) == "i" * 200
    assert findings.fitting("i" * 98 + "j" * 201, letters, 1e9) == "i" * 98 + "..." + "j" * 99
