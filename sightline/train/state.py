"""Everything that changes while training: weights, optimizer, average, loss scale, and where the run stands."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from sightline.config import Recipe, Run
from sightline.errors import UsageError
from sightline.hardware.devices import Device, place
from sightline.hardware.precision import LossScale, keep_fp32
from sightline.hardware.world import World
from sightline.models import norm
from sightline.parts import DataSpec
from sightline.train.averaging import Ema
from sightline.train.checkpoint import check_fit
from sightline.train.progress import Progress
from sightline.train.schedules import Plan

Tensors = dict[str, dict[str, Tensor]]  # file stem -> name -> tensor


def choose_trainable(model: nn.Module, rule: str) -> None:
    """head: takes the gradients of all parameters away but those of the last linear layer."""
    if rule == "all":
        return
    heads = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not heads:
        raise UsageError(f"train.trainable=head needs a linear layer, {type(model).__name__} has none; use all")
    model.requires_grad_(False)
    heads[-1].requires_grad_(True)


def join_batch_norms(model: nn.Module, bn_group: int, world: World) -> str:
    """Joins the batch-norms of ranks that `bn_group` puts together; returns what to tell the user."""
    if bn_group > 1 and world.size % bn_group:
        raise UsageError(
            f"train.bn_group={bn_group} does not divide the number of ranks, {world.size}; "
            f"use 0 (each its own), -1 (all) or a divisor"
        )
    if world.size == 1 or bn_group in (0, 1):
        return ""
    joined = norm.convert(model, bn_group)
    if not joined:
        return f"train.bn_group={bn_group}: the model has no batch-norm; left alone"
    of = world.size if bn_group == norm.ALL_RANKS else bn_group
    return f"train.bn_group: {joined} batch-norms have the statistics of {of} ranks in training"


class TrainState:
    """The state and its two halves in a checkpoint: tensors by name, numbers as JSON."""

    def __init__(
        self, recipe: Recipe, run: Run, spec: DataSpec, device: Device, plan: Plan, world: World | None = None
    ):
        torch.manual_seed(recipe.train.seed)  # initial weights are a function of the seed, on any device
        self.model = place(recipe.model.build(spec), device, run.channels_last)
        joined = join_batch_norms(self.model, recipe.train.bn_group, world or World())
        not_kept = keep_fp32(self.model, recipe.train.fp32_ops, device)
        missing = f"train.fp32_ops: the model has no module {', '.join(not_kept)}; left alone" if not_kept else ""
        self.notes = [note for note in (joined, missing) if note]  # what to tell the user when the run starts
        choose_trainable(self.model, recipe.train.trainable)
        self.optimizer = recipe.optimizer.build(self.model, device.torch_device)
        self.ema = Ema(self.model, recipe, plan) if recipe.train.ema else None
        self.loss_scale = LossScale(device.torch_device, enabled=recipe.train.precision == "fp16")
        self.progress = Progress()

    @property
    def evaluated_model(self) -> nn.Module:
        """The average when there is one: it is what is evaluated, called best, and exported."""
        return self.ema.model if self.ema else self.model

    def batch_norm_statistics(self) -> list[Tensor]:
        """Running means and variances of the weights and of their average."""
        models = [self.model, *([self.ema.model] if self.ema else [])]
        # What a checkpoint does not hold, such as a detector's anchors, is no statistic.
        kept = [(model, model.state_dict().keys()) for model in models]
        return [b for m, names in kept for n, b in m.named_buffers() if n in names and b.is_floating_point()]

    def share_batch_norm(self, rule: str, world: World) -> None:
        """Ranks see different pictures, so their statistics differ; `rule` says whose are evaluated and saved."""
        if rule == "averaged":
            world.average(self.batch_norm_statistics())
        elif rule == "rank0":
            world.copy_from_main(self.batch_norm_statistics())

    def tensors(self) -> Tensors:
        """References to all tensors, by checkpoint file and name."""
        found = {"model": dict(self.model.state_dict()), "optimizer": self._optimizer_tensors()}
        if self.ema:
            found["ema"] = dict(self.ema.model.state_dict())
        if self.loss_scale.enabled:
            found["loss_scale"] = {"scale": self.loss_scale.scale, "good_steps": self.loss_scale.good_steps}
        return found

    def weights_are_finite(self) -> bool:
        """Checked before a save, so that a broken state never replaces a good one."""
        weights = [t for t in self.model.state_dict().values() if t.is_floating_point()]
        return bool(torch.stack([t.isfinite().all() for t in weights]).all())

    def check_fit(self, tensors: Tensors) -> None:
        """BadCheckpoint where a checkpoint lacks a tensor, has one too many or one of another shape or type."""
        for stem, wanted in self.tensors().items():
            check_fit(stem, wanted, tensors.get(stem, {}))

    @torch.no_grad()
    def load(self, tensors: Tensors, progress: dict[str, Any]) -> None:
        """Copies a checkpoint into the tensors that are there."""
        self.check_fit(tensors)
        for stem, wanted in self.tensors().items():
            for name, tensor in wanted.items():
                tensor.copy_(tensors[stem][name])
        vars(self.progress).update(vars(Progress.from_json(progress)))  # the loop holds on to this object

    def progress_json(self) -> dict[str, Any]:
        """The numbers of the state."""
        return asdict(self.progress)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"{names[parameter]}:{key}": value
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
