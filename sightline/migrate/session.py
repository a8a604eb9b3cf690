"""Turning migration on and off: the one active Session, what it replaced, and its traces in the environment."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from torch.utils import _device

from sightline.migrate import logfile, patching, record, rules, syncs, targets
from sightline.migrate.options import Options
from sightline.migrate.virtual import Runtime

__all__ = ["Options", "Session", "activate", "active", "deactivate"]

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
AUTOLOAD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "autoload")


class Session:
    """What handlers share while migration is on."""

    def __init__(self, options: Options, target: targets.Target) -> None:
        self.options = options
        self.target = target
        self.devices = targets.DeviceMap(target)
        self.undo = patching.UndoStack()
        self.imports = patching.ImportHook()
        self.shows_cuda = target.tells_apart or options.claim
        """whether x.device and x.is_cuda are answered for the script"""
        self.runtime = Runtime(self)
        self.replaced: list[tuple[Any, Any]] = []
        """(original, what took its place) of functions and classes in modules"""
        self.cuda_modules: list[ModuleType] = []
        """where else a name of torch.cuda may be found"""


_active: Session | None = None


def active() -> Session | None:
    return _active


def activate(options: Options) -> Session | None:
    """Replaces what the rules name; a second call changes nothing. None where a real CUDA device does the work."""
    global _active
    if _active is not None:
        return _active
    target = targets.choose(options.target)
    if target is None:
        record.say(f"not needed, {torch.cuda.get_device_name()} is there; --target cpu would run without it")
        return None
    session = Session(options, target)
    # Built later they would hold our wrappers: torch.set_default_device and torch.jit would then miss every factory.
    _device._device_constructors()
    torch.jit._builtins._get_builtin_table()
    _active = session
    try:
        session.imports.install(session.undo)
        _write_environment(session)
        families = rules.families()
        session.cuda_modules = rules.cuda_modules()
        for family in families:
            rules.apply(family.rules(), session)
        rules.rebind(session)
        for family in families:
            if hasattr(family, "setup"):
                family.setup(session)
        syncs.setup(session)
        logfile.setup(session)
    except BaseException:
        _active = None
        session.undo.undo()
        raise
    return session


def deactivate() -> None:
    """Undoes all of it; refused, with nothing changed, if someone replaced one of our wrappers since."""
    global _active
    if _active is not None:
        _active.undo.undo()
        _active = None


def _write_environment(session: Session) -> None:
    """Children read it: workers and spawned processes import torch, which calls hook.autoload()."""
    wanted: dict[str, str] = {}
    session.options.write_environment(wanted)
    if session.options.legacy_load:
        wanted["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    if not _is_installed():
        paths = [AUTOLOAD, PACKAGE_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        wanted["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
        _extend_path(session)
    for name, value in wanted.items():
        session.undo.set_item(os.environ, name, value)


def _extend_path(session: Session) -> None:
    """A spawned process takes over the list of its parent before it imports torch, whatever PYTHONPATH says."""
    for path in (AUTOLOAD, PACKAGE_ROOT):
        # Not the first entry: that one is the script's folder, and changes once a script runs.
        if path not in sys.path[1:]:
            sys.path.append(path)
            session.undo.on_undo(lambda path=path: sys.path.remove(path) if path in sys.path else None)  # type: ignore[misc]


def _is_installed() -> bool:
    """Whether `import torch` finds our entry point without help; not so for a copy that is only on PYTHONPATH."""
    found = metadata.entry_points(group="torch.backends")
    return any(entry.value == "sightline.migrate.hook:autoload" for entry in found) and AUTOLOAD not in sys.path
