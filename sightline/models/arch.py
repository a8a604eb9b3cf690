"""Classifiers of torchvision and timm by name, and the names of all that can be chosen; ours are in config.py."""

from __future__ import annotations

import difflib

from torch import nn

from sightline.errors import UsageError
from sightline.models import timm_arch
from sightline.models.config import OURS, TIMM
from sightline.models.config import ArchConfig as ArchConfig
from sightline.models.weight_files import read_weights
from sightline.models.weights import copy_weights
from sightline.parts import DataSpec, LoadedWeights

# These models return auxiliary outputs in training by default.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # names of these in files
WITHOUT_AUXILIARY = {"googlenet": {"aux_logits": False}, "inception_v3": {"aux_logits": False}}


def names() -> list[str]:
    """Return the names of our networks and of torchvision's."""
    import torchvision  # here: it imports torch's compiler, seconds that our own networks need not wait for

    return sorted({*OURS, *torchvision.models.list_models(module=torchvision.models)})


def is_known(arch: str) -> bool:
    """Return whether somebody has the network; UsageError if timm is asked and missing."""
    return timm_arch.is_known(arch) if arch.startswith(TIMM) else arch in names()


def refuse_unknown(arch: str) -> None:
    """Raise UsageError for a network that nobody has."""
    if arch.startswith(TIMM):
        timm_arch.refuse_unknown(arch)
    elif arch not in names():
        near = difflib.get_close_matches(arch, names(), n=3)
        raise UsageError(f"model.arch='{arch}' is unknown" + (f"; did you mean {', '.join(near)}?" if near else ""))


def build(arch: str, spec: DataSpec) -> nn.Module:
    """Build a network of torchvision or timm for `spec`'s classes, with random weights."""
    refuse_unknown(arch)
    if arch.startswith(TIMM):
        return timm_arch.build(arch, spec)
    import torchvision

    return torchvision.models.get_model(
        arch, weights=None, num_classes=len(spec.classes), **WITHOUT_AUXILIARY.get(arch, {})
    )


def load_weights(config: ArchConfig, model: nn.Module) -> LoadedWeights:
    """Load the weights that the config names into a network of torchvision or timm."""
    weights = read_weights(config.weights, model.state_dict())
    unused = AUXILIARY if config.arch in WITHOUT_AUXILIARY else ()
    return copy_weights(model, weights, head=config.head_prefixes(model), unused=unused)


def draw_head(model: nn.Module, head: tuple[str, ...]) -> None:
    """Draw the head as torch draws a linear layer, for weights that may not have it. EfficientNets scale theirs by the
    number of classes: with ten, and features that are no longer small, the loss would start at 5 instead of 2.3."""
    for name, layer in model.named_modules():
        if f"{name}.".startswith(head) and isinstance(layer, nn.Linear | nn.Conv2d):
            bound = layer.weight[0].numel() ** -0.5
            for each in layer.parameters():
                nn.init.uniform_(each, -bound, bound)


def head_prefixes(arch: str, model: nn.Module) -> tuple[str, ...]:
    """Name the layer that gives the classes; a convolution in some networks."""
    if arch.startswith(TIMM) and (named := timm_arch.head_prefixes(arch)):
        return named
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    return (f"{layers[-1]}.",)
