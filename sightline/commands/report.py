"""`sightline report`: the page of one run, or of several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sightline.commands.words import parser_of


def report(flags: Sequence[str]) -> None:
    """Write an HTML page about a run, or compare several: `sightline report runs/resnet50`"""
    parser = parser_of("report", report)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folders, or that of all folds")
    parser.add_argument("--out", type=Path, help="the page; default: RUN/report.html, for several runs ./report.html")
    arguments = parser.parse_args(flags)
    from sightline.inference.folds import runs_of
    from sightline.report import page

    folders = [run for folder in arguments.runs for run in runs_of(folder)]
    out = arguments.out or (arguments.runs[0] / page.PAGE if len(arguments.runs) == 1 else None)
    print(f"wrote {page.write_report(folders, out)}; open it in a browser")
