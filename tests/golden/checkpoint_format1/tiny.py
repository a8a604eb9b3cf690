"""The recipe that made run/, in version 0.1.0: a convolution, a batch-norm and a head, with everything that is saved.

The checkpoint beside it is kept as it was written, to show that later versions read it. Never write it again.
"""

import dataclasses
from dataclasses import dataclass

from torch import nn

from sightline.config import Recipe
from sightline.parts import ModelConfig
from sightline.recipes import demo_classification


class Net(nn.Sequential):
    """130 parameters and a buffer of each kind."""

    def __init__(self, channels, classes):
        super().__init__(nn.Conv2d(channels, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.append(nn.Flatten())
        self.append(nn.Linear(4, classes))


@dataclass(frozen=True)
class NetConfig(ModelConfig):
    """Nothing to choose."""

    def build(self, spec):
        return Net(spec.channels, len(spec.classes))


def recipe() -> Recipe:
    """Eight steps in two epochs, in half precision with an average: all files a checkpoint can have."""
    demo = demo_classification.recipe()
    data = {"path": "synthetic:classes=2,samples=16,size=16", "classes": 2, "size": 16}
    return dataclasses.replace(
        demo,
        name="tiny",
        model=NetConfig(),
        data=dataclasses.replace(demo.data, **data, eval_size=16, eval_resize=16),
        train=dataclasses.replace(demo.train, epochs=2, global_batch=4, precision="fp16", ema=0.5),
    )
