"""Settings of a run: one value for each field of its parts, with where it comes from.

The command line, a YAML file, keywords of Python, what lies at --data.path, what a network was made for, and a stored
run are layers of one form, {"part.field": value}. A later origin wins, and `build` makes the frozen objects once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from sightline.errors import UsageError
from sightline.files.typed_json import hints_of
from sightline.recipe.recipe import PARTS, Recipe, Run


class Origin(IntEnum):
    """Where a value comes from. A user's own word wins over what is decided for them."""

    RECIPE = 0
    DECIDED = 1  # by the recipe's plan, at the first start of a run
    STORED = 2  # by a run
    DERIVED = 3  # from other values
    DATA = 4
    MODEL = 5
    FILE = 6
    FLAG = 7


IN_PYTHON = "set in Python"


@dataclass(frozen=True)
class Value:
    """The value of a field. `because` is what set it, for messages and the report: "--lr", "8 + 2 images in pets"."""

    value: Any
    origin: Origin
    because: str = ""
    is_implied: bool = False  # returned to a default where the user named another field


@dataclass(frozen=True)
class Settings:
    """All fields of a recipe and a run: the parts as the recipe made them, and what replaces their values."""

    recipe: Recipe
    run: Run
    values: Mapping[str, Value] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, Any]:
        """The parts as the recipe made them, by name."""
        return {**self.recipe.parts, "run": self.run}

    @classmethod
    def of(cls, recipe: Recipe, run: Run) -> Settings:
        """Return the settings that made these objects, as their origins say; what a plan decided is open again."""
        given, settings = cls(recipe, run), cls(recipe.undone(), run)
        known, values = settings.hints(), {}
        for name, text in recipe.origins.items():
            origin, _, because = text.partition(": ")
            if name in known and recipe.resolved.get(name, given.own(name)) != given.own(name):
                values[name] = Value(settings.own(name), Origin.FLAG, IN_PYTHON)
            elif name in known and origin.upper() in Origin.__members__ and name not in recipe.undecided:
                values[name] = Value(settings.own(name), Origin[origin.upper()], because)
        return replace(settings, values=values)

    def typed_beside(self, base: Recipe) -> Settings:
        """Return settings in which values that differ from a recipe of ours count as set by the user, in Python."""
        values = dict(self.values)
        for name in self.hints():
            part, _, key = name.partition(".")
            of_base = getattr(base, part, self.run)
            if name not in values and getattr(of_base, key, None) != self.own(name):
                values[name] = Value(self.own(name), Origin.FLAG, IN_PYTHON)
        return replace(self, values=values)

    def hints(self) -> dict[str, Any]:
        """Return the type of every field: {"train.epochs": int}."""
        found: dict[str, Any] = {}
        for name, part in self.parts.items():
            of_part = hints_of(type(part))
            found |= {f"{name}.{each.name}": of_part[each.name] for each in dataclasses.fields(part) if each.init}
        return found

    def put(self, origin: Origin, given: Mapping[str, Any], because: str | Mapping[str, str] = "") -> Settings:
        """Return settings with another layer, whose values have the types of their fields. Where a later origin has
        set a field already, that stays. `because` may be one text for each field."""
        values = dict(self.values)
        for name, part in self.parts.items():
            own = {key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{name}.")}
            implied = part.implied(own) if own and hasattr(part, "implied") else {}
            reasons = {key: because if isinstance(because, str) else because.get(f"{name}.{key}", "") for key in own}
            of_all = ", ".join(dict.fromkeys(filter(None, reasons.values())))
            for key, value in {**implied, **own}.items():
                old = values.get(f"{name}.{key}")
                if old is None or old.origin <= origin:
                    values[f"{name}.{key}"] = Value(value, origin, reasons.get(key, of_all), key not in own)
        return replace(self, values=values)

    def own(self, name: str) -> Any:
        """Return the recipe's own value of "part.field"."""
        part, _, key = name.partition(".")
        return getattr(self.parts[part], key)

    def __getitem__(self, name: str) -> Value:
        """Return the value of "part.field"."""
        return self.values.get(name) or Value(self.own(name), Origin.RECIPE)

    def is_typed(self, name: str) -> bool:
        """Return whether the user set a field, in a file or as a flag: then nothing else may decide it."""
        return self[name].origin >= Origin.FILE if name in self.values else False

    def typed_in(self, part: str) -> set[str]:
        """Return the fields of a part that the user set."""
        return {name.partition(".")[2] for name in self.values if name.startswith(f"{part}.") and self.is_typed(name)}

    def part(self, name: str) -> Any:
        """Return one part as these settings make it, which checks it."""
        own = {key.partition(".")[2]: each.value for key, each in self.values.items() if key.startswith(f"{name}.")}
        try:
            return replace(self.parts[name], **own)
        except (TypeError, ValueError) as error:  # of a part of the user's own
            raise UsageError(f"{name}: {error}") from error

    def build(self) -> tuple[Recipe, Run]:
        """Return the frozen objects; each part checks itself, in the order of a recipe."""
        parts = {name: self.part(name) for name in PARTS}
        run, values = self.part("run"), {name: each.value for name, each in self.values.items()}
        open_again = {name for name, each in self.values.items() if each.origin is Origin.DECIDED}
        if "data.size" in open_again:  # the sizes that follow it
            open_again |= {n for n, v in self.values.items() if v.origin is Origin.DERIVED and n.startswith("data.")}
        undecided = {name: self.own(name) for name in self.values if name in open_again}
        made = replace(self.recipe, **parts, origins=self.origins(), resolved=values, undecided=undecided)
        return made, run

    def origins(self) -> dict[str, str]:
        """Return where values come from that are not the recipe's own, e.g. {"optimizer.lr": "flag: --lr"}. What a run
        stored keeps the origin that it had then."""
        return {
            name: each.because if each.origin is Origin.STORED and each.because else _text(each)
            for name, each in self.values.items()
            if not each.is_implied or each.value != self.own(name)
        }

    def differing(self) -> dict[str, tuple[Any, Any, str]]:
        """Return the values that are not those of the recipe, each with the recipe's and its origin."""
        origins = self.origins()
        return {
            name: (self[name].value, self.own(name), origins[name])
            for name in self.hints()
            if name in origins and self[name].value != self.own(name)
        }


def _text(value: Value) -> str:
    origin = value.origin.name.lower()
    return f"{origin}: {value.because}" if value.because else origin


def plain(part: Any) -> dict[str, Any]:
    """Return the fields of a part as plain values, under the names that users type."""
    values = {}
    for each in dataclasses.fields(part):
        value = getattr(part, each.name)
        values[each.name] = _lists(value)
    return values


def _lists(value: Any) -> Any:
    return [_lists(each) for each in value] if isinstance(value, tuple | list) else value
