"""Classifiers chosen by name: our ResNets, those of TensorFlow and Keras, or any of torchvision and timm."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from sightline.errors import UsageError
from sightline.models import timm_arch
from sightline.models.resnet import STAGES, ResNetConfig
from sightline.models.weight_files import read_weights
from sightline.models.weights import copy_weights
from sightline.parts import DataSpec, LoadedWeights, ModelConfig

KERAS_SCRIPT = ResNetConfig(padding="same_but_stem", init="he_truncated", head_init="normal")
ESTIMATOR_SCRIPT = ResNetConfig(padding="same", init="variance_scaling", head_init="glorot")
KERAS_APPLICATIONS = ResNetConfig(bn_momentum=0.01, bn_eps=1.001e-5, init="glorot", head_init="glorot")

OURS: dict[str, ResNetConfig] = {
    **{f"resnet{depth}": ResNetConfig(depth=depth) for depth in STAGES},
    "resnext101_32x4d": ResNetConfig(depth=101, groups=32, group_width=4),
    # TensorFlow's Keras script; the original has depth 50 only.
    **{f"resnet{depth}_tf": replace(KERAS_SCRIPT, depth=depth) for depth in STAGES},
    # TensorFlow's estimator script.
    **{
        f"resnet{depth}_tf1": replace(ESTIMATOR_SCRIPT, depth=depth, project_every_stage=depth < 50) for depth in STAGES
    },
    **{
        f"resnet{depth}v2_tf1": replace(ESTIMATOR_SCRIPT, depth=depth, version="v2", project_every_stage=depth < 50)
        for depth in STAGES
    },
    **{
        f"resnext{depth}_32x4d_tf": replace(ESTIMATOR_SCRIPT, depth=depth, groups=32, group_width=4)
        for depth in STAGES
        if depth >= 50
    },
    **{
        f"resnext{depth}v2_32x4d_tf": replace(
            ESTIMATOR_SCRIPT, depth=depth, groups=32, group_width=4, version="v2_ends"
        )
        for depth in STAGES
        if depth >= 50
    },
    # keras.applications.
    **{
        f"keras_resnet{depth}": replace(KERAS_APPLICATIONS, depth=depth, version="v1", bias=True)
        for depth in (50, 101, 152)
    },
    **{
        f"keras_resnet{depth}v2": replace(KERAS_APPLICATIONS, depth=depth, version="v2_keras")
        for depth in (50, 101, 152)
    },
}
# These models return auxiliary outputs in training by default.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # names of these in files
WITHOUT_AUXILIARY = {"googlenet": {"aux_logits": False}, "inception_v3": {"aux_logits": False}}


@dataclass(frozen=True)
class ArchConfig(ModelConfig):
    """A classifier chosen by its name."""

    arch: str = "resnet50"
    """Name of the network. Ours, with torchvision's names and weights: resnet18 ... resnet200, resnext101_32x4d.
    TensorFlow's scripts: resnet50_tf, resnext101_32x4d_tf. keras.applications: keras_resnet50 ... keras_resnet152v2.
    Or any torchvision classifier, or timm:NAME where timm is installed, with its mean, std and size."""
    zero_init_residual: bool = False
    """Our ResNets except v2: start the last batch-norm of every block at 0."""
    weights: str = ""
    """Initial weights: a run, a file of torch or Keras, the prefix of a TensorFlow checkpoint, torchvision:NAME or
    timm:NAME; see docs/weights.md. A head for another number of classes starts at random."""

    @property
    def _is_timm(self) -> bool:
        return self.arch.startswith(timm_arch.PREFIX)

    def __post_init__(self) -> None:
        if self._is_timm:
            timm_arch.refuse_unknown(self.arch)
        elif self.arch not in OURS and self.arch not in names():
            near = difflib.get_close_matches(self.arch, names(), n=3)
            raise UsageError(
                f"model.arch='{self.arch}' is unknown" + (f"; did you mean {', '.join(near)}?" if near else "")
            )
        if self.arch in OURS:
            self._resnet()  # raises if the fields cannot be combined
        elif self.zero_init_residual:
            raise UsageError(f"model.zero_init_residual is for our ResNets such as resnet50, not for {self.arch}")

    def _resnet(self) -> ResNetConfig:
        return replace(OURS[self.arch], zero_init_residual=self.zero_init_residual)

    def build(self, spec: DataSpec) -> nn.Module:
        """Build the network for `spec`'s classes, with random weights."""
        if self.arch in OURS:
            return self._resnet().build(spec)
        if self._is_timm:
            return timm_arch.build(self.arch, spec)
        import torchvision

        return torchvision.models.get_model(
            self.arch, weights=None, num_classes=len(spec.classes), **WITHOUT_AUXILIARY.get(self.arch, {})
        )

    def load_weights(self, model: nn.Module) -> LoadedWeights:
        """Load `weights`."""
        if not self.weights:
            return LoadedWeights()
        if self.arch in OURS:
            return replace(self._resnet(), weights=self.weights).load_weights(model)
        weights = read_weights(self.weights, model.state_dict())
        unused = AUXILIARY if self.arch in WITHOUT_AUXILIARY else ()
        return copy_weights(model, weights, head=self.head_prefixes(model), unused=unused)

    def head_prefixes(self, model: nn.Module) -> tuple[str, ...]:
        """Name the layer that gives the classes; a convolution in some networks."""
        if self._is_timm and (named := timm_arch.head_prefixes(self.arch)):
            return named
        layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        return (f"{layers[-1]}.",)

    def data_fields(self) -> Mapping[str, Any]:
        """Return what timm knows about its images; torchvision's weights are for the defaults of `data`."""
        return timm_arch.data_fields(self.arch) if self._is_timm else {}


def names() -> list[str]:
    """Return all valid values of `arch`."""
    import torchvision  # here: it imports torch's compiler, seconds that our own networks need not wait for

    return sorted({*OURS, *torchvision.models.list_models(module=torchvision.models)})
