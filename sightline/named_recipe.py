"""The recipe and the flags that a command names; nothing here imports torch before the words are known to be right."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sightline import recipes, terminal, words
from sightline.data.loading.forkserver import start_early
from sightline.errors import SightlineError, UsageError
from sightline.fields import data_of, named
from sightline.files.checkpoint_folder import folder_of_runs, nearest_run, run_of
from sightline.files.plain_yaml import read_yaml
from sightline.hardware import early_cuda, launch

if TYPE_CHECKING:
    from sightline.config import Recipe, Run

TELLS_DATA = ("train", "show")  # commands that begin with a line about the data
TRAINS = ("benchmark", "train")  # commands that split a batch over --run.devices
NEEDS_BATCH = (
    "benchmark",
    "evaluate",
    "inspect",
    "show",
)  # commands that use train.global_batch, which no run has measured


def load_recipe(command: str, flags: Sequence[str], own: Collection[str] = ()) -> tuple[Recipe, Run]:
    """Load the recipe named first, or the one that --config names; flags may be short ones. `own` are the flags of the
    command itself, for suggestions."""
    flags = words.expand(flags)
    rest = [each for flag in flags for each in (flag.split("=", 1) if flag.startswith("--config=") else [flag])]
    file = None
    if "--config" in rest:
        at = rest.index("--config")
        if at + 1 == len(rest):
            raise UsageError("--config needs a file, e.g. --config runs/demo/config.yaml")
        file = Path(rest[at + 1])
        if not file.exists():
            raise UsageError(f"--config {file} does not exist; give a YAML file, e.g. config.yaml of a run folder")
        del rest[at : at + 2]
    name = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    if not name and file is None:
        raise UsageError(
            f"{command} what? Known: {', '.join(recipes.names())}; "
            f"e.g. `sightline {command} {recipes.names()[0]} --data.path DIR`"
        )
    if name:
        words.refuse(command, name, rest, own)
        if command == "train" and terminal.is_command():  # a script that calls us may fork later
            early_cuda.begin(value_of("device", rest, "auto"), flags)
        rest += _fields_of_data(command, name, rest, file)
        if command == "train":
            start_early(name, flags)  # before torch is imported, which takes as long there
    from sightline import config

    if file and not name:
        name = config.recipe_named_in(file)
        words.refuse(command, name, rest, own)
    recipe, run = config.load(name, rest, file, terminal.say if _tells(command, rest) else lambda _: None)
    if command in NEEDS_BATCH:
        recipe.train.require_batch(command)
    if command in TRAINS and run.devices > 1:
        from sightline.train.orders import refuse_uneven

        refuse_uneven(recipe, run.devices)  # else every rank would
    return recipe, run


def _fields_of_data(command: str, name: str, flags: Sequence[str], file: Path | None) -> list[str]:
    """Look at the data, say what was found there (`train`, `show`), and return flags for what they decide."""
    from sightline.data import found  # needs NumPy, which refused words need not wait for

    try:
        seen = found.of_recipe(name, flags, file)
    except SightlineError:
        if command in TELLS_DATA and launch.detect(os.environ) is None:
            raise
        # `check` lists all that is wrong, ranks fail together later, and data may be on another host.
        is_open = file is None and "data.classes" not in named(flags) and data_of(name)[0] in found.OPENERS
        return ["--data.classes=0"] if command == "check" and is_open else []  # the recipe's number is not the data's
    if seen.line and _tells(command, flags):
        terminal.say(seen.line)
    return seen.flags


def _tells(command: str, flags: Sequence[str]) -> bool:
    """Return whether this process says what was decided about the data: of several ranks, their starter has."""
    is_quiet = value_of("progress", flags, "auto") == "off"
    return command in TELLS_DATA and not is_quiet and launch.detect(os.environ) is None


def names_run(word: str) -> bool:
    """Return whether a word, which may name a recipe or a run folder, is the latter: also a misspelt one."""
    if word in recipes.names() or word.startswith("-") or word.endswith(".py"):
        return False
    return Path(word).is_dir() or os.sep in word


def names_recipe(target: str, flags: Sequence[str]) -> bool:
    """Return whether `evaluate` is about a recipe; with weights also if its name is misspelt, to be refused as such."""
    has_weights = any(flag.partition("=")[0] in ("--model.weights", "--weights") for flag in flags)
    return target in recipes.names() or target.endswith(".py") or has_weights


def refuse_flags_of_run(command: str, run: str, recipe: str, flags: Sequence[str], own: Collection[str]) -> None:
    """Refuse flags that the recipe of a run, or the user's own, does not have. One that cannot be found here is left to
    the parser."""
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"unexpected '{flags[0]}'; `sightline {command} --help` shows what comes after {command}")
    name = recipe
    if not name:
        with contextlib.suppress(UsageError):  # a damaged file does not matter: checkpoints hold their recipe
            name = str(read_yaml(run_of(Path(run)) / "config.yaml").get("recipe"))
    if recipe.endswith(".py") or name in recipes.names():
        words.refuse_flags(command, name, words.expand(flags), own)


def refuse_value_of_flag(flags: Sequence[str], value: str, usage: str) -> None:
    """Refuse a positional argument after a flag of the recipe: only the recipe in RUN knows which flags take values."""
    before = flags[flags.index(value) - 1] if value in flags[1:] else ""
    if before.startswith("--") and "." in before and "=" not in before:
        raise UsageError(f"'{value}' comes after {before}; begin with `sightline {usage}`, then {before} and the like")


def run_config(folder: Path) -> Path:
    """Return the config file of a run folder; UsageError if it is not one."""
    if (file := folder / "config.yaml").is_file():
        return file
    if not folder.exists():
        raise UsageError(f"{folder} does not exist{nearest_run(folder)}")
    what = "not a run folder; give a recipe, or a folder that `sightline train` wrote, e.g. runs/resnet50"
    raise UsageError(f"{folder} is {folder_of_runs(folder) or what}")


def refuse_recipe_named_first(flags: Sequence[str]) -> None:
    """Refuse an unknown recipe before the command's own options are parsed, which imports torch."""
    if flags and not flags[0].startswith("-"):
        recipes.refuse_unknown(flags[0])


def without_all_folds(flags: Sequence[str]) -> tuple[list[str], bool]:
    """Return the flags without `--data.fold all`, which means one run per fold, and whether it was given."""
    rest = [flag for flag in flags if flag != "--data.fold=all"]
    for at in reversed(range(len(rest) - 1)):
        if rest[at : at + 2] == ["--data.fold", "all"]:
            del rest[at : at + 2]
    return rest, len(rest) < len(flags)


def ran_as_ranks(arguments: Sequence[str], devices: int, device: str) -> bool:
    """Run the command as several local ranks, to its end, where asked for; return whether that was done."""
    if devices < 2:
        return False
    from sightline.hardware.launch import local

    return local.start(devices, device, arguments)


def ran_as_ranks_of_run(arguments: Sequence[str], flags: Sequence[str]) -> bool:
    """Do the same for a command about a run, whose recipe is not loaded yet: only its --run flags can be read."""
    devices = value_of("devices", flags, "0")  # if it is not a number, parsing the recipe's flags reports it
    return devices.isdecimal() and ran_as_ranks(arguments, int(devices), value_of("device", flags, "auto"))


def value_of(field: str, flags: Sequence[str], default: str) -> str:
    """Return the value of a --run flag; only the recipe of the run can read all of its flags."""
    for before, flag in zip(["", *flags], flags, strict=False):
        if flag.startswith(f"--run.{field}="):
            default = flag.partition("=")[2]
        elif before == f"--run.{field}":
            default = flag
    return default
