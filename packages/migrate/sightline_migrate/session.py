"""Turn migration on and off: the one active Session, its replacements, and its environment variables."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch
from torch.utils import _device

from sightline_migrate import AUTOLOAD, patching, targets
from sightline_migrate.options import MigrateOptions
from sightline_migrate.reporting import logfile, record, syncs
from sightline_migrate.rules import table
from sightline_migrate.virtual import places
from sightline_migrate.virtual.runtime import Runtime

__all__ = ["MigrateOptions", "Session", "activate", "active", "deactivate"]


class Session:
    """State that all rules share while migration is on."""

    def __init__(self, options: MigrateOptions, target: targets.Target) -> None:
        self.options = options
        self.target = target
        self.devices = targets.DeviceMap(target)
        self.undo = patching.UndoStack()
        self.imports = patching.ImportHook()
        self.shows_cuda = target.tells_apart or options.claim
        """True if x.device and x.is_cuda report cuda to the script"""
        self.runtime = Runtime(self)
        self.autocast_to: set[torch.dtype] = set()
        """types that autocast was on for"""
        self.sets_autocast_dtype = False
        """True after the script called torch.set_autocast_dtype("cuda", ...)"""
        self.default_place = places.HOST
        """where factories create a tensor without a device, as set_default_tensor_type says"""
        self.is_first = False
        """True in the first process of a run, until it says that migration is on"""
        self.replaced: list[tuple[Any, Any]] = []
        """(original, replacement) of functions and classes in modules"""
        self.cuda_modules: list[ModuleType] = []
        """modules that may hold other references to a name of torch.cuda"""


_active: Session | None = None


def active() -> Session | None:
    return _active


def activate(options: MigrateOptions) -> Session | None:
    """Apply all rules; a second call has no effect. Return None if a real CUDA device does the work."""
    global _active
    if _active is not None:
        return _active
    target = targets.choose(options.target)
    if target is None:
        record.say(f"not active: {torch.cuda.get_device_name()} is available; use --target cpu to run without it")
        return None
    session = Session(options, target)
    # Build these now: later they would hold our wrappers, and set_default_device and torch.jit would miss factories.
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


def activate_and_announce(options: MigrateOptions) -> None:
    """Activate for a whole process: by the command, a variable, or `import sightline_migrate.auto`."""
    session = activate(options)
    if session is not None:
        logfile.announce(session)


def deactivate() -> None:
    """Undo everything; raise, changing nothing, if one of our wrappers was replaced since."""
    global _active
    if _active is not None:
        _active.undo.undo()
        _active = None


def _write_environment(session: Session) -> None:
    """Set the variables for child processes: when they import torch, it finds the entry point in AUTOLOAD."""
    wanted: dict[str, str] = {}
    session.options.write_environment(wanted)
    if session.options.legacy_load:
        wanted["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    paths = [AUTOLOAD, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    wanted["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    for name, value in wanted.items():
        session.undo.set_item(os.environ, name, value)
    # A spawned process takes sys.path from its parent before it imports torch, whatever PYTHONPATH says.
    # The first entry does not count: it is the script's folder, and changes once a script runs.
    if AUTOLOAD not in sys.path[1:]:
        sys.path.append(AUTOLOAD)
        session.undo.on_undo(lambda: sys.path.remove(AUTOLOAD) if AUTOLOAD in sys.path else None)
