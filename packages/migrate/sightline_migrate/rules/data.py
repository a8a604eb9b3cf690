"""Data loading and optimizers: pinned memory and capturable steps, which the target may not have."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sightline_migrate.reporting import record
from sightline_migrate.rules import lazy_mode
from sightline_migrate.rules.table import Rule, dressed
from sightline_migrate.targets import HOST_MEMORY

if TYPE_CHECKING:
    from sightline_migrate.session import Session

UNCAPTURED = "capturable=False: the target has no graphs to capture a step"


def rules() -> list[Rule]:
    off = UNCAPTURED
    return [
        Rule("torch.utils.data.DataLoader.__init__", "ignored", dressed(_make_loader), "without pinned memory"),
        Rule("torch.optim.Optimizer.add_param_group", "adapted", dressed(_make_group), off, targets=HOST_MEMORY),
        Rule("torch.optim.Optimizer.load_state_dict", "adapted", dressed(_make_load), off, targets=HOST_MEMORY),
        *lazy_mode.rules(),
    ]


def setup(session: Session) -> None:
    """Clear `capturable` before each step of every optimizer derived from torch's."""
    lazy_mode.setup(session)
    if session.target.name not in HOST_MEMORY:
        return
    rule = Rule("torch.optim.Optimizer.step", "adapted", lambda rule, original, session: original, UNCAPTURED)

    def before_step(optimizer: Any, *_: Any) -> None:
        # A group may have changed since it was added. Compiled code decides by itself what to capture.
        if not is_dynamo_compiling():
            _without_capture(rule, optimizer.param_groups)

    handle = register_optimizer_step_pre_hook(before_step)
    session.undo.on_undo(handle.remove)


def _make_loader(rule: Rule, original: Any, session: Session) -> Any:
    drops, get = session.target.name in HOST_MEMORY, session.devices.get
    signature = inspect.signature(original)

    def __init__(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        device = given.get("pin_memory_device")
        if drops:
            if given.get("pin_memory") or device:
                record.hit(rule, (), {"pin_memory": given.get("pin_memory"), "pin_memory_device": device})
            given.pop("pin_memory_device", None)
            if "pin_memory" in given:
                given["pin_memory"] = False
        elif device:
            there = get(device)
            if there is not device:
                record.hit(rule, (), {"pin_memory_device": device}, f"pinned for {there}")
            given["pin_memory_device"] = there
        original(*bound.args, **bound.kwargs)

    return __init__


def _make_group(rule: Rule, original: Any, session: Session) -> Any:
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        _without_capture(rule, self.param_groups[-1:])

    return add_param_group


def _make_load(rule: Rule, original: Any, session: Session) -> Any:
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        _without_capture(rule, self.param_groups)

    return load_state_dict


def _without_capture(rule: Rule, groups: list[dict[str, Any]]) -> None:
    for group in groups:
        if group.get("capturable"):
            record.hit(rule, (), {"capturable": True})
            group["capturable"] = False
            if isinstance(group.get("lr"), torch.Tensor) and group.get("foreach"):
                group["foreach"] = False  # foreach takes a tensor as learning rate only if capturable
