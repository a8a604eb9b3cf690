"""The moving average of weights (EMA), kept as a second model so that it can be evaluated as it is."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Ema:
    """average += (1 - decay) * (weights - average), over parameters and float buffers, after every update."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        pairs = list(zip(self.model.state_dict().values(), model.state_dict().values(), strict=True))
        self._averages = [average for average, _ in pairs if average.is_floating_point()]
        self._weights = [weight for average, weight in pairs if average.is_floating_point()]
        self._copies = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """One step of the average; integer buffers (batch counters) are copied."""
        torch._foreach_lerp_(self._averages, self._weights, 1 - self.decay)
        for average, weight in self._copies:
            average.copy_(weight)
