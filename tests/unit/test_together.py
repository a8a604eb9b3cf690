"""Cases that share one test: all are tried, failures are named, and fixtures arrive."""

from pathlib import Path

import pytest
from _pytest.mark import KeywordMatcher
from together import together


def test_every_failure_is_raised_with_its_case():
    tried = []

    @together(("a", "b"), [(1, 1), (2, 3), (4, 4), (5, 6)])
    def equal(a: int, b: int):
        tried.append(a)
        assert a == b

    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases") as raised:
        equal()
    assert tried == [1, 2, 4, 5]
    assert [error.__notes__ for error in raised.value.exceptions] == [
        ["in the case {'a': 2, 'b': 3}"],
        ["in the case {'a': 5, 'b': 6}"],
    ]


def test_an_error_that_does_not_come_is_a_failure_too():
    @together("text", ["1", "x"])
    def refused(text: str):
        with pytest.raises(ValueError, match="invalid literal"):
            int(text)

    with pytest.raises(BaseExceptionGroup, match="1 of 2 cases") as raised:
        refused()
    assert raised.value.exceptions[0].__notes__ == ["in the case {'text': '1'}"]


def test_the_words_of_a_case_choose_its_test(request: pytest.FixtureRequest):
    @together(("kind", "size"), [("round", 3), ("square", 4)])
    def test_shapes(kind: str, size: int):
        pass

    item = pytest.Function.from_parent(request.node.parent, name="test_shapes", callobj=test_shapes)
    found = KeywordMatcher.from_item(item)
    assert found("square") and not found("oval")


PAIRS = []


@together("b", [1, 2])
@together("a", ["x", "y"])
def test_two_lists_are_all_pairs(a: str, b: int, tmp_path: Path):
    assert tmp_path.is_dir()
    PAIRS.append((a, b))


def test_the_pairs_above():
    assert PAIRS in ([], [("x", 1), ("y", 1), ("x", 2), ("y", 2)])  # none in another test process
