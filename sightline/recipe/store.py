"""Recipes and runs as plain values: config.yaml, the recipe in a checkpoint, and what changed between two of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sightline.errors import UsageError
from sightline.files.typed_json import short
from sightline.recipe.flags import converted
from sightline.recipe.recipe import Recipe, Run
from sightline.recipe.settings import Settings, plain
from sightline.recipe.suggest import nearest

ORIGINS = "origins"  # beside the parts of a config file
RECIPES_BF16 = "bf16_or_fp32"  # how versions before origins stored a bf16 that nobody had typed


def to_json(recipe: Recipe) -> dict[str, Any]:
    """Return plain values of every field, under the names that users type."""
    return {"recipe": recipe.name, **{name: plain(part) for name, part in recipe.parts.items()}}


def dump(recipe: Recipe, run: Run) -> str:
    """Return the text of config.yaml; a recipe loaded from it is the same."""
    from sightline.files import plain_yaml

    origins = {ORIGINS: dict(recipe.origins)} if recipe.origins else {}
    return plain_yaml.dump({**to_json(recipe), "run": plain(run), **origins})


def leaves(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Return every field under its dotted name, e.g. for TensorBoard's hparams."""
    return dict(_leaves({**to_json(recipe), "run": plain(run)}))


def diff(stored: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Return one line per field that decides the result and has changed since `stored` was written.

    A field that `stored` does not know was added by a later version; at its default it changes nothing.
    """
    before, after = dict(_leaves(stored)), dict(_leaves(to_json(recipe)))
    if before.get("train.precision") == RECIPES_BF16:
        before["train.precision"] = after["train.precision"] if after["train.precision"] != "fp16" else "bf16"
    ignored = set()
    for name, part in recipe.parts.items():
        for field in dataclasses.fields(part):
            key = f"{name}.{field.name}"
            is_new = key not in before and getattr(part, field.name) == field.default
            if is_new or not field.metadata.get("decides_result", True):
                ignored.add(key)
    return [
        f"{key[:80]}: {str(before.get(key, 'absent'))[:200]} -> {after.get(key, 'absent')}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and key not in ignored
    ]


def read_file(path: Path, settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a config file, each with the type that its part declares, and where the run that wrote it
    had them from. UsageError names the file."""
    from sightline.files.plain_yaml import read_yaml  # here: it takes 10 ms, and most starts read none

    values = read_yaml(path)
    values.pop("recipe", None)
    origins = values.pop(ORIGINS, {})
    return fields_of(values, settings, str(path)), origins_of(origins)


def fields_of(values: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
    """Return {"part.field": value} of parts that were read from `where`."""
    hints, found = settings.hints(), {}
    for part, fields in values.items():
        if not isinstance(part, str) or not isinstance(fields, dict):
            raise UsageError(f"{where}: expected `{short(part)}` to hold fields, e.g. `train: {{epochs: 10}}`")
        for field, value in fields.items():
            key = f"{part}.{field}"
            if not isinstance(field, str) or key not in hints:
                raise UsageError(f"{where}: unknown key '{key[:80]}'{nearest(key, hints, QUOTED)}")
            if key == "train.precision" and value == RECIPES_BF16:
                continue  # the recipe's own
            try:
                found[key] = converted(value, hints[key])
            except ValueError as error:
                like = f"write it like its default, {settings.own(key)!r}"
                raise UsageError(f"{where}: '{key}' is {short(value)}; {error}; {like}") from None
    return found


QUOTED = "'{}'"


def origins_of(values: object) -> dict[str, str]:
    """Return origins that were read from a file; none where they cannot be any."""
    return {str(name): str(said) for name, said in values.items()} if isinstance(values, dict) else {}


def at_absolute_paths(recipe: Recipe, run: Run) -> tuple[Recipe, Run]:
    """Return what a run stores, so that it finds its data and its folder from any directory. Fields that are compared
    on resume (model.weights, data.static) stay as they were typed."""
    places = {"out": run.out or f"runs/{recipe.name}", "benchmark_log": run.benchmark_log}
    places["rank_logs"] = run.rank_logs
    if run.resume not in ("auto", "never"):
        places["resume"] = run.resume
    absolute: dict[str, Any] = {name: os.path.abspath(path) for name, path in places.items() if path}
    data = recipe.data.at_absolute_path()
    return dataclasses.replace(recipe, data=data), dataclasses.replace(run, **absolute)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
