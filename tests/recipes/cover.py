"""The recipes in the default set of tests: every kind of part occurs among them. The others are slow."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from sightline import recipes

RICHEST = ("resnet50_mlperf", "ssd_resnet34", "unet2d")  # of each kind of data, the one that uses most of the engine
Kinds = Callable[[str], set[str]]


@cache
def made(name: str) -> Any:
    """Return a recipe as it is without flags."""
    return recipes.find(name).recipe()


def data(name: str) -> set[str]:
    """Return the kind of data of a recipe."""
    return {type(made(name).data).__name__}


def classes(name: str) -> set[str]:
    """Return the classes of model, data and task of a recipe."""
    recipe = made(name)
    return {type(part).__name__ for part in (recipe.model, recipe.data, recipe.task)}


def parts(name: str) -> set[str]:
    """Return these classes, and the kinds of optimizer and schedule."""
    recipe = made(name)
    return classes(name) | {f"optimizer {recipe.optimizer.kind}", f"schedule {recipe.schedule.kind}"}


def names() -> list[str]:
    """Return the names of all recipes, last those for anybody's data, of which a plan may decide values."""
    return sorted(recipes.names(), key=lambda name: name in recipes.ANY_DATA)


def chosen(kinds: Kinds) -> list[str]:
    """Choose recipes until every kind occurs."""
    found: list[str] = []
    for name in (*RICHEST, *names()):
        if kinds(name) - set().union(*map(kinds, found)):
            found.append(name)
    return found


def params(kinds: Kinds, *others: str) -> list[Any]:
    """Return (name, *others) of every recipe, slow where all kinds occur without it."""
    default = chosen(kinds)
    return [
        pytest.param(name, *others, id="-".join((name, *others)), marks=() if name in default else pytest.mark.slow)
        for name in recipes.names()
    ]


def richest(name: str) -> set[str]:
    """Return the recipe of images that uses most of the engine, and no other: for what is the engine's alone."""
    return {name} & {RICHEST[0]}


def recipe_of_each(kinds: Kinds) -> pytest.MarkDecorator:
    """Run a test with the `name` of every recipe, by default of one for every kind."""
    return pytest.mark.parametrize("name", params(kinds))
