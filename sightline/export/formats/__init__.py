"""Formats of exported files, one file each: SUFFIX, ABOUT, check_installed, write, load; RUNS: whether `predict` takes
it, and then RUNS_CODE (whether loading a stranger's file can run code) and about."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sightline import plugins
from sightline.errors import UsageError


def names() -> list[str]:
    """Return the names that users type."""
    return sorted(each.name.replace("_", "-") for each in pkgutil.iter_modules([str(Path(__file__).parent)]))


def find(name: str) -> Any:
    """Return the module of a format, of ours or of another installed package."""
    if name not in names():
        if plugins.has("formats", name):
            return plugins.load("formats", name)
        known = ", ".join(names()) + plugins.also_known("formats")
        raise UsageError(f"--format {name} is unknown; use one of {known}")
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


def require(packages: Sequence[str], what: str) -> None:
    """Raise UsageError unless these packages are installed."""
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}: `pip install sightline[export]`")
