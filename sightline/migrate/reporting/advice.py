"""One clear line where a script reaches CUDA in a way that cannot be replaced, before the program ends with it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from sightline import terminal
from sightline.migrate import zones
from sightline.migrate.options import MigrateError

if TYPE_CHECKING:
    from sightline.migrate.session import Session

# What torch says, and what to do about it.
KNOWN = (
    ("Cannot access accelerator device when none is available", "write torch.device('cuda', 0) for torch.device(0)"),
    ("Torch not compiled with CUDA enabled", "this call has no rule"),
    ("Found no NVIDIA driver", "this call has no rule"),
    ("CUDA driver version is insufficient", "this call has no rule"),
    ("0 active drivers", "Triton has no driver for this target; TRITON_INTERPRET=1 emulates it"),
    ("without ATen_cuda library", "this call has no rule"),
)


def advise(error: BaseException, target: str) -> str:
    """`file:line: what cannot run`; empty for errors that have nothing to do with CUDA."""
    if isinstance(error, MigrateError):
        return str(error)
    text = str(error)
    for sign, remedy in KNOWN:
        if sign in text:
            return f"{_line_of(error)}: {type(error).__name__}: needs a real CUDA device, not {target}; {remedy}"
    return ""


def _line_of(error: BaseException) -> zones.Site:
    """The last of the user's own lines on the way to the error."""
    found = zones.Site("?", 0, "?")
    step = error.__traceback__
    while step is not None:
        if zones.is_users(step.tb_frame.f_code.co_filename):
            found = zones.Site(step.tb_frame.f_code.co_filename, step.tb_lineno, step.tb_frame.f_code.co_name)
        step = step.tb_next
    return found


def install(session: Session) -> None:
    """Adds the line to what Python prints of an error that ends the program."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        line = advise(error, session.target.name)
        if line:
            terminal.say(f"sightline migrate: {line}", "stderr")

    def restore() -> None:
        if sys.excepthook is hook:  # a script's own hook, set since, stays
            sys.excepthook = before

    sys.excepthook = hook
    session.undo.on_undo(restore)
