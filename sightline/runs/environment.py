"""Everything a result depends on besides its recipe: versions, device, threads, host, command."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from sightline import __version__, plugins
from sightline.hardware.devices import Device

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "safetensors")


@cache  # importlib reads and parses a file for each
def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def environment(device: Device, ranks: int) -> dict[str, Any]:
    """Return plain values, as environment.json and checkpoints hold them."""
    used = plugins.loaded()
    return {
        "sightline": __version__,
        "python": platform.python_version(),
        "packages": dict(_versions()),
        **({"plugins": used} if used else {}),
        "device": device.name(),
        "device_kind": device.kind,
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "command": sys.argv,
    }
