"""Rules of stand-ins: nothing is replaced, the stand-ins count their own use; the scan and the report read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sightline.migrate.rules.table import Kind, Rule


def as_it_is(rule: Rule, original: Any, session: Any) -> Any:
    """A Maker: a package that is really there is left alone."""
    return original


def counted_rules(module: str, whats: Mapping[str, str], kind: Kind = "adapted") -> dict[str, Rule]:
    """name -> its rule, for what a module of a missing package offers."""
    return {name: Rule(f"{module}.{name}", kind, as_it_is, what, module=module) for name, what in whats.items()}
