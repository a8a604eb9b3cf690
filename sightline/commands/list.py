"""`sightline list`: the recipes, one to a line."""

from __future__ import annotations

from collections.abc import Sequence

from sightline import recipes
from sightline.commands.words import parser_of
from sightline.recipe import help as help_text


def list_recipes(flags: Sequence[str]) -> None:
    """List the recipes, or describe one: `sightline list resnet50`"""
    arguments = parser_of("list", list_recipes, "[RECIPE]").parse_known_args(flags)[1]
    for name in arguments:
        recipes.refuse_unknown(name)
        print(help_text.description(recipes.describe(name)))
    if not arguments:
        for name in recipes.names():
            print(help_text.row(f"{name:24} ", recipes.describe(name).splitlines()[0]))
