"""One file is one recipe, and its name is what the user types. Finding and describing them needs no torch."""

import ast
import difflib
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from sightline.errors import UsageError

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """All recipes of the package."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def describe(name: str) -> str:
    """The docstring of a recipe, read without importing it."""
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""


def find(name: str) -> ModuleType:
    """The module of a recipe: one of ours by name, or a user's own by the path of its .py file."""
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ";"
        raise UsageError(
            f"unknown recipe '{name}'{hint} Known: {', '.join(names())} (or the path of your own recipe ending in .py)"
        )
    return importlib.import_module(f"{__name__}.{name}")


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"recipe file {path} does not exist; give the path of a .py file that defines recipe()")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "recipe"):
        raise UsageError(f"{path} defines no recipe(); write `def recipe() -> Recipe: ...` as in {FOLDER}")
    return module
