"""Number formats: what a precision means, the autocast region, modules kept out of it, the loss scale fp16 needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from sightline.hardware.devices import Device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: Device, precision: str) -> contextlib.AbstractContextManager[object]:
    """Return the context in which matrix products run in `precision`."""
    if precision == "fp32":
        return contextlib.nullcontext()
    # The cast cache would hold tensors across captured graphs; a step casts every weight once anyway.
    return torch.autocast(device.kind, DTYPES[precision], cache_enabled=False)


def keep_fp32(model: nn.Module, patterns: Sequence[str], device: Device) -> list[str]:
    """Run the modules whose type or path matches without autocast; return the patterns that match no module.

    A module gets a subclass of its own type: what asks for the type, names of parameters, copies of the model and
    torch.compile see no difference, which an attribute or a hook on the instance would make.
    """
    left = set(patterns)
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for path, module in model.named_modules():
        kind: type[nn.Module] = type(module)
        matching = {each for each in patterns if fnmatchcase(path, each) or fnmatchcase(kind.__name__, each)}
        if matching and kind.forward is not nn.Module.forward:  # a ModuleList is never called
            if kind not in made:
                made[kind] = _kept_in_fp32(kind, device.kind)
            module.__class__ = made[kind]
            left -= matching
    return [pattern for pattern in dict.fromkeys(patterns) if pattern in left]


def _kept_in_fp32(kind: type[nn.Module], device_kind: str) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_kind, enabled=False):
            return kind.forward(self, *_as_fp32(args), **_as_fp32(kwargs))

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _as_fp32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        cast = (_as_fp32(each) for each in value)
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)  # a named tuple takes them singly
    return {key: _as_fp32(each) for key, each in value.items()} if isinstance(value, dict) else value


class LossScale:
    """fp16: the loss is multiplied so that small gradients survive. Lives on the device; never read by the host.

    Doubled after GROWTH_INTERVAL good steps, halved after a bad one, as torch's GradScaler does.
    """

    START = 65536.0
    GROWTH_INTERVAL = 2000

    def __init__(self, device: torch.device, enabled: bool):
        self.enabled = enabled
        self.scale = torch.full((), self.START if enabled else 1.0, device=device)
        self.good_steps = torch.zeros((), device=device)

    def update(self, finite: Tensor) -> None:
        """Adapt the scale after a step; `finite` says whether its gradients were."""
        if not self.enabled:
            return
        good = torch.where(finite, self.good_steps + 1, 0.0)
        grown = torch.where(good >= self.GROWTH_INTERVAL, self.scale * 2.0, self.scale)
        self.scale.copy_(torch.where(finite, grown, self.scale * 0.5))
        self.good_steps.copy_(torch.where(good >= self.GROWTH_INTERVAL, 0.0, good))
