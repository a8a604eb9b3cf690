"""The API for Python users and for the command line: train, evaluate, predict, and a trained network as a module.

`api.train("demo_classification", data=DIR, epochs=5)`; docs/start/python.md has examples. Failures are exceptions of
sightline.errors. A call leaves torch's settings and the signal handlers of the process as it found them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from sightline import config, terminal
from sightline.config import load as load_named
from sightline.data.inputs import list_files
from sightline.data.processes import refuse_in_new_process
from sightline.engine import checkpoint
from sightline.engine.setup import torch_as_before
from sightline.errors import OutOfMemory, SightlineError, UsageError, first_of
from sightline.export.exported import open_exported
from sightline.files.checkpoint_folder import run_of
from sightline.hardware import world
from sightline.hardware.devices import is_out_of_memory
from sightline.hardware.launch.place import is_rank_0
from sightline.inference import checkpoints, folds, given_weights, label_files, postprocessing, shares
from sightline.inference.checkpoints import Trained
from sightline.inference.ensemble import Ensemble
from sightline.inference.loaded import Model
from sightline.inference.predict import Input, open_trained, predict_files, predict_inputs
from sightline.parts import PredictOptions, Scores, Split
from sightline.recipe.flags import Given, ShortFields
from sightline.recipe.recipe import PARTS, Recipe, Run
from sightline.recipe.resolve import Resolved
from sightline.report import inline as _shows_results  # noqa: F401  # in notebooks
from sightline.report.live import LivePage
from sightline.report.refresh import write_if_possible
from sightline.results import (
    Classification,
    Detection,
    EvaluateResult,
    Prediction,
    Predictions,
    ReportPage,
    Segmentation,
    TrainResult,
)
from sightline.runs.log import RunLog
from sightline.runs.loggers import Logger, RunStart
from sightline.runs.refused import as_before
from sightline.runs.screen import Screen
from sightline.train import start
from sightline.train.process import train_here

__all__ = [
    "Classification",
    "Detection",
    "EvaluateResult",
    "Logger",
    "Model",
    "Prediction",
    "Predictions",
    "Recipe",
    "ReportPage",
    "Run",
    "RunStart",
    "Scores",
    "Segmentation",
    "TrainResult",
    "choose_postprocessing",
    "evaluate",
    "evaluate_all",
    "evaluate_labels",
    "evaluate_weights",
    "load",
    "model",
    "predict",
    "report",
    "train",
    "train_folds",
    "write_predictions",
]

Flags = Given  # ["--optimizer.lr", "0.1"] or {"optimizer.lr": 0.1}
Place = str | Path
Runs = Place | Sequence[Place]  # several: an ensemble
SHOWN_RUNS = 20  # of an ensemble: all that anybody names

# A flag of a recipe, not the end of a file's name.
_FLAG = re.compile(rf"(?<![\w./-])--((?:{'|'.join((*PARTS, 'run'))})\.(?!no-)[a-z0-9-]+)")


@contextlib.contextmanager
def _called(runs: bool = True) -> Iterator[None]:
    """Surround a call: torch is left as it was. What runs a network is refused in a process that only imports the
    script."""
    if runs:
        refuse_in_new_process()
    try:
        with torch_as_before():
            yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        elsewhere = " or use --run.device cpu" if isinstance(error, torch.OutOfMemoryError) else ""
        said = f"{error}; lower --train.global-batch{elsewhere}, unless the network alone is too large for this device"
        raise _with_fields(OutOfMemory(said)) from error
    except SightlineError as error:
        _with_fields(error)
        raise


def _with_fields(error: SightlineError) -> SightlineError:
    """Note for a script how it sets a field of which an error names the flag; a command shows no notes."""
    if flag := _FLAG.search(str(error)):
        field = flag[1].replace("-", "_")
        note = f'In Python, {flag[0]} VALUE is flags={{"{field}": VALUE}}, or {field} of a Recipe or Run'
        if note not in getattr(error, "__notes__", ()):  # of a call within
            error.add_note(note)
    return error


@_called(runs=False)
def load(name: str, flags: Flags = (), config: Path | None = None) -> tuple[Recipe, Run]:
    """Load the recipe `name`, changed by a YAML file and then by flags."""
    return load_named(name, flags, config)


@_called()
def train(
    recipe: Place | Recipe,
    run: Run | None = None,
    *,
    flags: Flags = (),
    loggers: Sequence[Logger] = (),
    report: bool = True,
    **fields: Unpack[ShortFields],
) -> TrainResult:
    """Train a recipe, or resume its run: `train("demo_classification", data="pets", epochs=5)`.

    `recipe` is a name, the path of your own .py recipe or of a YAML file, or an object, to which `run` belongs.
    Keywords are the short flags of the command line; `flags` are any others, as a dict {"optimizer.lr": 0.1} or a list
    ["--optimizer.lr", "0.1"]; a keyword wins. `loggers` get every number of the run; `report` writes report.html.
    Raises Interrupted after Ctrl-C, when the run is saved, and the same call resumes it.
    """
    flags = flags if isinstance(flags, Mapping | str) else list(flags)  # also of an iterator
    if _asks_for_all_folds(flags):
        raise UsageError("data.fold=all is a run per fold; without it, call api.train_folds(*api.load(NAME, flags))")
    if isinstance(recipe, Recipe):
        resolved = config.of_object(recipe, run or Run(), flags, fields)
    elif run is not None:
        raise UsageError(f"'{recipe}' is a name, and a Run belongs to a Recipe object; give keywords or flags instead")
    else:
        resolved = config.named(str(recipe), flags, fields)
    if resolved.run.progress != "off" and is_rank_0():
        for line in resolved.lines:
            terminal.say_if_read(line)
    with as_before(Path(resolved.run.out or f"runs/{resolved.recipe.name}")):
        return train_here(resolved.recipe, resolved.run, loggers, LivePage if report else None, resolved.facts)


@_called()
def train_resolved(resolved: Resolved) -> TrainResult:
    """Train what a command line was resolved to."""
    return train_here(resolved.recipe, resolved.run, page=LivePage, facts=resolved.facts)


@_called()
def train_folds(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Train every fold of the data into fold-0, fold-1 and so on below the run folder, each an ordinary run that
    resumes, and combine their best scores; return what folds.json there holds."""
    data: Any = recipe.data
    folds.refuse_without(recipe)
    if run.resume not in ("auto", "never"):
        raise UsageError(f"--run.resume {run.resume} cannot be combined with --data.fold all; leave one of them out")
    folder = Path(run.out or f"runs/{recipe.name}")
    rank = world.detect().rank
    log = RunLog(folder, Screen(run.progress, rank), rank, attempt=None)
    rows = []
    for fold in range(data.folds):
        name = f"fold-{fold}"
        log.say(f"fold {fold}, {fold + 1} of {data.folds}: {folder / name}")
        benchmark_log = run.benchmark_log and str(Path(run.benchmark_log) / name)
        recipe = start.with_batch_of(recipe, dataclasses.replace(run, out=str(folder / "fold-0")))
        data = recipe.data
        one = recipe.decided({"data.fold": fold}, "one run per fold")
        train_here(one, dataclasses.replace(run, out=str(folder / name), benchmark_log=benchmark_log), page=LivePage)
        rows.append(folds.read_fold(folder / name, fold, recipe.task.headline))
        gc.collect()  # captured graphs and the last network hold memory that the next one needs
        torch.compiler.reset()  # else the next network counts as one recompilation too many of the last
    document = folds.summary(recipe.name, recipe.task.headline, rows)
    log.folder.write_json(folds.DOCUMENT, document)
    if log.folder.is_main and run.report == "auto":
        write_if_possible([folder / row["folder"] for row in rows], folder / "report.html")
    return document


@_called()
def evaluate(
    run_folder: Place, flags: Flags = (), which: str = "best", recipe_file: str = "", *, split: Split = "val"
) -> EvaluateResult:
    """Score a checkpoint on its recipe's val split; flags may change data.path and run fields. Of other data without a
    val split, all samples are scored. `split="test"` scores the test split, and raises UsageError if there is none."""
    folds.refuse_folds(Path(run_folder))
    path, tensors, stored = checkpoint.read_of_run(Path(run_folder), which)
    trained = Trained.set_up(path, tensors, stored, recipe_file, flags)
    with checkpoints.opened(trained, run_of(path), split=split) as evaluation:
        scores = evaluation.score(path, stored)
    of, step = f"{path} on the {split} split", stored["progress"]["step"]
    return EvaluateResult(**vars(scores), of=of, folder=str(run_of(path)), step=step)


@_called()
def evaluate_all(run_folder: Place, flags: Flags = (), recipe_file: str = "") -> list[dict[str, Any]]:
    """Score every checkpoint of a run; return rows by step, as evaluation.json holds them."""
    folds.refuse_folds(Path(run_folder))
    return checkpoints.evaluate_all(Path(run_folder), flags, recipe_file)


@_called()
def evaluate_labels(
    target: Place, labels: Place, flags: Flags = (), which: str = "best", recipe_file: str = ""
) -> EvaluateResult:
    """Compute Dice against label files, in their own geometry: of a folder of masks, or of a run's predictions for the
    raw files of its val split; those masks stay in predictions-CHECKPOINT of the run, or below run.out."""
    folder = Path(target)
    folds.refuse_folds(folder)
    if folder.is_dir() and not (folder / "checkpoints").is_dir() and not (folder / checkpoint.MANIFEST).is_file():
        if flags:
            raise UsageError(
                f"{target} is not a run, so there is no recipe for {' '.join(map(str, flags))} to change; leave it out"
            )
        scores = label_files.evaluate_folder(folder, Path(labels))
        return EvaluateResult(**vars(scores), of=f"masks of {folder} against {labels}")
    trained = open_trained(folder, which, recipe_file, "evaluate --labels", flags)
    out = Path(trained.run.out or run_of(trained.path)) / f"predictions-{trained.path.name}"
    scores = label_files.evaluate_run(trained, Path(labels), out)
    return EvaluateResult(**vars(scores), of=f"{trained.path} against {labels}")


@_called()
def choose_postprocessing(
    run_folder: Place, labels: Place = "", flags: Flags = (), which: str = "best", recipe_file: str = ""
) -> dict[str, Any]:
    """Decide per class whether keeping only its largest connected component raises the validation Dice of a run, or of
    all folds together, on prepared volumes or, with the folder of `labels`, on the raw files; return what
    postprocessing.json of that folder holds. `predict` applies it."""
    folder, command = Path(run_folder), "evaluate --choose-postprocessing"
    runs = [open_trained(each, which, recipe_file, command, flags) for each in folds.runs_of(folder)]
    folder = Path(runs[0].run.out or (run_of(runs[0].path) if len(runs) == 1 else folder))
    return postprocessing.choose(runs, folder, Path(labels) if labels else None)


@_called()
def evaluate_weights(recipe: Recipe, run: Run, *, split: Split = "val") -> EvaluateResult:
    """Score a recipe's `model.weights` on its val or test split; scores.json, or scores-test.json, is written into
    run.out, nothing without it."""
    scores = given_weights.evaluate_weights(recipe, run, split)
    return EvaluateResult(**vars(scores), of=f"{getattr(recipe.model, 'weights', '')} on the {split} split")


@_called(runs=False)
def report(runs: Runs, out: Place | None = None) -> ReportPage:
    """Write the page of a run, or of several beside each other, as `sightline report` does: RUN/report.html, of several
    runs report.html in this folder, or `out`. In a notebook the result shows the page."""
    from sightline.report.page import write_report  # most programs need not wait for it

    folders = [runs] if isinstance(runs, str | Path) else runs
    return ReportPage(write_report([Path(each) for each in folders], Path(out) if out else None))


@_called()
def model(
    run_folder: Place, device: str = "auto", which: str = "best", recipe_file: str = "", flags: Flags = ()
) -> Model:
    """Load the network of a run as a module in evaluation mode, with its preprocessing and class names.

    The weights are those that `evaluate` uses: of the best checkpoint (`which`: latest, or a name under checkpoints/),
    averaged ones if the run has them.
    """
    given = (*_to_predict(flags), {"run.device": device})
    return Model(_in_one_process(open_trained(Path(run_folder), which, recipe_file, "predict", *given)))


@overload
def predict(
    run: Runs | Model,
    inputs: Input | Sequence[Input],
    out: None = ...,
    flags: Flags = ...,
    which: str = ...,
    recipe_file: str = ...,
    *,
    top: int | None = ...,
    threshold: float | None = ...,
    probabilities: bool = ...,
    postprocess: bool = ...,
    trust: bool = ...,
) -> Predictions: ...
@overload
def predict(
    run: Runs,
    inputs: Place | Sequence[Place],
    out: Place,
    flags: Flags = ...,
    which: str = ...,
    recipe_file: str = ...,
    *,
    top: int | None = ...,
    threshold: float | None = ...,
    draws: bool = ...,
    probabilities: bool = ...,
    postprocess: bool = ...,
    trust: bool = ...,
) -> dict[str, Any]: ...
@_called()
def predict(
    run: Runs | Model,
    inputs: Input | Sequence[Input],
    out: Place | None = None,
    flags: Flags = (),
    which: str = "best",
    recipe_file: str = "",
    *,
    top: int | None = None,
    threshold: float | None = None,
    draws: bool = True,
    probabilities: bool = False,
    postprocess: bool = True,
    trust: bool = False,
) -> Predictions | dict[str, Any]:
    """Predict images or volumes: paths, folders, PIL images or arrays, one or a list of them. Write nothing.

    Return an object per file or image, in the order given: Classification, Detection or Segmentation. `run` is a run
    folder, a file of `sightline export`, or what `model` returned, which is not loaded again; of a list of runs, or the
    folder of all folds, the probabilities are averaged. An input that cannot be read is an error, or left out with
    {"data.on_bad_sample": "skip"}. Images are decoded in this process unless flags give run.workers. `postprocess`
    applies what `choose_postprocessing` decided. `trust` loads a .pt2, which can run code that its author put in. With
    `out`, the results are written there, as `write_predictions` does, and what predictions.json holds is returned.
    """
    how: dict[str, Any] = {"top": top, "threshold": threshold, "draws": draws, "probabilities": probabilities}
    if out is not None:
        how |= {"postprocess": postprocess, "trust": trust}
        return write_predictions(run, inputs, out, flags, which, recipe_file, **how)  # type: ignore[arg-type]
    options = PredictOptions(**how)
    if isinstance(run, Model):
        if flags:
            raise UsageError("flags cannot change a network that is loaded; give them to api.model, or name the run")
        return predict_inputs(run, inputs, _processed(run, options, postprocess))
    trained = _in_one_process(_opened(run, which, _to_predict(flags), recipe_file, trust))
    return predict_inputs(trained, inputs, _processed(trained, options, postprocess))


@_called()
def write_predictions(
    run_folder: Runs,
    inputs: Place | Sequence[Place],
    out: Place = "",
    flags: Flags = (),
    which: str = "best",
    recipe_file: str = "",
    *,
    top: int | None = None,
    threshold: float | None = None,
    draws: bool = True,
    probabilities: bool = False,
    postprocess: bool = True,
    trust: bool = False,
    form: str = "",
) -> dict[str, Any]:
    """Predict images or volumes, or all in folders, with a run, an exported file or several of them: write
    predictions.json, predictions.csv, masks of volumes and drawings into `out`; without it into `predictions` of the
    run, or the next of predictions-2, predictions-3, ... that does not exist yet.

    Return what predictions.json holds. Unreadable files are listed in it; they are an error at the end unless
    flags set data.on_bad_sample to skip, and always if no file could be read. Ranks of a launcher share the files.
    `trust` loads a .pt2, which can run code that its author put in. `form` also writes what a tool for labelling
    imports: coco, yolo, labelme, labelstudio or cvat.
    """
    options = PredictOptions(top, threshold, draws, probabilities, form=form)
    paths = [Path(inputs)] if isinstance(inputs, str | Path) else list(inputs)
    runs = [run_folder] if isinstance(run_folder, str | Path) else run_folder
    if not (isinstance(runs, Sequence) and all(isinstance(each, str | Path) for each in (*runs, *paths))):
        raise UsageError(
            "to write predictions give files and a run folder; without `out`, objects are returned for any"
        )
    opened = _opened(run_folder, which, _to_predict(flags), recipe_file, trust, command="")
    if len(runs) > 1 and not (out or opened.run.out):
        named = first_of(runs, SHOWN_RUNS)
        raise UsageError(f"the results of {len(runs)} runs ({named}) belong to none of them; add --out DIR")
    is_silent = opened.run.progress == "off" or not opened.world.is_main
    say = (lambda _: None) if is_silent else terminal.say
    options = _processed(opened, options, postprocess, say)
    if isinstance(opened, Ensemble):
        named = first_of([each.path for each in opened.members], SHOWN_RUNS)
        say(f"the probabilities of {len(opened.members)} runs are averaged: {named}")
    with shares.joined(opened, say) as trained:
        run = Path(trained.run.out or run_of(trained.path))
        folder = Path(out) if out else Path(shares.from_main(trained.world, str(_free_folder(run))))
        if folder.resolve() in {Path(each).resolve() for each in paths}:
            raise UsageError(f"--out {folder} is also an input, and results would mix with it; give another folder")
        results = folder if out else run  # where drawings of earlier calls may lie
        data = trained.recipe.data
        files = list_files([Path(each) for each in paths], data.file_suffixes, results, say)
        files = data.first_files(files, trained.spec)
        shares.refuse_other_files(trained.world, files)
        return predict_files(trained, files, folder, options)


def _opened(
    run_folder: Runs, which: str, given: Sequence[Given], recipe_file: str, trust: bool, command: str = "predict"
) -> Trained:
    """Open a run or an exported file to predict with, several as an ensemble; with "" as the command in any number of
    ranks."""
    runs = [run_folder] if isinstance(run_folder, str | Path) else list(run_folder)
    kinds = [type(each).__name__ for each in runs if not isinstance(each, str | Path)]
    if kinds or not runs:
        raise UsageError(f"runs are {', '.join(kinds) or 'none'}; name one or several folders, e.g. runs/resnet50")
    named = [Path(each) for each in runs]
    members: list[Trained] = []
    for name in named:
        if name.is_file():
            members.append(open_exported(name, which, recipe_file, trust, *given))
            continue
        for path in folds.runs_of(name):  # run folders alone: who trusts a file has named it
            members.append(open_trained(path, which, recipe_file, command, *given))
    if len(members) == 1:
        return members[0]
    return Ensemble.of(members, named[0] if len(named) == 1 else members[0].path)


def _processed(
    engine: Trained | Model, options: PredictOptions, wanted: bool, say: Callable[[str], None] = lambda _: None
) -> PredictOptions:
    """Add what was chosen for the run, or for all folds together; of runs that were named one by one, for each."""
    if not wanted:
        return options
    path = Path(engine.about()["checkpoint"])
    folders = [run_of(path)]
    if isinstance(engine, Ensemble) and not (path / folds.DOCUMENT).is_file():
        folders = [run_of(each.path) for each in engine.members]
    chosen = [postprocessing.chosen(folder, engine.spec.classes) for folder in folders]
    largest = tuple(number for number in chosen[0] if all(number in each for each in chosen))
    if largest:
        names = ", ".join(engine.spec.classes[number] for number in largest)
        where = ", ".join(str(folder / postprocessing.DOCUMENT) for folder in folders)
        say(f"only the largest connected component of {names} is kept, as {where} says; {postprocessing.OFF}: all")
    return dataclasses.replace(options, largest=largest)


def _in_one_process(trained: Trained) -> Trained:
    """Decode in this process, unless flags ask for others, which take seconds to start."""
    workers = max(0, trained.run.workers)
    return dataclasses.replace(trained, run=dataclasses.replace(trained.run, workers=workers))


def _free_folder(run: Path) -> Path:
    """Return the first of predictions, predictions-2, ... below `run` that is not taken: results are never mixed."""
    names = itertools.chain(["predictions"], (f"predictions-{number}" for number in itertools.count(2)))
    return next(run / name for name in names if not os.path.lexists(run / name))


def _asks_for_all_folds(flags: Flags) -> bool:
    if isinstance(flags, Mapping):
        return flags.get("data.fold") == "all"
    return not isinstance(flags, str) and config.without_all_folds(flags)[1]


def _to_predict(flags: Flags) -> tuple[Given, ...]:
    """Return flags as layers. A run that was trained with `skip` still reports files that cannot be predicted."""
    return {"data.on_bad_sample": "fail"}, flags
