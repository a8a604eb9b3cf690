"""Parts of other installed packages, found by entry points: recipes, sources, preparations, formats, loggers, commands.

Looked at only for a name that is not ours, so that ours cannot be replaced and nobody else waits for the scan. What an
entry point loads is what a file of ours would be: docs/howto/plugin.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sightline.errors import SightlineError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Group = Literal["recipes", "sources", "preparations", "formats", "loggers", "commands"]
MODULES: dict[Group, tuple[str, ...]] = {  # the groups whose entry points are modules, and what each must define
    "recipes": ("recipe",),
    "sources": ("detect",),
    "preparations": ("prepare",),
    "formats": ("SUFFIX", "ABOUT", "RUNS", "check_installed", "write", "load"),
}

_loaded: dict[tuple[Group, str], tuple[Any, str]] = {}  # with the package


def names(group: Group) -> list[str]:
    """Return the names that other packages bring, ours included where they took one; imports none of them."""
    return sorted({each.name for each in _scan(group)})


def has(group: Group, name: str) -> bool:
    """Return whether another package brings a part of this name; imports nothing."""
    return (group, name) in _loaded or any(each.name == name for each in _scan(group))


def package(group: Group, name: str) -> str:
    """Return the package that brings a part, with its version."""
    load(group, name)
    return _loaded[group, name][1]


def loaded() -> dict[str, str]:
    """Return the packages of the parts that were imported, by group and name, e.g. `sources.flowers`."""
    return {f"{group}.{name}": package for (group, name), (_, package) in sorted(_loaded.items())}


@contextlib.contextmanager
def naming_absent_sources(trained: Path | None, used: Mapping[str, str]) -> Iterator[None]:
    """Where the data of a run or checkpoint are refused, name the packages whose sources it was trained with, if they
    are not installed here. `used` is what `loaded` returned then."""
    try:
        yield
    except UsageError as error:
        absent = {
            package
            for part, package in used.items()
            if part.startswith("sources.") and not has("sources", part.partition(".")[2])
        }
        if not absent:
            raise
        raise UsageError(
            f"{trained} was trained with a source of {' or '.join(sorted(absent))}, which is not installed here; "
            f"install it. Without it: {error}"
        ) from error


def load(group: Group, name: str) -> Any:
    """Import the part of this name. UsageError names the package where that fails, or if several bring one."""
    if (group, name) not in _loaded:
        found = [each for each in _scan(group) if each.name == name]
        if not found:
            raise UsageError(f"no installed package brings '{name}' among its {group}; install it, or check the name")
        if len(found) > 1:
            packages = " and ".join(sorted(map(_package, found)))
            raise UsageError(f"'{name}' is brought by {packages} as one of their {group}; uninstall all but one")
        _loaded[group, name] = _import(group, found[0]), _package(found[0])
    return _loaded[group, name][0]


def also_known(group: Group) -> str:
    """Return what a list of known names ends with, e.g. `, flowers (sightline-flowers 1.0)`; "" without plugins."""
    return "".join(f", {each.name} ({_package(each)})" for each in sorted(_scan(group), key=lambda each: each.name))


def _scan(group: Group) -> Sequence[EntryPoint]:
    from importlib.metadata import entry_points  # here: it takes 20 ms

    return entry_points(group=f"sightline.{group}")


def _package(found: EntryPoint) -> str:
    return f"{found.dist.name} {found.dist.version}" if found.dist else "an unknown package"


def _import(group: Group, found: EntryPoint) -> Any:
    at_fault = f"'{found.name}' of the package {_package(found)} ({found.group})"
    name = found.dist.name if found.dist else found.name
    remedy = f"update or remove the package: `pip uninstall {name}`"
    try:
        part = found.load()
    except SightlineError:
        raise
    except (Exception, SystemExit) as error:  # of somebody else's code
        raise UsageError(f"{at_fault} cannot be imported: {type(error).__name__}: {error}; {remedy}") from error
    missing = [each for each in MODULES.get(group, ()) if not hasattr(part, each)]
    if missing:
        raise UsageError(f"{at_fault} is {found.value}, which does not define {', '.join(missing)}; {remedy}")
    if group not in MODULES and not callable(part):
        raise UsageError(f"{at_fault} is {found.value}, which cannot be called; {remedy}")
    return part
