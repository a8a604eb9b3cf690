"""What the values of masks mean, exactly at the borders of the rules: classes, edges, or nothing."""

import numpy as np
import pytest

from sightline.data.sources.index_files import Names
from sightline.data.sources.mask_classes import MaskClasses, decide
from sightline.data.sources.mask_survey import COLOURED, GREY, Survey


def classes_of(pixels: dict[int, int], ignore: str = "") -> MaskClasses:
    """Decide about one grey mask with so many pixels of each value."""
    one, values = np.ones(1, np.int64), np.asarray(list(pixels), np.int64)
    counts, ends = np.asarray(list(pixels.values()), np.int64), np.asarray([len(pixels)])
    none = Names.of([b""])
    survey = Survey(one, one, GREY * one, 3 * one, 8 * one, ends, values, values * 0x010101, counts, none)
    return decide([survey], None, ignore)


def has_edges(pixels: dict[int, int]) -> bool:
    problem = classes_of(pixels).problem
    return problem is not None and problem[0] == "soft edges"


def between(number: int, largest: int, each: int = 1) -> dict[int, int]:
    """Values that end at `largest`."""
    return dict.fromkeys(range(largest - number + 1, largest + 1), each)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (between(17, 201), True),
        (between(16, 201), False),  # so few may be classes
        (between(17, 200), False),  # so dark may be numbers of classes
        (between(17, 254), True),
        (between(65, 254, 20), True),  # many of them, whatever they hold
        (between(64, 254, 20), False),  # else only where they hold less than a quarter of the pixels
    ],
    ids=str,
)
def test_black_and_white_with_some_values_between_have_edges(values: dict[int, int], expected: bool):
    assert has_edges({0: 500, 255: 500, **values}) is expected


def test_edges_hold_less_than_a_quarter_of_the_pixels():
    edges = between(17, 230, 4)  # 68 pixels
    assert not has_edges({0: 102, 255: 102, **edges}) and has_edges({0: 102, 255: 103, **edges})
    assert has_edges({0: 102, 255: 103, **edges}) and not has_edges({0: 102, 254: 103, **edges})


@pytest.mark.parametrize(
    ("large", "number", "expected"), [(8, 65, True), (8, 64, False), (9, 72, False), (9, 73, True)]
)
def test_many_values_of_which_few_hold_nearly_all_pixels_are_edges(large: int, number: int, expected: bool):
    """More than 64 values, and more than eight for each that holds many."""
    counts = [10_000] * large + [1] * (number - large)
    assert has_edges(dict(enumerate(counts))) is expected


def test_classes_that_hold_a_hundredth_are_no_edges():
    """Of 66 values eight hold 99 % and no more, so that a ninth is counted among the large ones only beyond it."""
    assert has_edges(dict(enumerate([990] * 8 + [80] + [0] * 57)))
    assert not has_edges(dict(enumerate([989] * 8 + [88] + [0] * 57)))


@pytest.mark.parametrize(
    ("values", "ignored"),
    [
        ((0, 255), ()),
        ((255,), ()),
        ((0, 1, 255), (255,)),
        ((0, 128, 255), ()),
        ((0, 127, 255), ()),
        ((0, 126, 255), (255,)),
        ((0, 86, 170, 255), ()),  # one beside an even step
        ((0, 87, 170, 255), (255,)),
        (tuple(range(0, 256, 17)), ()),  # 16 even steps
        (tuple(np.linspace(0, 255, 17).round().astype(int).tolist()), (255,)),
    ],
    ids=str,
)
def test_255_counts_for_nothing_unless_the_values_are_even_greys(values: tuple[int, ...], ignored: tuple[int, ...]):
    found = classes_of(dict.fromkeys(values, 9))
    assert found.ignored == ignored and found.values == tuple(each for each in values if each not in ignored)
    assert classes_of(dict.fromkeys(values, 9), "none").ignored == ()
    assert classes_of(dict.fromkeys(values, 9), "255").ignored == (255,)


def test_two_classes_are_enough_and_one_is_not():
    assert classes_of({0: 5, 7: 5}).problem is None
    problem = classes_of({7: 5}).problem
    assert problem and problem[0] == "too few classes" and "7 alone" in problem[1]


def test_eight_values_are_said():
    eight, nine = (dict.fromkeys(range(2, 2 + n), 9) for n in (8, 9))
    assert classes_of(eight).said == ("values 2, 3, 4, 5, 6, 7, 8, 9 renumbered",)
    assert classes_of(nine).said == ("values 2, 3, 4, 5, 6, 7, 8, 9, ... renumbered",)
    assert classes_of({0: 5, 1: 5, 2: 5}).said == ()


def test_a_colour_counts_for_nothing_by_its_six_digits():
    one, values = np.ones(1, np.int64), np.asarray([0x000000, 0x1A00FF, 0xFF0000])
    counts, ends = np.asarray([9, 9, 9]), np.asarray([3])
    survey = Survey(one, one, COLOURED * one, 3 * one, 8 * one, ends, values, values, counts, Names.of([b""]))
    assert decide([survey], None, "#1a00Ff").ignored == (0x1A00FF,)
