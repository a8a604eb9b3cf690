"""Read flags: words of a command line become {"part.field": value}, each with the type of its field.

    --train.epochs 3   --train.epochs=3   --data.mean 0.5 0.5 0.5   --train.deterministic   --train.no-deterministic

Keywords and dicts of Python name the same fields. `options.py` reads a command's own options in the same way.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypedDict, Union, get_args, get_origin

from sightline.errors import UsageError
from sightline.files.typed_json import typed
from sightline.recipe.suggest import ALIASES, nearest, nearest_flags

SEVERAL = (tuple, list)  # fields whose values are typed behind each other
Given = Sequence[str] | Mapping[str, Any]  # ["--optimizer.lr", "0.1"] or {"optimizer.lr": 0.1}
Hints = Mapping[str, Any]  # the type of every field that can be named


class ShortFields(TypedDict, total=False):
    """The short flags as keywords of `api.train`."""

    data: str | os.PathLike[str]
    epochs: int
    batch_size: int | str
    lr: float
    out: str | os.PathLike[str]
    device: str
    workers: int
    weights: str | os.PathLike[str]
    resume: str | os.PathLike[str]


class Words:
    """The words that are left of a command line."""

    def __init__(self, words: Sequence[str]):
        self.left = list(words)

    def next(self) -> str:
        return self.left.pop(0)

    def values(self) -> list[str]:
        """Take the words up to the next flag; a negative number is not one."""
        taken = []
        while self.left and not self.left[0].startswith("--"):
            taken.append(self.next())
        return taken


def flag_of(name: str, off: bool = False) -> str:
    """Return how a user types a field: "train.global_batch" is --train.global-batch."""
    part, dot, key = name.rpartition(".")
    return f"--{part}{dot}{'no-' if off else ''}{key}".replace("_", "-")


def spellings(hints: Hints) -> dict[str, tuple[str, bool]]:
    """Return every flag of these fields: what it sets, and whether it switches that off."""
    found = {flag_of(name): (name, False) for name in hints}
    return found | {flag_of(name, off=True): (name, True) for name, hint in hints.items() if hint is bool}


def long(flag: str) -> str:
    """Return a flag with a short name written out: --lr=0.1 is --optimizer.lr=0.1."""
    name, equals, value = flag.partition("=")
    name = name.replace("_", "-")
    return ALIASES.get(name, name) + equals + value if name.startswith("--") else flag


def read(given: Given, hints: Hints, of: str = "", own: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what flags, or a dict of Python, set: values, and what set each. `of` is the command and its recipe, e.g.
    "train resnet50", and `own` the flags of the command itself, for suggestions."""
    if isinstance(given, str):
        raise UsageError(f"flags is the text '{given}'; give a list, e.g. {given.split()}, or a dict of fields")
    return _read_fields(given, hints) if isinstance(given, Mapping) else _read_words(given, hints, of, own)


def _read_words(
    given: Sequence[str], hints: Hints, of: str, own: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    known, words = spellings(hints), Words(given)
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    while words.left:
        word = words.next()
        typed_as = word.partition("=")[0]
        flag, equals, text = long(word).partition("=")
        if flag in ("-h", "--help", "--help-all"):
            raise UsageError("flags that print help are for the command line")
        if not word.startswith("--") or word == "--":
            raise UsageError(_unexpected(word, of if not values else ""))
        if flag not in known:
            raise UsageError(_unknown(flag, known, of, own))
        name, off = known[flag]
        values[name] = value_of(flag, off, hints[name], text if equals else None, words)
        said[name] = typed_as
    return values, said


def value_of(flag: str, off: bool, hint: Any, text: str | None, words: Words) -> Any:
    """Return the value of a flag: the text behind its `=`, or the words behind it. UsageError for one that the field
    cannot hold."""
    if hint is bool:
        if text is not None or (words.left and not words.left[0].startswith("-")):
            on, no = (_on(flag), flag) if off else (flag, _off(flag))
            raise UsageError(f"{on} is a switch: write it alone, or {no}")
        return not off
    if get_origin(hint) in SEVERAL:
        return _several(flag, [*([text] if text is not None else []), *words.values()], hint)
    if get_origin(hint) is dict or dataclasses.is_dataclass(hint):
        raise UsageError(f"{flag} holds more than a flag can say; set it in the recipe file")
    expected = expected_of(hint)
    if text is None and words.left and not words.left[0].startswith("--"):
        text = words.next()
    if text is None or (not text and expected):
        raise UsageError(f"{flag} needs a value" + (f", expected {expected}" if expected else ""))
    try:
        return converted(text, hint)
    except ValueError as error:
        raise UsageError(f"{flag} is '{text}', {_why(error, text, hint)}") from None


def converted(value: Any, hint: Any) -> Any:
    """Return a text or a value of Python as the type of a field; ValueError says what was expected."""
    if NoneType in get_args(hint):
        if value is None or str(value).lower() == "none":
            return None
        hint = Union[tuple(each for each in get_args(hint) if each is not NoneType)]  # noqa: UP007  # of one type: itself
    if hasattr(value, "tolist"):  # a number or an array of NumPy or torch
        value = value.tolist()
    if hint is Path:
        return Path(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool) and (hint is str or get_origin(hint) is Literal):
        value = "on" if value else "off"  # as YAML 1.1 reads these two words
    return typed(value, hint, from_text=True)


def expected_of(hint: Any) -> str:
    """Say which values a field takes; "" for any text."""
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if get_origin(hint) in SEVERAL and get_origin(arguments[0]) is Literal:
        return f"one or more of {', '.join(map(str, get_args(arguments[0])))}"
    if get_origin(hint) in SEVERAL:
        inner = arguments[0] if not _rows(hint) else get_args(arguments[0])[0]
        many = _NUMBERS.get(inner, "a word").partition(" ")[2] + "s"
        count = f"{len(arguments)} " if get_origin(hint) is tuple and arguments[-1] is not ... else ""
        return f"{count}{many}{SPACED}"
    if arguments:  # a union
        words = [", ".join(map(str, get_args(each))) or _NUMBERS.get(each, "") for each in arguments]
        return " or ".join(words) if all(words) else ""
    return _NUMBERS.get(hint, "")


SPACED = " with spaces between them"  # for words, not for Python
_NUMBERS = {int: "a whole number", float: "a number", NoneType: "none"}


def _why(error: ValueError, text: Any, hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"{error}{nearest(str(text), map(str, get_args(hint)))}"
    return f"expected {expected_of(hint)}" if get_args(hint) else str(error)


def _rows(hint: Any) -> int:
    """Return the length of the tuples within a tuple or list, which are typed one after the other; 0 if none are."""
    inner = get_args(hint)[:1]
    is_row = inner and get_origin(inner[0]) is tuple and ... not in get_args(inner[0])
    return len(get_args(inner[0])) if is_row else 0


def _several(flag: str, texts: list[str], hint: Any) -> Any:
    given: Any = texts
    if length := _rows(hint):
        given = [texts[at : at + length] for at in range(0, len(texts), length)]
    try:
        return converted(given, hint)
    except ValueError:
        given = f"is '{' '.join(texts)}'" if texts else "needs values"
        raise UsageError(f"{flag} {given}, expected {expected_of(hint)}") from None


def _off(flag: str) -> str:
    part, dot, field = flag.removeprefix("--").rpartition(".")
    return f"--{part}{dot}no-{field}"


def _on(flag: str) -> str:
    part, dot, field = flag.removeprefix("--").rpartition(".")
    return f"--{part}{dot}{field.removeprefix('no-')}"


def _unexpected(word: str, of: str) -> str:
    """Say that a word is not a flag; right behind a recipe it is usually the folder of the data."""
    recipe = of.partition(" ")[2]
    if recipe and word != "--":
        return f"unexpected '{word}' after {recipe}; flags come next, e.g. --data.path {word}"
    return f"unexpected '{word}'; every flag begins with -- and has its value behind it, e.g. --train.epochs 3"


def _unknown(flag: str, known: Collection[str], of: str, own: Collection[str]) -> str:
    near = " or ".join(nearest_flags(flag, known, own))
    hint = f" did you mean {near}?" if near else ""
    if not of:
        return f"unknown flag {flag};{hint}".rstrip(";")
    command, _, recipe = of.partition(" ")
    more = f"; `sightline {command} --help` shows those of {command}" if command != "train" else ""
    return (
        f"unknown flag {flag} of {of};{hint} `sightline train {recipe} --help` shows the usual ones, --help-all every "
        f"one{more}"
    )


def _read_fields(given: Mapping[str, Any], hints: Hints) -> tuple[dict[str, Any], dict[str, str]]:
    """Read fields by dotted names or by the short ones: {"lr": 0.1, "run.workers": 0}. None is as if not given."""
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name, value in given.items():
        if value is None:
            continue
        key = long(f"--{name}").removeprefix("--").replace("-", "_")
        if "." not in key:
            short = ", ".join(each.removeprefix("--").replace("-", "_") for each in ALIASES)
            raise UsageError(
                f"unknown field '{name}'; the short names are {short}, all others are dotted and go into a dict: "
                '{"optimizer.kind": "adamw"}'
            )
        if key not in hints:
            raise UsageError(f"unknown field '{key}'{nearest(key, hints, QUOTED)}")
        hint = hints[key]
        try:
            values[key] = converted(value, hint)
        except ValueError as error:
            why = _why(error, value, hint).removesuffix(SPACED)
            raise UsageError(f"{name} is {value!r}, {why}") from None
        said[key] = f"{name}="
    return values, said


QUOTED = "'{}'"


def fields_among(given: Given, hints: Hints) -> dict[str, Any]:
    """Return the fields of these hints that flags set, among flags of fields that are not known yet."""
    if isinstance(given, Mapping):
        parts = {name.partition(".")[0] for name in hints}
        return _read_fields(
            {name: value for name, value in given.items() if long(f"--{name}")[2:].partition(".")[0] in parts}, hints
        )[0]
    known, words, values = spellings(hints), Words(given), {}
    while words.left:
        flag, equals, text = long(words.next()).partition("=")
        if flag in known:
            name, off = known[flag]
            values[name] = value_of(flag, off, hints[name], text if equals else None, words)
    return values
