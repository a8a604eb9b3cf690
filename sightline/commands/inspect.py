"""`sightline inspect`: facts about a recipe or a run; inspect_facts.py finds them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sightline import plugins
from sightline.commands.words import names_run, own_flags, parser_of, refuse_recipe_of_no_run
from sightline.errors import UsageError
from sightline.recipe import store


def inspect(flags: Sequence[str]) -> None:
    """Show size, steps, learning rates and where values come from: `sightline inspect resnet50 --lr-at 0 5000`"""
    usage = "RECIPE|RUN [--lr-at STEP ...] [--ranks N] [--json] [--recipe FILE] [--part.field VALUE ...]"
    parser = parser_of("inspect", inspect, usage)
    parser.add_argument("--recipe", default="", help="your own recipe file, if the run was made with one")
    parser.add_argument(
        "--lr-at", type=int, nargs="+", default=[], metavar="STEP", help="show the rates of these steps"
    )
    parser.add_argument(
        "--ranks", type=int, help="devices of the run, on all hosts; some rates depend on it (default: --run.devices)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments, rest = parser.parse_known_args(flags)
    from sightline import config
    from sightline.recipe.show import why

    is_run = bool(rest) and names_run(rest[0])
    if is_run:
        settings = config.of_run("inspect", Path(rest[0]), rest[1:], arguments.recipe, own_flags(parser))
    else:
        refuse_recipe_of_no_run(arguments.recipe)
        settings = config.asked("inspect", rest, own_flags(parser)).resolved().settings
    recipe, run = settings.build()
    recipe.train.require_batch("inspect")
    from sightline.commands import inspect_facts as measure

    path = getattr(recipe.data, "path", "")
    if is_run and os.path.isabs(path) and not os.path.exists(path):
        raise UsageError(f"the data of {rest[0]} were in {path}, which is gone; add --data.path DIR")
    folder = Path(rest[0]) if is_run else None
    with plugins.naming_absent_sources(folder, store.packages_of(folder)):
        found = measure.inspect(recipe, run, arguments.lr_at, arguments.ranks, is_run)
    print(measure.as_text(found, why(settings.differing()), arguments.json))
