"""The commands, one file each. They import what they need when they are called: help and refusals need no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sightline.commands.average import average
from sightline.commands.benchmark import benchmark
from sightline.commands.check import check
from sightline.commands.doctor import doctor
from sightline.commands.evaluate import evaluate
from sightline.commands.export import export
from sightline.commands.inspect import inspect
from sightline.commands.launch import launch
from sightline.commands.legacy import legacy
from sightline.commands.list import list_recipes
from sightline.commands.migrate import migrate
from sightline.commands.predict import predict
from sightline.commands.prepare import prepare
from sightline.commands.report import report
from sightline.commands.runs import runs
from sightline.commands.show import show
from sightline.commands.train import train
from sightline.commands.warm import warm

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
    "warm": warm,
    "migrate": migrate,
    "legacy": legacy,
}
