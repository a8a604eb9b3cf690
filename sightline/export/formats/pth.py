"""torch.save of {"state_dict": ..., "sightline": description}, which torch.load(weights_only=True) reads."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from sightline.export.served import Runs, Served
from sightline.export.weights import running, state_of

SUFFIX = ".pth"
RUNS = False
ABOUT = "weights for torch.load(weights_only=True)"


def check_installed() -> None:
    """Do nothing: torch is there."""


def write(served: Served, about: str, path: Path) -> None:
    """Write the weights under the network's own names."""
    packed = io.BytesIO()  # torch's own writer of files hides the errno of a full disk
    torch.save({"state_dict": state_of(served), "sightline": about}, packed)
    path.write_bytes(packed.getbuffer())


def load(path: Path, served: Served) -> Runs:
    """Return the network with the weights of the file."""
    return running(served, torch.load(path, map_location="cpu", weights_only=True)["state_dict"])
