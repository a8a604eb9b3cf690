"""Run an unmodified CUDA script on the available device: `sightline-migrate train.py --device cuda`.

From Python: `activate()`, `deactivate()`, `with migrate(target="cpu"):`. Importing this package does not import torch.
LAYOUT below says how the parts fit together and which file holds what.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sightline_migrate.session import Session

LAYOUT = """
A script calls torch as if CUDA were available. Only entry points are replaced (no mode, no tensor subclass,
torch.device untouched), so other operations cost nothing extra. A replaced function checks its caller's zone:
  script     the user's files and libraries        sees a virtual CUDA device
  torch      torch/nn, torch/optim, torch/amp ...  gets real answers; devices in its requests are mapped
  machinery  dynamo, inductor, triton, fx ...      gets real answers; its dtypes are never converted

cli.py, __main__.py  the command line; auto.py: activation by import
hook.py              called by `import torch` in child processes, through the entry point `torch.backends` in autoload/,
                     which is on the PYTHONPATH of child processes only
options.py           the options, and the environment variables that carry them to child processes
session.py           activate, deactivate, the active Session
targets.py           Target: the device that replaces CUDA; DeviceMap: "cuda:1" -> the target's name
zones.py             which zone is calling; the user's own line
patching.py          undo stack, wrappers that look like the original, import hooks
rules/               table.py: Rule and the collection of all rules; makers.py: the few ways to replace a name;
                     one file per family, each with rules() -> list[Rule] and an optional setup(session)
virtual/             the CUDA runtime that scripts see: devices, memory, properties; streams, events, graphs;
                     places.py: on target cpu, which storage is on the host and which on the device; what a move copies
stand_ins/           apex, pynvml and libcudart where they are not installed; missing.py: what to do about others
reporting/           record.py: hit() and truth() count calls per call site; log files, report, scan, sync points
"""

__version__ = "0.2.0"

FOLDERS = [os.path.dirname(os.path.abspath(__file__))]
"""of code that is never the script's: this one, and that of the names that Sightline gives it, where they are used"""
AUTOLOAD = os.path.join(FOLDERS[0], "autoload")
"""with this folder on PYTHONPATH, SIGHTLINE_MIGRATE=1 alone migrates `python script.py`"""


def activate(**options: Any) -> Session | None:
    """Run CUDA calls on `target` from now on; return None if a real CUDA device does the work."""
    from sightline_migrate import session

    return session.activate(session.MigrateOptions.from_keywords(**options))


def deactivate() -> None:
    """Undo activate(): restore every attribute, hook and environment variable."""
    from sightline_migrate import session

    session.deactivate()


class migrate:
    """`with migrate(target="cpu"): ...`; has no effect if migration is already active."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.opened = False

    def __enter__(self) -> Session | None:
        from sightline_migrate import session

        self.opened = session.active() is None
        return activate(**self.options)

    def __exit__(self, *_: object) -> None:
        from sightline_migrate import session

        if self.opened and session.active() is not None:
            deactivate()
