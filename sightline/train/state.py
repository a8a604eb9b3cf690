"""Everything that changes while training: weights, optimizer, average, loss scale, and where the run stands."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from sightline.engine.checkpoint import Tensors, check_fit
from sightline.engine.model import BuiltModel, choose_trainable, head_of
from sightline.engine.progress import TrainProgress
from sightline.hardware.devices import Device
from sightline.hardware.precision import LossScale
from sightline.hardware.world import World
from sightline.parts import ModelConfig
from sightline.recipe.recipe import Recipe
from sightline.train.averaging import Ema
from sightline.train.schedules import RunLength
from sightline.train.stopwatch import Stopwatch


class TrainState:
    """The state and its two halves in a checkpoint: tensors by name, numbers as JSON."""

    def __init__(self, recipe: Recipe, built: BuiltModel, device: Device, length: RunLength):
        self.model, self.notes = built  # notes are shown when the run starts
        self.device = device
        choose_trainable(self.model, recipe.train.trainable)
        knows_head = recipe.train.head_epochs > 0 or recipe.optimizer.trunk_lr_scale != 1
        head = head_of(recipe.model, self.model) if knows_head else ()
        self.optimizer = recipe.optimizer.build(self.model, device.torch_device, head)
        # What learns outside the head; head_epochs freezes it for a while.
        named = self.model.named_parameters()
        self.trunk = [p for name, p in named if head and p.requires_grad and not name.startswith(head)]
        self.ema = Ema(self.model, recipe, length) if recipe.train.ema else None
        self.loss_scale = LossScale(device.torch_device, enabled=recipe.train.precision == "fp16")
        self.progress = TrainProgress()
        self.stopwatch = Stopwatch()
        self.choices: dict[str, str] = {}  # measured by this run, for its later starts; no part of the recipe

    def load_pretrained(self, config: ModelConfig) -> str:
        """Load the weights of --model.weights, where given, into a run that has no checkpoint yet; return a note."""
        note = config.start_from(self.model)
        if note and self.ema:
            self.ema.model.load_state_dict(self.model.state_dict())
        return note

    @property
    def evaluated_model(self) -> nn.Module:
        """Return the moving average where there is one: it is evaluated and called best."""
        return self.ema.model if self.ema else self.model

    def batch_norm_statistics(self) -> list[Tensor]:
        """Return running means and variances of the model and of its average."""
        models = [self.model, *([self.ema.model] if self.ema else [])]
        # Buffers that a checkpoint does not hold, such as a detector's anchors, are not statistics.
        kept = [(model, model.state_dict().keys()) for model in models]
        return [b for m, names in kept for n, b in m.named_buffers() if n in names and b.is_floating_point()]

    def share_batch_norm(self, rule: str, world: World) -> None:
        """Make statistics, which differ between ranks, equal; `rule` chooses those to evaluate and save."""
        if rule == "averaged":
            world.average(self.batch_norm_statistics())
        elif rule == "rank0":
            world.copy_from_main(self.batch_norm_statistics())

    def tensors(self) -> Tensors:
        """Return references to all tensors, by checkpoint file and name."""
        found = {"model": dict(self.model.state_dict()), "optimizer": self._optimizer_tensors()}
        if self.ema:
            found["ema"] = dict(self.ema.model.state_dict())
        if self.loss_scale.enabled:
            found["loss_scale"] = {"scale": self.loss_scale.scale, "good_steps": self.loss_scale.good_steps}
        return found

    def weights_are_finite(self) -> bool:
        """Check the weights before a save, so that a broken state never replaces a good one."""
        weights = [t for t in self.model.state_dict().values() if t.is_floating_point()]
        return bool(torch.stack([t.isfinite().all() for t in weights]).all())

    def check_fit(self, tensors: Tensors) -> None:
        """Raise BadCheckpoint where a tensor is missing, unknown, or of another shape or type."""
        for stem, wanted in self.tensors().items():
            check_fit(stem, wanted, tensors.get(stem, {}))

    @torch.no_grad()
    def load(self, tensors: Tensors, progress: dict[str, Any]) -> None:
        """Copy a checkpoint into the existing tensors."""
        self.check_fit(tensors)
        for stem, wanted in self.tensors().items():
            for name, tensor in wanted.items():
                tensor.copy_(tensors[stem][name])
        vars(self.progress).update(vars(TrainProgress.from_json(progress)))  # the loop keeps a reference to this object

    def progress_json(self) -> dict[str, Any]:
        """Return the numbers of the state."""
        return asdict(self.progress)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"{names[parameter]}:{key}": value
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
