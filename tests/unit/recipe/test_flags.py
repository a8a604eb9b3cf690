"""Flags: every field of every recipe, right and wrong words, and the same fields as keywords of Python."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sightline import config, recipes
from sightline.errors import UsageError
from sightline.recipe.recipe import Run

NAME = "demo_classification"
BASE = recipes.find(NAME).recipe()
GIVEN: list[tuple[list[str], dict[str, Any]]] = [  # words, and the fields that they set
    (["--train.epochs", "3", "--train.epochs=4", "--train.seed", "9223372036854775807"],
     {"train.epochs": 4, "train.seed": 2**63 - 1}),
    (["--train.global_batch", "16", "--optimizer.lr", "1e-3", "--run.out", "a b"],
     {"train.global_batch": 16, "optimizer.lr": 0.001, "run.out": "a b"}),
    (["--run.no-device-prefetch", "--run.override", "--train.deterministic"],
     {"run.device_prefetch": False, "run.override": True, "train.deterministic": True}),
    (["--data.path=--train.epochs=7", "--run.test-id=", "--run.benchmark-log=x", "--train.fp32-ops"],
     {"data.path": "--train.epochs=7", "run.benchmark_log": "x"}),
    (["--data.mean", "-1", "-.5", "1e-3", "--train.fp32-ops", "fc", "conv"],
     {"data.mean": (-1.0, -0.5, 0.001), "train.fp32_ops": ("fc", "conv")}),
    (["--train.global-batch", "auto"], {"train.global_batch": "auto"}),
    (["--lr=0.5", "--batch-size", "8", "--workers", "-1", "--out=x=y"],
     {"optimizer.lr": 0.5, "train.global_batch": 8, "run.workers": -1, "run.out": "x=y"}),
]  # fmt: skip
REFUSED = [
    ["--help"],
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


def changed(fields: dict[str, Any]) -> tuple[config.Recipe, Run]:
    """The demo's objects with these fields, by dataclasses.replace alone."""
    made: dict[str, Any] = {**BASE.parts, "run": Run()}
    for name, value in fields.items():
        part, _, field = name.partition(".")
        made[part] = dataclasses.replace(made[part], **{field: value})
    run = made.pop("run")
    return dataclasses.replace(BASE, **made), run


def restated(name: str) -> list[str]:
    """A flag for every field of a recipe, with the value it has."""
    recipe = recipes.find(name).recipe()
    flags = []
    for part, value in {**recipe.parts, "run": Run()}.items():
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
def test_every_field_of_a_recipe_can_be_typed(name: str):
    flags = restated(name)
    assert len(flags) > 100
    found, run = config.load(name, flags)
    assert (found, run) == (recipes.find(name).recipe(), Run())
    assert set(found.origins) >= {f"{part}.{field.name}" for part, made in found.parts.items()
                                  for field in dataclasses.fields(made)}  # fmt: skip


@pytest.mark.parametrize(("words", "fields"), GIVEN, ids=lambda value: " ".join(value))
def test_words_set_their_fields_and_no_others(words: list[str], fields: dict[str, Any]):
    assert config.load(NAME, words) == changed(fields)


@pytest.mark.parametrize(("words", "fields"), GIVEN, ids=lambda value: " ".join(value))
def test_the_same_fields_can_be_given_in_python(words: list[str], fields: dict[str, Any]):
    assert config.load(NAME, fields) == changed(fields)
    texts = {name: str(value) for name, value in fields.items() if type(value) in (int, float)}
    assert config.load(NAME, fields | texts) == changed(fields)


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_words_that_cannot_be_read_are_a_usage_error(words: list[str]):
    with pytest.raises(UsageError):
        config.load(NAME, words)


def test_a_kind_that_is_typed_takes_back_what_only_the_old_kind_reads():
    assert (BASE.optimizer.kind, BASE.optimizer.nesterov) == ("sgd", True)
    found = config.load(NAME, ["--optimizer.kind=adamw", "--optimizer.weight-decay=0.1"])[0].optimizer
    assert found == dataclasses.replace(BASE.optimizer, kind="adamw", weight_decay=0.1, nesterov=False)
    table = config.load("resnet50", ["--schedule.kind", "step", "--schedule.drop-epochs", "3", "5"])[0].schedule
    assert (table.kind, table.drop_epochs, table.table_epochs, table.table_rates) == ("step", (3, 5), (), ())


def test_a_part_of_ones_own_that_raises_a_value_error_is_refused(tmp_path: Path):
    path = tmp_path / "bolder.py"
    path.write_text(OWN)
    with pytest.raises(UsageError, match="task: too bold"):
        config.load(str(path), ["--task.boldness=3"])
    assert config.load(str(path), ["--task.boldness=1"])[0].task.boldness == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", ["check", "benchmark", "inspect", "launch"])
def test_short_flags_mean_the_same_to_every_command(command: str):
    told = config.asked(command, ["demo_classification", "--batch-size", "8", "--lr=0.5"])
    recipe = told.resolved().recipe
    assert (recipe.train.global_batch, recipe.optimizer.lr) == (8, 0.5)
