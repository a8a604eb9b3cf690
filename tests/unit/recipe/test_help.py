"""Help of `train RECIPE`, from the objects that a recipe returned."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from sightline import recipes
from sightline.errors import UsageError
from sightline.recipe import help
from sightline.recipe.part import AtLeast
from sightline.recipe.recipe import Recipe, Run

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
SHORT = {"--data", "--epochs", "--batch-size", "--lr", "--out", "--device", "--workers", "--weights", "--resume"}


@dataclass(frozen=True)
class Base:
    depth: Annotated[int, AtLeast(1)] = 18
    """Layers. Of all
    kinds."""
    kind: Literal["a", "b"] = "a"
    """Of the base."""


@dataclass(frozen=True)
class Model(Base):
    kind: Literal["a", "b", "c"] = "b"
    """Which one; e.g. c."""
    loud: bool = True
    """Says more."""
    sides: tuple[float, ...] = (0.5, 1e-5)
    """Of the box."""
    names: tuple[str, str] = ("a b", "c")
    untold: str = ""
    """of no field"""
    batch: int | Literal["auto"] = "auto"
    """In samples."""


def golden(name: str) -> dict[str, str]:
    """The flags of a recipe with their defaults."""
    lines = (GOLDEN / f"flags_{name}.txt").read_text(encoding="utf-8").splitlines()
    return {flag: value for flag, _, value in (line.partition(" ") for line in lines)}


def recipe_of(name: str) -> Recipe:
    made = recipes.find(name).recipe()
    return Recipe(**{each.name: getattr(made, each.name) for each in dataclasses.fields(made)})


def with_model(model: Any) -> Recipe:
    return dataclasses.replace(recipe_of("demo_classification"), model=model)


def of_recipe(name: str) -> str:
    return help.of_recipe(recipe_of(name), Run(), name, recipes.describe(name))


# The usual flags


@pytest.mark.parametrize("name", recipes.names())
def test_about_twenty_flags_and_three_examples(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv("COLUMNS", "80")
    lines = of_recipe(name).splitlines()
    assert lines[0] == f"usage: sightline train {name} [--config FILE] [flags]"
    assert max(map(len, lines)) <= 80 and len(lines) <= 82
    shown = [line for line in lines if line.startswith("  --")]
    assert 18 <= len(shown) <= 23
    assert sum(line.startswith("  sightline train ") for line in lines) == 3
    weights = sum(" --data DIR --weights " in line for line in lines)
    assert weights == (2 if name.startswith(("finetune_", "ssd_")) else 0)
    assert f"(default: {golden(name)['--train.epochs']})" in "\n".join(lines)
    assert {line.split(",")[0].strip() for line in shown} >= SHORT


def test_the_look_of_the_usual_flags(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = of_recipe("unet2d")
    for part in (
        "five folds.\n\nexamples:\n  sightline train unet2d --data DIR --out runs/mine\n",
        "\n\nthe usual flags:\n  --data, --data.path\n      A folder written by `sightline prepare decathlon`, or ",
        "\n  --data.on-bad-sample {fail,skip}\n      If a volume cannot be read: end the run with exit 3, or skip ",
        "\n  --batch-size, --train.global-batch\n      Samples per optimizer update, ",
        "\n  --lr, --optimizer.lr\n      Base learning rate, for the global batch of the recipe unless lr_for_batch "
        "says otherwise\n      (default: 0.001)\n",
        "\n  --out, --run.out\n      Run folder; default runs/RECIPE\n",
    ):
        assert part in text, part
    assert "Equal bits need" not in text, "one sentence of each"
    assert text.endswith("The same command again resumes its run.")


def test_the_choices_and_defaults_of_a_part_of_ones_own(monkeypatch: pytest.MonkeyPatch):
    @dataclass(frozen=True)
    class Own(Model):
        weights: str = "a b.pth"
        """Of the own
        part. And more."""

    text = help.of_recipe(with_model(Own(depth=7)), Run(), "own.py", "My recipe.\n\nMore.")
    assert "\n\nMy recipe.\n\nexamples:\n" in text
    assert "\n  --model.depth\n      Layers (default: 7)\n" in text
    assert "\n  --weights, --model.weights\n      Of the own part (default: 'a b.pth')\n" in text


# Every flag


@pytest.mark.parametrize("name", recipes.names())
def test_every_flag_is_shown_with_its_text(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv("COLUMNS", "80")
    lines = help.every_flag(recipe_of(name), Run(), name).splitlines()
    assert max(map(len, lines)) <= 80
    shown = {}
    for line, after in itertools.pairwise(lines):
        if line.startswith("  --"):
            words = line.replace(",", " ").split()
            [flag] = [each for each in words if each[:2] == "--" and "." in each and ".no-" not in each]
            shown[flag] = after
            assert (".no-" in f"{line}{after}") == (golden(name)[flag] in ("True", "False")), line
    assert set(shown) == set(golden(name))
    assert all(text.startswith(" " * 4) and text.strip() for text in shown.values())
    assert [line[:-1] for line in lines if line[:1].strip()][1:] == list(help.PARTS)


def test_flags_of_one_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert help.every_flag(with_model(Model(loud=False)), Run(), "own.py", "model") == (
        "usage: sightline train own.py [--config FILE] [flags]\n"
        "\n"
        "model:\n"
        "  --model.depth INT\n"
        "      Layers. Of all kinds (default: 18)\n"
        "  --model.kind {a,b,c}\n"
        "      Which one; e.g. c (default: b)\n"
        "  --model.loud, --model.no-loud\n"
        "      Says more (default: off)\n"
        "  --model.sides FLOAT ...\n"
        "      Of the box (default: 0.5 1e-05)\n"
        "  --model.names TEXT TEXT\n"
        "      (default: 'a b' c)\n"
        "  --model.untold TEXT\n"
        "      of no field\n"
        "  --model.batch INT|auto\n"
        "      In samples (default: auto)"
    )


def test_choices_too_long_for_a_line_are_folded_between_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = help.every_flag(with_model(Model()), Run(), "own.py", "run")
    assert "  --run.affinity {disabled, socket, single, single_unique,\n    socket_unique_interleaved, " in text


def test_a_class_without_source_has_no_texts():
    made = dataclasses.make_dataclass("Made", [("depth", int, 3)])
    assert help.texts_of(made) == {}
    text = help.every_flag(with_model(made()), Run(), "own.py", "model")
    assert text.endswith("\nmodel:\n  --model.depth INT\n      (default: 3)")


def test_texts_are_inherited_and_replaced():
    texts = help.texts_of(Model)
    assert (texts["depth"], texts["kind"]) == ("Layers. Of all kinds.", "Which one; e.g. c.")
    assert "names" not in texts and help.texts_of(Base)["kind"] == "Of the base."


def test_a_recipe_file_of_ones_own(tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import dataclass, replace\n"
        "from sightline.recipes import demo_classification\n"
        "from sightline.tasks.classification import Classification\n\n\n"
        "@dataclass(frozen=True)\nclass Focal(Classification):\n"
        '    gamma: float = 2.0\n    """Of the focal loss."""\n\n\n'
        "def recipe():\n    return replace(demo_classification.recipe(), task=Focal(gamma=1.5))\n"
    )
    text = help.every_flag(recipe_of(str(own)), Run(), str(own), "task")
    assert "\n  --task.gamma FLOAT\n      Of the focal loss (default: 1.5)" in text
    assert "\n  --task.label-smoothing FLOAT\n      " in text


# Words that ask for it


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        (["resnet50", "--help"], True),
        (["resnet50", "--epochs", "3", "-h"], True),
        (["resnet50", "--help-all=data"], True),
        (["resnet50", "--epochs", "3"], False),
        (["--help"], False),
        (["--config", "x", "--help"], False),
        ([], False),
    ],
)
def test_help_is_asked_about_a_recipe(flags: list[str], asked: bool):
    assert help.is_asked(flags) is asked


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (["a", "--help"], ("a", False, "")),
        (["a", "--help-all"], ("a", True, "")),
        (["a", "--help-all", "data"], ("a", True, "data")),
        (["a", "--help-all=run", "--lr", "1"], ("a", True, "run")),
        (["a", "--help-all", "--lr", "1"], ("a", True, "")),
    ],
)
def test_the_part_that_is_asked_for(flags: list[str], answer: tuple[str, bool, str]):
    assert help.question(flags) == answer


def test_an_unknown_part_is_refused():
    with pytest.raises(UsageError, match="--help-all optimiser: there is no such part; known: model, data, "):
        help.question(["a", "--help-all", "optimiser"])


def test_of_train(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = help.of_train(["resnet50", "unet2d"]).splitlines()
    assert lines[0] == "recipes: resnet50, unet2d" and max(map(len, lines)) <= 60
    assert "--batch-size for --train.global-batch" in " ".join(" ".join(lines).split())


# Layout


def test_rows_are_folded_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert help.row("name  ", "some words about it") == "name  some words about it"
    monkeypatch.setattr(sys, "stdout", type("Tty", (), {"isatty": lambda self: True})())
    assert help.row("name  ", "some words about it") == "name  some words\n      about it"
    assert help.description("Two words and more.\n\n    sightline train resnet50 --data DIR") == (
        "  Two words and\n  more.\n  \n      sightline train resnet50 --data DIR"
    ).replace("\n  \n", "\n\n")


def test_rows_break_between_words_and_never_inside_of_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(help, "terminal_columns", lambda: 24)
    assert help.row("name  ", "some well-known-long-words and more").splitlines() == [
        "name  some", "      well-known-long-words", "      and more",
    ]  # fmt: skip
    assert help.row("name  ", "x" * 40) == f"name\n      {'x' * 40}"
    monkeypatch.setattr(help, "terminal_columns", lambda: 5)
    assert help.row("a name  ", "of two words").splitlines() == ["a name  of two", "        words"], "twice the name"
    monkeypatch.setattr(help, "terminal_columns", lambda: 0)
    assert help.row("name  ", "x " * 400) == "name  " + "x " * 400


def test_an_entry_has_its_flag_then_its_text_and_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert help.entry(["--a", "-b"], "INT", "How many there are.", "3").splitlines() == [
        "  --a, -b INT", "      How many there are (default: 3)",
    ]  # fmt: skip
    assert help.entry(["--a"], "", "On or off", "", "(required)") == "  --a\n      On or off (required)"
    assert help.entry(["--a"], "X", "", "").splitlines() == ["  --a X"]
    choices = "{" + ",".join(["first", "second", "third", "fourth", "fifth"]) + "}"
    assert help.entry(["--kind"], choices, "", "").splitlines() == [
        "  --kind {first, second, third, fourth,",
        "    fifth}",
    ]
    assert [help.as_typed(value) for value in (True, False, (1, "a b"), None, "", "a b", 0.5)] == [
        "on", "off", "1 'a b'", "", "", "'a b'", "0.5",
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "4000")
    assert help.columns() == help.WIDEST == 100
