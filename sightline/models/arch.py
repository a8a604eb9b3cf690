"""Classifiers by name: our ResNets, or any classification model of torchvision."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import torchvision
from torch import nn

from sightline.errors import UsageError
from sightline.models.resnet import STAGES, ResNetConfig
from sightline.models.weights import load_weights
from sightline.parts import DataSpec, ModelConfig

OURS = {f"resnet{depth}": depth for depth in STAGES}
# These return auxiliary outputs in training unless told not to.
WITHOUT_AUXILIARY = {"googlenet": {"aux_logits": False}, "inception_v3": {"aux_logits": False}}


@dataclass(frozen=True)
class ArchConfig(ModelConfig):
    """A classifier chosen by its name."""

    arch: str = "resnet50"
    """resnet18 ... resnet152 (ours, torchvision's names and weights), or any classification model of torchvision."""
    zero_init_residual: bool = False
    """resnets of ours: start the last batch-norm of every block at 0."""
    weights: str = ""
    """A .safetensors or .pth file to start from; a head for another number of classes is left fresh."""

    def __post_init__(self) -> None:
        if self.arch not in names():
            near = difflib.get_close_matches(self.arch, names(), n=3)
            raise UsageError(
                f"model.arch='{self.arch}' is unknown" + (f"; did you mean {', '.join(near)}?" if near else "")
            )
        if self.zero_init_residual and self.arch not in OURS:
            raise UsageError(f"model.zero_init_residual is for {', '.join(OURS)}, not for {self.arch}")

    def build(self, spec: DataSpec) -> nn.Module:
        """The network for `spec`'s classes, with random weights."""
        if self.arch in OURS:
            depth = OURS[self.arch]
            return ResNetConfig(depth=depth, zero_init_residual=self.zero_init_residual).build(spec)  # type: ignore[arg-type]
        return torchvision.models.get_model(
            self.arch, weights=None, num_classes=len(spec.classes), **WITHOUT_AUXILIARY.get(self.arch, {})
        )

    def start_from(self, model: nn.Module) -> str:
        """Loads `weights`; says what was loaded."""
        if not self.weights:
            return ""
        layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        return load_weights(model, Path(self.weights), head=f"{layers[-1]}.")


def names() -> list[str]:
    """All names that `arch` may have."""
    return sorted({*OURS, *torchvision.models.list_models(module=torchvision.models)})
