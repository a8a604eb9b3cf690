"""Reader of Keras ResNet weights: HDF5 files of Keras 2 and Keras 3, converted to our names and layouts.

weight_files.py calls it; tf_weights.py uses its names. Needs h5py: `pip install sightline[keras]`.
"""

from __future__ import annotations

import mmap
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from sightline.errors import BadCheckpoint, UsageError, first_of

KINDS = {  # Keras's name of an array -> torch's
    "kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
NORM_ORDER = ("gamma", "beta", "moving_mean", "moving_variance")  # Keras 3 stores numbers in place of these names
OTHER_ORDER = ("kernel", "bias")
IN_BLOCK = re.compile(r"conv([2-5])_block([1-9]\d{0,2})_(?:(preact)|([0-3]))_(conv|bn)", re.ASCII)
# As Keras before 2.2.5 and TensorFlow's Keras script call them: res2a_branch2a, bn2a_branch2a, res2a_branch1.
IN_OLD_BLOCK = re.compile(r"(res|bn)([2-5])([a-z])_branch(?:(1)|2([abc]))", re.ASCII)
OUTSIDE = {"conv1_conv": "conv1", "conv1_bn": "bn1", "post_bn": "bn_out", "conv1": "conv1", "bn_conv1": "bn1"}
HEAP = b"GCOL\x01\0\0\0"  # signature of a string heap
SAVE_AGAIN = "save the weights of the network alone, with Keras's model.save_weights()"
MOST_STRINGS = 100_000  # and heaps of them; ResNet152V2 has some hundred in ten heaps
MOST_OBJECTS = 10_000  # folders and arrays of a file, 15 kB each; ResNet152 has 932 arrays, with an optimizer thrice
MOST_FOLDERS = 64  # in each other; a model within a model adds two
MOST_MEMORY = 2**29  # bytes for the folders and names of a file

Found = dict[tuple[str, str], Any]  # (layer, kind) -> an h5py dataset, not yet read


def read_keras(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the file's arrays under our names.

    An array whose name or shape is not in `expected` becomes a meta tensor without values. So the file cannot make us
    read more than the model holds, whatever sizes it declares.
    """
    try:
        import h5py
    except ImportError as error:
        raise UsageError(
            f"{path} is a Keras file, which needs the package h5py: `pip install sightline[keras]`"
        ) from error
    try:
        _check_heaps(path)
        with h5py.File(path, "r") as file:
            with _bounded_memory():
                found = _datasets(file, h5py, path)
            return _convert(found, expected, path)
    except BadCheckpoint:
        raise
    except Exception as error:  # h5py raises many types for a damaged file
        text = (str(error).strip().splitlines() or [""])[0][:200]
        raise BadCheckpoint(
            f"{path} is not a complete HDF5 file ({type(error).__name__}: {text}); fetch or write it again"
        ) from error


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Refuse this process more than MOST_MEMORY beyond what it has, where the kernel does so: HDF5 allocates whatever
    length a file claims for a text, up to 4 GiB, before it looks for the text. Reserved addresses do not count."""
    used, before = getattr(psutil.Process().memory_info(), "data", 0), resource.getrlimit(resource.RLIMIT_DATA)
    most = used + MOST_MEMORY
    if used and (before[0] == resource.RLIM_INFINITY or before[0] > most):
        resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _check_heaps(path: Path) -> None:
    """Raise BadCheckpoint if a heap of strings, which holds layer names, is damaged: HDF5 walks it for ever."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        heap, end, seen = data.find(HEAP), 0, 0
        while heap >= 0:
            strings = _strings(data, heap)
            if strings < 0 or heap < end:
                raise BadCheckpoint(
                    f"{path} is damaged: the strings at byte {heap} do not fill their heap; fetch or write it again"
                )
            end, seen = heap + _number(data, heap + 8, 8), seen + 1 + strings
            if seen > MOST_STRINGS:
                raise BadCheckpoint(f"{path} holds more than {MOST_STRINGS} strings; {SAVE_AGAIN}")
            heap = data.find(HEAP, heap + len(HEAP))


def _strings(data: mmap.mmap, heap: int) -> int:
    """Return the number of strings of a heap; -1 if they do not fill it."""
    end, place, count = heap + _number(data, heap + 8, 8), heap + 16, 0
    if end > len(data):
        return -1
    while place + 16 <= end:
        number, length = _number(data, place, 2), _number(data, place + 8, 8)
        step = 16 + (length + 7) // 8 * 8 if number else length  # 0: free space, length with header
        if step < 16 or place + step > end:
            return -1
        count += number > 0
        place += step
    return count


def _number(data: mmap.mmap, place: int, size: int) -> int:
    return int.from_bytes(data[place : place + size], "little")


def _datasets(file: Any, h5py: Any, path: Path) -> Found:
    """Return every array of a layer by (layer, kind)."""
    items: dict[str, Any] = {}  # path within the file -> dataset
    seen = 0

    def visit(place: str, item: Any) -> bool | None:  # visititems follows no external link and visits once
        nonlocal seen
        seen += 1
        if place.count("/") > MOST_FOLDERS:  # HDF5 walks to each from the root: 3,000 took over 30 s
            raise BadCheckpoint(f"{path} holds more than {MOST_FOLDERS} folders in each other; {SAVE_AGAIN}")
        if isinstance(item, h5py.Dataset) and not place.startswith(("optimizer/", "optimizer_weights/")):
            items[place] = item
        return seen > MOST_OBJECTS or None  # anything but None ends the visit

    if file.visititems(visit):
        raise BadCheckpoint(
            f"{path} holds more than {MOST_OBJECTS} folders and arrays, no ResNet of keras.applications has so many; "
            f"{SAVE_AGAIN}"
        )
    if not items:
        raise BadCheckpoint(f"{path} holds no layer weights; write it with Keras's model.save_weights()")
    found: Found = {}
    for place, item in items.items():
        key = _key_of_keras3(place, items, path) if "/vars/" in place else _key_of_keras2(place)
        if key in found:
            raise BadCheckpoint(f"{path} holds {key[1]} of layer '{key[0]}' twice; save one model only")
        found[key] = item
    return found


def _key_of_keras2(place: str) -> tuple[str, str]:
    """Split [model_weights/]conv1_conv/conv1_conv/kernel:0; a nested model adds more folders in front."""
    layer, _, name = place.rpartition("/")
    return layer.rpartition("/")[2], name.removesuffix(":0")


def _key_of_keras3(place: str, items: Mapping[str, Any], path: Path) -> tuple[str, str]:
    """Split layers/conv2d_7/vars/0, numbered per class; the layer's own name is an attribute of `vars`."""
    group, _, number = place.rpartition("/")
    layer = items[place].parent.attrs.get("name")
    if not isinstance(layer, str):
        # Order alone cannot tell a shortcut from the last layer of its block: their shapes are equal.
        raise BadCheckpoint(
            f"{path} does not name its layers (at {place}), like files of older Keras versions; "
            f"load it there and save it with a current Keras 3, or as plain .h5 with Keras 2"
        )
    first = items.get(f"{group}/0")
    order = NORM_ORDER if first is not None and len(_shape(first)) == 1 else OTHER_ORDER
    known = [str(index) for index in range(len(order))]
    return layer, order[known.index(number)] if number in known else number


def _convert(found: Found, expected: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    names = our_names({key: len(_shape(item)) for key, item in found.items()}, path)
    return {
        name: _tensor(found[key], key[1], expected.get(name), f"{path}: {key[1]} of layer '{key[0]}'")
        for key, name in names.items()
    }


def our_names(dimensions: Mapping[tuple[str, str], int], path: Path) -> dict[tuple[str, str], str]:
    """Return our name for each (layer, kind) of a Keras ResNet, given the number of dimensions of its array."""
    heads = {layer for (layer, kind), count in dimensions.items() if kind == "kernel" and count == 2}
    if len(heads) != 1:
        raise BadCheckpoint(
            f"{path} has {len(heads)} dense layers ({first_of(sorted(heads)) or 'no top'}); expected one, the head; "
            f"use a file with its top: a head for another number of classes is not loaded and starts at random"
        )
    is_pre_activated = any(layer.endswith("_preact_bn") for layer, _ in dimensions)
    names: dict[tuple[str, str], str] = {}
    for layer, kind in dimensions:
        ours = "fc" if layer in heads else _our_layer(layer, is_pre_activated)
        if ours is None or kind not in KINDS:
            raise BadCheckpoint(
                f"{path} holds {kind} of layer '{layer}', which no ResNet of keras.applications has; "
                f"expected layers such as conv2_block1_1_conv, and one dense layer"
            )
        names[layer, kind] = f"{ours}.{KINDS[kind]}"
    return names


def _our_layer(layer: str, is_pre_activated: bool) -> str | None:
    """Return our name: conv3_block2_1_bn (once bn3b_branch2a) is layer2.1.bn1, or .bn2 if a batch-norm precedes the
    first convolution."""
    if old := IN_OLD_BLOCK.fullmatch(layer):
        kind, stage, block, projects, branch = old.groups()
        place = f"layer{int(stage) - 1}.{ord(block) - ord('a')}"
        if projects:
            return f"{place}.downsample.{0 if kind == 'res' else 1}"
        return f"{place}.{'conv' if kind == 'res' else 'bn'}{ord(branch) - ord('a') + 1}"
    match = IN_BLOCK.fullmatch(layer)
    if match is None:
        return OUTSIDE.get(layer)
    stage, block, preact, number, kind = match.groups()
    place = f"layer{int(stage) - 1}.{int(block) - 1}"
    if preact:
        return f"{place}.bn1" if kind == "bn" else None
    if number == "0":
        return f"{place}.downsample.{0 if kind == 'conv' else 1}"
    return f"{place}.{kind}{int(number) + (is_pre_activated and kind == 'bn')}"


def _tensor(item: Any, kind: str, wanted: Tensor | None, what: str) -> Tensor:
    if item.dtype.kind != "f":
        raise BadCheckpoint(f"{what} has type {item.dtype}; expected floating-point numbers")
    if item.chunks is not None or item.is_virtual or item.external:
        # Compressed chunks may expand to any size; virtual and external arrays read files that the user did not name.
        raise BadCheckpoint(
            f"{what} is compressed, chunked or in another file; save it again with Keras, which writes it whole"
        )
    shape = _shape(item)
    order = {4: (3, 2, 0, 1), 2: (1, 0)}.get(len(shape), tuple(range(len(shape)))) if kind == "kernel" else None
    turned = shape if order is None else tuple(shape[axis] for axis in order)
    if wanted is None or turned != tuple(wanted.shape):
        return torch.empty(turned, device="meta")  # copy_weights raises, or skips the head
    values = torch.from_numpy(np.asarray(item[()], dtype=np.float32))
    return values if order is None else values.permute(order).contiguous()


def _shape(item: Any) -> tuple[int, ...]:
    return tuple(item.shape or ())
