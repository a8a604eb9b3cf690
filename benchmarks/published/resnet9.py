"""ResNet-9 for images of 32 pixels, as in David Page's entry to DAWNBench: 24 epochs of batch 512.

    sightline train benchmarks/published/resnet9.py --data.path DIR

Network, rates and decay are those that he describes (https://myrtle.ai/learn/how-to-train-your-resnet/). Different are
the borders of shifted crops, black here and mirrored there, and erased boxes, of random sizes instead of 8 x 8 in every
image; labels are smoothed, and mirror images count in evaluation. What it reaches: benchmarks/notes/published.md.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from sightline.data.classification import ClassificationData
from sightline.kernels.batch_norm import norm_relu
from sightline.parts import DataSpec, ModelConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import ClassificationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


class ConvNorm(nn.Module):
    """A 3x3 convolution, batch norm and ReLU."""

    def __init__(self, channels_in: int, channels_out: int):
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        return norm_relu(self.conv(x), self.norm)


class Halved(nn.Module):
    """Twice the channels at half the resolution, and with `residual` two more convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, residual: bool):
        super().__init__()
        self.first = ConvNorm(channels_in, channels_out)
        self.beside = nn.Sequential(*(ConvNorm(channels_out, channels_out) for _ in range(2))) if residual else None

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.first(x), 2)
        return x if self.beside is None else x + self.beside(x)


class ResNet9(nn.Module):
    """Network from (batch, channels, 32, 32) to logits (batch, classes)."""

    def __init__(self, channels: int, classes: int, width: int):
        super().__init__()
        self.stem = ConvNorm(channels, width)
        self.layer1 = Halved(width, 2 * width, residual=True)
        self.layer2 = Halved(2 * width, 4 * width, residual=False)
        self.layer3 = Halved(4 * width, 8 * width, residual=True)
        self.head = nn.Linear(8 * width, classes, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(pixels))))
        return self.head(x.amax(dim=(2, 3))) / 8


@dataclass(frozen=True)
class ResNet9Config(ModelConfig):
    """The fields of the network."""

    width: int = 64
    """Channels of the first convolution."""

    def build(self, spec: DataSpec) -> nn.Module:
        """Build the network for the channels and classes of the data."""
        return ResNet9(spec.channels, len(spec.classes), self.width)


def recipe() -> Recipe:
    """Return the recipe; only the last epoch is evaluated."""
    return Recipe(
        name="resnet9",
        model=ResNet9Config(),
        data=ClassificationData(crop="shift", size=32, eval_resize=32, eval_size=32, random_erase=0.3, decoder="cpu"),
        task=ClassificationConfig(label_smoothing=0.1, tta=True),
        optimizer=OptimizerConfig(kind="sgd", lr=0.1, lr_for_batch=128, nesterov=True, weight_decay=5e-4),
        schedule=ScheduleConfig(kind="polynomial", power=1.0, warmup_epochs=5),
        train=TrainConfig(epochs=24, global_batch=512, precision="bf16", eval_every_epochs=1000),
    )
