"""Texts and labels of a page, whatever a run calls its classes and scores."""

from html.parser import HTMLParser

import pytest

from sightline.report import charts, most_wrong, scores
from sightline.report.curves import _label
from sightline.report.html import is_score, text


class Attributes(HTMLParser):
    """All attributes of a piece of HTML, as a browser reads them."""

    def __init__(self, html: str):
        super().__init__()
        self.found: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += attributes


@pytest.mark.parametrize("name", ['" onmouseover="alert(1)', "' onmouseover='alert(1)", '"><script>alert(1)</script>'])
def test_a_name_stays_inside_its_attribute(name: str):
    pieces = {
        "title": scores._matrix([{"class": name, "predicted": [3]}]),
        "aria-label": charts.line_chart({name: [(0.0, 1.0), (1.0, 2.0)]}, "step"),
        "alt": most_wrong._figure({"name": "a"}, {name: "AAAA"}),
    }
    for attribute, html in pieces.items():
        found = Attributes(html).found
        assert "onmouseover" not in dict(found)
        assert any(key == attribute and name in (value or "") for key, value in found), html


def test_quotes_of_both_kinds_are_escaped():
    assert not {'"', "'", "<", ">"} & set(text("\"'<>"))


def test_bytes_that_are_not_text_are_written_out():
    assert text("a\udcff<b>") == "a\\udcff&lt;b&gt;"
    text("a\udcff").encode()


def test_a_score_may_have_a_slash_in_its_name():
    curves = ["evaluate/iou/car", "evaluate/iou/bus"]
    assert [_label("run", curve, curves, 1) for curve in curves] == ["iou/car", "iou/bus"]


@pytest.mark.parametrize(("value", "expected"), [(1, True), (0.5, True), (True, False), (10**400, False), ("1", False)])
def test_a_score_is_a_number_that_can_be_drawn(value: object, expected: bool):
    assert is_score(value) is expected and not is_score(float("nan")) and not is_score(float("inf"))
