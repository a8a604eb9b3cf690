"""What a process does first: find its place among the ranks and its device, and give `auto` values their meaning."""

from __future__ import annotations

from dataclasses import replace

import torch

from sightline.config import Recipe, Run
from sightline.hardware import devices, world
from sightline.hardware.devices import Device
from sightline.hardware.world import World


def set_up(recipe: Recipe, run: Run) -> tuple[World, Device, Recipe]:
    """This process's place and device, and the recipe with its precision resolved."""
    here = world.detect()
    devices.set_deterministic(recipe.train.deterministic)  # before anything initialises the device
    device = devices.select(run.device, here.local_rank)
    device.activate()
    if run.threads:
        torch.set_num_threads(run.threads)
    precision = device.resolve_precision(recipe.train.precision)
    return here, device, replace(recipe, train=replace(recipe.train, precision=precision))
