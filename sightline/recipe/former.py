"""Values that a recipe had in earlier versions: a run that was started with them keeps them on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline.files.checkpoint_folder import run_of
from sightline.recipe.settings import Origin, Settings, plain
from sightline.recipe.store import stored_in


def as_started(settings: Settings, folder: Path, resume: str) -> Settings:
    """Return the settings with the recipe's former values if the run in `folder`, or else that of `resume`, was
    started with them."""
    former = {
        name: value
        for name, value in settings.recipe.former.items()
        if settings[name].origin is Origin.RECIPE and value != settings.own(name)
    }
    stored = (stored_in(folder) or stored_in(run_of(Path(resume)))) if former else {}
    if stored.get("recipe") != settings.recipe.name:
        return settings
    now = {name: plain(part) for name, part in settings.recipe.parts.items()}
    if any(_field(stored, name) in (None, _field(now, name)) for name in former):
        return settings
    return settings.put(Origin.STORED, former)


def _field(values: dict[str, Any], name: str) -> Any:
    part, _, key = name.partition(".")
    fields = values.get(part)
    return fields.get(key) if isinstance(fields, dict) else None
