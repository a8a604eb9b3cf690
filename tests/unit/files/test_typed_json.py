"""Plain values as the types of fields, and JSON within bounds."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from sightline.files.typed_json import UnknownField, as_dataclass, read_json, typed


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (True, bool, True),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, 2], tuple[float, float], (1.0, 2.0)),
        ([1, 2], list[int], [1, 2]),
        ([], tuple[str, ...], ()),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        (None, float | None, None),
        (2, float | None, 2.0),
        ("b", Literal["a", "b"], "b"),
        ("caf\udce9", str, "caf\udce9"),
        (34, Literal[18, 34], 34),
        ([{}], Any, [{}]),
    ],
)
def test_values_that_fit(value, hint, expected):
    found = typed(value, hint)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "reported"),
    [
        (True, int, "a whole number"),
        (1, bool, "true or false"),
        (1.0, int, "a whole number"),
        ("1", int, "a whole number"),
        (1, str, "a text"),
        (2**63, int, "a number of 64 bits"),
        (10**400, float, "a number of 64 bits"),
        (None, float, "a number"),
        ("x", float | None, "a number or expected nothing"),
        ("ab", tuple[str, ...], "a list"),
        ([1], tuple[int, int], "2 values"),
        ([1, "2"], list[int], "a whole number"),
        ({"a": "b"}, dict[str, float], "a number"),
        (True, Literal[0, 1], "one of 0, 1"),
        ("c", Literal["a", "b"], "one of a, b"),
        ({}, list[int], "a list"),
        ("a\0b", str, "a text without NUL"),
        ("a\ud800", str, "a text without NUL"),
    ],
)
def test_values_that_do_not_fit_are_refused(value, hint, reported):
    with pytest.raises(ValueError, match=f"expected {reported}"):
        typed(value, hint)


def test_yaml_s_spellings_are_taken_where_asked_for():
    assert typed("1e-3", float, from_text=True) == 1e-3
    assert typed("7", int, from_text=True) == 7
    assert typed(7, str, from_text=True) == "7"
    assert typed(["1e-3", 2], tuple[float, ...], from_text=True) == (1e-3, 2.0)
    assert typed("34", Literal[18, 34], from_text=True) == 34
    for value, hint in (("1.5", int), (True, str), ("x", float), (None, int)):
        with pytest.raises(ValueError, match="expected"):
            typed(value, hint, from_text=True)


@dataclass
class Some:
    step: int
    scores: dict[str, float] = field(default_factory=dict)


def test_a_dataclass_of_plain_values():
    assert as_dataclass(Some, {"step": 3, "scores": {"a": 1}}) == Some(3, {"a": 1.0})
    assert math.isnan(as_dataclass(Some, {"step": 3, "scores": {"a": math.nan}}).scores["a"])
    for values, reported in (
        ({}, "step is missing"),
        ({"step": "x"}, "step is 'x', expected a whole"),
        ([], "an object"),
    ):
        with pytest.raises(ValueError, match=reported):
            as_dataclass(Some, values)
    with pytest.raises(UnknownField, match="pace, which this version does not know"):
        as_dataclass(Some, {"step": 3, "pace": 1})


def test_json_within_bounds(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"a": [1, {"b": "ä"}]}))
    assert read_json(path, 100) == {"a": [1, {"b": "ä"}]}
    path.write_text('{"a": 1, "a": 2}')
    assert read_json(path, 100) == {"a": 2}
    with pytest.raises(ValueError, match="a key twice"):
        read_json(path, 100, refuse_twice=True)


@pytest.mark.parametrize(
    "data", [b"[" * 90_000, b'{"a":' * 90_000, b"[" * 17 + b"]" * 17, b"9" * 5000, b"\xff", b"", b"{"]
)
def test_json_that_is_none_is_a_value_error(tmp_path: Path, data: bytes):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(ValueError):  # noqa: PT011
        read_json(path, 10**6)


def test_json_beyond_its_bound_is_not_read(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_bytes(b"[]".ljust(101))
    with pytest.raises(ValueError, match="more than the 100 bytes allowed"):
        read_json(path, 100)
    assert read_json(path, 101) == []


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (Sequence[int], [1, 2], (1, 2)),
        (list, [1, "a"], [1, "a"]),
        (tuple, [1, "a"], (1, "a")),
        (dict, {"a": [1]}, {"a": [1]}),
    ],
)
def test_fields_of_users_may_be_sequences_and_containers_of_anything(hint, value, expected):
    assert typed(value, hint) == expected
    with pytest.raises(ValueError, match="expected"):
        typed(3, hint)
