"""Loader of initial weights, our own or foreign: strictly by name, without running code from the file.

Called after a model is built; train/checkpoint.py reads the checkpoints of a run.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sightline.errors import BadCheckpoint, BadData
from sightline.files.archive import Limits, zip_members
from sightline.files.tensors import read_tensors
from sightline.models.keras_weights import read_keras

PREFIXES = ("module.", "_orig_mod.")  # left by DDP (and averaging) and by torch.compile
WRAPPERS = ("model", "state_dict")  # keys under which training scripts store the state dict
ZIP_LIMITS = Limits(members=200_000, member_bytes=2**40, zip_ratio=1)
MAX_PICKLE_BYTES = 8 * 2**20  # ResNet-152 has 150 kB
SHOWN = 4  # keys that an error message names before it counts the rest


def load_weights(model: nn.Module, path: Path, *, head: str) -> str:
    """Copy the file's tensors into `model`; return a line that says what was loaded. See `copy_weights`."""
    return copy_weights(model, read_weights(path, model.state_dict()), path, head=head)


def copy_weights(
    model: nn.Module,
    state: Mapping[str, Tensor],
    path: Path,
    *,
    head: str | tuple[str, ...] = (),
    unused: tuple[str, ...] = (),
) -> str:
    """Copy the tensors read from `path` into `model`; return a line that says what was loaded.

    Names and shapes must match. The exception is `head`: if a shape differs in a key that starts with it, the whole
    head keeps its initialisation. Keys that start with `unused` belong to layers that the model does not have.
    """
    expected = model.state_dict()
    given = len(state)
    state = {key: tensor for key, tensor in state.items() if not key.startswith(unused)}
    _check_names(state, expected, path)

    differing = [key for key in state if not _fits(state[key], expected[key])]
    body = [key for key in differing if not key.startswith(head)]
    if body:
        shapes = [f"{key} {_form(state[key])} in the file, {_form(expected[key])} in the model" for key in body]
        raise BadCheckpoint(
            f"{path} does not fit the model: {_first(shapes)}; "
            f"set the depth, width and stem of the model to the file's, or choose other weights"
        )
    kept = {key: tensor for key, tensor in state.items() if not (differing and key.startswith(head))}
    model.load_state_dict(kept, strict=False)  # _check_names has compared the names
    summary = f"loaded {'all ' if len(kept) == given else ''}{len(kept)} tensors of {path}"
    if differing:
        shapes = [f"{key} is {_form(state[key])} there, {_form(expected[key])} here" for key in differing]
        summary += f"; the head is not loaded ({_first(shapes)})"
    return summary + (f"; {given - len(state)} of {', '.join(unused)} are not used" if given > len(state) else "")


def read_weights(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the file's tensors by name; tensors of a Keras file that do not fit `expected` have no values."""
    path = Path(path)
    if not path.is_file():
        raise BadCheckpoint(f"weights {path} {'is not a file' if path.exists() else 'does not exist'}; check the path")
    if path.suffix == ".safetensors":
        return _plain_names(_unwrap(_read_safetensors(path), path), path)
    if path.suffix in (".pth", ".pt"):
        return _plain_names(_unwrap(_read_pickle(path), path), path)
    if path.suffix == ".h5":
        return read_keras(path, expected)
    raise BadCheckpoint(f"weights {path} end in '{path.suffix}'; expected .safetensors, .pth, .pt or .h5")


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
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"  # written by torch 1.6 or later
        if is_zip:
            _check_zip(path)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # Read from memory: a false length in the file cannot ask for more than is there.
        return torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types for a damaged or hostile pickle
        raise BadCheckpoint(
            f"{path} cannot be loaded as plain weights ({_one_line(error)}); if you trust where it came from, "
            f"save only its state dict again with torch.save(model.state_dict(), ...) or as .safetensors"
        ) from error


def _check_zip(path: Path) -> None:
    """Raise BadData for a compressed archive or a large pickle.

    torch stores its members uncompressed. A compressed member may expand a thousandfold, and unpickling the list of
    tensors takes sixty times its size in memory.
    """
    for member in zip_members(path, ZIP_LIMITS):
        if member.name.endswith("data.pkl") and member.size > MAX_PICKLE_BYTES:
            raise BadData(f"{member.name} has {member.size} bytes; the limit is {MAX_PICKLE_BYTES}")


def _unwrap(content: Any, path: Path) -> Mapping[str, Tensor]:
    """Return the state dict itself, without the dictionaries that training scripts wrap around it."""
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not content:
        raise BadCheckpoint(f"{path} holds {_kind(content)}; expected a state dict: names to tensors")
    others = [f"{key} ({_kind(value)})" for key, value in content.items() if not _is_entry(key, value)]
    if others:
        raise BadCheckpoint(
            f"{path} holds more than tensors: {_first(others)}; expected a state dict, "
            f"alone or under the key {' or '.join(repr(w) for w in WRAPPERS)}"
        )
    return content


def _plain_names(state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    plain: dict[str, Tensor] = {}
    for key, tensor in state.items():
        name = key
        while name.startswith(PREFIXES):
            name = name.partition(".")[2]
        if name in plain:
            raise BadCheckpoint(f"{path} holds '{name}' twice, once as '{key}'; save one state dict only")
        plain[name] = tensor
    return plain


def _check_names(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    # torch ignores this counter too: files older than torch 0.4.1 lack it, and nothing here reads it.
    missing = [key for key in expected if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in expected]
    if not missing and not unexpected:
        return
    found = [f"{what}: {_first(keys)}" for what, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
    raise BadCheckpoint(
        f"{path} does not match this model ({len(state)} tensors, {len(expected)} expected; {'; '.join(found)}); "
        f"choose the model the file was made with, or rename its keys"
    )


def _fits(found: Tensor, wanted: Tensor) -> bool:
    # Any float type is converted; integers in place of floats mean a quantised file.
    return found.shape == wanted.shape and found.is_floating_point() == wanted.is_floating_point()


def _form(tensor: Tensor) -> str:
    kind = "" if tensor.is_floating_point() else f" {str(tensor.dtype).removeprefix('torch.')}"
    return "x".join(map(str, tensor.shape)) + kind if tensor.dim() else "scalar" + kind


def _is_entry(key: Any, value: Any) -> bool:
    if not isinstance(key, str) or not isinstance(value, Tensor):
        return False
    return value.layout == torch.strided and value.device.type == "cpu"  # neither sparse nor without values (meta)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.layout} tensor on {value.device.type}"
    return f"{'an empty' if isinstance(value, Mapping) and not value else 'a'} {type(value).__name__}"


def _first(items: list[str]) -> str:
    rest = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].partition('. ')[0][:200]}"  # the rest advises weights_only=False
