"""U-Net for slices and volumes, as nnU-Net builds it: depth, kernels and strides follow from patch and spacing.

Strided convolutions go down, transposed convolutions go up; instance norm and leaky ReLU are one operation of
kernels/. tasks/segmentation.py reads the outputs; tasks/sliding_window.py reads `patch`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.errors import UsageError
from sightline.kernels import narrow, paired, transposed
from sightline.kernels.instance_norm import instance_norm_leaky_relu
from sightline.models.config import UnetConfig as UnetConfig
from sightline.models.weight_files import read_weights
from sightline.models.weights import copy_weights
from sightline.parts import DataSpec, LoadedWeights

# Rule for the shape of the network, with nnU-Net's numbers.
MOST_STRIDES = 5
SMALLEST_STRIDED = 8  # an axis with fewer voxels is not halved further
COARSE_RATIO = 2.0  # an axis more than this many times coarser than the finest is not strided until the others catch up
MOST_FILTERS = {2: 512, 3: 320}
NORM_GROUPS = 32

DROPPED_BLOCK = 5
DROPPED_SHARE = 0.1
DROP_RAMP_STEPS = 10_000
DROPPING_LEVELS = 3  # the bottleneck and the two levels before it

CONVS: dict[int, type[nn.Conv2d | nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, type[nn.ConvTranspose2d | nn.ConvTranspose3d]] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORMS: dict[int, type[nn.BatchNorm2d | nn.BatchNorm3d]] = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
# Parts of a decoder's level, and those of a residual block that are not blocks of their own there.
ORIGINAL_PARTS = {
    "transposed": "transp_conv",
    "block": "conv_block",
    "above": "conv_o",
    "across": "conv_s",
    "share": "psi",
}
ORIGINAL_RESIDUAL = {
    "conv2.conv": "conv2",
    "conv2.norm": "norm",
    "projection.conv": "downsample",
    "projection.norm": "norm_res",
}
Axes = tuple[int, ...]  # one number per axis of the patch


def original_name(ours: str, levels: int, residual: bool) -> str:
    """Return the name of a tensor in the original: NVIDIA's nnU-Net, whose Lightning module holds it as `model`."""
    part, number, rest = ours.split(".", 2)
    at = int(number)
    if part == "encoder":
        block = "input_block" if at == 0 else "bottleneck" if at == levels - 1 else f"downsamples.{at - 1}"
        for mine, original in ORIGINAL_RESIDUAL.items() if residual else ():
            rest = rest.replace(f"{mine}.", f"{original}.") if rest.startswith(f"{mine}.") else rest
        return f"{block}.{rest}"
    if part == "heads":
        return f"output_block.conv.{rest}" if at == 0 else f"deep_supervision_heads.{at - 1}.conv.{rest}"
    inner, _, rest = rest.partition(".")
    if inner == "gate":
        inner, _, rest = rest.partition(".")
    return f"upsamples.{at}.{ORIGINAL_PARTS[inner]}.{rest}"


def geometry(patch: Sequence[int], spacing: Sequence[float]) -> tuple[list[Axes], list[Axes]]:
    """Return kernels and strides of every level, finest first, for a patch in voxels and its spacing in mm."""
    size, distance = list(patch), list(spacing)
    kernels: list[Axes] = []
    strides: list[Axes] = [(1,) * len(size)]
    while len(kernels) < MOST_STRIDES:
        is_fine = [mm / min(distance) <= COARSE_RATIO for mm in distance]
        stride = tuple(2 if fine and side >= SMALLEST_STRIDED else 1 for fine, side in zip(is_fine, size, strict=True))
        if max(stride) == 1:
            break
        kernels.append(tuple(3 if fine else 1 for fine in is_fine))
        strides.append(stride)
        size = [side // step for side, step in zip(size, stride, strict=True)]
        distance = [mm * step for mm, step in zip(distance, stride, strict=True)]
    return [*kernels, (3,) * len(size)], strides


def filters(levels: int, width: int, most: int) -> list[int]:
    """Return the filters of every level, finest first."""
    return [min(width * 2**level, most) for level in range(levels)]


class InstanceNorm(nn.modules.instancenorm._InstanceNorm):
    """Instance norm with leaky ReLU in one operation; a slope of 1 means no ReLU."""

    def __init__(self, channels: int):
        super().__init__(channels, affine=True)

    def forward(self, x: Tensor, slope: float = 1.0) -> Tensor:
        return instance_norm_leaky_relu(x, self.weight, self.bias, self.eps, slope)


class DropBlock(nn.Module):
    """Dropout of blocks of voxels in all channels of a sample, in training only; the other voxels are scaled up."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # saved: a resumed run continues the ramp

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        dim = x.dim() - 2
        share = (self.steps / DROP_RAMP_STEPS).clamp(max=1.0) * DROPPED_SHARE
        self.steps += 1
        noise = torch.rand(len(x), 1, *x.shape[2:], device=x.device)
        centres = (noise < share / DROPPED_BLOCK**dim).float()
        pool = functional.max_pool2d if dim == 2 else functional.max_pool3d
        kept = 1 - pool(centres, DROPPED_BLOCK, 1, DROPPED_BLOCK // 2)
        scale = kept.numel() / kept.sum().clamp(min=1.0)  # 0 instead of 0 / 0 if everything is dropped
        return x * (kept * scale).to(x.dtype)


class ConvNorm(nn.Module):
    """Convolution without bias, optional DropBlock, norm and leaky ReLU; a slope of 1 means no ReLU."""

    def __init__(
        self,
        config: UnetConfig,
        channels: tuple[int, int],
        kernel: Axes,
        stride: Axes,
        slope: float,
        drops: bool = False,
    ):
        super().__init__()
        padding = tuple((k - s + 1) // 2 for k, s in zip(kernel, stride, strict=True))
        self.conv = CONVS[len(kernel)](*channels, kernel, stride, padding, bias=False)  # type: ignore[arg-type]
        self.drop = DropBlock() if drops else None
        self.norm = make_norm(config.norm, channels[1], len(kernel))
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        x = paired.convolve(self.conv, x)
        if self.drop is not None:
            x = self.drop(x)
        if isinstance(self.norm, InstanceNorm):
            return self.norm(x, self.slope)
        x = self.norm(x)
        return x if self.slope == 1 else functional.leaky_relu(x, self.slope, inplace=True)


class Block(nn.Module):
    """Two convolutions, the first with the stride; if residual, the input is added before the last ReLU."""

    def __init__(
        self,
        config: UnetConfig,
        channels: tuple[int, int],
        kernel: Axes,
        stride: Axes,
        residual: bool = False,
        drops: bool = False,
    ):
        super().__init__()
        out, ones = channels[1], (1,) * len(kernel)
        self.slope, self.residual = config.negative_slope, residual
        self.conv1 = ConvNorm(config, channels, kernel, stride, self.slope, drops)
        self.conv2 = ConvNorm(config, (out, out), kernel, ones, 1.0 if residual else self.slope, drops)
        changes = max(stride) > 1 or channels[0] != out
        self.projection = ConvNorm(config, channels, kernel, stride, 1.0, drops) if residual and changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        if not self.residual:
            return y
        y = y + (x if self.projection is None else self.projection(x))
        return functional.leaky_relu(y, self.slope, inplace=True)


class Gate(nn.Module):
    """Attention gate: scales each voxel of `skip` by 0..1, computed from the upsampled level and `skip` itself."""

    def __init__(self, config: UnetConfig, channels: int, dim: int):
        super().__init__()
        kernel, ones = (3,) * dim, (1,) * dim
        self.above = ConvNorm(config, (channels, channels // 2), kernel, ones, 1.0)
        self.across = ConvNorm(config, (channels, channels // 2), kernel, ones, 1.0)
        self.share = ConvNorm(config, (channels // 2, 1), kernel, ones, 1.0)

    def forward(self, up: Tensor, skip: Tensor) -> Tensor:
        share = self.share(functional.relu(self.above(up) + self.across(skip)))  # (batch, 1, ...)
        return skip * torch.sigmoid(share)


class Up(nn.Module):
    """Decoder step to the next finer level: upsample, concatenate with the skip connection, two convolutions."""

    def __init__(self, config: UnetConfig, channels: tuple[int, int], kernel: Axes, stride: Axes):
        super().__init__()
        dim, out = len(kernel), channels[1]
        self.transposed = TRANSPOSED[dim](*channels, stride, stride)  # type: ignore[arg-type]
        self.gate = Gate(config, out, dim) if config.attention else None
        self.block = Block(config, (2 * out, out), kernel, (1,) * dim)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        up = transposed.convolve(self.transposed, x)
        if self.gate is not None:
            skip = self.gate(up, skip)
        return self.block(torch.cat([up, skip], dim=1))


class Unet(nn.Module):
    """Network from (batch, channels, *patch) to logits (batch, classes, *patch). In training with deep supervision it
    returns a tuple of logits, full resolution first, each at the resolution of its level."""

    def __init__(
        self, config: UnetConfig, spec: DataSpec, filters: list[int], kernels: list[Axes], strides: list[Axes]
    ):
        super().__init__()
        self.patch = tuple(spec.size)
        self.filters, self.kernels, self.strides = filters, kernels, strides
        self.deep_supervision = config.deep_supervision
        levels = len(filters)
        first_drop = max(1, levels - DROPPING_LEVELS) if config.drop_block else levels
        self.encoder = nn.ModuleList(
            Block(config, channels, kernels[level], strides[level], config.residual, drops=level >= first_drop)
            for level, channels in enumerate(zip([spec.channels, *filters], filters, strict=False))
        )
        self.decoder = nn.ModuleList(
            Up(config, (filters[level], filters[level - 1]), kernels[level], strides[level])
            for level in range(levels - 1, 0, -1)
        )
        # Only levels that predict have a head, so that every parameter gets a gradient.
        heads = 1 + config.aux_heads if config.deep_supervision else 1
        self.heads = nn.ModuleList(
            CONVS[len(self.patch)](channels, len(spec.classes), 1) for channels in filters[:heads]
        )
        self._initialise(config.negative_slope)

    def _initialise(self, slope: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):  # transposed convolutions keep torch's initialisation
                nn.init.kaiming_normal_(module.weight, a=slope, mode="fan_in", nonlinearity="leaky_relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def norm_shapes(self, batch: int) -> list[tuple[int, ...]]:
        """Return the shape that the norms of every level get of a batch."""
        shapes, size = [], self.patch
        for channels, stride in zip(self.filters, self.strides, strict=True):
            size = tuple(side // step for side, step in zip(size, stride, strict=True))
            shapes.append((batch, channels, *size))
        return shapes

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        x, skips = image, []
        for block in self.encoder:
            x = block(x)
            skips.append(x)
        outputs = []
        for up, skip in zip(self.decoder, skips[-2::-1], strict=True):
            x = up(x, skip)
            outputs.append(x)
        if self.training and self.deep_supervision:
            return tuple(narrow.convolve(head, x) for head, x in zip(self.heads, outputs[::-1], strict=False))
        return narrow.convolve(self.heads[0], x)


def make_norm(kind: str, channels: int, dim: int) -> nn.Module:
    """Make the norm of a layer, with scale and shift."""
    if kind == "instance":
        return InstanceNorm(channels)
    if kind == "batch":
        return BATCH_NORMS[dim](channels)
    return nn.GroupNorm(math.gcd(NORM_GROUPS, channels), channels)


def _text(axes: Sequence[int]) -> str:
    return "x".join(map(str, axes))


def build(config: UnetConfig, spec: DataSpec) -> Unet:
    """Build the network for `spec`'s patch, spacing, channels and classes, with random weights."""
    dim = len(spec.size)
    if dim not in CONVS:
        raise UsageError(f"a U-Net is for slices or volumes, got a patch of {_text(spec.size)}; give 2 or 3 numbers")
    if spec.spacing and len(spec.spacing) != dim:
        raise UsageError(
            f"the patch {_text(spec.size)} has {dim} axes but its spacing {len(spec.spacing)}; give as many"
        )
    kernels, strides = geometry(spec.size, spec.spacing or (1.0,) * dim)  # images have no spacing
    levels = len(strides)
    if levels < 2:
        raise UsageError(
            f"the patch {_text(spec.size)} is too small to be halved; one side must have {SMALLEST_STRIDED} or more"
        )
    multiples = [math.prod(axis) for axis in zip(*strides, strict=True)]
    if any(side % multiple for side, multiple in zip(spec.size, multiples, strict=True)):
        fitting = [-(-side // multiple) * multiple for side, multiple in zip(spec.size, multiples, strict=True)]
        raise UsageError(
            f"the patch {_text(spec.size)} cannot be halved and doubled again: its sides must be multiples of "
            f"{_text(multiples)}, e.g. {_text(fitting)}"
        )
    if config.deep_supervision and config.aux_heads > levels - 2:
        raise UsageError(
            f"model.aux_heads={config.aux_heads}: the patch {_text(spec.size)} makes {levels} levels, of which "
            f"{levels - 2} lie between the finest and the deepest; use at most that many, or no deep_supervision"
        )
    most = config.max_filters or MOST_FILTERS[dim]
    return Unet(config, spec, filters(levels, config.width, most), kernels, strides)


def load_weights(config: UnetConfig, model: nn.Module) -> LoadedWeights:
    """Load the weights that the config names, of our names or of the original's."""
    assert isinstance(model, Unet)
    ours = model.state_dict()
    theirs = {original_name(name, len(model.filters), config.residual): name for name in ours}
    found = read_weights(config.weights, {**{name: ours[our] for name, our in theirs.items()}, **ours})
    if not any(name in ours for name in found.tensors):
        tensors = {theirs.get(name, name): tensor for name, tensor in found.tensors.items()}
        found = replace(found, tensors=tensors, names={our: name for name, our in theirs.items()})
    # Heads of deep supervision, where this network has none or fewer.
    unused = (
        "deep_supervision_heads.",
        *(f"heads.{level}." for level in range(len(model.heads), MOST_STRIDES)),
    )
    return copy_weights(model, found, head="heads.", unused=unused)


def describe(model: nn.Module) -> str:
    """Describe the levels that were chosen for the patch."""
    assert isinstance(model, Unet)
    return (
        f"U-Net for patches of {_text(model.patch)}: {len(model.filters)} levels, "
        f"filters {' '.join(map(str, model.filters))}, kernels {' '.join(map(_text, model.kernels))}, "
        f"strides {' '.join(map(_text, model.strides))}"
    )
