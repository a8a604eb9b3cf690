"""`sightline runs`: a table of run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sightline.commands.words import parser_of
from sightline.recipe import help as help_text


def runs(flags: Sequence[str]) -> None:
    """List runs with recipe, data, best score, epochs, time and state: `sightline runs demo`"""
    parser = parser_of("runs", runs)
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=Path("runs"), help="default: runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(flags)
    from sightline.overview import listing

    found, columns = listing.find_runs(arguments.folder), help_text.terminal_columns()
    print(listing.as_json(found) if arguments.json else listing.as_text(found, arguments.folder, columns))
