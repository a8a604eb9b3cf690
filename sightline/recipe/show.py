"""Say why values are what they are: those that differ from the recipe, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTHING = ("", (), None)  # values of a recipe that say nothing
WITHOUT_WORDS = {"model": "what the network was made for", "stored": "as the run has it", "derived": "follows others"}


def why(differing: Mapping[str, tuple[Any, Any, str]]) -> list[str]:
    """Return a line per value, e.g. `optimizer.lr 0.05, not 0.2: --lr`."""
    return [
        f"{name} {typed(value)}{f', not {typed(own)}' if own not in NOTHING else ''}: {reason(origin)}"
        for name, (value, own, origin) in differing.items()
    ]


def reason(origin: str) -> str:
    """Return an origin as people say it: `flag: --lr` is --lr."""
    kind, _, said = origin.partition(": ")
    return said or WITHOUT_WORDS.get(kind, kind)


def typed(value: Any) -> str:
    """Return a value as it is typed in flags."""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "none"
    return (
        {True: "on", False: "off", "": "none"}.get(value, str(value)) if isinstance(value, bool | str) else str(value)
    )
