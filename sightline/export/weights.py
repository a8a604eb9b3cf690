"""Exported files that hold weights alone, for `--model.weights` and for programs with the network's code."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sightline.export.served import Runs, Served


def state_of(served: Served) -> dict[str, Tensor]:
    """Return plain contiguous copies of the network's tensors."""
    state = served.model.state_dict()
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


@torch.no_grad()
def running(served: Served, state: Mapping[str, Tensor]) -> Runs:
    """Return a copy of the network that has these tensors and none of its own."""
    twin = copy.deepcopy(served)
    for tensor in twin.model.state_dict().values():
        tensor.fill_(math.nan if tensor.is_floating_point() else 0)
    twin.model.load_state_dict(state)
    return twin
