"""Trackers that runs are shown in, one file each, as --run.track names them; aside.py holds those that send. A name
that is not ours is a logger of another installed package. docs/howto/trackers.md."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from sightline import plugins
from sightline.errors import SightlineError, UsageError
from sightline.recipe.recipe import Run
from sightline.recipe.suggest import nearest
from sightline.runs.loggers import Logger
from sightline.runs.trackers.aside import LEAVES_S, Aside

NAMES = ("mlflow", "tensorboard", "trackio", "wandb")


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise UsageError for a name that is neither ours nor that of a plugin."""
    for name in names:
        if name not in NAMES and not plugins.has("loggers", name):
            known = ", ".join(NAMES) + plugins.also_known("loggers")
            raise UsageError(f"unknown --run.track '{name}'{nearest(name, NAMES)}; known: {known}")


def opened(run: Run) -> list[Logger]:
    """Return a logger for each tracker that a run asks for. Nothing is sent yet."""
    asked = dict.fromkeys((*run.track, *(["tensorboard"] if run.tensorboard else [])))
    refuse_unknown(asked)
    return [_of_ours(name, run) if name in NAMES else _of_plugin(name) for name in asked]


def leave(loggers: Sequence[Logger], page: Path) -> list[str]:
    """Hand the page over to trackers of a run that has ended, and wait for them; return what went wrong."""
    aside = [each for each in loggers if isinstance(each, Aside)]
    for each in aside:
        each.end(page)
    until = time.monotonic() + LEAVES_S
    return [problem for each in aside if (problem := each.wait(until))]


def _of_ours(name: str, run: Run) -> Logger:
    if name == "tensorboard":
        from sightline.runs.trackers.tensorboard import TensorBoard

        return TensorBoard(run.tensorboard_every_steps)
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ValueError:  # something else of this name is in its place
        is_there = False
    if not is_there:
        raise UsageError(f"--run.track {name} needs the package {name}: `pip install sightline[{name}]`")
    return Aside(name)


def _of_plugin(name: str) -> Logger:
    make = plugins.load("loggers", name)
    try:
        made: Logger = make()
    except SightlineError:
        raise
    except Exception as error:  # of somebody else's code
        raise UsageError(
            f"--run.track {name} cannot be opened: {type(error).__name__}: {error}; fix that, or leave it out"
        ) from error
    return made
