"""The words behind a command: what names a run, what a recipe, and what is refused before anything is loaded."""

from pathlib import Path

import pytest

from sightline import config
from sightline.commands import start, words
from sightline.errors import UsageError
from sightline.recipe.recipe import Run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "resnet50").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("word", "is_run"),
    [("mine", True), ("runs/mine", True), ("gone", False), ("resnet50", False), ("./resnet50", True), ("-x/y", False),
     ("a/recipe.py", False)],
)  # fmt: skip
def test_a_word_names_a_run_where_it_is_a_folder_or_looks_like_one(word: str, is_run: bool):
    assert words.names_run(word) is is_run


@pytest.mark.parametrize(
    ("target", "flags", "is_recipe"),
    [
        ("resnet50", [], True),
        ("mine.py", [], True),
        ("resnet5", [], False),
        ("resnet5", ["--weights", "a.pth"], True),
        ("resnet5", ["--model.weights=a.pth"], True),
        ("resnet5", ["--lr", "3"], False),
    ],
)
def test_evaluate_is_about_a_recipe_where_it_is_one_or_weights_are_given(target: str, flags: list, is_recipe: bool):
    assert words.names_recipe(target, flags) is is_recipe


def test_a_parser_has_the_first_line_of_its_command_and_takes_no_half_flags():
    def look(flags: list[str]) -> None:
        """Look at things: `sightline look`"""

    parser = words.parser_of("look", look, "[THING]")
    parser.add_argument("--thing", action="store_true")
    words.add_checkpoint(parser)
    assert parser.format_help().startswith("usage: sightline look [THING]\n\nLook at things: `sightline look`\n")
    assert words.own_flags(parser) == ["--help", "--thing", "--checkpoint", "--recipe"]
    found, rest = parser.parse_known_args(["--thin"])
    assert (found.thing, found.checkpoint, found.recipe, rest) == (False, "best", "", ["--thin"])
    assert words.parser_of("look", look).format_usage().startswith("usage: sightline look [-h]")


def test_a_positional_word_after_a_flag_of_the_recipe_is_refused():
    usage = "evaluate RUN"
    for flags in (["mine", "--run.out", "x"], ["--all", "mine"], ["--run.out=x", "mine"], ["-x", "mine"]):
        words.refuse_value_of_flag(flags, "mine", usage)
    with pytest.raises(UsageError, match="^'mine' comes after --run.out; begin with `sightline evaluate RUN`, "):
        words.refuse_value_of_flag(["--all", "--run.out", "mine"], "mine", usage)


def test_what_belongs_to_a_run_or_to_a_recipe_is_refused_elsewhere():
    words.refuse_recipe_of_no_run("")
    with pytest.raises(UsageError, match="^--recipe is for runs that were made with your own recipe; give a run"):
        words.refuse_recipe_of_no_run("a.py")
    words.refuse_recipe_named_first([])
    words.refuse_recipe_named_first(["--steps", "3"])
    words.refuse_recipe_named_first(["resnet50"])
    with pytest.raises(UsageError, match="resnet5"):
        words.refuse_recipe_named_first(["resnet5"])


def test_a_page_is_named_where_it_is(here: Path, capsys: pytest.CaptureFixture[str]):
    start.say_page(here / "report.html")
    (here / "report.html").touch()
    start.say_page(here / "report.html")
    assert capsys.readouterr().out == f"report: {here / 'report.html'}\n"


def test_a_batch_that_ranks_cannot_share_is_refused():
    recipe, _ = config.load("demo_classification", ["--train.global-batch", "9"])
    for devices in (0, 1, 3):
        start.refuse_uneven_batch(recipe, Run(devices=devices))
    with pytest.raises(UsageError, match="9 cannot be split over 2 devices"):
        start.refuse_uneven_batch(recipe, Run(devices=2))
