"""Replace attributes with a full undo, make wrappers look like their originals, hook into imports."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, MutableMapping, Sequence
from types import ModuleType
from typing import Any

from sightline_migrate.options import MigrateError

ABSENT = object()
ORIGINAL = "__migrate_original__"


class UndoStack:
    """All changes with their previous values; undone in reverse order, all or none."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[[], str], Callable[[], None]]] = []
        self._placed: dict[tuple[int, str], Any] = {}  # a name may be replaced more than once: the last one counts

    def __len__(self) -> int:
        return len(self._steps)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class; an inherited one is inherited again after undo."""
        old = vars(owner).get(name, ABSENT)
        setattr(owner, name, value)
        key = (id(owner), name)
        self._placed[key] = vars(owner).get(name, ABSENT)

        def check() -> str:
            is_ours = vars(owner).get(name, ABSENT) is self._placed[key]
            return "" if is_ours else f"{getattr(owner, '__name__', owner)}.{name}"

        def undo() -> None:
            delattr(owner, name) if old is ABSENT else setattr(owner, name, old)

        self._steps.append((check, undo))

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Replace an entry of a dict, e.g. os.environ or sys.modules; undo ignores later changes by others."""
        old = mapping.get(key, ABSENT)
        mapping[key] = value

        def undo() -> None:
            if old is ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = old

        self.on_undo(undo)

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Register any other undo function."""
        self._steps.append((lambda: "", undo))

    def undo(self) -> None:
        """Undo everything, or raise and change nothing if an attribute was replaced since."""
        changed = [name for check, _ in self._steps if (name := check())]
        if changed:
            raise MigrateError(
                f"{', '.join(changed[:5])} was replaced again after activation; undo that first, then deactivate"
            )
        while self._steps:
            self._steps.pop()[1]()
        self._placed.clear()


def dress(wrapper: Any, original: Any, name: str) -> Any:
    """Make a wrapper look like its original, so that pickle, fx and dynamo find it by its name.

    `__wrapped__` stays the original's: dynamo reads it to find the generator of a context manager.
    """
    module, _, last = name.rpartition(".")
    wrapper.__name__ = getattr(original, "__name__", last)
    wrapper.__qualname__ = getattr(original, "__qualname__", last)
    owner = getattr(original, "__module__", None)
    # Functions written in C name `torch._C._VariableFunctions` or no module; pickle finds the wrapper only by its
    # public name.
    if not owner or owner.startswith("torch._C") or not _is_found(owner, wrapper.__qualname__):
        owner = module
        wrapper.__qualname__ = last
    wrapper.__module__ = owner
    wrapper.__doc__ = getattr(original, "__doc__", None)
    wrapper.__wrapped__ = getattr(original, "__wrapped__", original)
    setattr(wrapper, ORIGINAL, original)
    return wrapper


def _is_found(module: str, qualname: str) -> bool:
    here: Any = sys.modules.get(module)
    for part in qualname.split("."):
        here = getattr(here, part, None)
    return here is not None


def original_of(value: Any) -> Any:
    """Return the function that a wrapper replaces; return anything else unchanged."""
    return getattr(value, ORIGINAL, value)


class ImportHook(importlib.abc.MetaPathFinder):
    """Runs callbacks right after a module is imported."""

    def __init__(self) -> None:
        self._after: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._searching = False

    def when_imported(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        """Run `callback(module)` right after `name` is imported, or now if it already is."""
        module = sys.modules.get(name)
        if module is not None:
            callback(module)
        else:
            self._after.setdefault(name, []).append(callback)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._after or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            # A script may only check that the module exists: callbacks wait until it is executed.
            spec.loader = _Follower(spec.loader, lambda: self._after.pop(name, []))  # type: ignore[assignment]
        return spec

    def install(self, undo: UndoStack) -> None:
        """Put the hook first on sys.meta_path until undo."""
        sys.meta_path.insert(0, self)
        undo.on_undo(lambda: sys.meta_path.remove(self))


class _Follower:
    """The module's own loader, followed by the callbacks; other attributes come from the real loader."""

    def __init__(self, loader: Any, take: Callable[[], list[Callable[[ModuleType], None]]]) -> None:
        self._loader = loader
        self._take = take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        for callback in self._take():
            callback(module)
