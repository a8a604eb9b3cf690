"""`sightline launch`: a training on several hosts; launch_hosts.py starts it."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.commands.start import resolved_of
from sightline.commands.words import refuse_recipe_named_first


def launch(flags: Sequence[str]) -> None:
    """Train on several hosts: `sightline launch resnet50 --hosts a:8,b:8 --launcher ssh --data.path DIR`"""
    refuse_recipe_named_first(flags)
    from sightline.commands import launch_hosts as command
    from sightline.recipe.options import split_options

    options, rest = split_options(command.LaunchOptions, flags, prog="sightline launch")
    recipe, run = resolved_of("launch", rest)
    command.launch(options, rest, recipe, run, print)
