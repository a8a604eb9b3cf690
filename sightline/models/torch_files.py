"""Reader of state dicts in .safetensors and in torch's pickles, as training scripts write them.

weight_files.py calls it. Nothing from a pickle is run: torch's weights_only, which may make an argparse.Namespace too.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sightline.errors import BadCheckpoint, BadData, first_of
from sightline.files.archive import Limits, zip_members
from sightline.files.tensors import read_tensors
from sightline.models.weights import Weights

PICKLES = (".pth", ".pt", ".tar", ".ckpt", ".bin")  # .tar: model_best.pth.tar
PREFIXES = ("module.", "_orig_mod.")  # left by DDP (and averaging) and by torch.compile
# Keys under which training scripts store state dicts. Averages come first: these scripts evaluate and publish them.
AVERAGES = ("model_ema", "state_dict_ema")
WRAPPERS = ("model", "state_dict", "model_state_dict")
# Files of DenseNets from before torchvision 0.3: norm.1 is norm1 today.
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")
ZIP_LIMITS = Limits(members=200_000, member_bytes=2**40, zip_ratio=1)
MAX_PICKLE_BYTES = 8 * 2**20  # ResNet-152 has 150 kB


def read_torch(path: Path, wanted: Collection[str]) -> Weights:
    """Return a file's tensors by plain names.

    `wanted` are names of the network: a file of Lightning holds them behind the name of an attribute.
    """
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    state, about = _unwrap(content, path)
    return _only_network(Weights(str(path), _plain_names(state, str(path), wanted), about), wanted)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(path)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: torch cannot map the file
        raise BadCheckpoint(f"{path} is not a complete safetensors file ({error}); fetch or write it again") from error


def _read_pickle(path: Path) -> Any:
    # CVE-2025-32434 and CVE-2026-24747: before 2.10 a file could bypass weights_only.
    if torch.__version__ < "2.10":  # a TorchVersion, which compares numerically
        raise BadCheckpoint(
            f"{path} is a pickle, which torch {torch.__version__} cannot read safely; "
            f"use torch 2.10 or newer, or convert the file to .safetensors"
        )
    # torchvision's and timm's scripts store their flags in one; it holds values and runs nothing.
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            with path.open("rb") as file:
                is_zip = file.read(4) == b"PK\x03\x04"  # written by torch 1.6 or later
            if is_zip:
                _check_zip(path)
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            # Read from memory: a false length in the file cannot ask for more than is there.
            return torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many types for a damaged or hostile pickle
            objects = _objects(path, str(error))
            found = f"it holds objects, which can run code: {first_of(objects)}" if objects else _one_line(error)
            raise BadCheckpoint(
                f"{path} cannot be loaded as plain weights ({found}); if you trust where it came from, "
                f"save only its state dict again with torch.save(model.state_dict(), ...) or as .safetensors"
            ) from error


def _objects(path: Path, told: str) -> list[str]:
    """Return the names of classes and functions in a pickle that are neither tensors nor plain values."""
    first = re.findall(r"GLOBAL ([\w.]+) (?:was not an allowed global|whose module \S+ is blocked)", told)
    if not first:
        return []
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # noqa: BLE001  # not a zip file, or damaged: any of many types
        return first


def _check_zip(path: Path) -> None:
    """Raise BadData for a compressed archive or a large pickle.

    torch stores its members uncompressed. A compressed member may expand a thousandfold, and unpickling the list of
    tensors takes sixty times its size in memory.
    """
    for member in zip_members(path, ZIP_LIMITS):
        if member.name.endswith("data.pkl") and member.size > MAX_PICKLE_BYTES:
            raise BadData(f"{member.name} has {member.size} bytes; the limit is {MAX_PICKLE_BYTES}")


def _unwrap(content: Any, path: Path) -> tuple[Mapping[str, Tensor], str]:
    """Return the state dict itself, without the dictionaries around it, and which one it is where there are several."""
    about = ""
    for _ in range(2):  # {"model": {"state_dict": ...}}
        held = [key for key in (*AVERAGES, *WRAPPERS) if isinstance(content, Mapping) and _is_dict(content.get(key))]
        if not held:
            break
        content = content[held[0]]
        if held[0] in AVERAGES:
            content = {key: value for key, value in content.items() if key != "n_averaged"}  # of torch's AveragedModel
            about = f"'{held[0]}', the averaged weights" + (f", not '{held[1]}'" if len(held) > 1 else "")
    if not _is_dict(content):
        raise BadCheckpoint(f"{path} holds {_kind(content)}; expected a state dict: names to tensors")
    others = [f"{key} ({_kind(value)})" for key, value in content.items() if not _is_entry(key, value)]
    if others:
        raise BadCheckpoint(
            f"{path} holds more than tensors: {first_of(others)}; expected a state dict, "
            f"alone or under the key {' or '.join(repr(key) for key in (*WRAPPERS, *AVERAGES))}"
        )
    return content, about


def _plain_names(state: Mapping[str, Tensor], path: str, wanted: Collection[str]) -> dict[str, Tensor]:
    plain: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name = key
        while name.startswith(PREFIXES):
            name = name.partition(".")[2]
        renamed = OLD_DENSENET.sub(r"\1\2.", name)
        name = renamed if renamed in wanted else name
        if name in plain:
            raise BadCheckpoint(f"{path} holds '{name}' twice, once as '{key}'; save one state dict only")
        plain[name] = tensor
    return plain


def _only_network(found: Weights, wanted: Collection[str]) -> Weights:
    """Take the tensors of the attribute that is the network, where none has a wanted name itself."""
    if any(name in wanted for name in found.tensors):
        return found
    inside: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.tensors.items():
        attribute, _, rest = name.partition(".")
        inside.setdefault(attribute, {})[rest] = tensor
    plain = {attribute: _plain_names(held, found.origin, wanted) for attribute, held in inside.items()}
    networks = [attribute for attribute, held in plain.items() if any(name in wanted for name in held)]
    if not networks:
        return found
    if len(networks) > 1 and "model" not in networks:
        raise BadCheckpoint(
            f"{found.origin} holds this network {len(networks)} times, as {first_of(networks)}; "
            f"save the state dict of one"
        )
    chosen = "model" if "model" in networks else networks[0]
    about = ", ".join(filter(None, (found.about, f"those of its attribute '{chosen}'")))
    left = tuple(name for name in found.tensors if name.partition(".")[0] != chosen)
    return replace(found, tensors=plain[chosen], about=about, left=left)


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0


def _is_entry(key: Any, value: Any) -> bool:
    if not isinstance(key, str) or not isinstance(value, Tensor):
        return False
    return value.layout == torch.strided and value.device.type == "cpu"  # neither sparse nor without values (meta)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.layout} tensor on {value.device.type}"
    return f"{'an empty' if isinstance(value, Mapping) and not value else 'a'} {type(value).__name__}"


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line and not line.startswith("Check the documentation")]
    told = lines[-1] if lines and lines[0].startswith("Weights only load failed") else (lines or [""])[0]
    return f"{type(error).__name__}: {told.partition('. ')[0][:200]}"  # the rest advises weights_only=False
