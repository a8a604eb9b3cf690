"""Trackers that runs are shown in, one file each, named as --run.track names them. `opened(run)` of each returns a
Logger or raises UsageError. A name that is not ours is a logger of another installed package."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable

from sightline import plugins
from sightline.errors import SightlineError, UsageError
from sightline.recipe.recipe import Run
from sightline.recipe.suggest import nearest
from sightline.runs.loggers import Logger

NAMES = ("tensorboard",)


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


def require(module: str, flag: str, extra: str) -> None:
    """Raise UsageError where the module of a tracker is not installed."""
    try:
        is_there = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or it is blocked
        is_there = False
    if not is_there:
        raise UsageError(f"{flag} needs the package {extra}: `pip install sightline[{extra}]`, or leave it out")


def _of_ours(name: str, run: Run) -> Logger:
    made: Logger = importlib.import_module(f"{__name__}.{name}").opened(run)
    return made


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
