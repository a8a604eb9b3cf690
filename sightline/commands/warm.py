"""`sightline warm`: fill the cache folder with what a first start compiles; measure/warm.py does the work."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.commands.start import ran_as_ranks, refuse_uneven_batch, resolved_of
from sightline.commands.words import parser_of, refuse_recipe_named_first


def warm(flags: Sequence[str]) -> None:
    """Compile a recipe ahead, into the cache folder: `sightline warm resnet50 --train.precision fp16`"""
    parser_of("warm", warm, "RECIPE [flags of `sightline train RECIPE`]").parse_known_args(flags or ["--help"])
    refuse_recipe_named_first(flags)
    recipe, run = resolved_of("warm", flags)
    refuse_uneven_batch(recipe, run)
    if ran_as_ranks(["warm", *flags], run.devices, run.device):
        return
    from sightline.measure import warm as measure

    measure.warm(recipe, run, print)
