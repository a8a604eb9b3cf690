"""Gaudi's lazy mode: add a step mark after each backward pass and each optimizer step.

Lazy mode collects operations until a step mark. Scripts written for CUDA have no marks; these rules let them run
unmodified with PT_HPU_LAZY_MODE=1.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Rule, dressed

if TYPE_CHECKING:
    from sightline_migrate.session import Session

CORE = "habana_frameworks.torch.core"
_MARKED = "followed by a step mark, for lazy mode"


def is_on() -> bool:
    return os.environ.get("PT_HPU_LAZY_MODE") == "1"


def rules() -> list[Rule]:
    # Tensor.backward() calls it by this name.
    return [Rule("torch.autograd.backward", "adapted", dressed(_make_backward), _MARKED, targets=("hpu",))]


def setup(session: Session) -> None:
    """Mark steps of every optimizer derived from torch's."""
    if session.target.name != "hpu" or not is_on():
        return
    mark = _mark_step()
    rule = Rule("torch.optim.Optimizer.step", "adapted", lambda rule, original, session: original, _MARKED)

    def after_step(*_: Any) -> None:
        record.hit(rule)
        mark()

    handle = register_optimizer_step_post_hook(after_step)
    session.undo.on_undo(handle.remove)


def _make_backward(rule: Rule, original: Any, session: Session) -> Any:
    if not is_on():
        return original
    mark = _mark_step()

    def backward(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        record.hit(rule)
        mark()

    return backward


def _mark_step() -> Callable[[], Any]:
    found: Callable[[], Any] = importlib.import_module(CORE).mark_step
    return found
