"""Texts and labels of a page, whatever a run calls its classes and scores."""

import pytest

from sightline.report.html import is_score, text
from sightline.report.page import _label


def test_bytes_that_are_not_text_are_written_out():
    assert text("a\udcff<b>") == "a\\udcff&lt;b&gt;"
    text("a\udcff").encode()


def test_a_score_may_have_a_slash_in_its_name():
    curves = ["evaluate/iou/car", "evaluate/iou/bus"]
    assert [_label("run", curve, curves, 1) for curve in curves] == ["iou/car", "iou/bus"]


@pytest.mark.parametrize(("value", "expected"), [(1, True), (0.5, True), (True, False), (10**400, False), ("1", False)])
def test_a_score_is_a_number_that_can_be_drawn(value: object, expected: bool):
    assert is_score(value) is expected and not is_score(float("nan")) and not is_score(float("inf"))
