"""The commands. Each is a few lines that call one function; --help and list import no torch."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sightline import __version__, recipes, terminal
from sightline.errors import BadData, SightlineError, UsageError

PREPARE = Path(__file__).parent / "data" / "prepare"
CLASSES_SHOWN = 20
WORST_SHOWN = 5
SAFE_PATH = "PYTHONSAFEPATH"


def list_recipes(flags: Sequence[str]) -> None:
    """the recipes, one line each; `list NAME` shows one whole"""
    arguments = _parser("list", list_recipes, "[RECIPE]").parse_known_args(flags)[1]
    for name in arguments:
        if name not in recipes.names():
            recipes.find(name)  # says which names there are
        print(textwrap.indent(recipes.describe(name), "  "))
    if not arguments:
        for name in recipes.names():
            print(f"{name:24} {recipes.describe(name).splitlines()[0]}")


def prepare(flags: Sequence[str]) -> None:
    """make data ready for training, change its form, or draw some: `prepare shapes --out DIR`"""
    known = sorted(m.name for m in pkgutil.iter_modules([str(PREPARE)]) if not m.name.startswith("_"))
    if not flags or flags[0] not in known:
        if flags and flags[0] in ("-h", "--help"):
            _parser("prepare", prepare, f"{{{','.join(known)}}} [options]").print_help()
            return
        raise UsageError(f"prepare what? Known: {', '.join(known)}; e.g. `sightline prepare shapes --out DIR`")
    from sightline.config import parse_options

    module = importlib.import_module(f"sightline.data.prepare.{flags[0]}")
    options = parse_options(module.Options, flags[1:], prog=f"sightline prepare {flags[0]}")
    from sightline.data.progress import shown_progress

    with shown_progress() as progress:
        counts = module.prepare(options, progress)
    print(f"{flags[0]}: {_counts(counts)} in {options.out}")


def check(flags: Sequence[str]) -> None:
    """look at every sample before training, list all that is wrong: `check RECIPE --data.path DIR [--json]`"""
    parser = _parser("check", check)
    what = "decode every picture whole; without, only its header is read"
    parser.add_argument("--decode", action=argparse.BooleanOptionalAction, default=True, help=what)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments, rest = parser.parse_known_args(flags)
    recipe, run = _load_recipe("check", rest)
    from sightline.data.processes import cores
    from sightline.data.progress import shown_progress

    with shown_progress() as progress:
        processes = run.workers if run.workers >= 0 else min(cores(), 16)
        report = recipe.data.check(arguments.decode, processes, progress)
    print(report.as_json() if arguments.json else report.as_text())
    if report.problems:
        raise BadData(f"{len(report.problems)} problems; mend what is listed above")


def train(flags: Sequence[str]) -> None:
    """train a recipe, or go on with it: `train RECIPE [--config FILE] [--part.field VALUE ...]`"""
    if flags and flags[0] in ("-h", "--help"):
        _parser("train", train, "RECIPE [--config FILE] [--part.field VALUE ...]").print_help()
        print(f"\nrecipes: {', '.join(recipes.names())}; `sightline train RECIPE --help` lists every field of one")
        print("`--data.fold all`, where the data have folds, trains one run per fold and tells their mean and spread")
        return
    rest, wants_all_folds = _without_all_folds(flags)
    recipe, run = _load_recipe("train", rest)
    if _ran_as_ranks(["train", *flags], run.devices, run.device):
        return
    from sightline import api

    if wants_all_folds:
        document = api.train_folds(recipe, run)
        if _is_main():
            from sightline.evaluate import folds

            print(f"{folds.as_text(document)}\nfinished: results are in {run.out or f'runs/{recipe.name}'}")
        return
    scores = api.train(recipe, run)
    if _is_main():
        print(f"finished: {_values(scores.values)}; results are in {run.out or f'runs/{recipe.name}'}")


def evaluate(flags: Sequence[str]) -> None:
    """evaluate a run, a checkpoint or masks: `evaluate RUN [--checkpoint best|latest|NAME | --all] [--labels DIR]`"""
    parser = _parser("evaluate", evaluate)
    parser.add_argument("run", metavar="RUN", help="run folder, or a ckpt-* folder; with --labels also one of masks")
    _add_checkpoint(parser)
    parser.add_argument("--all", action="store_true", help="every checkpoint the run keeps, as a table; goes on if cut")
    what = "label files, or a Decathlon folder: score volumes in the geometry of their files; without, as prepared"
    parser.add_argument("--labels", metavar="DIR", help=what)
    arguments, rest = parser.parse_known_args(flags)
    _refuse_value_of_flag(flags, arguments.run, "evaluate RUN")
    if arguments.all and arguments.labels:
        raise UsageError("--all and --labels do not go together; name one with --checkpoint")
    devices = _value_of("devices", rest, "0")  # if it is no number, the recipe's own reading of it says so
    if devices.isdecimal() and _ran_as_ranks(["evaluate", *flags], int(devices), _value_of("device", rest, "auto")):
        return
    from sightline import api

    if arguments.all:
        rows_of_all = api.evaluate_all(arguments.run, rest, arguments.recipe)
        if _is_main():
            print(_table(rows_of_all))
        return
    if arguments.labels:
        scores = api.evaluate_labels(arguments.run, arguments.labels, rest, arguments.checkpoint, arguments.recipe)
    else:
        scores = api.evaluate(arguments.run, rest, arguments.checkpoint, arguments.recipe)
    if not _is_main():
        return
    rows = scores.tables.get("classes", [])
    for row in rows[:CLASSES_SHOWN]:
        values = "  ".join(f"{key} {_number(row[key])}" for key in row if key not in ("class", "samples"))
        print(f"  {row['class']:24} {values}" + (f"  of {row['samples']}" if "samples" in row else ""))
    if len(rows) > CLASSES_SHOWN:
        print(f"  and {len(rows) - CLASSES_SHOWN} more classes in scores-*.json of the run")
    if arguments.labels and scores.worst:
        print("  lowest: " + ", ".join(f"{row['name']} {row['dice']:.4f}" for row in scores.worst[:WORST_SHOWN]))


def predict(flags: Sequence[str]) -> None:
    """what a run says of pictures or volumes, drawn and as JSON: `predict RUN FILE_OR_FOLDER ... --out DIR`"""
    parser = _parser("predict", predict)
    parser.add_argument("run", metavar="RUN", help="run folder, or a ckpt-* folder")
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="pictures, NIfTI volumes, or folders of them")
    parser.add_argument("--out", required=True, help="folder for predictions.json, masks and drawn pictures")
    parser.add_argument("--top", type=int, help="most classes or boxes of a picture")
    parser.add_argument("--score-threshold", type=float, help="least score of what is shown, 0 to 1")
    what = "draw what was found; without, only predictions.json is written"
    parser.add_argument("--draw", action=argparse.BooleanOptionalAction, default=True, help=what)
    what = "of volumes also CASE.npy: the probability of every class at every voxel, float32"
    parser.add_argument("--save-probabilities", action="store_true", help=what)
    _add_checkpoint(parser)
    arguments, rest = parser.parse_known_args(flags)
    for first in (arguments.run, arguments.inputs[0]):
        _refuse_value_of_flag(flags, first, "predict RUN INPUT ...")
    if arguments.top is not None and arguments.top < 1:
        raise UsageError(f"--top {arguments.top} must be at least 1")
    if arguments.score_threshold is not None and not 0 <= arguments.score_threshold <= 1:
        raise UsageError(f"--score-threshold {arguments.score_threshold} must be in 0..1")
    from sightline import api

    api.predict(
        arguments.run,
        arguments.inputs,
        arguments.out,
        rest,
        arguments.checkpoint,
        arguments.recipe,
        top=arguments.top,
        threshold=arguments.score_threshold,
        draws=arguments.draw,
        probabilities=arguments.save_probabilities,
    )


def average(flags: Sequence[str]) -> None:
    """mean weights of several checkpoints: `average RUN/checkpoints/ckpt-* --out DIR`, then `evaluate DIR`"""
    parser = _parser("average", average)
    parser.add_argument("checkpoints", type=Path, nargs="+", help="ckpt-* folders, or a run folder for all it keeps")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    arguments = parser.parse_args(flags)
    from sightline.train import averaging, checkpoint

    paths = [path for given in arguments.checkpoints for path in checkpoint.all_of(given)]
    averaging.average_checkpoints(paths, arguments.out)
    print(f"averaged {', '.join(path.name for path in paths)} into {arguments.out}")


def benchmark(flags: Sequence[str]) -> None:
    """how fast a recipe's step or input is: `benchmark RECIPE [--peers] [--loader] [--scaling] [--data real]`"""
    parser = _parser("benchmark", benchmark)
    for name, default, text in (
        ("steps", 50, "steps per repeat"),
        ("warmup", 10, "steps before the first repeat"),
        ("repeats", 5, "repeats; the median is reported"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--data", choices=("synthetic", "real"), default="synthetic", help="what the step is fed with")
    parser.add_argument("--loader", action="store_true", help="input only, beside torch's DataLoader")
    parser.add_argument("--peers", action="store_true", help="also what one would run instead, alternating")
    what = "the training step, or forward and predictions of evaluation batches, not compiled, as `evaluate` runs them"
    parser.add_argument("--what", choices=("train", "predict"), default="train", help=what)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the JSON file")
    parser.add_argument("--logname", default="", help="a second file with throughput and latencies alone, flat")
    _add_scaling(parser)
    arguments, rest = parser.parse_known_args(flags)
    options = vars(arguments)
    wants_scaling = options.pop("scaling")
    given = {name: options.pop(name) for name in SCALING_FLAGS}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    if given and not wants_scaling:
        raise UsageError(f"--{next(iter(given)).replace('_', '-')} belongs to --scaling; add it")
    recipe, run = _load_recipe("benchmark", rest)
    from sightline.measure import benchmark as measure
    from sightline.measure.scaling import ScalingOptions

    scaling = ScalingOptions(**given) if wants_scaling else None
    result = measure.benchmark(recipe, run, measure.BenchmarkOptions(**options, scaling=scaling), print)
    print(measure.as_text(result))


# Their defaults stand where torch is: in sightline/measure/scaling.py.
SCALING_FLAGS: dict[str, dict[str, Any]] = {
    "devices": {"type": int, "nargs": "+", "metavar": "N", "help": "how many; 2 8 64 1024 if left out"},
    "links": {
        "nargs": "+",
        "metavar": "LINK",
        "help": "inside a host, and between hosts: names of docs/scaling.md or NAME,SPEED; nvlink4 ib400 if left out",
    },
    "per_host": {"type": int, "metavar": "N", "help": "devices of a host; 8 if left out"},
    "step_ms": {"type": float, "metavar": "MS", "help": "one device's step; measured if left out"},
    "spread": {"type": float, "metavar": "SHARE", "help": "deviation of single steps, e.g. 0.02; measured if left out"},
    "sample_kb": {"type": float, "metavar": "KB", "help": "read per sample; as of ImageNet or COCO if left out"},
    "storage_gbs": {
        "type": float,
        "metavar": "GB/S",
        "help": "what the samples' storage gives to all; endless if left out",
    },
    "disk_gbs": {"type": float, "metavar": "GB/S", "help": "at which checkpoints are written; 1 if left out"},
}


def _add_scaling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prediction for many devices")
    group.add_argument(
        "--scaling", action="store_true", help="also predict the step on many devices; see docs/scaling.md"
    )
    for name, options in SCALING_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", **options)


def inspect(flags: Sequence[str]) -> None:
    """what a recipe is made of: parameters, FLOP, groups, steps, learning rates: `inspect RECIPE [--lr-at STEP ...]`"""
    parser = _parser("inspect", inspect)
    parser.add_argument("--lr-at", type=int, nargs="+", default=[], metavar="STEP", help="steps to show the rate of")
    parser.add_argument("--ranks", type=int, default=1, help="devices the run would have; some rates depend on it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments, rest = parser.parse_known_args(flags)
    recipe, run = _load_recipe("inspect", rest)
    from sightline.measure import inspect as measure

    print(measure.as_text(measure.inspect(recipe, run, arguments.lr_at, arguments.ranks), arguments.json))


def doctor(flags: Sequence[str]) -> None:
    """what this machine can do, and what is missing"""
    parser = _parser("doctor", doctor)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where runs would be written")
    arguments = parser.parse_args(flags)
    from sightline.hardware.doctor import examine

    checks = examine(arguments.folder)
    for check in checks:
        print(f"{check.status:5} {check.name:24} {check.value}" + (f"  -> {check.remedy}" if check.remedy else ""))
    if any(check.status == "fail" for check in checks):
        raise UsageError("this machine cannot train; the lines marked `fail` say why")


def migrate(flags: Sequence[str]) -> None:
    """run an unmodified CUDA script on the device that is there: `migrate [--target cpu] script.py ...`"""
    from sightline.migrate import cli

    code = cli.main(flags)
    if code:
        raise SystemExit(code)


def launch(flags: Sequence[str]) -> None:
    """train on several hosts: `launch RECIPE --hosts a:8,b:8 --launcher mpirun|slurm|kubernetes|... [--print]`"""
    from sightline.config import split_options
    from sightline.hardware.launch import command

    options, rest = split_options(command.Options, flags, prog="sightline launch")
    recipe, run = _load_recipe("launch", rest)
    command.launch(options, rest, recipe, run, print)


def legacy(flags: Sequence[str]) -> None:
    """run a command line of the original READMEs: `legacy [--print] SCRIPT ARGS ...`, `legacy -- LINE`"""
    from sightline.legacy import command

    command.legacy(flags, print, lambda words: COMMANDS[words[0]](words[1:]))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": train,
    "launch": launch,
    "evaluate": evaluate,
    "predict": predict,
    "list": list_recipes,
    "average": average,
    "benchmark": benchmark,
    "inspect": inspect,
    "prepare": prepare,
    "check": check,
    "doctor": doctor,
    "migrate": migrate,
    "legacy": legacy,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code of the process."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if flags[:1] == ["migrate"]:  # a script's output is its own; the command guards what it says itself
        return _run(flags)
    with terminal.guarded(), _folder_off_path():
        return _run(flags)


@contextlib.contextmanager
def _folder_off_path() -> Iterator[None]:
    """Let processes that this one starts import nothing from the current folder, unless this one does: ranks, started
    as `python -m sightline`, would run a json.py that lies beside somebody's images."""
    before = os.environ.get(SAFE_PATH, "")
    with contextlib.suppress(FileNotFoundError):  # the folder was removed
        if not {"", os.getcwd()} & set(sys.path):
            os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ[SAFE_PATH] = before  # empty is off


def _run(flags: list[str]) -> int:
    if not flags or flags[0] in ("-h", "--help"):
        print(_overview())
        return 0 if flags else UsageError.exit_code
    if flags[0] == "--version":
        print(f"sightline {__version__}")
        return 0
    try:
        if flags[0] not in COMMANDS:
            raise UsageError(f"unknown command '{flags[0]}'; known: {', '.join(COMMANDS)}")
        COMMANDS[flags[0]](flags[1:])
        if sys.stdout:  # None where it was closed
            sys.stdout.flush()  # here, where a reader that has gone can be met; at exit it would be code 120
    except SightlineError as error:
        _complain(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _complain(text: str) -> None:
    """On a terminal that was closed (SIGHUP) nothing can be said any more; the exit code is then all that is left."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _overview() -> str:
    lines = [f"sightline {__version__}: vision training", "", "usage: sightline COMMAND ...", ""]
    lines += [f"  {name:10} {(command.__doc__ or '').strip()}" for name, command in COMMANDS.items()]
    lines += ["", "`sightline train RECIPE --help` lists every field of a recipe; docs/quickstart.md shows the way."]
    return "\n".join(lines)


def _parser(name: str, command: Callable[[Sequence[str]], None], more: str = "") -> argparse.ArgumentParser:
    usage = f"sightline {name} {more}" if more else None
    return argparse.ArgumentParser(f"sightline {name}", usage=usage, description=command.__doc__, allow_abbrev=False)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="best", help="best, latest or a name under checkpoints/")
    parser.add_argument("--recipe", default="", help="your own recipe file, if the run was made with one")


def _refuse_value_of_flag(flags: Sequence[str], value: str, usage: str) -> None:
    """Only the recipe inside RUN knows which of its flags take values, so what comes first must be first."""
    before = flags[flags.index(value) - 1] if value in flags[1:] else ""
    if before.startswith("--") and "." in before and "=" not in before:
        raise UsageError(f"'{value}' stands after {before}; begin with `sightline {usage}`, then {before} and the like")


def _load_recipe(command: str, flags: Sequence[str]):  # type: ignore[no-untyped-def]  # (Recipe, Run), not imported here
    """The recipe named first, or the one that --config names."""
    rest = [each for flag in flags for each in (flag.split("=", 1) if flag.startswith("--config=") else [flag])]
    file = None
    if "--config" in rest:
        at = rest.index("--config")
        if at + 1 == len(rest):
            raise UsageError("--config needs a file, e.g. --config runs/demo/config.yaml")
        file = Path(rest[at + 1])
        del rest[at : at + 2]
    name = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    if not name and file is None:
        raise UsageError(
            f"{command} what? Known: {', '.join(recipes.names())}; e.g. `sightline {command} {recipes.names()[0]}`"
        )
    from sightline import config

    return config.load(name or config.recipe_named_in(file), rest, file)  # type: ignore[arg-type]


def _without_all_folds(flags: Sequence[str]) -> tuple[list[str], bool]:
    """The flags without `--data.fold all`, which is no number but five runs, and whether it stood there."""
    rest = [flag for flag in flags if flag != "--data.fold=all"]
    for at in reversed(range(len(rest) - 1)):
        if rest[at : at + 2] == ["--data.fold", "all"]:
            del rest[at : at + 2]
    return rest, len(rest) < len(flags)


def _ran_as_ranks(arguments: Sequence[str], devices: int, device: str) -> bool:
    """Whether the command has been run, to its end, by several ranks that this process started."""
    if devices < 2:
        return False
    from sightline.hardware.launch import local

    return local.start(devices, device, arguments)


def _value_of(field: str, flags: Sequence[str], default: str) -> str:
    """What the flags of a run say, which only its own recipe can read in full."""
    for before, flag in zip(["", *flags], flags, strict=False):
        if flag.startswith(f"--run.{field}="):
            default = flag.partition("=")[2]
        elif before == f"--run.{field}":
            default = flag
    return default


def _is_main() -> bool:
    """Of the ranks a launcher starts, one speaks."""
    return os.environ.get("RANK", "0") == "0"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _values(values: dict[str, float]) -> str:
    """The first ones; all of them stand in the line of the evaluation."""
    shown = [f"{name} {_number(value).strip()}" for name, value in values.items() if name != "samples"]
    return ", ".join(shown[:3]) or "not evaluated"


def _number(value: float | str | None) -> str:
    from sightline.log import as_score

    return str(value) if isinstance(value, int | str) else f"{as_score(value):>6}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Step and scores of each checkpoint under each other."""
    names = [name for name in rows[0]["values"] if name != "samples"] if rows else []
    lines = ["      step  " + "  ".join(f"{name:>6}" for name in names)]
    for row in rows:
        lines.append(f"{row['step']:10}  " + "  ".join(f"{_number(row['values'].get(name)):>6}" for name in names))
    return "\n".join(lines)
