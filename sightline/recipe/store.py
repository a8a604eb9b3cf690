"""Recipes and runs as plain values: config.yaml, the recipe in a checkpoint, and what changed between two of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sightline.errors import UsageError
from sightline.files.typed_json import read_json, short, typed
from sightline.recipe.flags import QUOTED, converted
from sightline.recipe.recipe import Recipe, Run
from sightline.recipe.settings import Origin, Settings, plain
from sightline.recipe.show import reason
from sightline.recipe.suggest import nearest

ORIGINS = "origins"  # beside the parts of a config file
RECIPES_BF16 = "bf16_or_fp32"  # how versions before origins stored a bf16 that nobody had typed


def to_json(recipe: Recipe) -> dict[str, Any]:
    """Return plain values of every field, under the names that users type."""
    return {"recipe": recipe.name, **{name: plain(part) for name, part in recipe.parts.items()}}


def dump(recipe: Recipe, run: Run) -> str:
    """Return the text of config.yaml; a recipe loaded from it is the same. A consent to resume although something
    changed is for one start, so it is not kept."""
    from sightline.files import plain_yaml

    origins = {ORIGINS: dict(recipe.origins)} if recipe.origins else {}
    return plain_yaml.dump({**to_json(recipe), "run": {**plain(run), "override": False}, **origins})


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
        f"{key[:80]}: {_shown(before.get(key, 'absent'))[:200]} -> {_shown(after.get(key, 'absent'))}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and key not in ignored
    ]


def _shown(value: Any) -> str:
    return str(value) if value != "" else "(none)"


def put_file(settings: Settings, path: Path) -> Settings:
    """Return settings with the fields of a config file; of one that a run wrote, each also says what the run had it
    from. UsageError names the file."""
    values, origins = _read(path)
    said = {name: f"{path}, there {reason(text)}" for name, text in origins.items()}
    return put(settings, Origin.FILE, values, str(path), lambda name: said.get(name, str(path)))


def put_run(settings: Settings, path: Path) -> Settings:
    """Return settings with what a run was started with, as its config.yaml has it."""
    values, origins = _read(path)
    return put(settings, Origin.STORED, values, str(path), lambda name: origins.get(name, ""))


def with_decisions_of(settings: Settings, run: Path) -> Settings:
    """Return settings with what the plan of their recipe decided for a run."""
    values = stored_in(run)
    origins = origins_of(values.get(ORIGINS, {}))
    prefix = Origin.DECIDED.name.lower()
    decided: dict[str, dict[str, Any]] = {}
    for name in (name for name, said in origins.items() if said.partition(":")[0] == prefix):
        part, _, key = name.partition(".")
        fields = values.get(part)
        if isinstance(fields, dict) and key in fields:
            decided.setdefault(part, {})[key] = fields[key]
    where = str(run / "config.yaml")
    return put(settings, Origin.STORED, decided, where, lambda name: origins.get(name, ""))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from sightline.files.plain_yaml import read_yaml  # here: it takes 10 ms, and most starts read none

    values = read_yaml(path, may_wait=True)
    values.pop("recipe", None)
    return values, origins_of(values.pop(ORIGINS, {}))


def stored_in(run: Path) -> dict[str, Any]:
    """Return what the config.yaml of a run folder holds; {} where it cannot be read."""
    from sightline.files.plain_yaml import read_yaml

    try:
        return read_yaml(run / "config.yaml")
    except UsageError:
        return {}


def packages_of(run: Path | None) -> dict[str, str]:
    """Return the packages of the parts that a run was trained with, as `plugins.loaded` gave them; {} where they cannot
    be read."""
    try:
        values = typed(read_json(run / "environment.json", 2**20), dict[str, Any]) if run else {}
        return typed(values.get("plugins", {}), dict[str, str])
    except (OSError, ValueError):
        return {}


def put(
    settings: Settings, origin: Origin, parts: Mapping[str, Any], where: str, said: Callable[[str], str]
) -> Settings:
    """Return settings with the fields of parts that were read from `where`, each as the type that its part declares."""
    values = _fields_of(parts, settings, where)
    if isinstance(parts.get("train"), dict) and parts["train"].get("precision") == RECIPES_BF16:
        train = dataclasses.replace(settings.recipe.train, precision="bf16")
        settings = dataclasses.replace(settings, recipe=dataclasses.replace(settings.recipe, train=train))
    return settings.put(origin, values, {name: said(name) for name in values})


def _fields_of(values: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
    hints, found = settings.hints(), {}
    made = {f"{name}.{each.name}" for name, part in settings.parts.items() for each in dataclasses.fields(part)}
    for part, fields in values.items():
        if not isinstance(part, str) or not isinstance(fields, dict):
            raise UsageError(f"{where}: expected `{short(part)}` to hold fields, e.g. `train: {{epochs: 10}}`")
        for field, value in fields.items():
            key = f"{part}.{field}"
            if key in made and key not in hints:  # field(init=False), which the part computes
                continue
            if not isinstance(field, str) or key not in hints:
                same = [name for name in hints if name.endswith(f".{field}")]  # train.lr is optimizer.lr
                near = f"; did you mean '{same[0]}'?" if same else nearest(key, hints, QUOTED)
                raise UsageError(f"{where}: unknown key '{key[:80]}'{near}")
            if key == "train.precision" and value == RECIPES_BF16:
                continue  # the recipe's own
            try:
                found[key] = converted(value, hints[key])
            except ValueError as error:
                like = f"write it like its default, {settings.own(key)!r}"
                raise UsageError(f"{where}: '{key}' is {short(value)}; {error}; {like}") from None
    return found


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
