"""Fields that only some kinds of a part read: naming another kind returns them to their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def foreign_defaults(config: Any, named: Mapping[str, Any], fields_of_kind: Mapping[str, set[str]]) -> dict[str, Any]:
    """Return the defaults of the fields that a newly named kind does not read; nothing where no kind is named."""
    if "kind" not in named:
        return {}
    foreign = set().union(*fields_of_kind.values()) - fields_of_kind.get(named["kind"], set())
    return {each.name: each.default for each in fields(config) if each.name in foreign}
