"""`sightline show`: training samples as the network sees them; show_sheet.py draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sightline import plugins
from sightline.commands.start import resolved_of
from sightline.commands.words import names_run, own_flags, parser_of, refuse_recipe_of_no_run
from sightline.recipe import store


def show(flags: Sequence[str]) -> None:
    """Draw training samples as the network sees them, with labels: `sightline show resnet50 --data.path DIR`"""
    parser = parser_of("show", show, "RECIPE|RUN [--out FILE] [--recipe FILE] [--part.field VALUE ...]")
    parser.add_argument("--out", type=Path, help="the sheet; default: samples.png, of a run RUN/samples.png")
    parser.add_argument("--recipe", default="", help="your own recipe file, if the run was made with one")
    arguments, rest = parser.parse_known_args(flags)
    folder = Path(rest[0]) if rest and names_run(rest[0]) else None
    if folder:
        from sightline import config

        recipe, run = config.of_run("show", folder, rest[1:], arguments.recipe, own_flags(parser)).build()
        recipe.train.require_batch("show")
    else:
        refuse_recipe_of_no_run(arguments.recipe)
        recipe, run = resolved_of("show", rest, own_flags(parser), tells=True)
    from sightline.commands.show_sheet import draw_sheet

    with plugins.naming_absent_sources(folder, store.packages_of(folder)):
        path, said = draw_sheet(recipe, run, folder, arguments.out)
    print(f"wrote {path}: {said}")
