"""Former defaults of recipes: a run that was started with them keeps them on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline.errors import UsageError
from sightline.files.checkpoint_folder import run_of
from sightline.files.plain_yaml import read_yaml
from sightline.recipe.settings import Origin, Settings, plain

# Absolute rates for batch 2,048, used at any batch.
RESNET50: dict[str, Any] = {
    "optimizer.lr_for_batch": 0,
    "schedule.kind": "table",
    "schedule.unit": "step",
    "schedule.drop_epochs": (),
    "schedule.warmup_epochs": 0.0,
    "schedule.warmup_factor": 0.0,
    "schedule.table_epochs": (1, 2, 3, 4, 30, 60, 80),
    "schedule.table_rates": (0.275, 0.45, 0.625, 0.8, 0.08, 0.008, 0.0008),
}
FORMER: dict[str, dict[str, Any]] = {"resnet50": RESNET50}


def as_started(settings: Settings, folder: Path, resume: str) -> Settings:
    """Return the settings with the recipe's former defaults if the run in `folder`, or else that of `resume`, was
    started with them."""
    former = {
        name: value
        for name, value in FORMER.get(settings.recipe.name, {}).items()
        if settings[name].origin is Origin.RECIPE and value != settings.own(name)
    }
    stored = (_stored(folder) or _stored(run_of(Path(resume)))) if former else {}
    if stored.get("recipe") != settings.recipe.name:
        return settings
    now = {name: plain(part) for name, part in settings.recipe.parts.items()}
    if any(_field(stored, name) in (None, _field(now, name)) for name in former):
        return settings
    return settings.put(Origin.STORED, former)


def _stored(folder: Path) -> dict[str, Any]:
    try:
        return dict(read_yaml(folder / "config.yaml"))
    except UsageError:
        return {}


def _field(values: dict[str, Any], name: str) -> Any:
    part, _, key = name.partition(".")
    fields = values.get(part)
    return fields.get(key) if isinstance(fields, dict) else None
