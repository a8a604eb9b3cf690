"""Functions that make tensors: zeros, empty, tensor, *_like, new_*, windows, fft frequencies."""

from __future__ import annotations

from sightline.migrate.makers import maps
from sightline.migrate.rules import Rule


def rules() -> list[Rule]:
    names = ["torch.zeros", "torch.ones"]
    return [Rule(name, "exact", maps(), "made on the target") for name in names]
