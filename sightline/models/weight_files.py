"""Reader of initial weights of any kind: run folders, files of torch, Keras and TensorFlow, and names to fetch.

Models call `load_weights`, or `read_weights` and then weights.py; nothing from a file is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from sightline.errors import BadCheckpoint
from sightline.files.checkpoint_folder import MANIFEST, damage_is_reported, find, verify
from sightline.files.tensors import read_tensors
from sightline.models.keras_weights import read_keras
from sightline.models.named_weights import fetch_named
from sightline.models.tf_checkpoint import index_of
from sightline.models.tf_weights import read_tensorflow
from sightline.models.torch_files import PICKLES, read_torch
from sightline.models.weights import Weights, copy_weights
from sightline.parts import LoadedWeights


def load_weights(model: nn.Module, source: str | Path, *, head: str) -> LoadedWeights:
    """Copy the tensors of `source`, as `read_weights` takes it, into `model`. See `copy_weights`."""
    return copy_weights(model, read_weights(source, model.state_dict()), head=head)


def read_weights(source: str | Path, expected: Mapping[str, Tensor]) -> Weights:
    """Read a run or checkpoint folder, a file, the prefix of a TensorFlow checkpoint, torchvision:NAME or timm:NAME.

    `expected` are the model's tensors: their names decide which part of a file is the network, and their shapes which
    values are read.
    """
    if fetched := fetch_named(str(source)):
        found = read_weights(fetched, expected)
        return replace(found, origin=f"{source} ({fetched})")
    path = Path(source)
    if (index := index_of(path)) is not None:
        return read_tensorflow(index, expected)
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise BadCheckpoint(f"weights {path} {'is not a file' if path.exists() else 'does not exist'}; check the path")
    if path.suffix == ".h5":
        return Weights(str(path), read_keras(path, expected))
    if path.suffix == ".safetensors" or path.suffix in PICKLES:
        return read_torch(path, expected.keys())
    raise BadCheckpoint(
        f"weights {path} end in '{path.suffix}'; expected .safetensors, {', '.join(PICKLES)} or .h5, a run folder, "
        f"the prefix of a TensorFlow checkpoint, torchvision:NAME or timm:NAME"
    )


def _read_folder(path: Path) -> Weights:
    """Return the weights of a run's best checkpoint, or of a checkpoint folder; the average if the run has one."""
    if not (path / MANIFEST).is_file() and not (path / "checkpoints").is_dir():
        prefixes = sorted(file.with_suffix("") for file in path.glob("*.index"))
        remedy = f"give the prefix of a TensorFlow checkpoint, e.g. {prefixes[-1]}" if prefixes else "check the path"
        raise BadCheckpoint(
            f"weights {path} is a folder, but neither of a run (no checkpoints/ in it) nor of a checkpoint "
            f"(no {MANIFEST}); {remedy}"
        )
    folder = find(path, "best")
    files = verify(folder)
    stem = "ema" if "ema.safetensors" in files else "model"
    with damage_is_reported(folder, f"{stem}.safetensors"):
        state = read_tensors(folder / f"{stem}.safetensors")
    which = "best checkpoint" if folder != path else "checkpoint"
    return Weights(str(folder), state, f"the {'averaged ' * (stem == 'ema')}weights of the {which}")
