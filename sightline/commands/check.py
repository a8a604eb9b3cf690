"""`sightline check`: all problems of a dataset, or the suspicious labels of a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from sightline.commands.start import say_page
from sightline.commands.words import add_checkpoint, names_run, own_flags, parser_of, refuse_recipe_of_no_run
from sightline.errors import BadData, UsageError
from sightline.hardware.launch import among_ranks


def check(flags: Sequence[str]) -> None:
    """Check every sample before training and list all problems: `sightline check resnet50 --data.path DIR`"""
    parser = parser_of("check", check, "RECIPE|RUN [--no-decode] [--json] [--write FILE.csv] [--part.field VALUE ...]")
    what = "decode every image; without, read only its header"
    parser.add_argument("--decode", action=argparse.BooleanOptionalAction, default=True, help=what)
    parser.add_argument("--json", action="store_true", help="print JSON")
    what = "write a table without duplicates, leaks between splits and unreadable images, for --data"
    parser.add_argument("--write", type=Path, metavar="FILE.csv", help=what)
    add_checkpoint(parser)
    arguments, rest = parser.parse_known_args(flags)
    if rest and names_run(rest[0]):
        _check_labels(arguments, rest, own_flags(parser))
        return
    refuse_recipe_of_no_run(arguments.recipe)
    if arguments.checkpoint != "best":
        raise UsageError("--checkpoint is for `check RUN`; a recipe has none")
    from sightline import config
    from sightline.recipe.settings import Origin

    rest, wants_all_folds = config.without_all_folds(rest)  # one fold's two splits are all samples, too
    told = config.asked("check", rest, own_flags(parser))
    if not among_ranks():
        told.refuse_missing_data()
    resolved = told.resolved()  # the check itself lists all that is wrong with the data
    recipe, run, data = resolved.recipe, resolved.run, resolved.recipe.data
    is_open = resolved.settings.hints().get("data.classes") is int
    if is_open and resolved.settings["data.classes"].origin is Origin.RECIPE:
        # Nobody could count them, and the recipe's number is not that of these data.
        data = dataclasses.replace(data, classes=0)  # type: ignore[type-var]
    from sightline.hardware.limits import usable_cores
    from sightline.inference.folds import refuse_without
    from sightline.terminal.progress import shown_progress

    if wants_all_folds:
        refuse_without(recipe)
    if arguments.write:
        from sightline.data.check.clean_list import refuse_place

        data.refuse_list()
        refuse_place(arguments.write)
    with shown_progress() as progress:
        processes = run.workers if run.workers >= 0 else min(usable_cores(), 16)
        report = data.check_samples(arguments.decode, processes, progress)
    print(report.as_json() if arguments.json else report.as_text())
    found = len(report.problems)
    if arguments.write:
        from sightline.data.check.images import Report

        assert isinstance(report, Report) and report.clean is not None, "refuse_list has said no"
        print(report.clean.write(arguments.write), file=sys.stderr if arguments.json else sys.stdout)
        found = len(report.unsolved)
    if found:
        still = " that the list does not solve" if arguments.write else ""
        raise BadData(f"{found} problem{'s' * (found > 1)}{still}; fix what is listed above")


def _check_labels(arguments: argparse.Namespace, words: Sequence[str], own: Collection[str]) -> None:
    """List the samples of a run whose labels its network contradicts."""
    if arguments.write or not arguments.decode:
        raise UsageError("--write and --no-decode are for `check RECIPE --data DIR`; check RUN looks at its labels")
    from sightline import config
    from sightline.files.checkpoint_folder import run_of
    from sightline.inference import suspicious

    folder, rest = Path(words[0]), words[1:]
    if folder.is_dir() and not any((folder / name).exists() for name in ("checkpoints", "manifest.json")):
        raise UsageError(
            f"{folder} is not a run; to check data, name a recipe: sightline check demo_classification --data {folder}"
        )
    config.refuse_flags_of_run("check", folder, arguments.recipe, rest, own)
    found = suspicious.check_run(folder, rest, arguments.checkpoint, arguments.recipe)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(suspicious.as_text(found))
    run = run_of(folder)
    if (run / "report.html").exists() and not any(word.startswith(("--run.out", "--out")) for word in rest):
        from sightline.report.page import write_report

        say_page(write_report([run]))
