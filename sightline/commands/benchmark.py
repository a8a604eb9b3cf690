"""`sightline benchmark`: the speed of a step, of the input, or of a whole run; measure/ does the work."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.commands.start import ran_as_ranks, refuse_uneven_batch, resolved_of
from sightline.commands.words import refuse_recipe_named_first
from sightline.hardware.launch.place import is_rank_0


def benchmark(flags: Sequence[str]) -> None:
    """Measure the speed of a recipe's step or input: `sightline benchmark resnet50 --peers`"""
    refuse_recipe_named_first(flags)
    from sightline.measure import benchmark as measure
    from sightline.measure import whole
    from sightline.recipe.options import split_options

    flags = measure.with_folder(flags)
    options, rest = split_options(measure.BenchmarkOptions, flags, prog="sightline benchmark", flat=True)
    recipe, run = resolved_of("benchmark", rest)
    refuse_uneven_batch(recipe, run)
    if ran_as_ranks(["benchmark", *flags], 0 if options.whole else run.devices, run.device):
        return
    if options.whole:
        print(whole.as_text(whole.measure(recipe, run, rest, options.out, print)))
        return
    result = measure.benchmark(recipe, run, options, print)
    if is_rank_0():
        print(measure.as_text(result))
