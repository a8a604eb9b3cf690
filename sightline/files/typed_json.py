"""JSON out of files that may be damaged or hostile: read within bounds, its values taken as the types of fields.

Used for checkpoints, plans, records and config files. Every refusal is an OSError or a ValueError; the caller knows the
file's purpose and turns it into an error of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from sightline.files.regular import regular

MAX_DEPTH = 16  # of lists and objects within each other: comparing and printing recurse
_WHOLE = range(-(2**63), 2**63)
NO_NAME = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # JSON can spell these; no file can be called so
_hints: dict[tuple[type, bool], dict[str, Any]] = {}

Part = TypeVar("Part")


class UnknownField(ValueError):
    """A field that this version does not have; a later one may have written it."""


def read_json(path: Path, most_bytes: int, *, refuse_twice: bool = False) -> Any:
    """Return the value in a file of at most this many bytes, which take up to 21 times as many as Python objects.

    Raises OSError, or ValueError as `loads` does.
    """
    with open(path, "rb", opener=regular) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"more than the {most_bytes} bytes allowed")
    return loads(data, refuse_twice=refuse_twice)


def loads(data: bytes, *, refuse_twice: bool = False) -> Any:
    """Return the value in bytes; ValueError where they are not JSON, nest too deeply or (`refuse_twice`) hold a key
    twice in one object."""
    try:
        value = json.loads(data, object_pairs_hook=_each_once if refuse_twice else None)
        _check_depth(value, MAX_DEPTH)
    except RecursionError:
        raise ValueError(f"values nested more than {MAX_DEPTH} deep") from None
    return value


def typed(value: Any, hint: Any, *, from_text: bool = False) -> Any:
    """Return a plain value as the type `hint`; ValueError says what was expected.

    `from_text` also takes a number that is written as text, and text that was read as a number: YAML 1.1 does both.
    """
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        for choice in arguments:
            if (type(value) is type(choice) and value == choice) or (from_text and str(value) == str(choice)):
                return choice
        raise ValueError(f"expected one of {', '.join(map(str, arguments))}")
    if origin in (typing.Union, types.UnionType):
        return _first_that_fits(value, arguments, from_text)
    if origin is Sequence:
        origin, arguments = tuple, (*arguments, ...)
    if origin in (list, tuple, dict) and not arguments:  # of anything
        arguments = (Any, Any) if origin is dict else (Any, ...)
    if origin in (list, tuple) and isinstance(value, list | tuple):
        if origin is tuple and ... not in arguments:
            if len(value) != len(arguments):
                raise ValueError(f"expected {len(arguments)} values")
            return tuple(typed(v, h, from_text=from_text) for v, h in zip(value, arguments, strict=True))
        return origin(typed(each, arguments[0], from_text=from_text) for each in value)
    if origin is dict and isinstance(value, dict):
        return {typed(key, arguments[0]): typed(each, arguments[1]) for key, each in value.items()}
    return _scalar(value, origin, from_text)


def as_dataclass(kind: type[Part], values: Any) -> Part:
    """Return the dataclass that plain values describe; ValueError names the field, UnknownField one of another
    version."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{short(values)} where an object was expected")
    hints = hints_of(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{name} is missing")
    if unknown := [str(name) for name in values if name not in known]:
        raise UnknownField(f"{', '.join(unknown[:3])[:80]}, which this version does not know")
    made = {}
    for name, value in values.items():
        try:
            made[name] = typed(value, hints[name])
        except ValueError as error:
            raise ValueError(f"{name} is {short(value)}, {error}") from None
    return kind(**made)


def hints_of(kind: type, *, with_extras: bool = False) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, kept: Python would evaluate the texts of all fields every time."""
    if (kind, with_extras) not in _hints:
        try:
            found = typing.get_type_hints(kind, include_extras=with_extras)
        except NameError:  # a type that is imported for type checkers alone, or is known within a function
            found = _hints_one_by_one(kind, with_extras)
        _hints[kind, with_extras] = found
    return _hints[kind, with_extras]


def _hints_one_by_one(kind: type, with_extras: bool) -> dict[str, Any]:
    """Return the types of fields; that of a name which cannot be found is Any."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        known = vars(sys.modules.get(base.__module__, typing))
        for name, hint in vars(base).get("__annotations__", {}).items():
            alone = types.SimpleNamespace(__annotations__={name: hint})
            try:
                found |= typing.get_type_hints(alone, known, dict(vars(base)), include_extras=with_extras)
            except NameError:
                found[name] = Any
    return found


def short(value: object) -> str:
    """Return a value as a message shows it."""
    return reprlib.repr(value)[:200]


def _first_that_fits(value: Any, hints: tuple[Any, ...], from_text: bool) -> Any:
    reasons = []
    for hint in hints:
        try:
            return typed(value, hint, from_text=from_text)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(" or ".join(reasons))


def _scalar(value: Any, kind: Any, from_text: bool) -> Any:
    if from_text and isinstance(value, str) and kind in (int, float):
        with contextlib.suppress(ValueError):  # refused below
            value = kind(value)
    if from_text and kind is str and type(value) in (int, float):
        return str(value)
    if type(value) is int and value not in _WHOLE:
        raise ValueError("expected a number of 64 bits")
    if kind is float and type(value) is int:
        return float(value)
    if kind is not Any and type(value) is not kind:
        raise ValueError(f"expected {_KINDS.get(kind, 'another type')}")
    if kind is str and NO_NAME.search(value):
        raise ValueError("expected a text without NUL and without half a character")
    return value


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "an object",
    types.NoneType: "nothing",
}


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object holds a key twice")
    return found


def _check_depth(value: Any, left: int) -> None:
    if isinstance(value, dict | list):
        if not left:
            raise ValueError(f"values nested more than {MAX_DEPTH} deep")
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, dict | list):
                _check_depth(each, left - 1)
