"""A recipe that takes a number from a file beside it."""

import sys
from dataclasses import replace
from pathlib import Path

from sightline.config import Recipe
from sightline.recipes import demo_classification

sys.path.insert(0, str(Path(__file__).parent))
from numbers_of_mine import WIDTH


def recipe() -> Recipe:
    """Return the demo's recipe with that width."""
    base = demo_classification.recipe()
    return replace(base, name="imports", model=replace(base.model, width=WIDTH))
