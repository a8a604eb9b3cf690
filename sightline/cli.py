"""The commands. Each is a few lines that call one function; --help and list import no torch."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

from sightline import __version__, recipes, terminal
from sightline.errors import BadData, Interrupted, SightlineError, UsageError, unforeseen_disk_error
from sightline.hardware.launch import among_ranks
from sightline.hardware.launch.place import is_rank_0
from sightline.recipe import help as help_text
from sightline.safe_path import folder_off_path

if TYPE_CHECKING:
    from sightline.recipe.plan import Purpose
    from sightline.recipe.recipe import Recipe, Run
    from sightline.recipe.resolve import Resolved

PREPARE = Path(__file__).parent / "data" / "prepare"


def list_recipes(flags: Sequence[str]) -> None:
    """List the recipes, or describe one: `sightline list resnet50`"""
    arguments = _parser("list", list_recipes, "[RECIPE]").parse_known_args(flags)[1]
    for name in arguments:
        recipes.refuse_unknown(name)
        print(help_text.description(recipes.describe(name)))
    if not arguments:
        for name in recipes.names():
            print(help_text.row(f"{name:24} ", recipes.describe(name).splitlines()[0]))


def prepare(flags: Sequence[str]) -> None:
    """Prepare, convert or draw data for training: `sightline prepare shapes --out DIR`"""
    known = sorted(m.name for m in pkgutil.iter_modules([str(PREPARE)]) if not m.name.startswith("_"))
    if not flags or flags[0] not in known:
        if flags and flags[0] in ("-h", "--help"):
            _parser("prepare", prepare, f"{{{','.join(known)}}} [options]").print_help()
            return
        raise UsageError(f"prepare what? Available: {', '.join(known)}; e.g. `sightline prepare shapes --out DIR`")
    from sightline.recipe.options import parse_options

    module = importlib.import_module(f"sightline.data.prepare.{flags[0]}")
    options = parse_options(get_type_hints(module.prepare)["options"], flags[1:], prog=f"sightline prepare {flags[0]}")
    from sightline.terminal.progress import shown_progress

    with shown_progress() as progress:
        counts = module.prepare(options, progress)
    if describe := getattr(module, "describe", None):
        print(describe(counts, options.out))
        return
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(f"{flags[0]}: {told} in {options.out}")


def check(flags: Sequence[str]) -> None:
    """Check every sample before training and list all problems: `sightline check resnet50 --data.path DIR`"""
    parser = _parser("check", check, "RECIPE|RUN [--no-decode] [--json] [--write FILE.csv] [--part.field VALUE ...]")
    what = "decode every image; without, read only its header"
    parser.add_argument("--decode", action=argparse.BooleanOptionalAction, default=True, help=what)
    parser.add_argument("--json", action="store_true", help="print JSON")
    what = "write a table without duplicates, leaks between splits and unreadable images, for --data"
    parser.add_argument("--write", type=Path, metavar="FILE.csv", help=what)
    _add_checkpoint(parser)
    arguments, rest = parser.parse_known_args(flags)
    if rest and _names_run(rest[0]):
        _check_labels(arguments, rest, _own(parser))
        return
    _refuse_recipe_of_no_run(arguments.recipe)
    if arguments.checkpoint != "best":
        raise UsageError("--checkpoint is for `check RUN`; a recipe has none")
    from sightline import config
    from sightline.recipe.settings import Origin

    rest, wants_all_folds = config.without_all_folds(rest)  # one fold's two splits are all samples, too
    told = config.asked("check", rest, _own(parser))
    if not among_ranks():
        told.refuse_missing_data()
    resolved = told.resolved()  # the check itself lists all that is wrong with the data
    recipe, run, data = resolved.recipe, resolved.run, resolved.recipe.data
    is_open = resolved.settings.hints().get("data.classes") is int
    if is_open and resolved.settings["data.classes"].origin is Origin.RECIPE:
        # Nobody could count them, and the recipe's number is not that of these data.
        data = dataclasses.replace(data, classes=0)  # type: ignore[type-var]
    from sightline.evaluate.folds import refuse_without
    from sightline.hardware.limits import usable_cores
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
    from sightline.evaluate import suspicious
    from sightline.files.checkpoint_folder import run_of

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

        _tell_page(write_report([run]))


def show(flags: Sequence[str]) -> None:
    """Draw training samples as the network sees them, with labels: `sightline show resnet50 --data.path DIR`"""
    parser = _parser("show", show, "RECIPE|RUN [--out FILE] [--recipe FILE] [--part.field VALUE ...]")
    parser.add_argument("--out", type=Path, help="the sheet; default: samples.png, of a run RUN/samples.png")
    parser.add_argument("--recipe", default="", help="your own recipe file, if the run was made with one")
    arguments, rest = parser.parse_known_args(flags)
    folder = Path(rest[0]) if rest and _names_run(rest[0]) else None
    if folder:
        from sightline import config

        recipe, run = config.of_run("show", folder, rest[1:], arguments.recipe, _own(parser)).build()
        recipe.train.require_batch("show")
    else:
        _refuse_recipe_of_no_run(arguments.recipe)
        recipe, run = _resolved("show", rest, _own(parser), tells=True)
    from sightline.measure.show import draw_sheet

    path, said = draw_sheet(recipe, run, folder, arguments.out)
    print(f"wrote {path}: {said}")


def train(flags: Sequence[str]) -> None:
    """Train a recipe, or resume its run: `sightline train classification --data DIR`"""
    if flags and flags[0] in ("-h", "--help"):
        _parser("train", train, "RECIPE [--config FILE] [--part.field VALUE ...]").print_help()
        print(f"\n{help_text.of_train(recipes.names())}")
        return
    if help_text.is_asked(flags):
        _print_help(flags)
        return
    from sightline import config

    if help_text.is_asked(["", *flags]):  # of the recipe of a config file
        _print_help(config.recipe_asked(flags))
        return
    rest, wants_all_folds = config.without_all_folds(flags)
    told = config.asked("train", rest)
    if not among_ranks():
        told.refuse_missing_data()
    if terminal.is_command():  # a script that calls us may fork later
        from sightline.data.loading.forkserver import start_early
        from sightline.hardware import early_cuda

        early_cuda.begin(told.run)
        start_early(told.settings.recipe, told.run)  # before torch is imported, which takes as long there
    resolved = told.resolved(needs_data=not among_ranks(), purpose="train")
    recipe, run = resolved.recipe, resolved.run
    _say(resolved)
    _refuse_uneven(recipe, run)
    from sightline.runs.refused import as_before

    folder = Path(run.out or f"runs/{recipe.name}")
    with as_before(folder / "fold-0" if wants_all_folds else folder):
        if _ran_as_ranks(["train", *flags], run.devices, run.device):
            return
    from sightline import api

    if wants_all_folds:
        with as_before(folder / "fold-0"):
            document = api.train_folds(recipe, run)
        if is_rank_0():
            from sightline.evaluate import folds

            print(f"{folds.as_text(document)}\nfinished: results are in {folder}")
            print(f"next: sightline predict {folder} FILE ..., the ensemble of all folds")
            _tell_page(folder / "report.html")
        return
    with as_before(folder):
        api.train_resolved(resolved)
    if is_rank_0():
        from sightline.runs import ending
        from sightline.train import checkpoint

        own = rest[0] if rest[0].endswith(".py") else ""
        best = checkpoint.find(folder, "best").name
        print(ending.as_text(folder, best, own, resolved.facts.has_test))
        _tell_page(folder / "report.html")


def evaluate(flags: Sequence[str]) -> None:
    """Score a run, a checkpoint, masks or given weights: `sightline evaluate runs/resnet50 --checkpoint latest`"""
    parser = _parser("evaluate", evaluate)
    what = "run folder, or a ckpt-* folder; with --labels also one of masks; or a recipe, with --model.weights FILE"
    parser.add_argument("run", metavar="RUN", help=what)
    _add_checkpoint(parser)
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
    _refuse_value_of_flag(flags, arguments.run, "evaluate RUN")
    _refuse_flags_of_run("evaluate", arguments, rest, _own(parser))
    if arguments.all and (arguments.labels or arguments.choose_postprocessing):
        other = "--labels" if arguments.labels else "--choose-postprocessing"
        raise UsageError(f"--all cannot be combined with {other}; name one checkpoint with --checkpoint")
    if arguments.split == "test" and (arguments.all or arguments.labels or arguments.choose_postprocessing):
        raise UsageError(
            "--split test cannot be combined with --all, --labels or --choose-postprocessing: a test split scores one "
            "checkpoint after it was chosen"
        )
    if _ran_as_ranks_of_run(["evaluate", *flags], rest):
        return
    if not Path(arguments.run).is_dir() and _names_recipe(arguments.run, rest):
        _evaluate_weights(arguments, rest, _own(parser))
        return
    from sightline import api
    from sightline.runs import score_text

    if arguments.choose_postprocessing:
        from sightline.evaluate import postprocessing

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
            _tell_page(page)


def _evaluate_weights(arguments: argparse.Namespace, flags: Sequence[str], own: Collection[str]) -> None:
    """Score weights from a file with the network, data and task of a recipe."""
    others = (arguments.all, arguments.labels, arguments.recipe, arguments.choose_postprocessing)
    if any(others) or arguments.checkpoint != "best":
        raise UsageError(
            f"--all, --labels, --recipe, --checkpoint and --choose-postprocessing are for runs, and {arguments.run} is "
            "a recipe; leave them out"
        )
    recipe, run = _resolved("evaluate", [arguments.run, *flags], own)
    from sightline import api
    from sightline.runs import score_text

    scores = api.evaluate_weights(recipe, run, split=arguments.split)
    if is_rank_0():
        file = str(Path(run.out) / "scores.json") if run.out else "scores.json if --run.out DIR is given"
        for line in score_text.of_classes(scores, file):
            print(line)


def predict(flags: Sequence[str]) -> None:
    """Predict images or volumes; write JSON, CSV, masks and drawings: `sightline predict runs/resnet50 a.jpg`"""
    parser = _parser("predict", predict)
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
    what = "draw the findings; without, write predictions.json and predictions.csv only"
    parser.add_argument("--draw", action=argparse.BooleanOptionalAction, default=True, help=what)
    what = "volumes: also write CASE.npy, the probability of every class at every voxel, float32"
    parser.add_argument("--save-probabilities", action="store_true", help=what)
    what = "volumes: masks as `evaluate --choose-postprocessing` decided"
    parser.add_argument("--postprocessing", action=argparse.BooleanOptionalAction, default=True, help=what)
    _add_checkpoint(parser)
    arguments, rest = parser.parse_known_args(flags)
    for first in (arguments.run, arguments.inputs[0]):
        _refuse_value_of_flag(flags, first, "predict RUN INPUT ...")
    _refuse_flags_of_run("predict", arguments, rest, _own(parser))
    if _ran_as_ranks_of_run(["predict", *flags], rest):
        return
    from sightline import api
    from sightline.evaluate.folds import is_exported, split_runs

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
    )


def export(flags: Sequence[str]) -> None:
    """Write a run's network into one file and compare it: `sightline export runs/resnet50 --format onnx`"""
    parser = _parser("export", export)
    parser.add_argument("run", metavar="RUN", help="run folder, or a ckpt-* folder")
    parser.add_argument("--format", default="onnx", help="onnx, torch-export, safetensors or pth; default: onnx")
    parser.add_argument("--out", default="", help="the file; default: RUN/model.onnx, .pt2, .safetensors or .pth")
    what = "detectors: outputs of the network, without decoding of boxes and NMS; default file: RUN/model-raw.onnx"
    parser.add_argument("--raw", action="store_true", help=what)
    _add_checkpoint(parser)
    arguments, rest = parser.parse_known_args(flags)
    _refuse_value_of_flag(flags, arguments.run, "export RUN")
    _refuse_flags_of_run("export", arguments, rest, _own(parser))
    from sightline.export import run

    options = run.ExportOptions(arguments.format, arguments.out, arguments.raw)
    run.export(arguments.run, options, rest, arguments.checkpoint, arguments.recipe, print)


def runs(flags: Sequence[str]) -> None:
    """List runs with recipe, data, best score, epochs, time and state: `sightline runs demo`"""
    parser = _parser("runs", runs)
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=Path("runs"), help="default: runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(flags)
    from sightline.runs import overview

    found, columns = overview.find_runs(arguments.folder), help_text.terminal_columns()
    print(overview.as_json(found) if arguments.json else overview.as_text(found, arguments.folder, columns))


def report(flags: Sequence[str]) -> None:
    """Write an HTML page about a run, or compare several: `sightline report runs/resnet50`"""
    parser = _parser("report", report)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folders, or that of all folds")
    parser.add_argument("--out", type=Path, help="the page; default: RUN/report.html, for several runs ./report.html")
    arguments = parser.parse_args(flags)
    from sightline.evaluate.folds import runs_of
    from sightline.report import page

    folders = [run for folder in arguments.runs for run in runs_of(folder)]
    out = arguments.out or (arguments.runs[0] / page.PAGE if len(arguments.runs) == 1 else None)
    print(f"wrote {page.write_report(folders, out)}; open it in a browser")


def average(flags: Sequence[str]) -> None:
    """Average the weights of checkpoints into a new one: `sightline average runs/resnet50 --out DIR`"""
    parser = _parser("average", average)
    parser.add_argument("checkpoints", type=Path, nargs="+", help="ckpt-* folders, or a run folder for all it keeps")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    arguments = parser.parse_args(flags)
    from sightline.train import averaging, checkpoint

    paths = [path for given in arguments.checkpoints for path in checkpoint.all_of(given)]
    averaging.average_checkpoints(paths, arguments.out)
    print(f"averaged {', '.join(path.name for path in paths)} into {arguments.out}")


def benchmark(flags: Sequence[str]) -> None:
    """Measure the speed of a recipe's step or input: `sightline benchmark resnet50 --peers`"""
    _refuse_recipe_named_first(flags)
    from sightline.measure import benchmark as measure
    from sightline.measure import whole
    from sightline.recipe.options import split_options

    flags = measure.with_folder(flags)
    options, rest = split_options(measure.BenchmarkOptions, flags, prog="sightline benchmark", flat=True)
    recipe, run = _resolved("benchmark", rest)
    _refuse_uneven(recipe, run)
    if _ran_as_ranks(["benchmark", *flags], 0 if options.whole else run.devices, run.device):
        return
    if options.whole:
        print(whole.as_text(whole.measure(recipe, run, rest, options.out, print)))
        return
    result = measure.benchmark(recipe, run, options, print)
    if is_rank_0():
        print(measure.as_text(result))


def inspect(flags: Sequence[str]) -> None:
    """Show size, steps, learning rates and where values come from: `sightline inspect resnet50 --lr-at 0 5000`"""
    usage = "RECIPE|RUN [--lr-at STEP ...] [--ranks N] [--json] [--recipe FILE] [--part.field VALUE ...]"
    parser = _parser("inspect", inspect, usage)
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

    is_run = bool(rest) and _names_run(rest[0])
    if is_run:
        settings = config.of_run("inspect", Path(rest[0]), rest[1:], arguments.recipe, _own(parser))
    else:
        _refuse_recipe_of_no_run(arguments.recipe)
        settings = config.asked("inspect", rest, _own(parser)).resolved().settings
    recipe, run = settings.build()
    recipe.train.require_batch("inspect")
    from sightline.measure import inspect as measure

    path = getattr(recipe.data, "path", "")
    if is_run and os.path.isabs(path) and not os.path.exists(path):
        raise UsageError(f"the data of {rest[0]} were in {path}, which is gone; add --data.path DIR")
    found = measure.inspect(recipe, run, arguments.lr_at, arguments.ranks, is_run)
    print(measure.as_text(found, why(settings.differing()), arguments.json))


def doctor(flags: Sequence[str]) -> None:
    """Report what this machine can do and what is missing: `sightline doctor --folder runs`"""
    parser = _parser("doctor", doctor)
    parser.add_argument("--folder", type=Path, default=Path("."), help="folder in which runs will be written")
    parser.add_argument("--all", action="store_true", help="a line for everything, also for what is absent")
    arguments = parser.parse_args(flags)
    from sightline.hardware.doctor import as_lines, examine

    checks = examine(arguments.folder, arguments.all)
    for line in as_lines(checks, arguments.all):
        print(line)
    if any(check.status == "fail" for check in checks):
        raise UsageError("this machine cannot train; the lines marked `fail` say why")


def migrate(flags: Sequence[str]) -> None:
    """Run an unmodified CUDA script on another device: `sightline migrate --target cpu script.py`"""
    from sightline.migrate import cli

    code = cli.main(flags)
    if code:
        raise SystemExit(code)


def launch(flags: Sequence[str]) -> None:
    """Train on several hosts: `sightline launch resnet50 --hosts a:8,b:8 --launcher ssh --data.path DIR`"""
    _refuse_recipe_named_first(flags)
    from sightline.hardware.launch import command
    from sightline.recipe.options import split_options

    options, rest = split_options(command.LaunchOptions, flags, prog="sightline launch")
    recipe, run = _resolved("launch", rest)
    command.launch(options, rest, recipe, run, print)


def legacy(flags: Sequence[str]) -> None:
    """Run a command line of the original READMEs: `sightline legacy --print train.py --batch-size 256`"""
    from sightline.legacy import command

    command.legacy(flags, print, lambda words: COMMANDS[words[0]](words[1:]))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": train,
    "launch": launch,
    "evaluate": evaluate,
    "predict": predict,
    "export": export,
    "runs": runs,
    "report": report,
    "list": list_recipes,
    "average": average,
    "benchmark": benchmark,
    "inspect": inspect,
    "prepare": prepare,
    "check": check,
    "show": show,
    "doctor": doctor,
    "migrate": migrate,
    "legacy": legacy,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if flags[:1] == ["migrate"]:  # a script's output is its own; the command guards what it says itself
        return _run(flags)
    with terminal.guarded(), folder_off_path():
        code = _run(flags)
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python shuts down: no traceback of its threads
    return code


def _run(flags: list[str]) -> int:
    try:
        if not flags or flags[0] in ("-h", "--help"):
            print(_overview(), flush=True)
            return 0 if flags else UsageError.exit_code
        if flags[0] == "--version":
            print(f"sightline {__version__}", flush=True)
            return 0
        _refuse_unknown_command(flags[0])
        COMMANDS[flags[0]](flags[1:])
        if sys.stdout:  # None where it was closed
            sys.stdout.flush()  # here, where a reader that has gone can be met; at exit it would be code 120
    except Interrupted as stop:  # as asked for, so not an error
        if is_rank_0():
            _complain(str(stop))
        return stop.exit_code
    except SightlineError as error:
        _complain(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _complain("stopped by Ctrl-C; the same command starts again, from what was saved")
        return 130
    except BrokenPipeError:  # `| head` has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if (failed := unforeseen_disk_error(error)) is None:
            raise
        _complain(f"error: {failed}")
        return failed.exit_code
    return 0


def _complain(text: str) -> None:
    """Print an error. On a terminal that was closed (SIGHUP) only the exit code is left."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _tell_page(path: Path) -> None:
    if path.exists():  # else it could not be written
        print(f"report: {path}")


def _overview() -> str:
    lines = [f"sightline {__version__}: vision training", "", "usage: sightline COMMAND ...", ""]
    lines += [help_text.row(f"  {name:10} ", (command.__doc__ or "").strip()) for name, command in COMMANDS.items()]
    lines += [
        "",
        "`sightline COMMAND --help` lists options, `sightline train RECIPE --help` the usual flags of a recipe.",
    ]
    return "\n".join(lines)


def _parser(name: str, command: Callable[[Sequence[str]], None], more: str = "") -> argparse.ArgumentParser:
    usage = f"sightline {name} {more}" if more else None
    return argparse.ArgumentParser(f"sightline {name}", usage=usage, description=command.__doc__, allow_abbrev=False)


def _own(parser: argparse.ArgumentParser) -> list[str]:
    return [option for option in parser._option_string_actions if option.startswith("--")]


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="best", help="best, latest or a name under checkpoints/")
    parser.add_argument("--recipe", default="", help="your own recipe file, if the run was made with one")


def _print_help(flags: Sequence[str]) -> None:
    """Print the usual flags of a recipe, or with --help-all every flag, of one part if that is named."""
    from sightline.recipe.recipe import Run

    name, wants_all, part = help_text.question(flags)
    recipe = recipes.load(name)
    if wants_all:
        print(help_text.every_flag(recipe, Run(), name, part))
    else:
        print(help_text.of_recipe(recipe, Run(), name, recipes.describe(name)))


def _resolved(command: str, words: Sequence[str], own: Collection[str] = (), tells: bool = False) -> tuple[Recipe, Run]:
    """Return the recipe and run of a command's words, with a number for the batch, which no run has measured."""
    from sightline import config

    told = config.asked(command, words, own)
    if command in ("evaluate", "show") and not among_ranks():
        told.refuse_missing_data()
    purpose: Purpose = "score" if command == "evaluate" else "look"
    resolved = told.resolved(needs_data=tells and not among_ranks(), purpose=purpose)
    if tells:
        _say(resolved)
    if command != "launch":
        resolved.recipe.train.require_batch(command)
    return resolved.recipe, resolved.run


def _say(resolved: Resolved) -> None:
    """Say what was decided about the data; of several ranks, their starter has."""
    if resolved.run.progress != "off" and not among_ranks():
        for line in resolved.lines:
            terminal.say_if_read(line)


def _refuse_uneven(recipe: Recipe, run: Run) -> None:
    """Refuse a batch that the local ranks cannot share; else every rank would."""
    if run.devices > 1:
        from sightline.train.orders import refuse_uneven

        refuse_uneven(recipe, run.devices)


def _refuse_unknown_command(command: str) -> None:
    if command in COMMANDS:
        return
    from sightline.recipe.suggest import nearest

    meant = f"; did you mean `sightline train {command}`?" if command in recipes.names() else ""
    hint = meant or nearest(command, COMMANDS, "'{}'")
    known = f"{hint} Known" if hint else "; known"
    raise UsageError(f"unknown command '{command}'{known}: {', '.join(COMMANDS)}")


def _names_run(word: str) -> bool:
    """Return whether a word, which may name a recipe or a run folder, is the latter: also a misspelt one."""
    if word in recipes.names() or word.startswith("-") or word.endswith(".py"):
        return False
    return Path(word).is_dir() or os.sep in word


def _names_recipe(target: str, flags: Sequence[str]) -> bool:
    """Return whether `evaluate` is about a recipe; with weights also if its name is misspelt, to be refused as such."""
    from sightline.recipe.flags import long

    has_weights = any(long(flag).startswith("--model.weights") for flag in flags)
    return target in recipes.names() or target.endswith(".py") or has_weights


def _refuse_recipe_of_no_run(recipe_file: str) -> None:
    if recipe_file:
        raise UsageError("--recipe is for runs that were made with your own recipe; give a run folder, or leave it out")


def _refuse_flags_of_run(command: str, asked: argparse.Namespace, words: Sequence[str], own: Collection[str]) -> None:
    if words and not words[0].startswith("-"):
        raise UsageError(f"unexpected '{words[0]}'; `sightline {command} --help` shows what comes after {command}")
    from sightline import config

    config.refuse_flags_of_run(command, Path(asked.run), asked.recipe, words, own)


def _refuse_value_of_flag(flags: Sequence[str], value: str, usage: str) -> None:
    """Refuse a positional argument after a flag of the recipe: only the recipe in RUN knows which flags take values."""
    before = flags[flags.index(value) - 1] if value in flags[1:] else ""
    if before.startswith("--") and "." in before and "=" not in before:
        raise UsageError(f"'{value}' comes after {before}; begin with `sightline {usage}`, then {before} and the like")


def _refuse_recipe_named_first(flags: Sequence[str]) -> None:
    """Refuse an unknown recipe before the command's own options are read, which imports torch."""
    if flags and not flags[0].startswith("-"):
        recipes.refuse_unknown(flags[0])


def _ran_as_ranks(arguments: Sequence[str], devices: int, device: str) -> bool:
    """Run the command as several local ranks, to its end, where asked for; return whether that was done."""
    if devices < 2:
        return False
    from sightline.hardware.launch import local

    return local.start(devices, device, arguments)


def _ran_as_ranks_of_run(arguments: Sequence[str], words: Sequence[str]) -> bool:
    """Do the same for a command about a run, whose recipe is not loaded yet."""
    from sightline.recipe.resolve import run_fields

    run = run_fields(words)
    return _ran_as_ranks(arguments, run.get("run.devices", 0), run.get("run.device", "auto"))
