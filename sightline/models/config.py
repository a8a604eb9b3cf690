"""The networks as a recipe chooses them: their fields and rules. Building one and loading weights import its file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from sightline.errors import UsageError
from sightline.parts import DataSpec, LoadedWeights, ModelConfig
from sightline.recipe.part import Above, AtLeast, AtMost

if TYPE_CHECKING:
    from torch import nn

    from sightline.models.encoder_unet import EncoderUnet
    from sightline.models.resnet import ResNet
    from sightline.models.ssd import Ssd
    from sightline.models.unet import Unet

Depth = Literal[18, 34, 50, 101, 152, 200]
DEPTHS: tuple[Depth, ...] = get_args(Depth)
TIMM = "timm:"  # begins the names of timm's networks
ENCODERS = (*(f"resnet{depth}" for depth in DEPTHS), "resnext101_32x4d")
SSD_SIZE = 300  # side in pixels of the image that steps and scales refer to
SSD_LEVELS = 6


@dataclass(frozen=True)
class ResNetConfig(ModelConfig):
    """A residual network for classification."""

    depth: Depth = 50
    """Number of layers with weights; 18 and 34 have basic blocks, the others bottlenecks."""
    version: Literal["v1", "v1.5", "v2", "v2_keras", "v2_ends"] = "v1.5"
    """v1: stride in the first 1x1 of a bottleneck; v1.5: in its 3x3; v2: pre-activation, stride in the 3x3;
    v2_keras: pre-activation as in keras.applications, stride in the last block of a stage; v2_ends: blocks of v1.5, but
    no norm after the stem and one before the head, as TensorFlow's script builds ResNeXt of version 2."""
    width: Annotated[int, AtLeast(1, "64 is the published width")] = 64
    """Channels of the first stage; they double in every later stage."""
    groups: Annotated[int, AtLeast(1, "ResNeXt 32x4d has 32 groups of 4 channels")] = 1
    """Groups of the 3x3 in a bottleneck; ResNeXt-101 32x4d has 32."""
    group_width: Annotated[int, AtLeast(1, "ResNeXt 32x4d has 32 groups of 4 channels")] = 64
    """Channels per group in the first stage, for width 64; ResNeXt-101 32x4d has 4."""
    stem: Literal["7x7", "3x3"] = "7x7"
    """7x7: stride 2 and max-pool, as published; 3x3: stride 1, no pool, for images of about 32 pixels."""
    padding: Literal["torch", "same", "same_but_stem"] = "torch"
    """torch: equal on both sides; same: TensorFlow's SAME, with the odd pixel of a stride of 2 at the end;
    same_but_stem: SAME except in the stem convolution, as in the Keras script's ResNet-50."""
    project_every_stage: bool = False
    """Depth 18 and 34: project in the first stage too, although shapes do not need it, as in TensorFlow's script."""
    bias: bool = False
    """v1 and v1.5: a bias in every convolution, although a batch-norm follows, as in keras.applications."""
    bn_momentum: Annotated[float, Above(0), AtMost(1, "this is torch's momentum: Keras's 0.9 is 0.1 here")] = 0.1
    """Weight of the newest batch in the running statistics. Keras uses the complement: its 0.99 is 0.01 here."""
    bn_eps: Annotated[float, Above(0, "e.g. 1e-5")] = 1e-5
    """Added to the variance in every batch-norm."""
    init: Literal["torch", "he_truncated", "variance_scaling", "glorot"] = "torch"
    """Initial convolutions. torch: normal, variance 2/fan_out; he_truncated, variance_scaling: normal truncated at
    two deviations, variance 2/fan_in and 1/fan_in; glorot: uniform, variance 2/(fan_in+fan_out)."""
    head_init: Literal["torch", "normal", "glorot"] = "torch"
    """Initial head. torch: uniform within 1/sqrt(fan_in); normal: deviation 0.01, bias 0; glorot: bias 0."""
    zero_init_residual: bool = False
    """v1 and v1.5: start the last batch-norm of every block at 0, so that the block starts as the identity."""
    weights: str = ""
    """Initial weights: a run, a file of torch or Keras, the prefix of a TensorFlow checkpoint, torchvision:NAME or
    timm:NAME; see docs/howto/weights.md. A head for another number of classes starts at random."""

    def check(self) -> None:
        super().check()
        if not self.has_bottlenecks and (self.groups, self.group_width) != (1, 64):
            raise UsageError(
                f"model.groups={self.groups} and model.group_width={self.group_width} are for bottlenecks; "
                f"depth={self.depth} has basic blocks, use a depth of 50 or more"
            )
        if self.has_bottlenecks and self.width * self.group_width % 64:
            raise UsageError(
                f"model.width={self.width} with group_width={self.group_width} makes groups of "
                f"{self.width * self.group_width / 64:g} channels (width * group_width / 64); use a multiple of "
                f"{64 // math.gcd(64, self.group_width)} for the width"
            )
        if self.has_bottlenecks and self.project_every_stage:
            raise UsageError(
                f"model.project_every_stage is for depth 18 and 34; "
                f"every stage of depth={self.depth} starts with a projection anyway"
            )
        if self.version == "v2_keras" and not self.has_bottlenecks:
            raise UsageError(f"model.version=v2_keras has bottlenecks only, not depth={self.depth}; use 50 or more")
        if self.version == "v2_keras" and self.padding != "torch":
            raise UsageError(
                f"model.padding={self.padding} cannot be combined with version=v2_keras, which pads both sides alike; "
                f"use padding=torch, or version=v2"
            )
        if self.is_pre_activated and self.bias:
            raise UsageError(f"model.bias is for v1 and v1.5; {self.version} always has its published biases")
        if self.is_pre_activated and self.zero_init_residual:
            # The ReLU after that batch-norm passes no gradient at 0: the block could never learn.
            raise UsageError(
                f"model.zero_init_residual is for v1 and v1.5; in {self.version} a ReLU follows every batch-norm, "
                f"so a block that starts at 0 would stay at 0"
            )

    @property
    def has_bottlenecks(self) -> bool:
        return self.depth >= 50

    @property
    def is_pre_activated(self) -> bool:
        return self.version in ("v2", "v2_keras")

    @property
    def has_v2_ends(self) -> bool:
        """True if the norm stands before the head instead of after the stem."""
        return self.is_pre_activated or self.version == "v2_ends"

    def build(self, spec: DataSpec) -> ResNet:
        """Build the network for `spec`'s classes and channels, with random weights."""
        from sightline.models import resnet

        return resnet.ResNet(self, classes=len(spec.classes), channels=spec.channels)

    def load_weights(self, model: nn.Module) -> LoadedWeights:
        """Load `weights`, and say where they were made with another padding."""
        from sightline.models import resnet

        return resnet.load_weights(self, model) if self.weights else LoadedWeights()


KERAS_SCRIPT = ResNetConfig(padding="same_but_stem", init="he_truncated", head_init="normal")
ESTIMATOR_SCRIPT = ResNetConfig(padding="same", init="variance_scaling", head_init="glorot")
KERAS_APPLICATIONS = ResNetConfig(bn_momentum=0.01, bn_eps=1.001e-5, init="glorot", head_init="glorot")

OURS: dict[str, ResNetConfig] = {
    **{f"resnet{depth}": ResNetConfig(depth=depth) for depth in DEPTHS},
    "resnext101_32x4d": ResNetConfig(depth=101, groups=32, group_width=4),
    # TensorFlow's Keras script; the original has depth 50 only.
    **{f"resnet{depth}_tf": replace(KERAS_SCRIPT, depth=depth) for depth in DEPTHS},
    # TensorFlow's estimator script.
    **{
        f"resnet{depth}_tf1": replace(ESTIMATOR_SCRIPT, depth=depth, project_every_stage=depth < 50) for depth in DEPTHS
    },
    **{
        f"resnet{depth}v2_tf1": replace(ESTIMATOR_SCRIPT, depth=depth, version="v2", project_every_stage=depth < 50)
        for depth in DEPTHS
    },
    **{
        f"resnext{depth}_32x4d_tf": replace(ESTIMATOR_SCRIPT, depth=depth, groups=32, group_width=4)
        for depth in DEPTHS
        if depth >= 50
    },
    **{
        f"resnext{depth}v2_32x4d_tf": replace(
            ESTIMATOR_SCRIPT, depth=depth, groups=32, group_width=4, version="v2_ends"
        )
        for depth in DEPTHS
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
    timm:NAME; see docs/howto/weights.md. A head for another number of classes starts at random."""

    @property
    def is_timm(self) -> bool:
        """Return whether the network is one of timm's."""
        return self.arch.startswith(TIMM)

    def check(self) -> None:
        super().check()
        if self.arch in OURS:
            self.resnet()  # raises if the fields cannot be combined
        elif self.zero_init_residual:
            self.refuse_unknown()
            raise UsageError(f"model.zero_init_residual is for our ResNets such as resnet50, not for {self.arch}")

    def resnet(self) -> ResNetConfig:
        """Return the config of a network of ours."""
        return replace(OURS[self.arch], zero_init_residual=self.zero_init_residual, weights=self.weights)

    def refuse_unknown(self) -> None:
        """Raise UsageError for a name that is neither ours nor of torchvision or timm, which are then imported."""
        if self.arch not in OURS:
            from sightline.models import arch

            arch.refuse_unknown(self.arch)

    def build(self, spec: DataSpec) -> nn.Module:
        """Build the network for `spec`'s classes, with random weights."""
        if self.arch in OURS:
            return self.resnet().build(spec)
        from sightline.models import arch

        model = arch.build(self.arch, spec)
        if self.weights:
            arch.draw_head(model, self.head_prefixes(model))
        return model

    def load_weights(self, model: nn.Module) -> LoadedWeights:
        """Load `weights`."""
        if not self.weights:
            return LoadedWeights()
        if self.arch in OURS:
            return self.resnet().load_weights(model)
        from sightline.models import arch

        return arch.load_weights(self, model)

    def head_prefixes(self, model: nn.Module) -> tuple[str, ...]:
        """Name the layer that gives the classes; a convolution in some networks."""
        from sightline.models import arch

        return arch.head_prefixes(self.arch, model)

    def data_fields(self) -> Mapping[str, Any]:
        """Return what timm knows about its images; torchvision's weights are for the defaults of `data`."""
        if not self.is_timm:
            return {}
        self.refuse_unknown()
        from sightline.models import timm_arch

        return timm_arch.data_fields(self.arch)

    def takes_any_size(self) -> bool:
        """Return False for transformers whose positions were learnt for one size."""
        if not self.is_timm:
            return not self.arch.startswith("vit_")  # of torchvision
        self.refuse_unknown()
        from sightline.models import timm_arch

        return timm_arch.takes_any_size(self.arch)


@dataclass(frozen=True)
class SsdConfig(ModelConfig):
    """A single-shot detector with a ResNet trunk, for square images of any size.

    Smaller images have fewer levels: an unpadded level without a single cell is dropped with its steps, scales and
    ratios. 300 pixels give all six, with 38, 19, 10, 5, 3 and 1 cells per side; 128 pixels give four.
    """

    depth: Literal[18, 34] = 34
    """Depth of the ResNet whose first stages are the trunk; 34 is the published one."""
    width: Annotated[int, AtLeast(1, "64 is the published width")] = 64
    """Channels of the trunk's first stage; all other layers scale with it."""
    padding: Literal["torch", "same"] = "torch"
    """Padding of the pool and of strided convolutions. torch: equal on both sides, for torchvision's weights; same:
    TensorFlow's SAME, with the odd pixel at the end, for its weights. The stem always has 3 on both sides."""
    steps: Annotated[tuple[float, ...], Above(0, f"pixels of a {SSD_SIZE} image")] = (
        8.0,
        16.0,
        32.0,
        64.0,
        100.0,
        300.0,
    )
    """Pixels between cells, per level. The first four are the network's strides for any image size. The others are
    for 300 pixels and scale so that the cells cover an image of any size."""
    scales: Annotated[tuple[float, ...], Above(0, "pixels of a 300 image")] = (
        21.0,
        45.0,
        99.0,
        153.0,
        207.0,
        261.0,
        315.0,
    )
    """Side of each level's square boxes in a 300-pixel image, and of one more level; they scale with the image."""
    ratios: tuple[str, ...] = ("2", "2,3", "2,3", "2,3", "2", "2")
    """Aspect ratios of the other boxes, per level, separated by commas; each gives a wide and a tall box."""
    init: Literal["tf", "torch"] = "tf"
    """Initialisation. tf: trunk normal, truncated at two deviations, variance 1/fan_in, every block starts as the
    identity; the rest Glorot, bias 0. torch: trunk as in torchvision, the rest Glorot with torch's biases."""
    bn_momentum: Annotated[float, Above(0), AtMost(1, "this is torch's momentum: TensorFlow's 0.9 is 0.1 here")] = 0.1
    """Weight of the newest batch in the running statistics. TensorFlow uses the complement: its 0.9 is 0.1 here."""
    freeze: Literal["none", "first_block"] = "none"
    """first_block: freeze the weights of the stem, the first 3x3 after it and their batch-norms; the running
    statistics of these batch-norms are still updated."""
    weights: str = ""
    """Initial weights of the trunk, from a ResNet with torchvision's names, or of the whole network: a run, a file of
    torch, the prefix of a TensorFlow checkpoint such as model.ckpt-28152, torchvision:NAME or timm:NAME; see
    docs/howto/weights.md. Heads for another number of classes start at random."""

    def check(self) -> None:
        super().check()
        for name, count in (("steps", SSD_LEVELS), ("scales", SSD_LEVELS + 1), ("ratios", SSD_LEVELS)):
            if len(getattr(self, name)) != count:
                raise UsageError(
                    f"model.{name} has {len(getattr(self, name))} entries; expected {count}, for {SSD_LEVELS} levels"
                    + (" and one more" if count > SSD_LEVELS else "")
                )
        self.parsed_ratios()

    def parsed_ratios(self) -> list[list[float]]:
        """Return `ratios` as numbers."""
        try:
            found = [[float(text) for text in level.split(",") if text.strip()] for level in self.ratios]
        except ValueError:
            found = [[math.nan]]
        if not all(0 < ratio < math.inf for level in found for ratio in level):
            raise UsageError(
                f"model.ratios={' '.join(map(repr, self.ratios))} must be numbers above 0 with commas between, "
                f"one string per level, e.g. 2 2,3 2,3 2,3 2 2"
            )
        return found

    def trunk(self) -> ResNetConfig:
        """Return the config of the ResNet whose first stages are the trunk."""
        return ResNetConfig(
            depth=self.depth,
            width=self.width,
            padding="torch" if self.padding == "torch" else "same_but_stem",
            bn_momentum=self.bn_momentum,
        )

    def build(self, spec: DataSpec) -> Ssd:
        """Build the network for `spec`'s classes, channels and size, with random weights."""
        from sightline.models import ssd

        return ssd.build(self, spec)

    def load_weights(self, model: nn.Module) -> LoadedWeights:
        """Load `weights`, into the whole network or into its trunk, and say where they were made with other padding."""
        from sightline.models import ssd

        return ssd.load_weights(self, model) if self.weights else LoadedWeights()

    def head_prefixes(self, model: nn.Module) -> tuple[str, ...]:
        """Name all but the trunk: weights of a classifier leave the smaller levels random too."""
        return ("extras.", "heads.")


@dataclass(frozen=True)
class UnetConfig(ModelConfig):
    """A U-Net for the patch, channels and classes of the data; patch and spacing determine its levels."""

    norm: Literal["instance", "batch", "group"] = "instance"
    """Norm after every convolution; group uses gcd(32, channels) groups."""
    negative_slope: Annotated[float, AtLeast(0), AtMost(1, "0.01 is the published one")] = 0.01
    """Negative slope of the leaky ReLU, also used for the gain of the initialisation."""
    residual: bool = False
    """Add the input of each encoder block to its output."""
    attention: bool = False
    """Attention gates on the skip connections."""
    drop_block: bool = False
    """DropBlock in training, in the three deepest levels: blocks of side 5, share rising to 0.1 over 10,000 passes."""
    deep_supervision: bool = False
    """Coarser levels predict too in training; the task weighs their losses."""
    aux_heads: Annotated[int, AtLeast(1)] = 2
    """With deep_supervision: number of coarser levels that predict, starting at half resolution."""
    width: Annotated[int, AtLeast(1)] = 32
    """Filters of the first level; they double in every level below."""
    max_filters: Annotated[int, AtLeast(0, "0 is 512 in 2D and 320 in 3D")] = 0
    """Upper limit for the filters of a level; 0: 512 in 2D, 320 in 3D."""
    weights: str = ""
    """Initial weights: a run, or a file of torch with our names or those of the original's Lightning .ckpt; see
    docs/howto/weights.md. A head for another number of classes starts at random."""

    def check(self) -> None:
        super().check()
        if self.max_filters and self.max_filters < self.width:
            raise UsageError(
                f"model.max_filters={self.max_filters} must not be below model.width={self.width}; "
                f"0 means 512 in 2D and 320 in 3D"
            )
        if self.attention and self.width < 2:
            raise UsageError(
                f"model.attention halves the filters: model.width={self.width} is too small; use 2 or more"
            )

    def build(self, spec: DataSpec) -> Unet:
        """Build the network for `spec`'s patch, spacing, channels and classes, with random weights."""
        from sightline.models import unet

        return unet.build(self, spec)

    def load_weights(self, model: nn.Module) -> LoadedWeights:
        """Load `weights`, of our names or of the original's."""
        from sightline.models import unet

        return unet.load_weights(self, model) if self.weights else LoadedWeights()

    def start_from(self, model: nn.Module) -> str:
        """Load `weights`; return a line that describes the levels chosen for the patch, and what was loaded."""
        from sightline.models import unet

        return "; ".join(filter(None, (unet.describe(model), self.load_weights(model).note)))

    def head_prefixes(self, model: nn.Module) -> tuple[str, ...]:
        """Name the convolutions to the classes, also those of coarser levels."""
        return ("heads.",)


@dataclass(frozen=True)
class EncoderUnetConfig(ModelConfig):
    """A U-Net whose way down is a classifier's, so that pretrained weights fit it; for images of any size."""

    arch: str = "resnet34"
    """The classifier whose layers are the way down: resnet18 to resnet200 or resnext101_32x4d, with torchvision's names
    and weights, or timm:NAME where timm is installed."""
    width: Annotated[int, AtLeast(4, "64 is the published width")] = 64
    """Channels of a ResNet's first stage. The way up ends with a quarter of it; every level below has twice as many."""
    weights: str = ""
    """Initial weights of the way down, from such a classifier, or of the whole network: a run, a file of torch,
    torchvision:NAME or timm:NAME; see docs/howto/weights.md. For images with other than 3 channels its first
    convolution is adapted. A head for another number of classes starts at random."""

    @property
    def is_timm(self) -> bool:
        """Return whether the way down is one of timm's networks."""
        return self.arch.startswith(TIMM)

    def check(self) -> None:
        super().check()
        if not self.is_timm and self.arch not in ENCODERS:
            raise UsageError(
                f"model.arch={self.arch} cannot be the way down of a U-Net; use one of {', '.join(ENCODERS)}, or "
                "timm:NAME"
            )

    def encoder(self) -> ResNetConfig:
        """Return the config of the ResNet that is the way down."""
        return replace(OURS[self.arch], width=self.width)

    def refuse_unknown(self) -> None:
        """Raise UsageError for a name that timm does not know; it is then imported."""
        if self.is_timm:
            from sightline.models import timm_arch

            timm_arch.refuse_unknown(self.arch)

    def build(self, spec: DataSpec) -> EncoderUnet:
        """Build the network for `spec`'s channels and classes, with random weights."""
        from sightline.models import encoder_unet

        return encoder_unet.EncoderUnet(self, spec)

    def load_weights(self, model: nn.Module) -> LoadedWeights:
        """Load `weights`, into the whole network or into its way down."""
        from sightline.models import encoder_unet

        return encoder_unet.load_weights(self, model) if self.weights else LoadedWeights()

    def head_prefixes(self, model: nn.Module) -> tuple[str, ...]:
        """Name the way up and the head: weights of a classifier leave both random."""
        return ("decoder.", "head.")
