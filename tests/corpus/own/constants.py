"""A recipe of one's own: numbers in constants above it.

sightline train constants.py --data DIR
"""

from dataclasses import replace

from sightline.config import Recipe
from sightline.recipes import demo_classification

LR = 0.05
EPOCHS = 3


def recipe() -> Recipe:
    """Return the demo's recipe with these numbers."""
    base = demo_classification.recipe()
    return replace(
        base, name="constants", optimizer=replace(base.optimizer, lr=LR), train=replace(base.train, epochs=EPOCHS)
    )
