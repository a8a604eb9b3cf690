"""Start what a command asks for: resolve its recipe, say what was decided, run it as several local ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sightline import terminal
from sightline.errors import SightlineError
from sightline.files.sizes import loads_here
from sightline.hardware.launch import among_ranks

# Of the data of any run, whose checkpoint nobody has read yet.
WORKER_MODULES = (
    "sightline.data.classification.dataset",
    "sightline.data.detection.dataset",
    "sightline.data.volumes.inputs",
)

if TYPE_CHECKING:
    from sightline.recipe.plan import Purpose
    from sightline.recipe.recipe import Recipe, Run
    from sightline.recipe.resolve import Resolved


def resolved_of(
    command: str, words: Sequence[str], own: Collection[str] = (), tells: bool = False
) -> tuple[Recipe, Run]:
    """Return the recipe and run of a command's words, with a number for the batch, which no run has measured."""
    from sightline import config

    told = config.asked(command, words, own)
    if command in ("evaluate", "show") and not among_ranks():
        told.refuse_missing_data()
    purpose: Purpose = "score" if command == "evaluate" else "look"
    resolved = told.resolved(tells and not among_ranks(), purpose, starts=command == "launch")
    if tells:
        say_decided(resolved)
    if command != "launch":
        resolved.recipe.train.require_batch(command)
    return resolved.recipe, resolved.run


def say_decided(resolved: Resolved) -> None:
    """Say what was decided about the data; of several ranks, their starter has."""
    if resolved.run.progress != "off" and not among_ranks():
        for line in resolved.lines:
            terminal.say_if_read(line)


def begin_early(words: Sequence[str], inputs: Sequence[str] = ()) -> None:
    """Begin what a command about a run will need, beside the import of torch: CUDA, and the process that loader workers
    are forked from, unless `inputs` are so few that they are loaded here."""
    if not terminal.is_command():  # a script that calls us may fork later
        return
    from sightline.data.loading import forkserver
    from sightline.hardware import early_cuda
    from sightline.recipe.recipe import Run
    from sightline.recipe.resolve import run_fields

    try:
        run = Run(**{name.removeprefix("run."): value for name, value in run_fields(words).items()})
    except SightlineError:  # reported by who reads the flags
        return
    early_cuda.begin(run)
    if not inputs or (run.workers < 0 and not loads_here(map(Path, inputs))) or run.workers > 0:
        forkserver.start_for(run, *WORKER_MODULES)


def refuse_uneven_batch(recipe: Recipe, run: Run) -> None:
    """Refuse a batch that the local ranks cannot share; else every rank would."""
    if run.devices > 1:
        from sightline.engine.orders import refuse_uneven

        refuse_uneven(recipe, run.devices)


def ran_as_ranks(arguments: Sequence[str], devices: int, device: str) -> bool:
    """Run the command as several local ranks, to its end, where asked for; return whether that was done."""
    if devices < 2:
        return False
    from sightline.hardware.launch import local

    return local.start(devices, device, arguments)


def ran_as_ranks_of_run(arguments: Sequence[str], words: Sequence[str]) -> bool:
    """Do the same for a command about a run, whose recipe is not loaded yet."""
    from sightline.recipe.resolve import run_fields

    run = run_fields(words)
    return ran_as_ranks(arguments, run.get("run.devices", 0), run.get("run.device", "auto"))


def say_page(path: Path) -> None:
    if path.exists():  # else it could not be written
        print(f"report: {path}")
