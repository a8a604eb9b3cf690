"""Every limit of every field of every part, whatever class it was declared in: what is beyond is refused by name."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

import sightline
from sightline.errors import UsageError
from sightline.recipe.part import Above, AtLeast, AtMost, Below, Limit, Part

# What lies just outside and just inside a limit, by what its name says.
OUTSIDE = {AtLeast: -1, Above: 0, AtMost: 1, Below: 0}


def parts() -> list[type[Part]]:
    for module in pkgutil.walk_packages(sightline.__path__, "sightline."):
        if module.name.endswith("config") or ".augment" in module.name or ".recipe" in module.name:
            importlib.import_module(module.name)
    found, left = [], [Part]
    while left:
        kinds = left.pop().__subclasses__()
        left += kinds
        found += [kind for kind in kinds if kind.__module__.startswith("sightline.")]
    return sorted(set(found), key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def made(kind: type[Part]) -> Part | None:
    """A part with its own defaults, if they are enough."""
    try:
        return kind()
    except (UsageError, TypeError):
        return None


def limits(kind: type[Part]) -> Iterator[tuple[str, Limit, Any]]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is Annotated and name in kind.__dataclass_fields__:  # type: ignore[attr-defined]
            base, *extras = get_args(hint)
            yield from ((name, each, base) for each in extras if isinstance(each, Limit))


def as_field(base: Any, number: float, old: Any) -> Any:
    """A value of the field's kind: tuples have it at every place."""
    if isinstance(old, tuple) or get_origin(base) is tuple:
        return (number,) * max(1, len(old) if isinstance(old, tuple) else 1)
    return int(number) if base is int and number == int(number) else number


PARTS = [kind for kind in parts() if made(kind) is not None]


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__qualname__)
def test_what_is_beyond_a_limit_is_refused_by_name(kind: type[Part]):
    part = made(kind)
    for name, limit, base in limits(kind):
        if math.isinf(limit.bound):
            continue
        beyond = as_field(base, limit.bound + OUTSIDE[type(limit)], getattr(part, name))
        with pytest.raises(UsageError, match=rf"\b{name}\b"):
            dataclasses.replace(part, **{name: beyond})  # type: ignore[type-var]


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__qualname__)
def test_an_unknown_word_is_refused_by_name(kind: type[Part]):
    part = made(kind)
    for name, hint in get_type_hints(kind).items():
        if get_origin(hint) is Literal and name in kind.__dataclass_fields__:  # type: ignore[attr-defined]
            with pytest.raises(UsageError, match=rf"\b{name}='nobody' is unknown"):
                dataclasses.replace(part, **{name: "nobody"})  # type: ignore[type-var]


def test_most_parts_have_limits():
    assert sum(bool(list(limits(kind))) for kind in PARTS) >= 10 and len(PARTS) >= 12
