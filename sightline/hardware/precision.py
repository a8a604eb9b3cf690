"""Number formats: what a precision means, the autocast region, and the loss scale fp16 needs."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from sightline.hardware.devices import Device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: Device, precision: str) -> contextlib.AbstractContextManager[object]:
    """The region in which matrix products run in `precision`."""
    if precision == "fp32":
        return contextlib.nullcontext()
    # The cast cache would hold tensors across captured graphs; a step casts every weight once anyway.
    return torch.autocast(device.kind, DTYPES[precision], cache_enabled=False)


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
        """After a step; `finite` says whether its gradients were."""
        if not self.enabled:
            return
        good = torch.where(finite, self.good_steps + 1, 0.0)
        grown = torch.where(good >= self.GROWTH_INTERVAL, self.scale * 2.0, self.scale)
        self.scale.copy_(torch.where(finite, grown, self.scale * 0.5))
        self.good_steps.copy_(torch.where(good >= self.GROWTH_INTERVAL, 0.0, good))
