"""safetensors: the weights, and the description in the metadata of its header."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from sightline.export.served import Runs, Served
from sightline.export.weights import running, state_of
from sightline.files.tensors import read_tensors

SUFFIX = ".safetensors"
RUNS = False
ABOUT = "weights as safetensors"


def check_installed() -> None:
    """Do nothing: safetensors is there."""


def write(served: Served, about: str, path: Path) -> None:
    """Write the weights under the network's own names."""
    path.write_bytes(save(state_of(served), {"sightline": about, "format": "pt"}))


def load(path: Path, served: Served) -> Runs:
    """Return the network with the weights of the file."""
    return running(served, read_tensors(path))
