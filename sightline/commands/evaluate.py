"""`sightline evaluate`: scores of a run, a checkpoint, label files or given weights."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

from sightline.commands.start import begin_early, ran_as_ranks_of_run, resolved_of, say_page
from sightline.commands.words import (
    add_checkpoint,
    names_recipe,
    own_flags,
    parser_of,
    refuse_flags_of_run,
    refuse_value_of_flag,
)
from sightline.errors import UsageError
from sightline.hardware.launch.place import is_rank_0


def evaluate(flags: Sequence[str]) -> None:
    """Score a run, a checkpoint, masks or given weights: `sightline evaluate runs/resnet50 --checkpoint latest`"""
    parser = parser_of("evaluate", evaluate)
    what = "run folder, or a ckpt-* folder; with --labels also one of masks; or a recipe, with --model.weights FILE"
    parser.add_argument("run", metavar="RUN", help=what)
    add_checkpoint(parser)
    parser.add_argument(
        "--all", action="store_true", help="score every checkpoint of the run, as a table; resumes if interrupted"
    )
    what = "val, or test: the test split of the data, all of it; written as scores-CHECKPOINT-test.json"
    parser.add_argument("--split", choices=["val", "test"], default="val", help=what)
    what = "label files, or what `prepare decathlon` read: score volumes and images as their files are, not as prepared"
    parser.add_argument("--labels", metavar="DIR", help=what)
    what = (
        "volumes: keep only the largest component of a class in `predict` where that raises the Dice of the val split"
    )
    parser.add_argument("--choose-postprocessing", action="store_true", help=what)
    arguments, rest = parser.parse_known_args(flags)
    refuse_value_of_flag(flags, arguments.run, "evaluate RUN")
    refuse_flags_of_run("evaluate", arguments, rest, own_flags(parser))
    if arguments.all and (arguments.labels or arguments.choose_postprocessing):
        other = "--labels" if arguments.labels else "--choose-postprocessing"
        raise UsageError(f"--all cannot be combined with {other}; name one checkpoint with --checkpoint")
    if arguments.split == "test" and (arguments.all or arguments.labels or arguments.choose_postprocessing):
        raise UsageError(
            "--split test cannot be combined with --all, --labels or --choose-postprocessing: a test split scores one "
            "checkpoint after it was chosen"
        )
    if ran_as_ranks_of_run(["evaluate", *flags], rest):
        return
    if not Path(arguments.run).is_dir() and names_recipe(arguments.run, rest):
        _evaluate_weights(arguments, rest, own_flags(parser))
        return
    begin_early(rest)
    from sightline import api
    from sightline.overview import score_text

    if arguments.choose_postprocessing:
        from sightline.inference import postprocessing

        which = (arguments.checkpoint, arguments.recipe)
        print(postprocessing.as_text(api.choose_postprocessing(arguments.run, arguments.labels or "", rest, *which)))
        return
    if arguments.all:
        rows_of_all = api.evaluate_all(arguments.run, rest, arguments.recipe)
        if is_rank_0():
            print(score_text.of_checkpoints(rows_of_all))
        return
    if arguments.labels:
        scores = api.evaluate_labels(arguments.run, arguments.labels, rest, arguments.checkpoint, arguments.recipe)
    else:
        scores = api.evaluate(arguments.run, rest, arguments.checkpoint, arguments.recipe, split=arguments.split)
    if is_rank_0():
        for line in score_text.of_classes(scores, "scores-*.json of the run", bool(arguments.labels)):
            print(line)
        if arguments.split == "test" and (page := Path(scores.folder, "report.html")).is_file():
            api.report(scores.folder)
            say_page(page)


def _evaluate_weights(arguments: argparse.Namespace, flags: Sequence[str], own: Collection[str]) -> None:
    """Score weights from a file with the network, data and task of a recipe."""
    others = (arguments.all, arguments.labels, arguments.recipe, arguments.choose_postprocessing)
    if any(others) or arguments.checkpoint != "best":
        raise UsageError(
            f"--all, --labels, --recipe, --checkpoint and --choose-postprocessing are for runs, and {arguments.run} is "
            "a recipe; leave them out"
        )
    recipe, run = resolved_of("evaluate", [arguments.run, *flags], own)
    from sightline import api
    from sightline.overview import score_text

    scores = api.evaluate_weights(recipe, run, split=arguments.split)
    if is_rank_0():
        file = str(Path(run.out) / "scores.json") if run.out else "scores.json if --run.out DIR is given"
        for line in score_text.of_classes(scores, file):
            print(line)
