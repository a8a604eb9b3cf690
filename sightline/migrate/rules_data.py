"""Rules of the family: data."""

from __future__ import annotations

from sightline.migrate.rules import Rule


def rules() -> list[Rule]:
    return []
