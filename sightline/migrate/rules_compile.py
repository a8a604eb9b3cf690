"""Rules of the family: compile."""

from __future__ import annotations

from sightline.migrate.rules import Rule


def rules() -> list[Rule]:
    return []
