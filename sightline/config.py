"""From what a user says to a frozen recipe: by name, by file, by object, or out of a run. Imports no torch.

A recipe of one's own imports Recipe, Run and TrainConfig from here.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline import recipes
from sightline.errors import BadCheckpoint, UsageError
from sightline.files.checkpoint_folder import folder_of_runs, nearest_run, run_of
from sightline.files.typed_json import short
from sightline.hardware.launch import among_ranks
from sightline.parts import DataConfig
from sightline.recipe import flags, resolve, store
from sightline.recipe.flags import Given
from sightline.recipe.plan import Purpose
from sightline.recipe.recipe import PARTS, Recipe, Run
from sightline.recipe.resolve import Resolved
from sightline.recipe.settings import Origin, Settings
from sightline.train.config import TrainConfig

__all__ = ["Recipe", "Resolved", "Run", "TrainConfig"]


@dataclass(frozen=True)
class Asked:
    """A recipe with what its user said about it, checked; the data have not been looked at."""

    name: str  # of the recipe, or the path of its file
    settings: Settings
    run: Run

    def refuse_missing_data(self) -> None:
        """Raise UsageError where the place of the data does not exist."""
        data = self.settings.part("data")
        path = getattr(data, "path", "")
        if type(data).look is DataConfig.look or not path or path.startswith("synthetic:"):
            return
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"--data.path '{path}' does not exist; give the folder of your data, or draw some with `sightline "
                f"prepare shapes --out DIR`"
            ) from None
        except (OSError, ValueError) as error:  # what opens the data says more
            if isinstance(error, OSError) and error.errno == errno.ELOOP:
                raise UsageError(
                    f"--data.path '{path}' is a link that leads to itself; give the folder of your data"
                ) from None

    def resolved(self, needs_data: bool = False, purpose: Purpose = "look", starts: bool = False) -> Resolved:
        """Look at the model and the data; return the frozen recipe."""
        return resolve.decide(self.settings, needs_data, purpose, starts)


def asked(command: str, words: Sequence[str], own: Collection[str] = ()) -> Asked:
    """Read the words behind a command: a recipe or --config FILE, then flags, which may be short ones. `own` are the
    flags of the command itself, for suggestions."""
    file, rest = _config_in(words)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    if not name:
        if file is None:
            raise UsageError(
                f"{command}: which recipe? Available: {', '.join(recipes.names())}; "
                f"e.g. `sightline {command} {recipes.names()[0]} --data.path DIR`"
            )
        name = recipe_named_in(file)
    settings = Settings(recipes.load(name), Run())
    settings = resolve.read(settings, rest, file=file, of=f"{command} {name}", own=own)
    return Asked(name, settings, settings.part("run"))


def load(name: str, flags: Given = (), config: Path | None = None) -> tuple[Recipe, Run]:
    """Load the recipe `name`, changed by a YAML file and then by flags, as training would take it."""
    settings = resolve.read(Settings(recipes.load(name), Run()), flags, file=config)
    resolved = resolve.decide(settings, needs_data=False, starts=True)
    return resolved.recipe, resolved.run


def named(recipe: str, *given: Given) -> Resolved:
    """Resolve a recipe by its name, or by the path of a recipe or a config file, changed by flags."""
    words = ["--config", recipe] if recipe.endswith((".yaml", ".yml")) else []
    for each in given:  # words may name a file, too
        words += [] if isinstance(each, Mapping | str) else each
    file, rest = _config_in(words)
    given = (rest, *(each for each in given if isinstance(each, Mapping | str)))
    name = recipe_named_in(file) if file and recipe.endswith((".yaml", ".yml")) else recipe
    settings = resolve.read(Settings(recipes.load(name), Run()), *given, file=file, of=f"train {name}")
    told = Asked(name, settings, settings.part("run"))
    if not among_ranks():
        told.refuse_missing_data()
    return told.resolved(needs_data=not among_ranks(), purpose="train")


def of_object(recipe: Recipe, run: Run, *given: Given) -> Resolved:
    """Resolve objects that were built in Python, changed by flags."""
    settings = Settings.of(recipe, run)
    if recipe.name in recipes.names():
        settings = settings.typed_beside(recipes.load(recipe.name))
    settings = resolve.read(settings, *given)
    return resolve.decide(settings, needs_data=not among_ranks(), purpose="train", is_whole=True)


def of_run(
    command: str, folder: Path, words: Sequence[str] = (), recipe_file: str = "", own: Collection[str] = ()
) -> Settings:
    """Return the settings that a run was started with, as its config.yaml has them, changed by flags."""
    file = config_of(folder)
    name = recipe_file or str(_values(file).get("recipe"))
    if not recipe_file and not recipes.is_known(name):  # never run code that a file names, but by an installed name
        raise UsageError(f"this run was made with your own recipe '{name}'; add --recipe PATH/TO/{Path(name).stem}.py")
    settings = store.put_run(Settings(recipes.load(name), Run()), file)
    return resolve.read(settings, words, of=f"{command} {name}", own=own)


def of_stored(
    values: Mapping[str, Any], recipe_file: str = "", *given: Given, origins: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings of the recipe in a checkpoint, changed by flags. Only names of ours and of installed
    packages are resolved from a file; a user's own recipe is named by the user."""
    stored = values.get("recipe")
    if not isinstance(stored, str):
        raise BadCheckpoint(f"the checkpoint's recipe is called {short(stored)}, expected a name; take another one")
    if not recipe_file and not recipes.is_known(stored):
        raise UsageError(f"this run was made with your own recipe '{stored}'; add --recipe PATH/TO/{stored}.py")
    settings = Settings(recipes.load(recipe_file or stored), Run())
    # Only what a recipe is made of: a checkpoint must not say where things are written.
    parts = {part: values[part] for part in PARTS if part in values}
    with _blaming_the_checkpoint():
        settings = store.put(
            settings, Origin.STORED, parts, "the checkpoint's recipe", lambda name: (origins or {}).get(name, "")
        )
    try:
        changed = resolve.read(settings, *given)
        changed.part("model").refuse_unknown()
        return changed
    except UsageError:
        with _blaming_the_checkpoint():  # where it cannot be used without the flags either
            settings.build()[0].model.refuse_unknown()
        raise


def refuse_flags_of_run(command: str, run: Path, recipe_file: str, words: Sequence[str], own: Collection[str]) -> None:
    """Refuse flags that the recipe of a run does not have, and wrong values. A recipe that cannot be found here is left
    to who opens the run."""
    # A damaged file does not matter: checkpoints hold their recipe.
    name = recipe_file or str(store.stored_in(run_of(run)).get("recipe", ""))
    if recipe_file.endswith(".py") or (name and recipes.is_known(name)):
        hints = Settings(recipes.load(name), Run()).hints()
        flags.read(words, hints, f"{command} {name}", own)


def config_of(folder: Path) -> Path:
    """Return the config file of a run folder; UsageError if it is not one."""
    if (file := folder / "config.yaml").is_file():
        return file
    if not folder.exists():
        raise UsageError(f"{folder} does not exist{nearest_run(folder)}")
    what = "not a run folder; give a recipe, or a folder that `sightline train` wrote, e.g. runs/resnet50"
    raise UsageError(f"{folder} is {folder_of_runs(folder) or what}")


def without_all_folds(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return words without `--data.fold all`, which means one run per fold, and whether it was given."""
    rest = [word for word in words if word != "--data.fold=all"]
    for at in reversed(range(len(rest) - 1)):
        if rest[at : at + 2] == ["--data.fold", "all"]:
            del rest[at : at + 2]
    return rest, len(rest) < len(words)


@contextlib.contextmanager
def _blaming_the_checkpoint() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise BadCheckpoint(f"{error}; take another checkpoint, or the version that wrote this one") from error


def _config_in(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the file behind --config, and the other words."""
    rest = [each for word in words for each in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if "--config" not in rest:
        return None, rest
    at = rest.index("--config")
    if at + 1 == len(rest):
        raise UsageError("--config needs a file, e.g. --config runs/demo/config.yaml")
    file = Path(rest[at + 1])
    if not file.exists():
        raise UsageError(f"--config {file} does not exist; give a YAML file, e.g. config.yaml of a run folder")
    del rest[at : at + 2]
    return file, rest


def recipe_asked(words: Sequence[str]) -> list[str]:
    """Return words that ask for help with the recipe of their config file named first."""
    file, rest = _config_in(words)
    return [recipe_named_in(file), *rest] if file and rest[:1] and rest[0].startswith("-") else rest


def _values(file: Path) -> dict[str, Any]:
    from sightline.files.plain_yaml import read_yaml  # here: it takes 10 ms, and most commands read no file

    return read_yaml(file, may_wait=True)


def recipe_named_in(config: Path) -> str:
    """Return the recipe that a config file belongs to."""
    values = _values(config)
    if "recipe" not in values:
        raise UsageError(f"{config} names no recipe; give one on the command line or write `recipe: NAME` in it")
    name = str(values["recipe"])
    if not recipes.is_known(name):  # never run code that a file names, but by an installed name
        raise UsageError(
            f"{config} belongs to '{name}', which is not one of our recipes; if it is your own, give its path: "
            f"sightline train PATH/TO/{Path(name).stem}.py --config {config}"
        )
    return name
