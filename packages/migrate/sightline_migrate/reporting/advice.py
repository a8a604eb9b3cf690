"""Print one line of advice when a script fails on a call that cannot be replaced."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from sightline_migrate import terminal, zones
from sightline_migrate.options import MigrateError
from sightline_migrate.reporting import record

if TYPE_CHECKING:
    from sightline_migrate.session import Session

NO_RULE = "needs a real CUDA device, not {target}; this call has no rule"
FLEX = "FlexAttention cannot train on {target}; use the script's switch for scaled_dot_product_attention"
# (text of torch's error, what to say)
KNOWN = (
    (
        "Cannot access accelerator device when none is available",
        "needs a real CUDA device, not {target}; use torch.device('cuda', 0), not torch.device(0)",
    ),
    ("Torch not compiled with CUDA enabled", NO_RULE),
    ("Found no NVIDIA driver", NO_RULE),
    ("No CUDA GPUs are available", NO_RULE),
    ("CUDA driver version is insufficient", NO_RULE),
    ("without ATen_cuda library", NO_RULE),
    ("arguments from the 'CUDA' backend", NO_RULE),
    ("0 active drivers", "Triton has no driver for {target}; TRITON_INTERPRET=1 emulates it, slowly"),
    (
        "Weights only load failed",
        "torch.load reads only tensors since torch 2.6; --legacy-load reads whole pickles, for files you trust",
    ),
    ("FlexAttention does not support backward on CPU", FLEX),
    ("torch.compile on CPU only supports inference", FLEX),
)


def advise(error: BaseException, target: str) -> str:
    """Return `file:line: error; remedy`, or '' for other errors and for a refused call, which was printed already."""
    if isinstance(error, MigrateError):
        return str(error)
    text = str(error)
    for sign, said in KNOWN:
        if sign in text:
            line = _line_of(error)
            is_printed = said == NO_RULE and _is_refused(line)
            return "" if is_printed else f"{line}: {type(error).__name__}: {said.format(target=target)}"
    return ""


def _is_refused(line: zones.Site) -> bool:
    return any(
        each.kind == "refused" and (each.user.file, each.user.line) == (line.file, line.line)
        for each in record.records.values()
    )


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
