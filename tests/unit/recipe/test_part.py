"""Rules beside the fields: what a limit lets through, and the words in which it refuses the rest."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from sightline import recipes
from sightline.errors import UsageError
from sightline.recipe.part import Above, AtLeast, AtMost, Below, Part, check_value, foreign_defaults
from sightline.recipe.recipe import Run

LIMITS = [  # hint, the nearest values that are in and out, and the range in words
    (Annotated[int, AtLeast(1)], 1, 0, "at least 1"),
    (Annotated[int, AtMost(9)], 9, 10, "at most 9"),
    (Annotated[int, AtLeast(1), AtMost(9)], 9, 10, "in [1, 9]"),
    (Annotated[float, AtLeast(0)], 0.0, -0.5, "a finite number, at least 0"),
    (Annotated[float, Above(0)], 0.25, 0.0, "a finite number, above 0"),
    (Annotated[float, Below(1)], 0.75, 1.0, "a finite number, below 1"),
    (Annotated[float, AtLeast(0), Below(1)], 0.0, 1.0, "in [0, 1)"),
    (Annotated[float, Above(0), AtMost(1)], 1.0, 0.0, "in (0, 1]"),
    (Annotated[float, Above(0), Below(1)], 0.5, 1.0, "in (0, 1)"),
    (Annotated[tuple[float, ...], Above(0)], (1.0, 2.0), (1.0, 0.0), "a finite number, above 0"),
]


@pytest.mark.parametrize(("hint", "inside", "outside", "words"), LIMITS, ids=[row[3] for row in LIMITS])
def test_a_limit_lets_its_range_through_and_names_it(hint: Any, inside: Any, outside: Any, words: str):
    check_value("part.field", inside, hint)
    with pytest.raises(UsageError) as refused:
        check_value("part.field", outside, hint)
    assert str(refused.value) == f"part.field={outside} must be {words}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_within_any_limit_that_is_not_finite(value: float):
    for hint in (float, Annotated[float, AtLeast(0)], Annotated[float, AtMost(1)]):
        with pytest.raises(UsageError, match="must be a finite number"):
            check_value("part.field", value, hint)


def test_remedies_follow_the_range():
    hint = Annotated[float, Above(0, "0.1 is usual"), AtMost(1, "Keras counts from the other end")]
    with pytest.raises(UsageError, match=r"in \(0, 1\]; 0.1 is usual; Keras counts from the other end$"):
        check_value("part.field", 2.0, hint)


def test_choices_and_words_among_numbers():
    check_value("part.field", "b", Literal["a", "b"])
    check_value("part.field", "auto", int | Literal["auto"])
    check_value("part.field", 3, Annotated[int | Literal["auto"], AtLeast(1)])
    with pytest.raises(UsageError, match="part.field='c' is unknown; use one of a, b"):
        check_value("part.field", "c", Literal["a", "b"])
    with pytest.raises(UsageError, match="part.field='all' is unknown; use a number or auto"):
        check_value("part.field", "all", int | Literal["auto"])


@dataclass(frozen=True)
class Pair(Part):
    low: Annotated[int, AtLeast(0)] = 0
    high: int = 1

    part = "pair"

    def check(self) -> None:
        super().check()
        if self.low > self.high:
            raise UsageError("pair.low is above pair.high")


def test_fields_are_checked_first_and_then_what_they_have_to_agree_on():
    with pytest.raises(UsageError, match="pair.low=-1 must be at least 0"):
        Pair(low=-1, high=-2)
    with pytest.raises(UsageError, match="pair.low is above pair.high"):
        dataclasses.replace(Pair(), low=2)


def test_another_kind_takes_back_only_what_it_does_not_read():
    of_kind = {"a": {"x"}, "b": {"x", "y"}}
    made = dataclasses.make_dataclass("Made", [("kind", str, "b"), ("x", int, 1), ("y", int, 2), ("z", int, 3)])(y=7)
    assert foreign_defaults(made, {"kind": "a"}, of_kind) == {"y": 2}
    assert foreign_defaults(made, {"kind": "b"}, of_kind) == {} == foreign_defaults(made, {"x": 1}, of_kind)


@pytest.mark.parametrize("name", recipes.names())
def test_every_limit_of_every_part_holds_for_its_own_default(name: str):
    for part in (*recipes.load(name).parts.values(), Run()):
        assert dataclasses.replace(part) == part
