"""Print one line of advice when a script fails on a CUDA call that cannot be replaced."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from sightline import terminal
from sightline.migrate import zones
from sightline.migrate.options import MigrateError

if TYPE_CHECKING:
    from sightline.migrate.session import Session

# (text of torch's error, remedy)
KNOWN = (
    ("Cannot access accelerator device when none is available", "use torch.device('cuda', 0), not torch.device(0)"),
    ("Torch not compiled with CUDA enabled", "this call has no rule"),
    ("Found no NVIDIA driver", "this call has no rule"),
    ("No CUDA GPUs are available", "this call has no rule"),
    ("CUDA driver version is insufficient", "this call has no rule"),
    ("0 active drivers", "Triton has no driver for this target; TRITON_INTERPRET=1 emulates it"),
    ("without ATen_cuda library", "this call has no rule"),
)


def advise(error: BaseException, target: str) -> str:
    """Return `file:line: error; remedy`, or '' for errors unrelated to CUDA."""
    if isinstance(error, MigrateError):
        return str(error)
    text = str(error)
    for sign, remedy in KNOWN:
        if sign in text:
            return f"{_line_of(error)}: {type(error).__name__}: needs a real CUDA device, not {target}; {remedy}"
    return ""


def _line_of(error: BaseException) -> zones.Site:
    """Return the last of the user's own lines in the traceback."""
    found = zones.Site("?", 0, "?")
    step = error.__traceback__
    while step is not None:
        if zones.is_users(step.tb_frame.f_code.co_filename):
            found = zones.Site(step.tb_frame.f_code.co_filename, step.tb_lineno, step.tb_frame.f_code.co_name)
        step = step.tb_next
    return found


def install(session: Session) -> None:
    """Print the advice after the traceback of an error that ends the program."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        before(kind, error, traceback)
        line = advise(error, session.target.name)
        if line:
            terminal.say(f"sightline migrate: {line}", "stderr")

    def restore() -> None:
        if sys.excepthook is hook:  # keep a hook that the script set since
            sys.excepthook = before

    sys.excepthook = hook
    session.undo.on_undo(restore)
