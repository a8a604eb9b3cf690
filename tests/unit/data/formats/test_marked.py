"""What is read of one object: numbers, names, polygons, ellipses and regions of pixels, up to their exact limits."""

from collections import Counter

import numpy as np
import pytest

from sightline.data.formats import marked as m

BIG = int(m.LARGEST)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3.0), (-2.5, -2.5), (" 4e0 ", 4.0), (BIG, 1e9), (-BIG, -1e9), ("-1000000000", -1e9)],
)
def test_a_number_may_be_written_as_text(value, expected):
    assert m.number(value, "x") == expected


@pytest.mark.parametrize("value", [True, False, None, [1], "", "x", "1e9 1", "nan", "inf", BIG + 1, -BIG - 1, 10**400])
def test_what_is_no_finite_number_is_named(value):
    with pytest.raises(m.WrongEntry, match=r"^x of it is .*, expected a finite number$"):
        m.number(value, "x of it")


def test_numbers_are_as_many_as_expected():
    assert m.numbers([1, "2"], "x") == m.numbers((1, 2), "x", 2) == [1.0, 2.0]
    assert m.numbers([], "x") == []
    for values, count, said in (
        ([1], 2, r"x is \[1\], expected 2 numbers"),
        ([1, 2, 3], 2, "expected 2 numbers"),
        ([], 1, "expected 1 numbers"),
        ("12", 2, "x is '12', expected 2 numbers"),
        (None, 0, "x is None, expected a list of numbers"),
    ):
        with pytest.raises(m.WrongEntry, match=said):
            m.numbers(values, "x", count)


def test_points_are_pairs_of_numbers():
    for values in ([[1, 2], [BIG, -BIG]], [["1", 2], [1e9, "-1e9"]], [(1, 2), [1e9, -1e9]]):
        found = m.points(values, "p")
        assert found.dtype == np.float64 and found.tolist() == [[1, 2], [1e9, -1e9]]
    assert m.points([], "p").shape == (0, 2)
    for values, said in (
        ({}, r"p is \{\}, expected a list of points"),
        ([[1, BIG + 1]], "p is 1000000001, expected a finite number"),
        ([[1, 2], [3]], r"p is \[3\], expected 2 numbers"),
        ([[1, 2, 3]], r"p is \[1, 2, 3\], expected 2 numbers"),
        ([1, 2], "p is 1, expected 2 numbers"),
        ([[1, 10**400]], "expected a finite number"),
        ([[1, None]], "p is None, expected a finite number"),
    ):
        with pytest.raises(m.WrongEntry, match=said):
            m.points(values, "p")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *[(1, 1), (2.0, 2), ("30", 30), (m.MAX_SIDE, m.MAX_SIDE), (str(m.MAX_SIDE), m.MAX_SIDE)],
        *[(0, 0), (-1, 0), (0.5, 0), (1.5, 0), (m.MAX_SIDE + 1, 0)],
        *[(True, 0), (None, 0), ("", 0), ("x", 0), ("nan", 0), ("inf", 0), (10**400, 0)],
    ],
)
def test_a_side_that_is_none_is_unknown(value, expected):
    assert m.side(value) == expected


def test_names_of_classes():
    assert m.name("  two \t words\n", "x") == "two words"
    for same in ("a" * m.MOST_NAME, "\ud7ff\ue000", "0"):
        assert m.name(same, "x") == same
    for value in ("", "  ", 3, None, ["a"], "a" * (m.MOST_NAME + 1), "a\ud800", "\udfffa"):
        with pytest.raises(m.WrongEntry, match=r"^label of x is .*, expected the name of a class$"):
            m.name(value, "label of x")


def test_a_polygon_has_its_box_and_its_area():
    found = m.polygon("a", np.asarray([(5, 1), (9, 1), (9, 4)], np.float64))
    assert found == m.Shape("a", [[5, 1, 9, 1, 9, 4]], (5, 1, 4, 3), 6)
    other = m.polygon("a", np.asarray([(9, 4), (9, 1), (5, 1)], np.float64))  # the other way around
    assert other is not None and other.area == 6
    hole = m.polygon("a", np.asarray([(0, 0), (4, 0), (4, 4), (2, 1), (0, 4)], np.float64))
    assert hole is not None and hole.area == 10
    assert m.polygon("a", np.asarray([(5, 1), (9, 1)], np.float64)) is None


def test_a_box_may_be_given_by_any_two_corners():
    expected = m.Shape("a", [[1, 2, 4, 2, 4, 7, 1, 7]], (1, 2, 3, 5), 15)
    for corners in ((1, 2, 4, 7), (4, 7, 1, 2), (1, 7, 4, 2), (4, 2, 1, 7)):
        assert m.rectangle("a", *corners) == expected


def test_points_turn_clockwise():
    corners = np.asarray([(3.0, 1.0), (1.0, 1.0), (1.0, 4.0)])
    expected = [(1, 3), (1, 1), (-2, 1)]  # y grows downwards: what lies to the right comes to lie below
    np.testing.assert_allclose(m.turned(corners, 90, (1, 1)), expected, atol=1e-12)
    np.testing.assert_allclose(m.turned(corners, 30, (2, 5))[0], [2 + np.cos(np.pi / 6) + 2, 5 + 0.5 - 4 *
                               np.cos(np.pi / 6)])  # fmt: skip


def test_an_ellipse_is_a_polygon_that_lies_on_it():
    found = m.ellipse("a", 10, 20, 8, -4, 90)
    assert found is not None and found.label == "a"
    corners = np.asarray(found.outline).reshape(-1, 2)
    assert len(corners) == 64
    np.testing.assert_allclose(((corners - (10, 20)) / (4, 8)) ** 2 @ (1, 1), 1)
    np.testing.assert_allclose(found.box, (6, 12, 8, 16))
    assert 0.998 < found.area / (32 * np.pi) < 1
    upright = m.ellipse("a", 10, 20, 8, 4)
    assert upright is not None
    np.testing.assert_allclose(upright.box, (2, 16, 16, 8))
    first = np.asarray(upright.outline).reshape(-1, 2)[:2]
    np.testing.assert_allclose(first, [(18, 20), (10 + 8 * np.cos(np.pi / 32), 20 + 4 * np.sin(np.pi / 32))])
    assert m.ellipse("a", 1, 1, 0, 5) is None and m.ellipse("a", 1, 1, 5, 0) is None
    assert m.ellipse("a", 1, 1, 0.5, 0.5) is not None


def pixels(shape: m.Shape) -> np.ndarray:
    height, width = shape.outline["size"]
    counts = shape.outline["counts"]
    values = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    assert len(values) == height * width and len(counts) % 2 == 1
    return values.reshape(width, height).T


@pytest.mark.parametrize(
    ("left", "top"),
    [(0, 0), (2, 1), (3, 4), (-1, 0), (0, -2), (-2, -3), (5, 5), (6, 0), (0, 7), (-3, 0), (0, -4), (7, 1), (1, 8)],
)
def test_a_region_has_the_pixels_that_lie_in_the_image(left, top):
    inside = np.asarray([[0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 0, 1]], bool)
    expected = np.zeros((8, 7), bool)
    for y, x in np.argwhere(inside):
        if 0 <= y + top < 8 and 0 <= x + left < 7:
            expected[y + top, x + left] = True
    found = m.region("a", inside, left, top, 8, 7)
    if not expected.any():
        assert found is None
        return
    assert found is not None and found.label == "a" and found.area == expected.sum()
    np.testing.assert_array_equal(pixels(found), expected)
    ys, xs = np.nonzero(expected)
    sides = (np.ptp(xs) + 1, np.ptp(ys) + 1)
    assert found.box == (xs.min(), ys.min(), *sides) and {type(each) for each in found.box} == {float}


def test_a_region_that_is_its_whole_image():
    found = m.region("a", np.ones((3, 2), bool), 0, 0, 3, 2)
    assert found is not None and found.outline == {"size": [3, 2], "counts": [0, 6, 0]} and found.area == 6
    assert m.region("a", np.zeros((3, 2), bool), 0, 0, 3, 2) is None


def test_regions_lie_in_images_of_a_known_size(monkeypatch):
    monkeypatch.setattr(m, "MAX_SIDE", 9)
    monkeypatch.setattr(m, "MAX_PIXELS", 27)
    one = np.ones((1, 1), bool)
    for height, width in ((1, 1), (9, 3), (3, 9), (1, 9), (9, 1)):
        assert m.region("a", one, 0, 0, height, width) is not None
    for height, width in ((0, 3), (3, 0), (10, 1), (1, 10), (4, 7)):
        with pytest.raises(m.WrongEntry, match=f"a mask in an image of {width}x{height}, expected at most 27 pixels"):
            m.region("a", one, 0, 0, height, width)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], [0]), ([0], [1]), ([1], [0, 1]), ([0, 0, 1, 0], [2, 1, 1]), ([1, 1, 0], [0, 2, 1]), ([0, 1], [1, 1])],
)
def test_run_lengths_begin_with_false(values, expected):
    assert m.run_lengths(np.asarray(values, bool)) == expected


def test_the_background_by_its_name():
    assert all(map(m.is_background, ("background", "_BackGround_", "BG", "0", "#000000")))
    assert not any(map(m.is_background, ("backgrounds", "back_ground", "1", "00", "#000001", "")))


def test_shapes_without_an_area_are_counted():
    marked = m.Marked("a")
    one = m.rectangle("a", 0, 0, 1, 1)
    m.kept(marked, [None, one, None])
    assert marked.shapes == [one] and marked.notes == Counter({m.WITHOUT_AREA: 2})
    assert (marked.height, marked.width, marked.holds_image, marked.subset) == (0, 0, False, "")


def test_boxes_are_cut_off_at_the_borders_of_their_images():
    boxes = np.asarray([(-3, 2, 10, 4), (5, 6, 9, 9), (20, 3, 4, 4), (1, 2, 3, 4)], np.float64)
    found = m.clipped(boxes, np.asarray([8, 9, 10, 6]), np.asarray([5, 11, 12, 4]))
    assert found.tolist() == [[0, 2, 5, 4], [5, 6, 6, 3], [12, 3, 0, 4], [1, 2, 3, 4]]
