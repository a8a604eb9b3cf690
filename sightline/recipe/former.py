"""What a run keeps on resume though nobody types it again: values that its recipe had in earlier versions, and those
that were typed when it was started, where the others were decided."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sightline.files.checkpoint_folder import run_of
from sightline.recipe.recipe import MEASURED, Recipe
from sightline.recipe.settings import Origin, Settings, plain
from sightline.recipe.show import typed
from sightline.recipe.store import ORIGINS, origins_of, put, stored_in

# Fields that resume does not compare, and that say which samples there are. The others of the kind belong to one start:
# what ends it early, and how samples are read.
WHICH_SAMPLES = ("path", "split", "file_column", "label_column", "samples", "max_boxes")


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


def as_typed_before(settings: Settings, run: Path | None) -> tuple[Settings, list[str]]:
    """Return settings with what was typed when `run` was started and is not typed now, and these flags. Only for a
    recipe with a plan: the run keeps what that decided too, so that constants of the recipe are none of the run's."""
    if settings.recipe.plan is None or run is None:
        return settings, []
    stored, before, said = stored_in(run), Settings(settings.recipe, settings.run), []
    kept, origins = _kept(settings.recipe), origins_of(stored.get(ORIGINS))
    for origin in (Origin.FILE, Origin.FLAG):
        parts: dict[str, dict[str, Any]] = {}
        for name, text in origins.items():
            kind, _, because = text.partition(": ")
            if text == f"{Origin.DERIVED.name.lower()}: {MEASURED}":  # `auto` was typed
                kind = Origin.FLAG.name
            part, _, key = name.partition(".")
            value = _field(stored, name)
            if kind.upper() != origin.name or name not in kept or settings.is_typed(name) or value is None:
                continue
            parts.setdefault(part, {})[key] = value
            if name != "data.path":
                said.append(f"{because if because.startswith('--') else name} {typed(value)}")
        before = put(before, origin, parts, str(run / "config.yaml"), lambda name: origins[name].partition(": ")[2])
    return replace(settings, values={**before.values, **settings.values}), said


def _kept(recipe: Recipe) -> set[str]:
    """Return the fields that a run keeps as they were typed."""
    return {
        f"{name}.{field.name}"
        for name, part in recipe.parts.items()
        for field in fields(part)
        if field.metadata.get("decides_result", True) or (name == "data" and field.name in WHICH_SAMPLES)
    }
