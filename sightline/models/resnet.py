"""ResNet 18 to 152, v1.5: the stride of a bottleneck sits in its 3x3 convolution.

Parameter and buffer names are torchvision's, so its state dicts load by name, and with the same torch seed the
initial weights are equal to torchvision's too. Weights are drawn from torch's global generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from sightline.errors import UsageError
from sightline.kernels import stem
from sightline.models.weights import load_weights
from sightline.parts import DataSpec, ModelConfig


@dataclass(frozen=True)
class ResNetConfig(ModelConfig):
    """A residual network for classification."""

    depth: Literal[18, 34, 50, 101, 152] = 50
    """Layers with weights; 18 and 34 have basic blocks, the others bottlenecks."""
    width: int = 64
    """Channels of the first stage; every later stage has twice those of the one before."""
    stem: Literal["7x7", "3x3"] = "7x7"
    """7x7: stride 2 and max-pool, as published; 3x3: stride 1 and no pool, for pictures of about 32 pixels."""
    zero_init_residual: bool = False
    """Start the last batch-norm of every block at 0, so that each block begins as the identity."""
    weights: str = ""
    """A .safetensors or .pth file to start from; a head for another number of classes is left fresh."""

    def __post_init__(self) -> None:
        if self.depth not in STAGES:
            raise UsageError(f"model.depth={self.depth} is not a ResNet; use one of {', '.join(map(str, STAGES))}")
        if self.width < 1:
            raise UsageError(f"model.width={self.width} must be at least 1; 64 is the published width")
        if self.stem not in STEMS:
            raise UsageError(f"model.stem='{self.stem}' is unknown; use one of {', '.join(STEMS)}")

    def build(self, spec: DataSpec) -> ResNet:
        """The network for `spec`'s classes and channels, with random weights."""
        return ResNet(self, classes=len(spec.classes), channels=spec.channels)

    def start_from(self, model: nn.Module) -> str:
        """Loads `weights`; says what was loaded."""
        return load_weights(model, Path(self.weights), head="fc.") if self.weights else ""


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    # No bias: a batch-norm follows everywhere and would subtract it again.
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)


class Stem(nn.Conv2d):
    """The first convolution; the 7x7 of stride 2 is computed over blocks of pixels where that is faster."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel_size == (7, 7) and stem.applies(x):
            return stem.convolve(x, self.weight, before=3)
        return super().forward(x)


def _projection(channels_in: int, channels_out: int, stride: int) -> nn.Sequential | None:
    """The shortcut of a block: None is the identity."""
    if stride == 1 and channels_in == channels_out:
        return None
    return nn.Sequential(_conv(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the first carries the stride."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int):
        super().__init__()
        # Made first and registered last: the order of torchvision's random draws and of its names.
        shortcut = _projection(channels_in, width, stride)
        self.conv1 = _conv(channels_in, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        return functional.relu(out.add_(shortcut), inplace=True)


class Bottleneck(nn.Module):
    """1x1 down to `width`, 3x3 with the stride, 1x1 up to four times `width`, beside a shortcut."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int):
        super().__init__()
        channels_out = width * self.expansion
        shortcut = _projection(channels_in, channels_out, stride)  # made first, as in BasicBlock
        self.conv1 = _conv(channels_in, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, channels_out, 1)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        out = functional.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        return functional.relu(out.add_(shortcut), inplace=True)


Block = type[BasicBlock] | type[Bottleneck]

STAGES: dict[int, tuple[Block, tuple[int, int, int, int]]] = {  # depth -> block, blocks per stage
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}

STEMS = {"7x7": (7, 2), "3x3": (3, 1)}  # kernel, stride; a stem of stride 2 is followed by the max-pool


def make_stage(block: Block, channels_in: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """`blocks` blocks in a row; the first one carries the stride and changes the channels."""
    first = block(channels_in, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(blocks - 1)))


class ResNet(nn.Module):
    """(batch, channels, height, width) to logits (batch, classes)."""

    def __init__(self, config: ResNetConfig, classes: int, channels: int):
        super().__init__()
        block, blocks = STAGES[config.depth]
        widths = [config.width * 2**stage for stage in range(4)]
        outputs = [width * block.expansion for width in widths]
        kernel, stride = STEMS[config.stem]

        self.conv1 = Stem(channels, config.width, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(config.width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stride == 2 else nn.Identity()
        self.layer1 = make_stage(block, config.width, widths[0], blocks[0], stride=1)
        self.layer2 = make_stage(block, outputs[0], widths[1], blocks[1], stride=2)
        self.layer3 = make_stage(block, outputs[1], widths[2], blocks[2], stride=2)
        self.layer4 = make_stage(block, outputs[2], widths[3], blocks[3], stride=2)
        self.fc = nn.Linear(outputs[3], classes)
        self._initialise(config.zero_init_residual)

    def _initialise(self, zero_init_residual: bool) -> None:
        # Batch-norms (1, 0) and the head (uniform within 1/sqrt(fan_in)) keep torch's defaults.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock | Bottleneck) and zero_init_residual:
                last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
                nn.init.zeros_(last.weight)

    def forward(self, pixels: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(pixels)), inplace=True)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)  # (batch, outputs[3], height / 32, width / 32) with the 7x7 stem
        return self.fc(x.mean(dim=(2, 3)))
