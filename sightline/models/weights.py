"""Initial weights, our own or foreign, copied into a model strictly by name and shape.

Models call it after they are built, with what weight_files.py has read; engine/checkpoint.py resumes runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sightline.errors import BadCheckpoint, first_of
from sightline.parts import LoadedWeights, RowState, TensorRow

# Counters that other programs, or old files, do not keep: torch's of batches, and that of DropBlock's ramp.
COUNTERS = ("num_batches_tracked", "drop.steps")


@dataclass(frozen=True)
class Weights:
    """Tensors of a file, under our names and in our layout. One that does not fit the model may have no values."""

    origin: str  # for people
    tensors: Mapping[str, Tensor]
    about: str = ""  # for people: what was taken of a file that holds more
    names: Mapping[str, str] = field(default_factory=dict)  # our name -> name in the file, if not ours
    layouts: Mapping[str, str] = field(default_factory=dict)  # our name -> shape in the file, if turned since
    left: tuple[str, ...] = ()  # names in the file that belong to something else
    padding: str = ""  # of the network that the weights were made with, where the file tells


def copy_weights(
    model: nn.Module,
    weights: Weights,
    *,
    head: str | tuple[str, ...] = (),
    unused: tuple[str, ...] = (),
    classes: Callable[[Mapping[str, Tensor]], int] | None = None,
) -> LoadedWeights:
    """Copy tensors into `model`. Names and shapes must match, and all values must be finite.

    The exception is `head`: if a shape differs in a key that starts with it, the whole head keeps its initialisation;
    `classes` counts the classes of a head. Keys that start with `unused` belong to layers that the model does not have.
    """
    expected, path = model.state_dict(), weights.origin
    state = {key: tensor for key, tensor in weights.tensors.items() if not key.startswith(unused)}
    _check_names(state, expected, path)
    differing = [key for key in state if not _fits(state[key], expected[key])]
    body = [key for key in differing if not key.startswith(head)]
    if body:
        shapes = [f"{key} {_form(state[key])} in the file, {_form(expected[key])} in the model" for key in body]
        raise BadCheckpoint(
            f"{path} does not fit the model: {first_of(shapes)}; "
            f"set the depth, width and stem of the model to the file's, or choose other weights"
        )
    kept = {key: tensor for key, tensor in state.items() if not (differing and key.startswith(head))}
    _check_finite(kept, path)
    with torch.no_grad():
        for key, tensor in kept.items():
            expected[key].copy_(tensor)
    given = len(weights.tensors) + len(weights.left)
    dropped = [key for key in weights.tensors if key not in state]
    about = f": {weights.about}" if weights.about else ""
    notes = [f"loaded {'all ' if len(kept) == given else ''}{len(kept)} tensors of {path}{about}"]
    if differing:
        notes.append(_head_note(state, expected, differing, classes))
    if dropped:
        layers = [prefix for prefix in unused if any(key.startswith(prefix) for key in dropped)]
        notes.append(f"{len(dropped)} of {', '.join(layers)} are not used")
    notes += [f"not used: {first_of(list(weights.left))}"] if weights.left else []
    return LoadedWeights("; ".join(notes), _rows(weights, expected, kept))


def _check_names(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: str) -> None:
    missing = [key for key in expected if key not in state and not key.endswith(COUNTERS)]
    unexpected = [key for key in state if key not in expected]
    if not missing and not unexpected:
        return
    found = [f"{what}: {first_of(keys)}" for what, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
    raise BadCheckpoint(
        f"{path} does not match this model ({len(state)} tensors, {len(expected)} expected; {'; '.join(found)}); "
        f"choose the model the file was made with, or rename its keys"
    )


def _check_finite(state: Mapping[str, Tensor], path: str) -> None:
    as_loaded = {key: tensor.float() for key, tensor in state.items() if tensor.is_floating_point()}
    bad = [key for key, tensor in as_loaded.items() if not tensor.isfinite().all()]
    if bad:
        shares = [f"{key} ({int((~as_loaded[key].isfinite()).sum())} of {state[key].numel()})" for key in bad]
        raise BadCheckpoint(
            f"{path} holds values that are not finite: {first_of(shares)}; its training had diverged, "
            f"choose an earlier checkpoint"
        )


def _head_note(
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    differing: list[str],
    classes: Callable[[Mapping[str, Tensor]], int] | None,
) -> str:
    counts = [classes(tensors) if classes else len(tensors[differing[0]]) for tensors in (state, expected)]
    if counts[0] != counts[1]:
        return f"the head starts at random: {counts[0]} classes there, {counts[1]} here"
    shapes = [f"{key} is {_form(state[key])} there, {_form(expected[key])} here" for key in differing]
    return f"the head starts at random: {first_of(shapes)}"


def _rows(weights: Weights, expected: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> tuple[TensorRow, ...]:
    rows = []
    for key, tensor in expected.items():
        found, form = weights.tensors.get(key), _form(tensor)
        if found is None:
            rows.append(TensorRow(key, "kept", "", form))
            continue
        there = f"{weights.layouts.get(key, _form(found))} {weights.names.get(key, '')}".rstrip()
        is_same = key not in weights.layouts and found.dtype == tensor.dtype
        state: RowState = "at random" if key not in kept else "loaded" if is_same else "converted"
        rows.append(TensorRow(key, state, there, form))
    others = {key: _form(tensor) for key, tensor in weights.tensors.items() if key not in expected}
    others |= dict.fromkeys(weights.left, "")
    return (*rows, *(TensorRow(key, "unused", form, "") for key, form in others.items()))


def _fits(found: Tensor, wanted: Tensor) -> bool:
    # Any float type is converted; integers in place of floats mean a quantised file.
    return found.shape == wanted.shape and found.is_floating_point() == wanted.is_floating_point()


def _form(tensor: Tensor) -> str:
    kind = "" if tensor.dtype == torch.float32 else f" {str(tensor.dtype).removeprefix('torch.')}"
    return "x".join(map(str, tensor.shape)) + kind if tensor.dim() else "scalar" + kind
