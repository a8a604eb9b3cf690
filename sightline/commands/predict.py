"""`sightline predict`: the findings of networks in files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sightline import terminal
from sightline.commands.start import begin_early, ran_as_ranks_of_run
from sightline.commands.words import add_checkpoint, own_flags, parser_of, refuse_flags_of_run, refuse_value_of_flag
from sightline.hardware.launch.place import is_rank_0


def predict(flags: Sequence[str]) -> None:
    """Predict images or volumes; write JSON, CSV, masks and drawings: `sightline predict runs/resnet50 a.jpg`"""
    parser = parser_of("predict", predict)
    what = "run folder, a ckpt-* folder, or a .onnx or .pt2 file of `export`; several folders, or all folds: their mean"
    parser.add_argument("run", metavar="RUN", help=what)
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="images, NIfTI volumes, or folders of them")
    what = "average with this run or .onnx or .pt2 file too; may be repeated"
    parser.add_argument("--with", metavar="RUN", dest="others", action="append", default=[], help=what)
    what = "load .pt2 files: they are programs, and can run code that their author put in"
    parser.add_argument("--trust", action="store_true", help=what)
    what = "folder for predictions.json, predictions.csv, masks and drawings; default: RUN/predictions, then -2, -3 ..."
    parser.add_argument("--out", default="", help=what)
    parser.add_argument("--top", type=int, help="largest number of classes or boxes per image")
    parser.add_argument("--score-threshold", type=float, help="lowest score to show, 0 to 1")
    what = "also write what a tool for labelling imports as annotations"
    parser.add_argument("--format", default="", choices=("coco", "yolo", "labelme", "labelstudio", "cvat"), help=what)
    what = "draw the findings; without, write predictions.json and predictions.csv only"
    parser.add_argument("--draw", action=argparse.BooleanOptionalAction, default=True, help=what)
    what = "volumes: also write CASE.npy, the probability of every class at every voxel, float32"
    parser.add_argument("--save-probabilities", action="store_true", help=what)
    what = "volumes: masks as `evaluate --choose-postprocessing` decided"
    parser.add_argument("--postprocessing", action=argparse.BooleanOptionalAction, default=True, help=what)
    add_checkpoint(parser)
    arguments, rest = parser.parse_known_args(flags)
    for first in (arguments.run, arguments.inputs[0]):
        refuse_value_of_flag(flags, first, "predict RUN INPUT ...")
    refuse_flags_of_run("predict", arguments, rest, own_flags(parser))
    if ran_as_ranks_of_run(["predict", *flags], rest):
        return
    begin_early(rest, arguments.inputs)
    from sightline import api
    from sightline.inference.folds import is_exported, split_runs

    run_folders, inputs = split_runs([arguments.run, *arguments.inputs])
    for file in filter(is_exported, map(Path, inputs)):
        if is_rank_0():
            terminal.say(f"{file} is read as an input, not as a network; add a network with --with")
    api.write_predictions(
        [*run_folders, *arguments.others],
        inputs,
        arguments.out,
        rest,
        arguments.checkpoint,
        arguments.recipe,
        top=arguments.top,
        threshold=arguments.score_threshold,
        draws=arguments.draw,
        probabilities=arguments.save_probabilities,
        postprocess=arguments.postprocessing,
        trust=arguments.trust,
        form=arguments.format,
    )
