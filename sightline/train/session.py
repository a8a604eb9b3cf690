"""What is trained, where, and who is told: made once per start, and handed on whole."""

from __future__ import annotations

from dataclasses import dataclass

from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.recipe.recipe import Recipe, Run
from sightline.runs.log import RunLog


@dataclass(frozen=True)
class Session:
    """One start of a training on one rank. The recipe becomes final while the run is opened."""

    recipe: Recipe
    run: Run
    device: Device
    world: World
    log: RunLog
