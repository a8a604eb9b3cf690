"""SSD with a ResNet trunk: 8732 boxes for a 300-pixel image, each with class scores and offsets.

As in the MLPerf benchmark: ResNet-34 up to its third stage, without that stage's stride, and five smaller levels.
models/anchors.py makes the boxes that offsets refer to; tasks/detection.py reads the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.errors import BadCheckpoint, UsageError
from sightline.kernels import narrow
from sightline.models.anchors import default_boxes
from sightline.models.config import SSD_SIZE as SIZE
from sightline.models.config import ResNetConfig
from sightline.models.config import SsdConfig as SsdConfig
from sightline.models.resnet import (
    INITS,
    STAGES,
    BasicBlock,
    StemConv2d,
    end_stem,
    make_conv,
    make_norm,
    make_pool,
    make_stage,
)
from sightline.models.tf_checkpoint import index_of
from sightline.models.tf_weights import read_tensorflow_ssd
from sightline.models.weight_files import read_weights
from sightline.models.weights import Weights, copy_weights
from sightline.parts import DataSpec, LoadedWeights

TORCHVISION = "https://download.pytorch.org/models"
TRUNK_28152 = (
    "model.ckpt-28152: fetch model.ckpt-28152.index and model.ckpt-28152.data-00000-of-00001 from "
    "https://storage.googleapis.com/intel-optimized-tensorflow/models/ssd-backbone"
)

# Levels after the trunk's: channels of the 1x1 and of the 3x3 in multiples of the trunk's width, stride, is_padded.
EXTRAS = ((4, 8, 2, True), (4, 8, 2, True), (2, 4, 2, True), (2, 4, 1, False), (2, 4, 1, False))


class Trunk(nn.Module):
    """The first three stages of a ResNet, the third without its stride, with torchvision's parameter names."""

    def __init__(self, config: ResNetConfig, channels: int):
        super().__init__()
        blocks, width = STAGES[config.depth], config.width
        self.conv1 = StemConv2d(channels, width, bias=False, same=False)
        self.bn1 = make_norm(config, width)
        self.maxpool = make_pool(config)
        self.layer1 = make_stage(config, width, width, blocks[0], stride=1)
        self.layer2 = make_stage(config, width, 2 * width, blocks[1], stride=2)
        self.layer3 = make_stage(config, 2 * width, 4 * width, blocks[2], stride=1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = end_stem(self.conv1(pixels), self.bn1, self.maxpool)
        return self.layer3(self.layer2(self.layer1(x)))  # (batch, 4 * width, height / 8, width / 8)


class Level(nn.Module):
    """Step from one level to the next: a 1x1 and a 3x3 convolution, each with a ReLU and without batch-norm."""

    def __init__(self, channels_in: int, inner: int, out: int, stride: int, is_padded: bool, same: bool):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, inner, 1)
        if is_padded:
            self.conv2 = make_conv(inner, out, 3, stride, bias=True, same=same)
        else:
            self.conv2 = nn.Conv2d(inner, out, 3, stride)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv1(x), inplace=True)
        return functional.relu(self.conv2(x), inplace=True)


class Ssd(nn.Module):
    """Detector from (batch, channels, size, size) to logits (batch, anchors, classes + 1), offsets (batch, anchors, 4)
    and anchors (anchors, 4) as cy, cx, h, w, all in (level, row, column, anchor) order. Class 0 is background."""

    anchors: Tensor

    def __init__(self, config: SsdConfig, classes: int, channels: int, size: int):
        super().__init__()
        cells = feature_sizes(size)
        ratios = config.parsed_ratios()[: len(cells)]
        self.split = (classes + 1, 4)  # channels of one anchor: scores, then offsets
        self.per_cell = [_per_cell(level) for level in ratios]
        self.trunk = Trunk(config.trunk(), channels)
        self.extras = _extras(config, len(cells))
        outputs = [4 * config.width] + [out * config.width for _, out, _, _ in EXTRAS]
        # One convolution for scores and offsets: same results as two, but the input is read once.
        self.heads = nn.ModuleList(
            nn.Conv2d(channels_in, boxes * sum(self.split), 3, padding=1)
            for channels_in, boxes in zip(outputs, self.per_cell, strict=False)
        )
        scales = [scale * size / SIZE for scale in config.scales[: len(cells) + 1]]
        anchors = default_boxes(size, cells, _steps(config, cells, size), scales, ratios)
        self.register_buffer("anchors", anchors, persistent=False)  # computed from the config
        self._initialise(config)
        if config.freeze == "first_block":
            first = self.trunk.layer1[0]
            assert isinstance(first, BasicBlock)
            for layer in (self.trunk.conv1, self.trunk.bn1, first.conv1, first.bn1):
                layer.requires_grad_(False)

    def classes_of(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the number of classes, without background, that the heads of a state dict predict."""
        return len(tensors["heads.0.weight"]) // self.per_cell[0] - 5

    def _initialise(self, config: SsdConfig) -> None:
        # Batch-norms keep torch's default, scale 1 and shift 0; for tf the last one of a block starts at scale 0.
        is_tf = config.init == "tf"
        for module in self.trunk.modules():
            if isinstance(module, nn.Conv2d):
                INITS["variance_scaling" if is_tf else "torch"](module.weight)
            elif isinstance(module, BasicBlock) and is_tf:
                nn.init.zeros_(module.bn2.weight)
        for module in self.extras.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
        for module in self.heads.modules():
            if isinstance(module, nn.Conv2d):
                self._initialise_head(module.weight)
        for module in (*self.extras.modules(), *self.heads.modules()):
            if isinstance(module, nn.Conv2d) and module.bias is not None and is_tf:
                nn.init.zeros_(module.bias)

    @torch.no_grad()
    def _initialise_head(self, weight: Tensor) -> None:
        """Apply Glorot initialisation as if scores and offsets had separate convolutions."""
        per_anchor = weight.view(-1, sum(self.split), *weight.shape[1:])
        for part in per_anchor.split(self.split, dim=1):
            fans = weight.shape[1:].numel() + part.shape[0] * part.shape[1] * weight.shape[2:].numel()  # in and out
            part.uniform_(-math.sqrt(6 / fans), math.sqrt(6 / fans))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.trunk(pixels)
        features = [x]
        for level in self.extras:
            x = level(x)
            features.append(x)
        logits, offsets = [], []
        for head, x in zip(self.heads, features, strict=True):
            # This is the memory order of channels_last already, so nothing is copied before torch.cat.
            found = (
                narrow.convolve(head, x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, sum(self.split))
            )  # (batch, boxes, ...)
            scores, boxes = found.split(self.split, dim=2)
            logits.append(scores)
            offsets.append(boxes)
        return torch.cat(logits, dim=1), torch.cat(offsets, dim=1), self.anchors


def feature_sizes(size: int) -> list[int]:
    """Return the cells per side of every level of an image of `size` pixels, for either padding."""
    if size < 1:
        raise UsageError(f"an image of {size} pixels has no levels; {SIZE} is the published size")
    cells = math.ceil(size / 8)
    found = [cells]
    for *_, stride, is_padded in EXTRAS:
        if not is_padded and cells < 3:
            break
        cells = math.ceil(cells / stride) if is_padded else (cells - 3) // stride + 1
        found.append(cells)
    return found


def _extras(config: SsdConfig, levels: int) -> nn.ModuleList:
    width, same = config.width, config.padding != "torch"
    inputs = [4] + [out for _, out, _, _ in EXTRAS]
    return nn.ModuleList(
        Level(channels_in * width, inner * width, out * width, stride, is_padded, same)
        for channels_in, (inner, out, stride, is_padded) in zip(inputs[: levels - 1], EXTRAS, strict=False)
    )


def _per_cell(ratios: Sequence[float]) -> int:
    return 2 + 2 * len(ratios)  # two squares, and a wide and a tall box per ratio


def _steps(config: SsdConfig, cells: Sequence[int], size: int) -> list[float]:
    """Return the steps in pixels of an image of `size`.

    Padded levels have the network's stride, which does not depend on the size. The cells of unpadded levels are spread
    over the whole image, as steps of 100 and 300 spread 3 and 1 cells over 300 pixels.
    """
    is_padded = (True, *(level[3] for level in EXTRAS))
    published = feature_sizes(SIZE)
    return [
        config.steps[level] * (1 if is_padded[level] else size / SIZE * published[level] / count)
        for level, count in enumerate(cells)
    ]


def build(config: SsdConfig, spec: DataSpec) -> Ssd:
    """Build the network for `spec`'s classes, channels and size, with random weights."""
    height, width = spec.size
    if height != width:
        raise UsageError(f"this detector needs square images, got {height}x{width}; give one number, e.g. {SIZE}")
    return Ssd(config, classes=len(spec.classes), channels=spec.channels, size=height)


def load_weights(config: SsdConfig, model: nn.Module) -> LoadedWeights:
    """Load weights into the whole network or into its trunk, and say where they were made with other padding."""
    assert isinstance(model, Ssd)
    weights = _read(config, model)
    if any(key.startswith("heads.") for key in weights.tensors):
        loaded = copy_weights(model, weights, head="heads.", classes=model.classes_of)
    else:
        loaded = copy_weights(model.trunk, weights, unused=("layer4.", "fc."))
        loaded = replace(loaded, note=f"trunk: {loaded.note}")
    if not weights.padding or config.padding != "torch":
        return loaded
    wrong = f"they were made with padding={weights.padding}, this network has padding=torch"
    return replace(loaded, note=f"{loaded.note}; {wrong}")


def _read(config: SsdConfig, model: Ssd) -> Weights:
    expected = {**model.trunk.state_dict(), **model.state_dict()}  # a file holds the one or the other
    if (index := index_of(Path(config.weights))) is not None:
        return read_tensorflow_ssd(index, expected, model.per_cell)
    if not Path(config.weights).exists() and not config.weights.startswith(("torchvision:", "timm:")):
        raise BadCheckpoint(f"weights {config.weights} does not exist; check the path{_fitting(config.depth)}")
    return read_weights(config.weights, expected)


def _fitting(depth: int) -> str:
    """Name the weights that fit the trunk, and where they come from."""
    name = f"resnet{depth}"
    found = f". torchvision's {name} fits: give torchvision:{name}, or a {name}-*.pth of {TORCHVISION}"
    if depth != 34:
        return found
    return f"{found}. With --model.padding same, so does TensorFlow's {TRUNK_28152}"
