"""Data loading and optimizers: what they ask of a device that the target does not have."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from sightline.migrate import lazy_mode, record
from sightline.migrate.rules import Rule, dressed
from sightline.migrate.targets import HOST_MEMORY

if TYPE_CHECKING:
    from sightline.migrate.session import Session


def rules() -> list[Rule]:
    off = "capturable=False: there is no graph that could capture a step"
    return [
        Rule("torch.utils.data.DataLoader.__init__", "ignored", dressed(_make_loader), "without pinned memory"),
        Rule("torch.optim.Optimizer.add_param_group", "adapted", dressed(_make_group), off, targets=HOST_MEMORY),
        Rule("torch.optim.Optimizer.load_state_dict", "adapted", dressed(_make_load), off, targets=HOST_MEMORY),
        *lazy_mode.rules(),
    ]


def setup(session: Session) -> None:
    lazy_mode.setup(session)


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
                group["foreach"] = False  # many tensors at once take a learning rate in a tensor only if captured
