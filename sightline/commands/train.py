"""`sightline train`: from the words to a training, on one rank or several, and the last screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sightline import recipes, terminal
from sightline.commands.start import ran_as_ranks, refuse_uneven_batch, say_decided, say_page
from sightline.commands.words import parser_of
from sightline.hardware.launch import among_ranks
from sightline.hardware.launch.place import is_rank_0
from sightline.recipe import help as help_text


def train(flags: Sequence[str]) -> None:
    """Train a recipe, or resume its run: `sightline train classification --data DIR`"""
    if flags and flags[0] in ("-h", "--help"):
        parser_of("train", train, "RECIPE [--config FILE] [--part.field VALUE ...]").print_help()
        print(f"\n{help_text.of_train(recipes.names())}")
        return
    if help_text.is_asked(flags):
        _print_help(flags)
        return
    from sightline import config

    if help_text.is_asked(["", *flags]):  # of the recipe of a config file
        _print_help(config.recipe_asked(flags))
        return
    rest, wants_all_folds = config.without_all_folds(flags)
    told = config.asked("train", rest)
    if told.run.track:
        from sightline.runs import trackers

        trackers.refuse_unknown(told.run.track)  # before torch is imported
    if not among_ranks():
        told.refuse_missing_data()
    if terminal.is_command():  # a script that calls us may fork later
        from sightline.data.loading.forkserver import start_early
        from sightline.hardware import early_cuda

        early_cuda.begin(told.run)
        start_early(told.settings.recipe, told.run)  # before torch is imported, which takes as long there
    resolved = told.resolved(needs_data=not among_ranks(), purpose="train")
    recipe, run = resolved.recipe, resolved.run
    say_decided(resolved)
    refuse_uneven_batch(recipe, run)
    from sightline.runs.refused import as_before

    folder = Path(run.out or f"runs/{recipe.name}")
    with as_before(folder / "fold-0" if wants_all_folds else folder):
        if ran_as_ranks(["train", *flags], run.devices, run.device):
            return
    from sightline import api

    if wants_all_folds:
        with as_before(folder / "fold-0"):
            document = api.train_folds(recipe, run)
        if is_rank_0():
            from sightline.inference import folds

            print(f"{folds.as_text(document)}\nfinished: results are in {folder}")
            print(f"next: sightline predict {folder} FILE ..., the ensemble of all folds")
            say_page(folder / "report.html")
        return
    with as_before(folder):
        api.train_resolved(resolved)
    if is_rank_0():
        from sightline.engine import checkpoint
        from sightline.inference import by_task
        from sightline.overview import last_screen

        own = rest[0] if rest[0].endswith(".py") else ""
        best = checkpoint.find(folder, "best").name
        can_predict = by_task.has_reporter(recipe.task)
        print(last_screen.as_text(folder, best, own, resolved.facts.has_test, can_predict))
        say_page(folder / "report.html")


def _print_help(flags: Sequence[str]) -> None:
    """Print the usual flags of a recipe, or with --help-all every flag, of one part if that is named."""
    from sightline.recipe.recipe import Run

    name, wants_all, part = help_text.question(flags)
    recipe = recipes.load(name)
    if wants_all:
        print(help_text.every_flag(recipe, Run(), name, part))
    else:
        print(help_text.of_recipe(recipe, Run(), name, recipes.describe(name)))
