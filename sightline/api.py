"""The API for Python users and for the command line: train, evaluate, predict, and a trained network as a module.

`api.train("demo_classification", data=DIR, epochs=5)`; docs/api.md has examples. Failures are exceptions of
sightline.errors. A call leaves torch's settings and the signal handlers of the process as it found them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from sightline import config, terminal, words
from sightline.config import Recipe, Run
from sightline.config import load as load_config
from sightline.data.inputs import list_files
from sightline.data.listed import one_command
from sightline.data.processes import refuse_in_new_process
from sightline.errors import OutOfMemory, UsageError
from sightline.evaluate import checkpoints, folds, given_weights, label_files, shares
from sightline.evaluate.checkpoints import Trained
from sightline.evaluate.loaded import Model
from sightline.evaluate.predict import Input, open_trained, predict_files, predict_inputs
from sightline.export.exported import open_exported
from sightline.fields import flags_of
from sightline.files.checkpoint_folder import run_of
from sightline.hardware import world
from sightline.hardware.setup import torch_as_before
from sightline.named_recipe import load_recipe, without_all_folds
from sightline.parts import PredictOptions, Scores
from sightline.report.refresh import write_if_possible
from sightline.results import Classification, Detection, Prediction, Segmentation, TrainResult
from sightline.runs.log import RunLog
from sightline.runs.loggers import Logger, RunStart
from sightline.runs.refused import as_before
from sightline.runs.screen import Screen
from sightline.train import checkpoint, start
from sightline.train.session import train_here
from sightline.words import ShortFields

__all__ = [
    "Classification",
    "Detection",
    "Logger",
    "Model",
    "Prediction",
    "Recipe",
    "Run",
    "RunStart",
    "Scores",
    "Segmentation",
    "TrainResult",
    "evaluate",
    "evaluate_all",
    "evaluate_labels",
    "evaluate_weights",
    "load",
    "model",
    "predict",
    "train",
    "train_folds",
    "write_predictions",
]

Flags = Sequence[str] | Mapping[str, Any]  # ["--optimizer.lr", "0.1"] or {"optimizer.lr": 0.1}
Place = str | Path


@contextlib.contextmanager
def _called(runs: bool = True) -> Iterator[None]:
    """Surround a call: flags that cannot be parsed are an exception, and torch is left as it was. What runs a network
    is refused in a process that only imports the script."""
    if runs:
        refuse_in_new_process()
    raises = config.RAISES.set(not terminal.is_command())
    try:
        with torch_as_before():
            yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{error}; lower --train.global-batch, or use --run.device cpu") from error
    finally:
        config.RAISES.reset(raises)


@_called(runs=False)
def load(name: str, flags: Flags = (), config: Path | None = None) -> tuple[Recipe, Run]:
    """Load the recipe `name`, changed by a YAML file and then by flags."""
    return load_config(name, _as_list(name, flags), config)


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
    name = recipe.name if isinstance(recipe, Recipe) else str(recipe)
    given = [*_as_list(name, flags), *_as_list(name, fields)]
    if without_all_folds(given)[1]:
        raise UsageError("data.fold=all is a run per fold; without it, call api.train_folds(*api.load(NAME, flags))")
    if isinstance(recipe, Recipe):
        run = run or Run()
        return train_here(*(config.changed(recipe, run, given) if given else (recipe, run)), loggers, report)
    if run is not None:
        raise UsageError(f"'{name}' is a name, and a Run belongs to a Recipe object; give keywords or flags instead")
    is_file = name.endswith((".yaml", ".yml"))
    with one_command():
        recipe, run = load_recipe("train", ["--config", name, *given] if is_file else [name, *given])
        with as_before(Path(run.out or f"runs/{recipe.name}")):
            return train_here(recipe, run, loggers, report)


@_called()
def train_folds(recipe: Recipe, run: Run) -> dict[str, Any]:
    """Train every fold of the data into fold-0, fold-1 and so on below the run folder, each an ordinary run that
    resumes, and combine their best scores; return what folds.json there holds."""
    data: Any = recipe.data
    if not (hasattr(data, "fold") and hasattr(data, "folds")):
        raise UsageError(f"--data.fold all: {type(data).__name__} of {recipe.name} has no folds; leave it out")
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
        one = dataclasses.replace(recipe, data=dataclasses.replace(data, fold=fold))
        train_here(one, dataclasses.replace(run, out=str(folder / name), benchmark_log=benchmark_log))
        rows.append(folds.read_fold(folder / name, fold, recipe.task.headline))
        gc.collect()  # captured graphs and the last network hold memory that the next one needs
        torch.compiler.reset()  # else the next network counts as one recompilation too many of the last
    document = folds.summary(recipe.name, recipe.task.headline, rows)
    log.folder.write_json(folds.DOCUMENT, document)
    if log.folder.is_main and run.report == "auto":
        write_if_possible([folder / row["folder"] for row in rows], folder / "report.html")
    return document


@_called()
def evaluate(run_folder: Place, flags: Flags = (), which: str = "best", recipe_file: str = "") -> Scores:
    """Score a checkpoint on its recipe's val split; flags may change data.path and run fields."""
    path = checkpoint.find(Path(run_folder), which)
    tensors, stored = checkpoint.read(path)
    trained = Trained.set_up(path, tensors, stored, recipe_file, _as_list("", flags))
    with checkpoints.opened(trained, run_of(path)) as evaluation:
        return evaluation.score(path, stored)


@_called()
def evaluate_all(run_folder: Place, flags: Flags = (), recipe_file: str = "") -> list[dict[str, Any]]:
    """Score every checkpoint of a run; return rows by step, as evaluation.json holds them."""
    return checkpoints.evaluate_all(Path(run_folder), _as_list("", flags), recipe_file)


@_called()
def evaluate_labels(
    target: Place, labels: Place, flags: Flags = (), which: str = "best", recipe_file: str = ""
) -> Scores:
    """Compute Dice against label files, in their own geometry: of a folder of masks, or of a run's predictions for the
    raw files of its val split; those masks stay in predictions-CHECKPOINT of the run, or below run.out."""
    folder, given = Path(target), _as_list("", flags)
    if folder.is_dir() and not (folder / "checkpoints").is_dir() and not (folder / checkpoint.MANIFEST).is_file():
        if given:
            raise UsageError(
                f"{target} is not a run, so there is no recipe for {' '.join(given)} to change; leave it out"
            )
        return label_files.evaluate_folder(folder, Path(labels))
    trained = open_trained(folder, which, given, recipe_file, "evaluate --labels")
    out = Path(trained.run.out or run_of(trained.path)) / f"predictions-{trained.path.name}"
    return label_files.evaluate_run(trained, Path(labels), out)


@_called()
def evaluate_weights(recipe: Recipe, run: Run) -> Scores:
    """Score a recipe's `model.weights` on its val split; scores.json is written into run.out, nothing without it."""
    return given_weights.evaluate_weights(recipe, run)


@_called()
def model(
    run_folder: Place, device: str = "auto", which: str = "best", recipe_file: str = "", flags: Flags = ()
) -> Model:
    """Load the network of a run as a module in evaluation mode, with its preprocessing and class names.

    The weights are those that `evaluate` uses: of the best checkpoint (`which`: latest, or a name under checkpoints/),
    averaged ones if the run has them.
    """
    given = [*_as_list("", flags), f"--run.device={device}"]
    return Model(_in_one_process(open_trained(Path(run_folder), which, given, recipe_file, "predict")))


@overload
def predict(
    run: Place | Model,
    inputs: Input | Sequence[Input],
    out: None = None,
    flags: Flags = (),
    which: str = "best",
    recipe_file: str = "",
    *,
    top: int | None = None,
    threshold: float | None = None,
    probabilities: bool = False,
) -> list[Prediction]: ...
@overload
def predict(
    run: Place,
    inputs: Place | Sequence[Place],
    out: Place,
    flags: Flags = (),
    which: str = "best",
    recipe_file: str = "",
    *,
    top: int | None = None,
    threshold: float | None = None,
    draws: bool = True,
    probabilities: bool = False,
) -> dict[str, Any]: ...
@_called()
def predict(
    run: Place | Model,
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
) -> list[Prediction] | dict[str, Any]:
    """Predict images or volumes: paths, folders, PIL images or arrays, one or a list of them. Write nothing.

    Return an object per file or image, in the order given: Classification, Detection or Segmentation. `run` is a run
    folder, a file of `sightline export`, or what `model` returned, which is not loaded again. An input that cannot be
    read is an error, or left out with {"data.on_bad_sample": "skip"}. Images are decoded in this process unless flags
    give run.workers. With `out`, the results are written there, as `write_predictions` does, and what predictions.json
    holds is returned.
    """
    how: dict[str, Any] = {"top": top, "threshold": threshold, "draws": draws, "probabilities": probabilities}
    if out is not None:
        return write_predictions(run, inputs, out, flags, which, recipe_file, **how)  # type: ignore[arg-type]
    options = PredictOptions(**how)
    if isinstance(run, Model):
        if flags:
            raise UsageError("flags cannot change a network that is loaded; give them to api.model, or name the run")
        return predict_inputs(run, inputs, options)
    return predict_inputs(_in_one_process(_opened(run, which, _as_list("", flags), recipe_file)), inputs, options)


@_called()
def write_predictions(
    run_folder: Place,
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
) -> dict[str, Any]:
    """Predict images or volumes, or all in folders, with a run or an exported file: write predictions.json,
    predictions.csv, masks of volumes and drawings into `out`; without it into `predictions` of the run, or the next of
    predictions-2, predictions-3, ... that does not exist yet.

    Return what predictions.json holds. Unreadable files are listed in it; they are an error at the end unless
    data.on_bad_sample is skip, and always if no file could be read. Ranks of a launcher share the files.
    """
    options = PredictOptions(top, threshold, draws, probabilities)
    paths = [Path(inputs)] if isinstance(inputs, str | Path) else list(inputs)
    if not all(isinstance(each, str | Path) for each in (run_folder, *paths)):
        raise UsageError(
            "to write predictions give files and a run folder; without `out`, objects are returned for any"
        )
    opened = _opened(run_folder, which, _as_list("", flags), recipe_file, command="")
    is_silent = opened.run.progress == "off" or not opened.world.is_main
    say = (lambda _: None) if is_silent else terminal.say
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


def _opened(run_folder: Place, which: str, flags: Sequence[str], recipe_file: str, command: str = "predict") -> Trained:
    """Open a run or an exported file to predict with; with "" as the command in any number of ranks."""
    path = Path(run_folder)
    if path.is_file():
        return open_exported(path, which, flags, recipe_file)
    return open_trained(path, which, flags, recipe_file, command)


def _in_one_process(trained: Trained) -> Trained:
    """Decode in this process, unless flags ask for others, which take seconds to start."""
    workers = max(0, trained.run.workers)
    return dataclasses.replace(trained, run=dataclasses.replace(trained.run, workers=workers))


def _free_folder(run: Path) -> Path:
    """Return the first of predictions, predictions-2, ... below `run` that is not taken: results are never mixed."""
    names = itertools.chain(["predictions"], (f"predictions-{number}" for number in itertools.count(2)))
    return next(run / name for name in names if not os.path.lexists(run / name))


def _as_list(recipe: str, flags: Flags) -> list[str]:
    """Return flags as a list; `recipe` knows the types of fields that a dict names, "" if it is of a run."""
    if isinstance(flags, str):
        raise UsageError(f"flags is the text '{flags}'; give a list, e.g. {flags.split()}, or a dict of fields")
    if isinstance(flags, Mapping):
        return words.as_flags(flags, flags_of(recipe) if recipe else {})
    return words.expand(flags)
