"""Import small versions of apex and pynvml if they are not installed, or if no driver answers the real pynvml."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from sightline_migrate import zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Rule
from sightline_migrate.stand_ins import apex, pynvml
from sightline_migrate.stand_ins.rules import as_it_is

if TYPE_CHECKING:
    from sightline_migrate.session import Session

PACKAGES: Mapping[str, ModuleType] = {"apex": apex, "pynvml": pynvml}
"""each has MODULES (module -> its names), REFUSED (module -> advice), ADVICE (for all other names) and rules()"""


def rules() -> list[Rule]:
    """Return the rules of missing packages, for the scan; the stand-ins count their own use."""
    return [rule for name, package in PACKAGES.items() if is_missing(name) for rule in package.rules()]


def setup(session: Session) -> None:
    finder = StandIns()
    if _is_useless("pynvml"):
        hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "pynvml"}
        for name in hidden:
            del sys.modules[name]
        session.undo.on_undo(lambda: sys.modules.update(hidden))  # undone in reverse: after the stand-in is gone
    first = InsteadOfReal(finder)
    sys.meta_path.insert(0, first)
    sys.meta_path.append(finder)
    session.undo.on_undo(lambda: sys.meta_path.remove(first))
    session.undo.on_undo(finder.remove)


def is_missing(name: str) -> bool:
    """Return True if the real package is not installed, or cannot work."""
    if _is_useless(name):
        return True
    module = sys.modules.get(name)
    spec = importlib.util.find_spec(name) if module is None else module.__spec__
    return spec is None or _is_stand_in(spec)


def _is_useless(name: str) -> bool:
    """Return True for the installed pynvml, with its submodules, if no driver answers it; not for a script's own."""
    if name.partition(".")[0] != "pynvml" or pynvml.driver_answers():
        return False
    real = importlib.machinery.PathFinder.find_spec("pynvml")
    if real is None or real.origin is None:
        return False
    beside = metadata.distributions(name="nvidia-ml-py", path=[os.path.dirname(real.origin)])  # pip install --target
    return not zones.is_users(real.origin) or any(True for _ in beside)


def _is_stand_in(spec: importlib.machinery.ModuleSpec) -> bool:
    """Return True for our loader; an attribute marks it, since an import hook may wrap it."""
    return getattr(spec.loader, "is_stand_in", False)


class InsteadOfReal(importlib.abc.MetaPathFinder):
    """First on sys.meta_path, for a real pynvml that no driver answers."""

    def __init__(self, finder: StandIns) -> None:
        self._finder = finder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return self._finder.find_spec(name, path, target) if _is_useless(name) else None


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on sys.meta_path: asked only for modules that no other finder has, not even next to the script."""

    is_stand_in = True

    def __init__(self) -> None:
        self._contents = {name: names for package in PACKAGES.values() for name, names in package.MODULES.items()}
        self._refused = {name: advice for package in PACKAGES.values() for name, advice in package.REFUSED.items()}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self._refused and self._is_ours(name.partition(".")[0]):
            _refuse_module(name, self._refused[name])
        if name in self._contents and ("." not in name or self._is_ours(name.partition(".")[0])):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        # Import submodules, as the real packages do: `import apex` is enough to use apex.amp. First, because the class
        # apex.parallel.LARC must replace the module of that name.
        for other in self._contents:
            if other.rpartition(".")[0] == name:
                importlib.import_module(other)
        vars(module).update(self._contents[name])
        module.__getattr__ = lambda missing: _refuse_name(name, missing)  # type: ignore[method-assign]

    def remove(self) -> None:
        sys.meta_path.remove(self)
        for name in self._contents:
            if self._is_ours(name):
                del sys.modules[name]

    def _is_ours(self, name: str) -> bool:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        return spec is not None and _is_stand_in(spec)


def _refused(name: str, advice: str) -> str:
    """Count it and return the message to raise; --strict adds nothing: scripts try imports and have a fallback."""
    record.hit(_rule_of(name, advice))
    package = name.partition(".")[0]
    return f"{zones.user_site(zones.caller())}: {name} is not in the stand-in for the missing {package}; {advice}"


_rules: dict[str, Rule] = {}


def _rule_of(name: str, advice: str) -> Rule:
    if name not in _rules:
        _rules[name] = Rule(name, "refused", as_it_is, advice)
    return _rules[name]


def _refuse_module(name: str, advice: str) -> NoReturn:
    raise ModuleNotFoundError(_refused(name, advice), name=name)


def _refuse_name(module: str, name: str) -> NoReturn:
    full = f"{module}.{name}"
    if name.startswith("__"):  # looked up by Python itself
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    text = _refused(full, PACKAGES[module.partition(".")[0]].ADVICE)
    record.say(text)  # `from apex.amp import x` raises Python's own message instead
    raise AttributeError(text)
