"""Parts that users write in their own recipe files: types that flags can and cannot say, and parts without our base."""

from pathlib import Path

import pytest

from sightline import cli, config
from sightline.errors import UsageError
from sightline.recipe import store

HEAD = """
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from sightline.recipes import demo_classification
from sightline.tasks.classification import Classification

if TYPE_CHECKING:
    from torch import Tensor
"""
TASK = """

@dataclass(frozen=True)
class Own(Classification):
    names: list[int] = field(default_factory=list)
    pairs: tuple[tuple[int, int], ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    mode: Literal["a", "b"] | None = None
    weights: Tensor | None = None
    derived: int = field(default=3, init=False)


def recipe():
    return replace(demo_classification.recipe(), name="own", task=Own())
"""
OPTIMIZER = """

@dataclass(frozen=True)
class Plain:
    lr: float = 0.4

    def base_lr(self, batch, ranks):
        return self.lr


def recipe():
    return replace(demo_classification.recipe(), name="own", optimizer=Plain())
"""
SMALL = (
    "--train.precision=fp32 --model.width=4 --data.size=16 --epochs=1 --workers=0 --device=cpu --run.report=off".split()
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(HEAD + TASK)
    return tmp_path / "own.py"


def test_lists_and_pairs_are_typed_one_after_the_other(own: Path):
    task = config.load(str(own), ["--task.names", "3", "4", "--task.pairs", "1", "2", "3", "4"])[0].task
    assert (task.names, task.pairs) == ([3, 4], ((1, 2), (3, 4)))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="--task.pairs is '1 2 3', expected whole numbers"):
        config.load(str(own), ["--task.pairs", "1", "2", "3"])
    with pytest.raises(UsageError, match="--task.table holds more than a flag can say; set it in the recipe file"):
        config.load(str(own), ["--task.table", "a=1"])
    assert config.load(str(own), ["--task.mode", "b"])[0].task.mode == "b"  # type: ignore[attr-defined]


def test_a_type_that_cannot_be_found_does_not_stop_the_others(own: Path, capsys: pytest.CaptureFixture[str]):
    """As under `if TYPE_CHECKING`, which files without torch need."""
    assert cli.main(["train", str(own), "--help-all", "task"]) == 0
    said = capsys.readouterr().out
    assert "--task.names INT ..." in said and "--task.weights" in said and "--task.derived" not in said


def test_its_run_is_scored_inspected_and_resumed(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With nested values and a field that the part computes in its files."""
    data = [
        "--data",
        "synthetic:classes=2,samples=16,size=16",
        "--out",
        str(tmp_path / "run"),
        "--task.pairs",
        "1",
        "2",
    ]
    train = ["train", str(own), *data, *SMALL]
    assert cli.main(train) == 0, capsys.readouterr().err
    assert cli.main([*train[:-1], "--run.report=off", "--epochs=2"]) == 0, capsys.readouterr().err
    assert cli.main(["evaluate", str(tmp_path / "run"), "--recipe", str(own)]) == 0, capsys.readouterr().err
    settings = config.of_run("inspect", tmp_path / "run", recipe_file=str(own))
    assert settings["task.pairs"].value == ((1, 2),)
    recipe, _ = settings.build()
    assert store.diff(store.to_json(recipe), recipe) == []


def test_a_part_that_has_none_of_our_fields_takes_a_smaller_batch(tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text(HEAD + OPTIMIZER)
    recipe = config.named(str(own), {"data": "synthetic:classes=2,samples=16,size=16"}).recipe
    assert (recipe.train.global_batch, recipe.optimizer.lr) == (8, 0.4 * 8 / 64)


def test_help_of_a_config_file_is_that_of_its_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.yaml").write_text("recipe: unet3d\n")
    for word in ("--help", "-h", "--help-all"):
        assert cli.main(["train", "--config", str(tmp_path / "mine.yaml"), word]) == 0
        assert capsys.readouterr().out.startswith("usage: sightline train unet3d")


@pytest.mark.parametrize(
    "source", ["Recipe", "demo_classification.recipe", "replace(demo_classification.recipe(), model=5)"]
)
def test_what_is_no_recipe_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str):
    own = tmp_path / "own.py"
    own.write_text(f"{HEAD}\nfrom sightline.config import Recipe\n\n\ndef recipe():\n    return {source}\n")
    assert cli.main(["train", str(own)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: recipe() of {own} ") and said.count("\n") == 1 and "expected" in said
