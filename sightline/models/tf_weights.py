"""Classifiers and detectors in TensorFlow checkpoints, converted to our names and layouts.

weight_files.py and ssd.py call it; tf_checkpoint.py reads the files. Names of three scripts are known: the estimator's
ResNets and ResNeXts number their layers, the Keras ResNet names them, the detector does both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sightline.errors import BadCheckpoint, first_of
from sightline.files.protobuf import LENGTH, WireReader
from sightline.models.keras_weights import IN_OLD_BLOCK, KINDS, NORM_ORDER, our_names
from sightline.models.tf_checkpoint import AGAIN, TensorBundle
from sightline.models.weights import Weights

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # of tf.train.Checkpoint: which object each tensor belongs to
IN_BLOCK = re.compile(r"layer(\d+)\.(\d+)\.")
CONVS, NORMS = ("downsample.0", "conv1", "conv2", "conv3"), ("downsample.1", "bn1", "bn2", "bn3")  # as made in a block
# A layer of the estimator's network; its optimizer's tensors have one more part in their names.
COUNTED = re.compile(
    r"(?:(?:conv2d|batch_normalization|dense)(?:_\d+)?/(?:" + "|".join(KINDS) + r")|Variable(?:_\d+)?)"
)
HEIGHT_WIDTH_IN_OUT = (3, 2, 0, 1)  # to out, in, height, width


def read_tensorflow(index: Path, expected: Mapping[str, Tensor]) -> Weights:
    """Read a ResNet or ResNeXt of TensorFlow's estimator or Keras script. `expected` are the tensors of our network.

    A tensor whose name or shape is not in `expected` has no values, so a file cannot make us read more than that.
    """
    bundle = TensorBundle(index)
    if GRAPH in bundle.entries:
        names, padding = _named(bundle)
    else:
        names, padding = _counted(bundle, expected), "same"
    state = {ours: _tensor(bundle, theirs, expected.get(ours)) for theirs, ours in names.items()}
    return Weights(str(index), state, names=_swapped(names), layouts=_layouts(bundle, names), padding=padding)


def read_tensorflow_ssd(index: Path, expected: Mapping[str, Tensor], anchors: Sequence[int]) -> Weights:
    """Read TensorFlow's detector, or the trunk alone from its classifier. `expected` are the tensors of our detector
    and those of its trunk, `anchors` the boxes per cell of every level."""
    bundle = TensorBundle(index)
    trunk = {key: tensor for key, tensor in expected.items() if f"trunk.{key}" in expected}
    scope = "resnet34/" if "resnet34/conv2d/kernel" in bundle.entries else ""
    is_whole = "ssd/block7-conv1x1/kernel" in bundle.entries
    names = {theirs: f"{'trunk.' * is_whole}{ours}" for theirs, ours in _numbered(trunk, scope).items()}
    extras = range(len(anchors) - 1)
    if is_whole:
        names |= {
            f"ssd/block{7 + level}-conv{side}x{side}/{kind}": f"extras.{level}.conv{place}.{KINDS[kind]}"
            for level in extras
            for place, side in ((1, 1), (2, 3))
            for kind in ("kernel", "bias")
        }
    heads = {
        f"heads.{level}.{KINDS[kind]}": (
            f"ssd/class_net/class-{3 + level}/{kind}",
            f"ssd/box_net/box-{3 + level}/{kind}",
        )
        for level in range(len(anchors) * is_whole)
        for kind in ("kernel", "bias")
    }
    _refuse_missing(bundle, [*names, *(each for pair in heads.values() for each in pair)])
    state = {ours: _tensor(bundle, theirs, expected.get(ours)) for theirs, ours in names.items()}
    for ours, pair in heads.items():
        state[ours] = _head(bundle, pair, expected[ours], anchors[int(ours.split(".")[1])])
    told = _swapped(names) | {ours: " and ".join(pair) for ours, pair in heads.items()}
    shapes = _layouts(bundle, names | {scores: ours for ours, (scores, _) in heads.items()})
    used = {*names, *(each for pair in heads.values() for each in pair)}
    left = tuple(name for name in bundle.entries if name.startswith("ssd/") and name.endswith(tuple(KINDS)))
    left = tuple(name for name in left if name not in used)
    return Weights(str(index), state, names=told, layouts=shapes, left=left, padding="same")


def _refuse_missing(bundle: TensorBundle, names: Sequence[str]) -> None:
    if missing := [name for name in names if name not in bundle.entries]:
        raise BadCheckpoint(
            f"{bundle.index} lacks {len(missing)} of the {len(names)} tensors of this "
            f"{'detector' if any(name.startswith('ssd/') for name in names) else 'trunk'}, {missing[0]} first "
            f"(it holds {first_of(sorted(bundle.entries))}); give a checkpoint of TensorFlow's ResNet-34, "
            f"or set model.depth to the checkpoint's"
        )


def _head(bundle: TensorBundle, pair: tuple[str, str], wanted: Tensor, anchors: int) -> Tensor:
    """Join the convolutions of scores and of offsets: channels are (anchor, class) and (anchor, coordinate) there, and
    (anchor, class and coordinate) here."""
    scores, offsets = (bundle.entries[name].shape for name in pair)
    if len(scores) not in (1, 4) or scores[:-1] != offsets[:-1]:
        return torch.empty(scores, device="meta")
    joined = (*scores[:-1], scores[-1] + offsets[-1])
    turned = tuple(joined[axis] for axis in _order(len(joined)))
    if turned != tuple(wanted.shape) or scores[-1] % anchors or offsets[-1] % anchors:
        return torch.empty(turned, device="meta")
    parts = [_turned(bundle.read(name)) for name in pair]
    return torch.cat([part.reshape(anchors, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _counted(bundle: TensorBundle, expected: Mapping[str, Tensor]) -> dict[str, str]:
    """Return our names by those of the estimator; other layers of its network keep theirs, so that they are noticed."""
    scope = "resnet_model/" if "resnet_model/conv2d/kernel" in bundle.entries else ""
    names = _numbered(expected, scope)
    names |= {f"{scope}dense/kernel": "fc.weight", f"{scope}dense/bias": "fc.bias"}
    found = {name: ours for name, ours in names.items() if name in bundle.entries}
    rest = [name for name in bundle.entries if name.startswith(scope) and COUNTED.fullmatch(name[len(scope) :])]
    if not found:
        raise BadCheckpoint(
            f"{bundle.index} holds no network of TensorFlow's ResNet scripts, but {len(bundle.entries)} tensors: "
            f"{first_of(sorted(bundle.entries))}; expected names such as resnet_model/conv2d/kernel"
        )
    return {name: name for name in rest} | found


def _numbered(expected: Mapping[str, Tensor], scope: str) -> dict[str, str]:
    """Return our names by TensorFlow's, which numbers layers of a kind in the order in which it makes them.

    The projection of a block comes first. A grouped convolution is not a layer there but a variable without a name.
    """
    blocks = sorted({tuple(map(int, match.groups())) for key in expected if (match := IN_BLOCK.match(key))})
    places = [f"layer{stage}.{block}." for stage, block in blocks]
    convs = ["conv1", *(f"{place}{conv}" for place in places for conv in CONVS if f"{place}{conv}.weight" in expected)]
    norms = ["bn1", *(f"{place}{norm}" for place in places for norm in NORMS), "bn_out"]
    grouped = [conv for conv in convs if conv.endswith(".conv2") and _is_grouped(expected, conv)]
    names = {f"{scope}Variable{_n(number)}": f"{conv}.weight" for number, conv in enumerate(grouped)}
    plain = [conv for conv in convs if conv not in grouped]
    names |= {f"{scope}conv2d{_n(number)}/kernel": f"{conv}.weight" for number, conv in enumerate(plain)}
    for number, norm in enumerate(norm for norm in norms if f"{norm}.running_mean" in expected):
        for kind in NORM_ORDER:
            names[f"{scope}batch_normalization{_n(number)}/{kind}"] = f"{norm}.{KINDS[kind]}"
    return names


def _is_grouped(expected: Mapping[str, Tensor], conv2: str) -> bool:
    return expected[f"{conv2}.weight"].shape[1] != expected[f"{conv2.removesuffix('2')}1.weight"].shape[0]


def _n(number: int) -> str:
    return f"_{number}" if number else ""


def _named(bundle: TensorBundle) -> tuple[dict[str, str], str]:
    """Return our names by the keys of a Keras model in tf.train.Checkpoint, and the padding it was made with.

    Keys count the model's layers in an order of their own; the object graph holds the names of the variables too.
    """
    keys: dict[tuple[str, str], str] = {}
    for full_name, key in ObjectGraph(bundle.index, bundle.read_text(GRAPH)).variables():
        layer, _, kind = full_name.rpartition("/")
        if kind in KINDS and layer and key in bundle.entries:
            keys[layer.rpartition("/")[2], kind] = key
    ours = our_names({name: len(bundle.entries[key].shape) for name, key in keys.items()}, bundle.index)
    is_script = any(IN_OLD_BLOCK.fullmatch(layer) for layer, _ in keys)
    return {key: ours[name] for name, key in keys.items()}, "same_but_stem" if is_script else ""


class ObjectGraph(WireReader):
    """A TrackableObjectGraph: nodes (1) with attributes (2), each with a full name (2) and its tensor's key (3)."""

    def __init__(self, index: Path, data: bytes):
        super().__init__(data)
        self.index, self.data = index, data

    def damaged(self, what: str, at: int) -> BadCheckpoint:
        return BadCheckpoint(f"{self.index}: the object graph is damaged: {what} at byte {at}; {AGAIN}")

    def variables(self) -> Iterable[tuple[str, str]]:
        """Yield (full name, key) of all variables."""
        for node in self._parts(0, len(self.data), 1):
            for attribute in self._parts(*node, 2):
                texts = {n: self.data[at:end] for n, w, at, end in self.fields(*attribute) if w == LENGTH}
                yield texts.get(2, b"").decode("utf-8", "replace"), texts.get(3, b"").decode("utf-8", "replace")

    def _parts(self, at: int, stop: int, number: int) -> list[tuple[int, int]]:
        return [(begin, end) for n, wire, begin, end in self.fields(at, stop) if (n, wire) == (number, LENGTH)]


def _tensor(bundle: TensorBundle, name: str, wanted: Tensor | None) -> Tensor:
    shape = bundle.entries[name].shape
    order = _order(len(shape))
    turned = tuple(shape[axis] for axis in order)
    if wanted is None or turned != tuple(wanted.shape):
        return torch.empty(turned, device="meta")
    return bundle.read(name).permute(order)


def _turned(values: Tensor) -> Tensor:
    return values.permute(_order(values.dim()))


def _order(dimensions: int) -> tuple[int, ...]:
    return {4: HEIGHT_WIDTH_IN_OUT, 2: (1, 0)}.get(dimensions, tuple(range(dimensions)))


def _swapped(names: Mapping[str, str]) -> dict[str, str]:
    return {ours: theirs for theirs, ours in names.items()}


def _layouts(bundle: TensorBundle, names: Mapping[str, str]) -> dict[str, str]:
    """Return the shapes there, by our names, of tensors that have more than one axis."""
    shapes = {ours: bundle.entries[theirs].shape for theirs, ours in names.items()}
    return {ours: "x".join(map(str, shape)) for ours, shape in shapes.items() if len(shape) > 1}
