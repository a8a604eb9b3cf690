"""U-Net with a classifier as its way down, for images of any size: fine-tuning starts from its pretrained weights.

The way up is plain: twice the size by repeating pixels, the features of that size beside, two 3x3 convolutions with
batch-norm. tasks/masks.py reads the logits; tasks/sliding_window.py reads `patch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.kernels.batch_norm import norm_relu
from sightline.models import timm_arch
from sightline.models.config import EncoderUnetConfig, ResNetConfig
from sightline.models.resnet import (
    BLOCKS,
    INITS,
    STAGES,
    StemConv2d,
    make_conv,
    make_norm,
    make_pool,
    make_stage,
)
from sightline.models.weight_files import read_weights
from sightline.models.weights import Weights, copy_weights
from sightline.parts import DataSpec, LoadedWeights

RGB = 3  # channels that classifiers were trained with
DEEPEST = 4  # levels of the way up in which channels double; the others have as many


class Encoder(nn.Module):
    """A ResNet without its head, with torchvision's names: the features of the stem and of every stage."""

    def __init__(self, config: ResNetConfig, channels: int):
        super().__init__()
        width, blocks = config.width, STAGES[config.depth]
        expansion = BLOCKS[config.is_pre_activated, config.has_bottlenecks].expansion
        outputs = [width * 2**stage * expansion for stage in range(4)]
        self.conv1 = StemConv2d(channels, width, bias=False, same=False)
        self.bn1 = make_norm(config, width)
        self.maxpool = make_pool(config)
        self.layer1 = make_stage(config, width, width, blocks[0], 1)
        self.layer2 = make_stage(config, outputs[0], 2 * width, blocks[1], 2)
        self.layer3 = make_stage(config, outputs[1], 4 * width, blocks[2], 2)
        self.layer4 = make_stage(config, outputs[2], 8 * width, blocks[3], 2)
        self.channels = [width, *outputs]
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                INITS[config.init](module.weight)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        features = [norm_relu(self.conv1(pixels), self.bn1)]
        x = self.maxpool(features[0])
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
            features.append(x)
        return features


class Up(nn.Module):
    """Step to twice the size: repeat pixels, put the features of that size beside, two 3x3 convolutions."""

    def __init__(self, channels_in: int, skipped: int, out: int):
        super().__init__()
        self.conv1 = make_conv(channels_in + skipped, out, 3)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = make_conv(out, out, 3)
        self.bn2 = nn.BatchNorm2d(out)

    def forward(self, x: Tensor, skip: Tensor | None) -> Tensor:
        x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        x = x if skip is None else torch.cat([x, skip], dim=1)
        return norm_relu(self.conv2(norm_relu(self.conv1(x), self.bn1)), self.bn2)


class EncoderUnet(nn.Module):
    """Network from (batch, channels, height, width), of any size, to logits (batch, classes, height, width)."""

    any_size = True  # whole images may go through it, not windows alone

    def __init__(self, config: EncoderUnetConfig, spec: DataSpec):
        super().__init__()
        self.patch = tuple(spec.size)
        if config.is_timm:
            self.encoder, channels, sizes = timm_arch.build_encoder(config.arch, spec.channels)
        else:
            self.encoder = Encoder(config.encoder(), spec.channels)
            channels, sizes = self.encoder.channels, [2, 4, 8, 16, 32]
        self.first = next(name for name, each in self.encoder.state_dict().items() if each.dim() == 4)  # convolution
        self.stride = sizes[-1]
        # What lies beside each step up; nothing beside those that are finer than all features.
        skips = [*channels[-2::-1], *[0] * (sizes[0].bit_length() - 1)]
        widths = [max(1, config.width // 4) * 2 ** min(level, DEEPEST) for level in reversed(range(len(skips)))]
        self.decoder = nn.ModuleList(Up(*each) for each in zip([channels[-1], *widths], skips, widths, strict=False))
        self.head = nn.Conv2d(widths[-1], len(spec.classes), 3, padding=1)
        for module in self.decoder.modules():
            if isinstance(module, nn.Conv2d):
                INITS["torch"](module.weight)
        nn.init.xavier_uniform_(self.head.weight)
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]  # it has one

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[2:]
        below, right = -height % self.stride, -width % self.stride
        if below or right:  # with the mean colour
            image = functional.pad(image, (0, right, 0, below))
        *skips, x = self.encoder(image)
        for up in self.decoder:
            x = up(x, skips.pop() if skips else None)
        logits = self.head(x)
        return logits[:, :, :height, :width] if below or right else logits


def load_weights(config: EncoderUnetConfig, model: nn.Module) -> LoadedWeights:
    """Load weights into the whole network or into its way down, and say what was adapted."""
    assert isinstance(model, EncoderUnet)
    state = model.encoder.state_dict()
    weights = read_weights(config.weights, {**state, **model.state_dict()})
    if any(key.startswith("decoder.") for key in weights.tensors):
        weights, note = _for_channels(weights, f"encoder.{model.first}", model.state_dict())
        loaded = copy_weights(model, weights, head="head.")
    else:
        weights, note = _for_channels(_renamed(weights, state), model.first, state)
        # Of a classifier the last layers have no place here; what they are called differs.
        unused = tuple(dict.fromkeys(key.partition(".")[0] + "." for key in weights.tensors if key not in state))
        inside = {key.partition(".")[0] + "." for key in state}
        loaded = copy_weights(model.encoder, weights, unused=tuple(each for each in unused if each not in inside))
        loaded = replace(loaded, note=f"encoder: {loaded.note}")
    return replace(loaded, note=f"{loaded.note}; {note}" if note else loaded.note)


def adapted(weight: Tensor, channels: int) -> Tensor:
    """Return the first convolution (out, 3, height, width) for another number of channels: what it answers to a grey
    image is what it answered to the same grey in all three; further channels count like those, in turn."""
    if channels == 1:
        return weight.sum(1, keepdim=True)
    repeated = torch.cat([weight] * -(-channels // RGB), 1)[:, :channels]
    return repeated * (RGB / channels)


def _for_channels(weights: Weights, first: str, expected: Mapping[str, Tensor]) -> tuple[Weights, str]:
    """Return the weights with a first convolution for the channels of these images, and what to say of it."""
    found, wanted = weights.tensors.get(first), expected[first].shape
    if found is None or found.dim() != 4 or found.shape[1] != RGB or wanted[1] == RGB:
        return weights, ""
    layouts = {**weights.layouts, first: "x".join(map(str, found.shape))}
    tensors = {**weights.tensors, first: adapted(found.float(), wanted[1])}
    return replace(weights, tensors=tensors, layouts=layouts), f"{first} adapted from 3 channels to {wanted[1]}"


def _renamed(weights: Weights, expected: Mapping[str, Tensor]) -> Weights:
    """Return the weights under the names of timm's networks without a head, in which a first dot may be a bar."""
    ours = {name.replace(".", "_"): name for name in expected}
    names = {key: ours.get(key.replace(".", "_"), key) for key in weights.tensors}
    tensors = {names[key]: tensor for key, tensor in weights.tensors.items()}
    there = {new: old for old, new in names.items() if new != old}
    return replace(weights, tensors=tensors, names={**weights.names, **there})
