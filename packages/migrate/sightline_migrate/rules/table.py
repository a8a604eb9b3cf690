"""The table of rules: one Rule per replaced name, collected from one file per family, applied by a session."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from sightline_migrate import patching, zones

if TYPE_CHECKING:
    from sightline_migrate.session import Session

Kind = Literal["exact", "adapted", "converted", "ignored", "refused"]
"""exact: same effect; adapted: an equivalent; converted: another dtype, so other numbers; ignored: skipped, harmless;
refused: not possible on the target"""

Maker = Callable[["Rule", Any, "Session"], Any]
"""(rule, original, session) -> replacement; returning the original means no change on this target"""

FAMILIES = (
    "rules.factories",
    "rules.tensors",
    "rules.cuda",
    "rules.amp",
    "rules.load",
    "rules.compile",
    "rules.jit",
    "rules.backends",
    "rules.convolution",
    "rules.distributed",
    "rules.parallel",
    "rules.data",
    "rules.children",
    "stand_ins.finder",
    "stand_ins.libcudart",
)


@dataclass(frozen=True, eq=False)
class Rule:
    """The replacement of one public name."""

    name: str
    """dotted, as users write it: torch.cuda.is_available, torch.Tensor.cuda, torch.amp.GradScaler.__init__"""
    kind: Kind
    make: Maker
    what: str
    """the effect in words, for the log and the scan"""
    targets: tuple[str, ...] = ()
    """names of the targets it applies to; empty: all"""
    module: str = ""
    """a module that `import torch` does not load: the rule is applied when a script imports it"""
    since: tuple[int, int] = (0, 0)
    """first torch release that has the name"""
    until: tuple[int, int] = (999, 0)
    """first torch release without it"""

    def fits(self, target: str) -> bool:
        return self.fits_torch() and (not self.targets or target in self.targets)

    def fits_torch(self) -> bool:
        return self.since <= TORCH_VERSION < self.until


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


TORCH_VERSION = _version(torch.__version__)


def families() -> list[ModuleType]:
    return [importlib.import_module(f"sightline_migrate.{name}") for name in FAMILIES]


def all_rules() -> list[Rule]:
    """Return every rule for this torch release; a name may have several, for different targets."""
    return [rule for family in families() for rule in family.rules() if rule.fits_torch()]


def locate(name: str) -> tuple[Any, str]:
    """Return (owner, attribute) of a dotted name: the longest loaded module, then its attributes."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        owner: Any = sys.modules.get(".".join(parts[:cut]))
        if owner is None:
            continue
        for part in parts[cut:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise AttributeError(f"{name}: no prefix of it is a loaded module")


def apply(rules: Iterable[Rule], session: Session) -> None:
    """Apply the rules that fit the session's target; deferred ones wait for their module."""
    for rule in rules:
        if not rule.fits(session.target.name):
            continue
        if rule.module:
            session.imports.when_imported(rule.module, lambda _, rule=rule: apply_one(rule, session))  # type: ignore[misc]
        else:
            apply_one(rule, session)


def apply_one(rule: Rule, session: Session) -> None:
    """Replace one name, and every alias of the same object under torch.cuda."""
    owner, name = locate(rule.name)
    if not rule.name.startswith("torch.") and not hasattr(owner, name):
        return  # another release of a package than the one a stand-in imitates
    original = getattr(owner, name)
    if isinstance(owner, type):
        # The raw entry keeps static methods and properties intact.
        original = next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), original)
    replacement = _made_before(original, session) or rule.make(rule, original, session)
    if replacement is original:
        return
    session.undo.set(owner, name, replacement)
    if isinstance(owner, ModuleType) and callable(original):
        session.replaced.append((original, replacement))
    if isinstance(owner, ModuleType) and rule.name.startswith("torch.cuda."):
        for module in session.cuda_modules:
            if module is not owner and vars(module).get(name) is original:
                session.undo.set(module, name, replacement)


def _made_before(original: Any, session: Session) -> Any:
    """Return the replacement of a C function with two names, as torch.conv2d has: it stays one function."""
    if not isinstance(original, BuiltinFunctionType):
        return None
    return next((made for known, made in session.replaced if known is original), None)


def rebind(session: Session) -> None:
    """Replace originals that modules imported before activation, e.g. by `from torch import zeros`."""
    replaced = {id(original): made for original, made in session.replaced}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        # A console has no file.
        if zones.is_a_library(file) if file else module is sys.modules["__main__"]:
            for name, value in list(vars(module).items()):
                if id(value) in replaced and not name.startswith("__"):
                    session.undo.set(module, name, replaced[id(value)])


def cuda_modules() -> list[ModuleType]:
    return [m for n, m in list(sys.modules.items()) if n.startswith("torch.cuda") and isinstance(m, ModuleType)]


def dressed(make: Maker) -> Maker:
    """Wrap a maker so that its result looks like the original."""

    def make_dressed(rule: Rule, original: Any, session: Session) -> Any:
        made = make(rule, original, session)
        return made if made is original else patching.dress(made, original, rule.name)

    return make_dressed


def in_doubt(rule: Rule, doubt: str) -> Rule:
    """Return the rule for the log: of a move that a GPU may answer otherwise, one that says so."""
    if not doubt:
        return rule
    key = rule, doubt
    if key not in _in_doubt:
        _in_doubt[key] = replace(rule, kind="adapted", what=doubt)
    return _in_doubt[key]


_in_doubt: dict[tuple[Rule, str], Rule] = {}
