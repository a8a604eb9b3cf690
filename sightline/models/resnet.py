"""ResNet and ResNeXt, 18 to 200 layers, as torchvision, TensorFlow's scripts and keras.applications build them.

The default is torchvision's v1.5 with its parameter and buffer names, so its state dicts load by name. With the same
torch seed the initial weights are equal too; they are drawn from torch's global generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from sightline.kernels import batch_norm, bottleneck, stem, stem_tail
from sightline.kernels.batch_norm import norm_add_relu, norm_relu
from sightline.models.config import Depth
from sightline.models.config import ResNetConfig as ResNetConfig
from sightline.models.weight_files import read_weights
from sightline.models.weights import copy_weights
from sightline.parts import LoadedWeights


class SameConv2d(nn.Conv2d):
    """Convolution with TensorFlow's SAME padding, which depends on the input size and puts the odd pixel at the end."""

    def forward(self, x: Tensor) -> Tensor:
        (top, bottom), (left, right) = (
            same_padding(size, kernel, stride)
            for size, kernel, stride in zip(x.shape[2:], self.kernel_size, self.stride, strict=True)
        )
        padding = (top, left)
        if top != bottom or left != right:  # the convolution itself can only pad both sides equally
            x, padding = functional.pad(x, (left, right, top, bottom)), (0, 0)
        return functional.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class StemConv2d(SameConv2d):
    """First convolution, 7x7 with stride 2; uses kernels/stem.py where that is faster."""

    def __init__(self, channels_in: int, channels_out: int, *, bias: bool, same: bool):
        super().__init__(channels_in, channels_out, 7, 2, padding=0 if same else 3, bias=bias)
        self.same = same

    def forward(self, x: Tensor) -> Tensor:
        if stem.applies(x):
            return stem.convolve(x, self.weight, before=2 if self.same else 3, bias=self.bias)
        return super().forward(x) if self.same else nn.Conv2d.forward(self, x)


class SameMaxPool2d(nn.Module):
    """3x3 max-pool with stride 2 and TensorFlow's SAME padding."""

    def forward(self, x: Tensor) -> Tensor:
        # SAME pads even sizes by one pixel at the end, as ceil_mode does, and odd sizes by one on both sides. Both
        # frameworks pad with -inf, which never wins, so no padded copy is needed.
        return functional.max_pool2d(x, 3, 2, padding=(x.shape[2] % 2, x.shape[3] % 2), ceil_mode=True)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the padding before and after that gives ceil(size / stride) outputs."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def make_conv(
    channels_in: int,
    channels_out: int,
    kernel: int,
    stride: int = 1,
    *,
    groups: int = 1,
    bias: bool = False,  # a batch-norm that follows would subtract it again
    same: bool = False,
) -> nn.Conv2d:
    """Make a convolution whose output size is the input size divided by the stride, rounded up."""
    # With stride 1 and an odd kernel, SAME equals torch's padding.
    kind = SameConv2d if same and stride > 1 and kernel > 1 else nn.Conv2d
    padding = 0 if kind is SameConv2d else kernel // 2
    return kind(channels_in, channels_out, kernel, stride, padding=padding, groups=groups, bias=bias)


def make_norm(config: ResNetConfig, channels: int) -> nn.BatchNorm2d:
    """Make a batch-norm with the config's momentum and eps."""
    return nn.BatchNorm2d(channels, eps=config.bn_eps, momentum=config.bn_momentum)


def _projection(config: ResNetConfig, channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    """Make the shortcut of a block whose input and output shapes differ."""
    if config.is_pre_activated:  # the input is already normalised
        return nn.Sequential(make_conv(channels_in, channels_out, 1, stride, bias=config.version == "v2_keras"))
    return nn.Sequential(
        make_conv(channels_in, channels_out, 1, stride, bias=config.bias),
        make_norm(config, channels_out),
    )


def _shortcut(x: Tensor, projection: nn.Sequential | None) -> tuple[Tensor, nn.BatchNorm2d | None]:
    """Return the shortcut of a block, and its norm if the end of the block is to apply it."""
    if projection is None:
        return x, None
    conv, norm = projection
    assert isinstance(norm, nn.BatchNorm2d)
    return (conv(x), norm) if batch_norm.applies(x, norm) else (projection(x), None)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the first convolution has the stride."""

    expansion = 1

    def __init__(self, config: ResNetConfig, channels_in: int, width: int, stride: int, project: bool):
        super().__init__()
        same = config.padding != "torch"
        # Made first, registered last: this matches torchvision's order of random draws and of names.
        shortcut = _projection(config, channels_in, width, stride) if project else None
        self.conv1 = make_conv(channels_in, width, 3, stride, bias=config.bias, same=same)
        self.bn1 = make_norm(config, width)
        self.conv2 = make_conv(width, width, 3, bias=config.bias)
        self.bn2 = make_norm(config, width)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.hand_on(x)[0]

    def hand_on(self, x: Tensor, through: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the result, and what stands for it as the next block's shortcut; see norm_add_relu."""
        shortcut, norm = _shortcut(x, self.downsample)
        out = norm_relu(self.conv1(x), self.bn1)
        return norm_add_relu(self.conv2(out), self.bn2, shortcut, norm, through)


class Bottleneck(bottleneck.Fusable):
    """1x1 down to the inner width, grouped 3x3, 1x1 up to four times `width`, and a shortcut."""

    expansion = 4

    def __init__(self, config: ResNetConfig, channels_in: int, width: int, stride: int, project: bool):
        super().__init__()
        inner, channels_out, same = _inner_width(config, width), width * self.expansion, config.padding != "torch"
        first, second = (stride, 1) if config.version == "v1" else (1, stride)
        shortcut = _projection(config, channels_in, channels_out, stride) if project else None  # as in BasicBlock
        self.conv1 = make_conv(channels_in, inner, 1, first, bias=config.bias)
        self.bn1 = make_norm(config, inner)
        self.conv2 = make_conv(inner, inner, 3, second, groups=config.groups, bias=config.bias, same=same)
        self.bn2 = make_norm(config, inner)
        self.conv3 = make_conv(inner, channels_out, 1, bias=config.bias)
        self.bn3 = make_norm(config, channels_out)
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.hand_on(x)[0]

    def hand_on(self, x: Tensor, through: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the result, and what stands for it as the next block's shortcut; see norm_add_relu."""
        if through is None and bottleneck.applies(self, x):
            return bottleneck.run(self, x), None
        shortcut, norm = _shortcut(x, self.downsample)
        out = norm_relu(self.conv1(x), self.bn1)
        out = norm_relu(self.conv2(out), self.bn2)
        return norm_add_relu(self.conv3(out), self.bn3, shortcut, norm, through)


class PreActivatedBasicBlock(nn.Module):
    """BasicBlock with batch-norm and ReLU before each convolution and nothing after the sum."""

    expansion = 1

    def __init__(self, config: ResNetConfig, channels_in: int, width: int, stride: int, project: bool):
        super().__init__()
        self.bn1 = make_norm(config, channels_in)
        self.conv1 = make_conv(channels_in, width, 3, stride, same=config.padding != "torch")
        self.bn2 = make_norm(config, width)
        self.conv2 = make_conv(width, width, 3)
        self.downsample = _projection(config, channels_in, width, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:
        active = norm_relu(x, self.bn1)
        shortcut = x if self.downsample is None else self.downsample(active)
        out = norm_relu(self.conv1(active), self.bn2)
        return self.conv2(out).add_(shortcut)


class PreActivatedBottleneck(nn.Module):
    """Bottleneck with batch-norm and ReLU before each convolution and nothing after the sum."""

    expansion = 4

    def __init__(self, config: ResNetConfig, channels_in: int, width: int, stride: int, project: bool):
        super().__init__()
        inner, channels_out, same = _inner_width(config, width), width * self.expansion, config.padding != "torch"
        self.bn1 = make_norm(config, channels_in)
        self.conv1 = make_conv(channels_in, inner, 1)
        self.bn2 = make_norm(config, inner)
        self.conv2 = make_conv(inner, inner, 3, stride, groups=config.groups, same=same)
        self.bn3 = make_norm(config, inner)
        self.conv3 = make_conv(inner, channels_out, 1, bias=config.version == "v2_keras")
        self.downsample = _projection(config, channels_in, channels_out, stride) if project else None
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        active = norm_relu(x, self.bn1)
        if self.downsample is not None:
            shortcut = self.downsample(active)
        else:  # Keras's strided block without projection: a 1x1 max-pool, i.e. every second pixel
            shortcut = x if self.stride == 1 else x[:, :, :: self.stride, :: self.stride]
        out = norm_relu(self.conv1(active), self.bn2)
        out = norm_relu(self.conv2(out), self.bn3)
        return self.conv3(out).add_(shortcut)


Block = type[BasicBlock] | type[Bottleneck] | type[PreActivatedBasicBlock] | type[PreActivatedBottleneck]

BLOCKS: dict[tuple[bool, bool], Block] = {  # (is_pre_activated, has_bottlenecks)
    (False, False): BasicBlock,
    (False, True): Bottleneck,
    (True, False): PreActivatedBasicBlock,
    (True, True): PreActivatedBottleneck,
}

STAGES: dict[Depth, tuple[int, int, int, int]] = {  # depth -> blocks per stage
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}

STEMS = {"7x7": (7, 2), "3x3": (3, 1)}  # kernel, stride; a max-pool follows stride 2


def _inner_width(config: ResNetConfig, width: int) -> int:
    return width * config.group_width // 64 * config.groups


def _truncated_normal(weight: Tensor, gain: float) -> None:
    # Truncation at two deviations leaves 0.8796 of the deviation; dividing by it gives a variance of gain / fan_in.
    deviation = math.sqrt(gain / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


INITS: dict[str, Callable[[Tensor], object]] = {
    "torch": lambda weight: nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu"),
    "he_truncated": lambda weight: _truncated_normal(weight, gain=2),
    "variance_scaling": lambda weight: _truncated_normal(weight, gain=1),
    "glorot": nn.init.xavier_uniform_,
}

HEAD_INITS: dict[str, Callable[[Tensor], object]] = {
    "torch": lambda weight: weight,  # as nn.Linear drew it
    "normal": lambda weight: nn.init.normal_(weight, std=0.01),
    "glorot": nn.init.xavier_uniform_,
}


class Stage(nn.Sequential):
    """Blocks of v1 in a row, each linked to the next by its `hand_on`."""

    def forward(self, x: Tensor) -> Tensor:
        through: Tensor | None = None
        for block in self:
            assert isinstance(block, BasicBlock | Bottleneck)
            x, through = block.hand_on(x, through)
        return x


def make_stage(config: ResNetConfig, channels_in: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """Make a stage. Its first block changes the channels and has the stride; in v2_keras the last has the stride."""
    block = BLOCKS[config.is_pre_activated, config.has_bottlenecks]
    channels_out = width * block.expansion
    strides = [1] * blocks
    strides[-1 if config.version == "v2_keras" else 0] = stride
    project = config.project_every_stage or strides[0] > 1 or channels_in != channels_out
    first = block(config, channels_in, width, strides[0], project)
    stage = nn.Sequential if config.is_pre_activated else Stage
    return stage(first, *(block(config, channels_out, width, step, False) for step in strides[1:]))


def make_pool(config: ResNetConfig) -> nn.Module:
    """Make the pooling layer after the stem."""
    if STEMS[config.stem][1] == 1:
        return nn.Identity()
    if config.padding != "torch":
        return SameMaxPool2d()
    if config.version == "v2_keras":  # pads with zeros, which beat negative values: there is no ReLU before
        return nn.Sequential(nn.ZeroPad2d(1), nn.MaxPool2d(3, stride=2))
    return nn.MaxPool2d(3, stride=2, padding=1)


def end_stem(x: Tensor, norm: nn.BatchNorm2d, pool: nn.Module) -> Tensor:
    """Return pool(relu(norm(x))); `pool` is one of `make_pool`."""
    if isinstance(pool, nn.MaxPool2d) and stem_tail.applies(x, norm):
        return stem_tail.norm_relu_pool(x, norm, 1, 1)
    if isinstance(pool, SameMaxPool2d) and stem_tail.applies(x, norm):
        return stem_tail.norm_relu_pool(x, norm, x.shape[2] % 2, x.shape[3] % 2)
    return pool(norm_relu(x, norm))


class ResNet(nn.Module):
    """Network from (batch, channels, height, width) to logits (batch, classes)."""

    def __init__(self, config: ResNetConfig, classes: int, channels: int):
        super().__init__()
        self.has_v2_ends = config.has_v2_ends
        blocks = STAGES[config.depth]
        strides = (2, 2, 2, 1) if config.version == "v2_keras" else (1, 2, 2, 2)
        widths = [config.width * 2**stage for stage in range(4)]
        outputs = [width * BLOCKS[config.is_pre_activated, config.has_bottlenecks].expansion for width in widths]
        kernel, stride = STEMS[config.stem]
        has_bias = config.bias or config.version == "v2_keras"

        if config.stem == "7x7":
            self.conv1: nn.Conv2d = StemConv2d(channels, config.width, bias=has_bias, same=config.padding == "same")
        else:
            self.conv1 = make_conv(channels, config.width, kernel, stride, bias=has_bias, same=config.padding == "same")
        if not self.has_v2_ends:
            self.bn1 = make_norm(config, config.width)
        self.maxpool = make_pool(config)
        self.layer1 = make_stage(config, config.width, widths[0], blocks[0], strides[0])
        self.layer2 = make_stage(config, outputs[0], widths[1], blocks[1], strides[1])
        self.layer3 = make_stage(config, outputs[1], widths[2], blocks[2], strides[2])
        self.layer4 = make_stage(config, outputs[2], widths[3], blocks[3], strides[3])
        if self.has_v2_ends:
            self.bn_out = make_norm(config, outputs[3])
        self.fc = nn.Linear(outputs[3], classes)
        self._initialise(config)

    def _initialise(self, config: ResNetConfig) -> None:
        # Batch-norms keep torch's default: scale 1, shift 0.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                INITS[config.init](module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, BasicBlock | Bottleneck) and config.zero_init_residual:
                last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
                nn.init.zeros_(last.weight)
        HEAD_INITS[config.head_init](self.fc.weight)
        if config.head_init != "torch":
            nn.init.zeros_(self.fc.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.conv1(pixels)
        x = self.maxpool(x) if self.has_v2_ends else end_stem(x, self.bn1, self.maxpool)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)  # (batch, outputs[3], height / 32, width / 32) with the 7x7 stem
        if self.has_v2_ends:
            x = norm_relu(x, self.bn_out)
        return self.fc(x.mean(dim=(2, 3)))


def load_weights(config: ResNetConfig, model: nn.Module) -> LoadedWeights:
    """Load the weights that the config names, and say where they were made with another padding."""
    weights = read_weights(config.weights, model.state_dict())
    loaded = copy_weights(model, weights, head="fc.")
    if weights.padding in ("", config.padding):
        return loaded
    other = f"made with padding={weights.padding}, this network has padding={config.padding}"
    return replace(loaded, note=f"{loaded.note}; they were {other}: use the arch of their script, e.g. resnet50_tf")
