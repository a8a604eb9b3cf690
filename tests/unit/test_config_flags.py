"""Flags are parsed by a parser of only the fields they name; these compare it with the parser of all fields."""

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest

from sightline import config, fields, recipes
from sightline.errors import UsageError
from sightline.named_recipe import load_recipe

NAME = "demo_classification"
FLAGS = [
    ["--train.epochs", "3", "--train.epochs=4", "--train.seed", "9223372036854775807"],
    ["--train.global_batch", "16", "--optimizer.lr", "1e-3", "--run.out", "a b"],
    ["--run.no-device-prefetch", "--run.override", "--train.deterministic"],
    ["--data.path=--train.epochs=7", "--run.test-id=", "--run.benchmark-log=x", "--train.fp32-ops"],
    ["--optimizer.kind=adamw", "--optimizer.weight-decay=0.1", "--train.fp32-ops", "fc", "conv", "--train.seed=5"],
    ["--optimizer.kind", "rmsprop", "--schedule.kind", "step", "--schedule.drop-epochs", "3", "5"],
]
REFUSED = [
    ["--help"],
    ["-h"],
    ["--train.epochs=3", "--help"],
    ["--help", "--train.epochs=x"],
    ["--trian.epochs", "3"],
    ["--train.epoch", "3"],
    ["--train.epochs"],
    ["--train.epochs", "x"],
    ["--train.epochs", "3", "4"],
    ["--train.epochs=3", "stray"],
    ["stray"],
    ["-x"],
    ["--name", "x"],
    ["--train"],
    ["--train.", "3"],
    ["--run.no-out"],
    ["--run.override=yes"],
    ["--data.path", "--train.epochs", "3"],
    ["--run.device-prefetch", "off"],
    ["--run.compile", "maybe"],
    ["--train.epochs=0"],
    ["--run.keep=0", "--train.epochs=0"],
    ["--optimizer.beta1=0.5"],
    ["--train.epochs=x", "--run.keep=0"],
]

OWN = f"""
import dataclasses

from sightline.recipes import {NAME}
from sightline.tasks.classification import Classification


@dataclasses.dataclass(frozen=True)
class Bolder(Classification):
    boldness: int = 2

    def __post_init__(self):
        if self.boldness > 2:
            raise ValueError("too bold")


def recipe():
    return dataclasses.replace({NAME}.recipe(), name="bolder", task=Bolder())
"""


def held(name: str, flags: list[str]) -> tuple[config.Recipe, config.Run]:
    default = config.untouched(name)
    return config._holding(default, config._resets(default, fields.named(flags)))


def named(name: str, flags: list[str]) -> tuple[config.Recipe, config.Run]:
    """Load a recipe with the parser of the named fields."""
    return config._parse_named(*held(name, flags), flags)


def whole(name: str, flags: list[str]) -> tuple[config.Recipe, config.Run]:
    """Load a recipe with the parser of all fields."""
    return config._parse_whole(name, *held(name, flags), flags)


def outcome(load: Any, name: str, flags: list[str]) -> tuple[str, str, str]:
    """Return what is built or raised, and what is shown on both outputs."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            found = repr(load(name, flags))
        except (SystemExit, UsageError) as error:
            found = f"{type(error).__name__}: {error}"
    return found, out.getvalue(), err.getvalue()


def restated(name: str) -> list[str]:
    """Return a flag for every field that a text can spell, with the value it has."""
    recipe = config.untouched(name)
    flags = []
    for part, value in {**config._parts(recipe), "run": config.Run()}.items():
        for field in dataclasses.fields(value):
            now = getattr(value, field.name)
            flag = f"{part}.{field.name}".replace("_", "-")
            if isinstance(now, bool):
                flags.append(f"--{flag}" if now else f"--{flag.replace('.', '.no-')}")
            elif isinstance(now, tuple):
                flags += [f"--{flag}", *map(str, now)]
            else:
                flags.append(f"--{flag}={now}")
    return flags


@pytest.mark.parametrize("name", recipes.names())
def test_every_field_of_a_recipe_is_parsed_as_by_the_whole_parser(name: str):
    flags = restated(name)
    assert len(flags) > 100
    found = named(name, flags)
    assert repr(found) == repr(whole(name, flags))
    assert found == config.load(name)


@pytest.mark.parametrize("name", recipes.names())
def test_without_flags_the_objects_are_those_that_the_whole_parser_builds(name: str):
    assert repr(config.load(name)) == repr(whole(name, []))


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_flags_give_what_the_whole_parser_gives(flags: list[str]):
    assert repr(named(NAME, flags)) == repr(whole(NAME, flags))


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_refused_flags_and_help_are_left_to_the_whole_parser(flags: list[str]):
    with pytest.raises((SystemExit, UsageError, ValueError)):
        named(NAME, flags)


@pytest.mark.parametrize("flags", [REFUSED[0], ["--train.epochs", "x"], ["--run.keep=0", "--train.epochs=0"]])
def test_errors_and_help_are_shown_once_and_by_the_whole_parser(flags: list[str]):
    found = outcome(config.load, NAME, flags)
    assert found == outcome(whole, NAME, flags)
    assert found[0].startswith(("SystemExit", "UsageError"))


def test_a_part_of_ones_own_that_raises_a_value_error_is_refused_as_by_the_whole_parser(tmp_path: Path):
    path = tmp_path / "bolder.py"
    path.write_text(OWN)
    found = outcome(config.load, str(path), ["--task.boldness=3"])
    assert found == outcome(whole, str(path), ["--task.boldness=3"])
    assert "too bold" in found[2] and found[0] == "SystemExit: 2"
    assert config.load(str(path), ["--task.boldness=1"])[0].task.boldness == 1


@pytest.mark.parametrize("command", ["check", "benchmark", "inspect", "launch"])
def test_short_flags_mean_the_same_to_every_command(command: str):
    recipe, _ = load_recipe(command, ["demo_classification", "--batch-size", "8", "--lr=0.5"])
    assert (recipe.train.global_batch, recipe.optimizer.lr) == (8, 0.5)
