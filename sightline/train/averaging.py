"""Averages of weights: over time while training (EMA), and over finished checkpoints (`sightline average`)."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sightline.engine import checkpoint
from sightline.errors import BadCheckpoint, UsageError
from sightline.recipe.recipe import Recipe
from sightline.train.schedules import RunLength


class Ema:
    """average += share * (weights - average), over parameters and float buffers.

    A second model, so that it can be evaluated as it is.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, length: RunLength):
        cfg = recipe.train
        self.every_steps = cfg.ema_every_steps
        self.share = 1 - cfg.ema
        if cfg.ema_rule == "torchvision":
            # Its decay is meant per 32 steps of a batch of 1 over the epochs: scaled to what is really averaged.
            self.share = min(1.0, self.share * cfg.global_batch * cfg.ema_every_steps / cfg.epochs)
        # torchvision's average is the weights themselves up to its first update after warm-up, and it counts the steps
        # between updates again in every epoch; ours averages from the start and counts on.
        warmup = recipe.schedule.warmup_epochs * length.steps_per_epoch
        self.copies_until_step = round(warmup) + 1 if cfg.ema_rule == "torchvision" else 0
        self.counts_within = length.steps_per_epoch if cfg.ema_rule == "torchvision" else sys.maxsize
        self.model = copy.deepcopy(model).requires_grad_(False)
        pairs = list(zip(self.model.state_dict().values(), model.state_dict().values(), strict=True))
        self._averages = [average for average, _ in pairs if average.is_floating_point()]
        self._weights = [weight for average, weight in pairs if average.is_floating_point()]
        self._copies = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int, finite: Tensor) -> None:
        """Average in update number `step`, nothing if it was skipped; batch counters are copied."""
        if step % self.counts_within % self.every_steps:
            return
        if step < self.copies_until_step:
            torch._foreach_copy_(self._averages, self._weights)
        else:
            moves = torch._foreach_sub(self._weights, self._averages)
            torch._foreach_mul_(moves, self.share * finite)
            torch._foreach_add_(self._averages, moves)
        for average, weight in self._copies:
            average.copy_(weight)


def average_checkpoints(paths: Sequence[Path], out: Path) -> Path:
    """Write a checkpoint with the mean weights of those given; it can be evaluated, not resumed."""
    if len(paths) < 2:
        raise UsageError(f"{len(paths)} checkpoint given; an average takes two or more (--run.keep N keeps more)")
    if out.exists():
        raise UsageError(f"{out} exists; choose another --out")
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    state: dict[str, Any] = {}  # ends as that of the last checkpoint
    for path in paths:
        tensors, state = checkpoint.read(path)
        weights = tensors.get("ema", tensors["model"])
        if sums and {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in sums.items()}:
            raise BadCheckpoint(f"{path} holds another model than {paths[0]}")
        for name, tensor in weights.items():
            dtypes[name] = tensor.dtype
            # float64 holds both exact sums of counters and sums of floats without loss that matters.
            sums[name] = sums.get(name, torch.zeros_like(tensor, dtype=torch.float64)) + tensor.double()
    mean = {
        name: (total / len(paths) if dtypes[name].is_floating_point else total // len(paths)).to(dtypes[name])
        for name, total in sums.items()
    }
    state["averaged"] = [path.name for path in paths]
    return checkpoint.write(out, {"model": mean}, state)
