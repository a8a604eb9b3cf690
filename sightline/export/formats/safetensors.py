"""safetensors: the weights, and the description in the metadata of its header."""

from __future__ import annotations

import json
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


def about(path: Path) -> str:
    """Return the description in a file; "" if it has none."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header.get("__metadata__", {}).get("sightline", "")
