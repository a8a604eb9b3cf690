"""Rules of the family: tensors."""

from __future__ import annotations

from sightline.migrate.rules import Rule


def rules() -> list[Rule]:
    return []
