"""MONAI's DynUNet in the place of our U-Net: the same levels, filters, data, loss, optimizer and schedule as unet2d.

sightline train benchmarks/dynunet.py --data.path DIR --data.task 04
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from sightline.config import Recipe
from sightline.measure.peers_segmentation import dynunet
from sightline.models.unet import UnetConfig
from sightline.parts import DataSpec, ModelConfig
from sightline.recipes import unet2d


@dataclass(frozen=True)
class DynUnetConfig(ModelConfig):
    """The form of our U-Net, built by MONAI."""

    width: int = 32
    """Filters of the first level."""

    def build(self, spec: DataSpec) -> nn.Module:
        """Build the network with MONAI's initial weights."""
        ours = UnetConfig(width=self.width, deep_supervision=True).build(spec)
        return DynUnet(dynunet(ours, spec), ours.patch)


class DynUnet(nn.Module):
    """Answers as our tasks read networks: a tuple of logits in training."""

    def __init__(self, network: nn.Module, patch: tuple[int, ...]):
        super().__init__()
        self.network = network
        self.patch = patch

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        answer = self.network(image)
        return tuple(answer.unbind(1)) if self.training else answer


def recipe() -> Recipe:
    """Return unet2d with another network."""
    return replace(unet2d.recipe(), name="dynunet", model=DynUnetConfig())
