"""Read the words behind a command: the parsers of its own flags, and what it refuses before anything is loaded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from sightline import recipes
from sightline.errors import UsageError


def parser_of(name: str, command: Callable[[Sequence[str]], None], more: str = "") -> argparse.ArgumentParser:
    usage = f"sightline {name} {more}" if more else None
    return argparse.ArgumentParser(f"sightline {name}", usage=usage, description=command.__doc__, allow_abbrev=False)


def own_flags(parser: argparse.ArgumentParser) -> list[str]:
    return [option for option in parser._option_string_actions if option.startswith("--")]


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="best", help="best, latest or a name under checkpoints/")
    parser.add_argument("--recipe", default="", help="your own recipe file, if the run was made with one")


def names_run(word: str) -> bool:
    """Return whether a word, which may name a recipe or a run folder, is the latter: also a misspelt one."""
    if word in recipes.names() or word.startswith("-") or word.endswith(".py"):
        return False
    return Path(word).is_dir() or os.sep in word


def names_recipe(target: str, flags: Sequence[str]) -> bool:
    """Return whether `evaluate` is about a recipe; with weights also if its name is misspelt, to be refused as such."""
    from sightline.recipe.flags import long

    has_weights = any(long(flag).startswith("--model.weights") for flag in flags)
    return has_weights or target.endswith(".py") or recipes.is_known(target)


def refuse_recipe_of_no_run(recipe_file: str) -> None:
    if recipe_file:
        raise UsageError("--recipe is for runs that were made with your own recipe; give a run folder, or leave it out")


def refuse_flags_of_run(command: str, asked: argparse.Namespace, words: Sequence[str], own: Collection[str]) -> None:
    if words and not words[0].startswith("-"):
        raise UsageError(f"unexpected '{words[0]}'; `sightline {command} --help` shows what comes after {command}")
    from sightline import config

    config.refuse_flags_of_run(command, Path(asked.run), asked.recipe, words, own)


def refuse_value_of_flag(flags: Sequence[str], value: str, usage: str) -> None:
    """Refuse a positional argument after a flag of the recipe: only the recipe in RUN knows which flags take values."""
    before = flags[flags.index(value) - 1] if value in flags[1:] else ""
    if before.startswith("--") and "." in before and "=" not in before:
        raise UsageError(f"'{value}' comes after {before}; begin with `sightline {usage}`, then {before} and the like")


def refuse_recipe_named_first(flags: Sequence[str]) -> None:
    """Refuse an unknown recipe before the command's own options are read, which imports torch."""
    if flags and not flags[0].startswith("-"):
        recipes.refuse_unknown(flags[0])
