"""The demo with a task of one's own, whose field is a flag."""

from dataclasses import dataclass, replace

from torch import nn

from sightline.config import Recipe
from sightline.parts import Batch, Loss
from sightline.recipes import demo_classification
from sightline.tasks.classification import Classification


@dataclass(frozen=True)
class Louder(Classification):
    """Cross entropy, times a factor."""

    factor: float = 2.0
    """What the loss is multiplied with."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * self.factor, loss.sums)


def recipe() -> Recipe:
    """Return the demo's recipe with this task."""
    return replace(demo_classification.recipe(), name="task", task=Louder())
