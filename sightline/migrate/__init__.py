"""Runs an unmodified CUDA script on whatever device is there: `python -m sightline.migrate train.py --device cuda`.

`activate()`, `deactivate()` and `with migrate(target="cpu"):` do it from Python; importing this imports no torch.
How the parts fit together, and which file holds what: LAYOUT below.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sightline.migrate.session import Session

LAYOUT = """
A script calls torch as if CUDA were there. Entry points only are replaced (no mode, no tensor subclass, torch.device
untouched), so every operation that is not replaced costs what it did. A replaced function looks at who calls:
  script     the user's files and libraries        sees a virtual CUDA device
  torch      torch/nn, torch/optim, torch/amp ...  asks and gets the truth; devices in its requests are mapped
  machinery  dynamo, inductor, triton, fx ...      asks and gets the truth; its dtypes are never converted

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
virtual/             the CUDA runtime that scripts see: devices, memory, properties; streams, events, graphs
stand_ins/           apex and pynvml where they are not installed
reporting/           record.py: hit() and truth() count calls per call site; log files, report, scan, sync points
"""

AUTOLOAD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "autoload")
"""the folder that belongs on PYTHONPATH where SIGHTLINE_MIGRATE=1 alone should migrate `python script.py`"""


def activate(**options: Any) -> Session | None:
    """Makes CUDA calls run on `target` from here on; None where a real CUDA device is left to do it."""
    from sightline.migrate import session

    return session.activate(session.MigrateOptions.from_keywords(**options))


def deactivate() -> None:
    """Undoes activate(): every attribute, hook and environment variable is as it was before."""
    from sightline.migrate import session

    session.deactivate()


class migrate:
    """`with migrate(target="cpu"): ...`; inside another one, or once activated, it changes nothing."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.opened = False

    def __enter__(self) -> Session | None:
        from sightline.migrate import session

        self.opened = session.active() is None
        return activate(**self.options)

    def __exit__(self, *_: object) -> None:
        from sightline.migrate import session

        if self.opened and session.active() is not None:
            deactivate()
