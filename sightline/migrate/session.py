"""Turning migration on and off: the one active Session, what it replaced, and its traces in the environment."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch
from torch.utils import _device

from sightline.migrate import AUTOLOAD, patching, targets
from sightline.migrate.options import MigrateOptions
from sightline.migrate.reporting import logfile, record, syncs
from sightline.migrate.rules import table
from sightline.migrate.virtual.runtime import Runtime

__all__ = ["MigrateOptions", "Session", "activate", "active", "deactivate"]


class Session:
    """What handlers share while migration is on."""

    def __init__(self, options: MigrateOptions, target: targets.Target) -> None:
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


def activate(options: MigrateOptions) -> Session | None:
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
        families = table.families()
        session.cuda_modules = table.cuda_modules()
        for family in families:
            table.apply(family.rules(), session)
        table.rebind(session)
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
    """Children read it: workers and spawned processes import torch, which finds the entry point in AUTOLOAD."""
    wanted: dict[str, str] = {}
    session.options.write_environment(wanted)
    if session.options.legacy_load:
        wanted["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    paths = [AUTOLOAD, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    wanted["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    for name, value in wanted.items():
        session.undo.set_item(os.environ, name, value)
    # A spawned process takes over the list of its parent before it imports torch, whatever PYTHONPATH says.
    # Not looked for in the first entry: that one is the script's folder, and changes once a script runs.
    if AUTOLOAD not in sys.path[1:]:
        sys.path.append(AUTOLOAD)
        session.undo.on_undo(lambda: sys.path.remove(AUTOLOAD) if AUTOLOAD in sys.path else None)
