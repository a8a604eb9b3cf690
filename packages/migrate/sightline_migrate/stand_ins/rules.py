"""Rules of the stand-ins, for the scan and the report: they replace nothing, the stand-ins count their own use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sightline_migrate.rules.table import Kind, Rule


def as_it_is(rule: Rule, original: Any, session: Any) -> Any:
    """Leave a package that is installed unchanged (a Maker)."""
    return original


def counted_rules(module: str, whats: Mapping[str, str], kind: Kind = "adapted") -> dict[str, Rule]:
    """Return name -> rule for the names that a module of a missing package offers."""
    return {name: Rule(f"{module}.{name}", kind, as_it_is, what, module=module) for name, what in whats.items()}
