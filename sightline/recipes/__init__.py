"""The recipes: one per file, named after it. Finding and describing one of ours does not import torch."""

import ast
import dataclasses
import difflib
import importlib
import importlib.abc
import importlib.util
import inspect
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sightline import plugins
from sightline.errors import UsageError

if TYPE_CHECKING:
    from sightline.recipe.recipe import Recipe

FOLDER = Path(__file__).parent
ANY_DATA = ("classification", "detection", "segmentation")  # for anybody's images; they come first in lists
OWN = f"{__name__}.own_"


class _OwnRecipes(importlib.abc.MetaPathFinder):
    """Finder of users' recipes: the module name contains the path, so that loader workers can import its classes."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if not name.startswith(OWN):
            return None
        return importlib.util.spec_from_file_location(name, os.fsdecode(bytes.fromhex(name.rpartition("_")[2])))


sys.meta_path.append(_OwnRecipes())


def names() -> list[str]:
    """Return the names of all recipes of the package, first those for anybody's images."""
    found = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
    return sorted(found, key=lambda name: name not in ANY_DATA)


def is_known(name: str) -> bool:
    """Return whether a name is that of a recipe of ours or, looked up last, of another installed package."""
    return name in names() or (not name.endswith((".py", ".yaml", ".yml")) and plugins.has("recipes", name))


def describe(name: str) -> str:
    """Return the docstring of a recipe, of one of ours or of a file without importing it."""
    if not name.endswith(".py") and name not in names():
        return inspect.getdoc(plugins.load("recipes", name)) or ""
    path = Path(name) if name.endswith(".py") else FOLDER / f"{name}.py"
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def find(name: str) -> ModuleType:
    """Import a recipe: one of ours by name, or a user's own by the path of its .py file."""
    refuse_unknown(name)
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in names():
        module: ModuleType = plugins.load("recipes", name)
        return module
    return importlib.import_module(f"{__name__}.{name}")


def load(name: str) -> "Recipe":
    """Return a recipe as its file makes it."""
    from sightline.recipe.recipe import Recipe  # here: to list the recipes needs none

    made = find(name).recipe()
    if not isinstance(made, Recipe):
        raise UsageError(f"recipe() of {name} returned {type(made).__name__}, expected a Recipe")
    if not name.endswith(".py") and made.name != name:  # its runs store this name, and are found by it
        raise UsageError(f"recipe() of {name} is called '{made.name}'; name it '{name}' like its entry point")
    for part, value in made.parts.items():
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            raise UsageError(f"recipe() of {name} has {value!r:.80} as its {part}, expected an object of a dataclass")
    return made


def refuse_unknown(name: str) -> None:
    """Raise UsageError for a name that is not a recipe's, and for a missing file of a user's own."""
    if is_known(name):
        return
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UsageError(f"recipe file {name} does not exist; give the path of a .py file that defines recipe()")
        return
    if name.endswith((".yaml", ".yml")):
        raise UsageError(f"{name} is a config file, not a recipe; give it as --config {name}")
    if (Path(name) / "config.yaml").is_file():
        raise UsageError(f"{name} is a run, not a recipe; give its recipe, and the run as --out {name}")
    near = difflib.get_close_matches(name.lower(), names(), n=1)
    if _is_classifier(name):
        hint = f"; as a classifier it is `resnet50 --model.arch {name}`."
    else:
        hint = f"; did you mean '{near[0]}'?" if near else "."
    known = ", ".join(names()) + plugins.also_known("recipes")
    raise UsageError(f"unknown recipe '{name}'{hint} Known: {known} (or the path of your own recipe ending in .py)")


def _is_classifier(name: str) -> bool:
    """Return whether a name is that of a network, ours or torchvision's, which is then imported: an error may wait."""
    from sightline.models.config import OURS

    if name in OURS:
        return True
    try:
        from sightline.models import arch

        return name in arch.names()
    except ImportError:  # a broken installation must not hide that the recipe is unknown
        return False


def _from_file(path: Path) -> ModuleType:
    # The name contains path and modification time, so that an edited file is imported again, e.g. in a notebook.
    version, place = path.stat().st_mtime_ns, os.fsencode(path.resolve()).hex()
    try:
        module = importlib.import_module(f"{OWN}{version:x}_{place}")
    except SyntaxError as error:
        raise UsageError(f"{error.filename}, line {error.lineno}, is not Python: {error.msg}") from error
    if not hasattr(module, "recipe"):
        raise UsageError(f"{path} defines no recipe(); write `def recipe() -> Recipe: ...` as in {FOLDER}")
    return module
