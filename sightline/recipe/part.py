"""What all parts of a recipe share: rules beside the fields, checked when a part is made.

    bn_momentum: Annotated[float, Above(0), AtMost(1, "this is torch's momentum: Keras's 0.9 is 0.1 here")] = 0.1

Choices come from Literal, limits from Annotated; what several fields must agree on is the part's `check()`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sightline.errors import UsageError
from sightline.files.typed_json import hints_of


@dataclass(frozen=True)
class Limit:
    """One end of the range of a number; of a tuple, of each of its numbers. `remedy` is what a user could do."""

    bound: float
    remedy: str = ""

    def holds(self, value: float) -> bool:
        """Return whether a value is within this limit; never for NaN."""
        raise NotImplementedError


class AtLeast(Limit):
    """The smallest value, which is allowed."""

    def holds(self, value: float) -> bool:
        """Return whether the value is the bound or more."""
        return value >= self.bound


class Above(Limit):
    """The lower end of the range, which is not allowed."""

    def holds(self, value: float) -> bool:
        """Return whether the value is more than the bound."""
        return value > self.bound


class AtMost(Limit):
    """The largest value, which is allowed."""

    def holds(self, value: float) -> bool:
        """Return whether the value is the bound or less."""
        return value <= self.bound


class Below(Limit):
    """The upper end of the range, which is not allowed."""

    def holds(self, value: float) -> bool:
        """Return whether the value is less than the bound."""
        return value < self.bound


class Part:
    """A part of a recipe, a frozen dataclass. `part` is its name in flags: --model.depth."""

    part = ""

    def __post_init__(self) -> None:
        check_fields(self, f"{self.part}." if self.part else "")
        self.check()

    def check(self) -> None:
        """Raise UsageError where fields contradict each other. Call super().check() first."""

    def implied(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return values that other fields return to where a user names these: one flag switches, not one per field."""
        return {}


def not_compared(default: Any) -> Any:
    """Declare a field that does not decide the result (a path, a cache size); it is not compared on resume."""
    return dataclasses.field(default=default, metadata={"decides_result": False})


def check_fields(part: Any, prefix: str) -> None:
    """Raise UsageError for a field of a dataclass whose value is not among its choices or within its limits."""
    fields = part.__dataclass_fields__
    for name, hint in (hints_of(type(part), with_extras=True) if fields else {}).items():
        if name in fields:
            check_value(f"{prefix}{name}", getattr(part, name), hint)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise UsageError for a value that is not among the choices or within the limits of its annotation."""
    limits: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        limits = tuple(each for each in extras if isinstance(each, Limit))
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise UsageError(f"{name}={value!r} is unknown; use one of {', '.join(map(str, get_args(hint)))}")
    if isinstance(value, str) and get_origin(hint) in (Union, UnionType) and str not in get_args(hint):
        words = [word for each in get_args(hint) if get_origin(each) is Literal for word in get_args(each)]
        if value not in words:
            raise UsageError(f"{name}={value!r} is unknown; use a number or {' or '.join(words)}")
    if hint in (bool, int, float) and (value is None or isinstance(value, str)):
        raise UsageError(f"{name}={value!r} must be {'on or off' if hint is bool else 'a number'}")
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(each, float) and not math.isfinite(each) for each in numbers) or not all(
        limit.holds(each) for limit in limits for each in numbers if not isinstance(each, str)
    ):
        remedies = [limit.remedy for limit in limits if limit.remedy]
        raise UsageError("; ".join([f"{name}={value} must be {range_text(limits, hint)}", *remedies]))


def range_text(limits: tuple[Limit, ...], hint: Any) -> str:
    """Return the range that limits describe, e.g. `at least 1` or `in [0, 1)`."""
    low = next((each for each in limits if isinstance(each, AtLeast | Above)), None)
    high = next((each for each in limits if isinstance(each, AtMost | Below)), None)
    if low and high:
        begins, ends = "[" if isinstance(low, AtLeast) else "(", "]" if isinstance(high, AtMost) else ")"
        return f"in {begins}{low.bound:g}, {high.bound:g}{ends}"
    words = {AtLeast: "at least", Above: "above", AtMost: "at most", Below: "below"}
    said = " and ".join(f"{words[type(each)]} {each.bound:g}" for each in limits)
    if float not in (hint, *get_args(hint)):
        return said
    return f"a finite number, {said}" if said else "a finite number"


def refuse_foreign_fields(part: str, config: Any, fields_of_kind: Mapping[str, set[str]]) -> None:
    """Raise UsageError if a config sets a field that only another `kind` reads."""
    for kind, names in fields_of_kind.items():
        for name in sorted(names - fields_of_kind[config.kind]):
            if getattr(config, name) != config.__dataclass_fields__[name].default:
                raise UsageError(
                    f"{part}.{name}={getattr(config, name)} belongs to kind={kind}, not to kind={config.kind}; "
                    f"add --{part}.kind {kind} or leave it out"
                )


def foreign_defaults(config: Any, named: Mapping[str, Any], fields_of_kind: Mapping[str, set[str]]) -> dict[str, Any]:
    """Return the defaults of the fields that a newly named `kind` does not read; nothing where no kind is named."""
    if "kind" not in named:
        return {}
    foreign = set().union(*fields_of_kind.values()) - fields_of_kind.get(named["kind"], set())
    return {each.name: each.default for each in dataclasses.fields(config) if each.name in foreign}
