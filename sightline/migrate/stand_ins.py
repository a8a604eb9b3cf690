"""apex and pynvml, small, for scripts that import them where they are not installed."""

from __future__ import annotations

from sightline.migrate.rules import Rule


def rules() -> list[Rule]:
    return []
