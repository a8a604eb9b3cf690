"""Keras's ResNets and weight files, against Keras itself.

Its full weight files are too large to keep, so they are made here: keras/applications.json.gz holds the name and shape
of every array of the six models as Keras gave them and the logits Keras computed, and the numbers in the arrays come
from a formula of name and index (keras_fixtures.py) that both sides compute. That files are laid out as written here
is shown by two small ones that Keras wrote: keras/keras2.h5 and keras/keras3.weights.h5.
"""

import dataclasses
import functools
import gzip
import importlib.util
import json
import os
import random
import struct
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import warm
from torch import nn
from torch.nn import functional

from sightline.errors import BadCheckpoint, UsageError
from sightline.models import keras_weights
from sightline.models.arch import OURS, ArchConfig
from sightline.models.resnet import ResNetConfig
from sightline.models.weight_files import load_weights
from sightline.parts import DataSpec

HERE = Path(__file__).parent / "keras"
GENUINE = ("keras2.h5", "keras3.weights.h5")
MODELS = json.loads(gzip.decompress((HERE / "applications.json.gz").read_bytes()))["models"]

spec = importlib.util.spec_from_file_location("keras_fixtures", HERE.with_name("keras_fixtures.py"))
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)


# 25 million numbers a network, which several files hold.
values = functools.cache(fixtures.values)


def classes(count: int) -> DataSpec:
    return DataSpec(tuple(map(str, range(count))), 3, (64, 64), (0.5,) * 3, (0.25,) * 3)


def images(*shape: int) -> torch.Tensor:
    return torch.from_numpy(fixtures.values("input/pixels", shape)).permute(0, 3, 1, 2)


def write_keras2(path: Path, arrays, prefix: str = "") -> None:
    """The layout of model.save_weights("x.h5") in Keras 2, and with a prefix that of model.save("x.h5")."""
    with h5py.File(path, "w") as file:
        for name, shape in arrays:
            file[f"{prefix}{name.partition('/')[0]}/{name}:0"] = values(name, tuple(shape))


def write_keras3(path: Path, arrays, counters=("conv2d", "batch_normalization", "dense")) -> None:
    """The layout of model.save_weights("x.weights.h5") in Keras 3: layers counted by class, arrays by order."""
    layers: dict[str, list] = {}
    for name, shape in arrays:
        layers.setdefault(name.partition("/")[0], []).append((name, tuple(shape)))
    with h5py.File(path, "w") as file:
        for number, (layer, found) in enumerate(layers.items()):
            group = file.create_group(f"layers/{counters[number % len(counters)]}_{number}/vars")
            group.attrs["name"] = layer
            for index, (name, shape) in enumerate(found):
                group[str(index)] = values(name, shape)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(name, layout): the weight file of an application, made once."""
    folder, made = tmp_path_factory.mktemp("keras"), {}

    def write(name: str, layout: str = "keras2") -> Path:
        if (name, layout) not in made:
            made[name, layout] = folder / f"{name}_{layout}.h5"
            {"keras2": write_keras2, "keras3": write_keras3}[layout](made[name, layout], MODELS[name]["arrays"])
        return made[name, layout]

    yield write
    values.cache_clear()


def network(config: ArchConfig | ResNetConfig) -> nn.Module:
    """Its network without a number drawn: all are NaN until they come from a file."""
    with torch.device("meta"):
        model = config.build(classes(fixtures.CLASSES))
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    return model


class Small(nn.Module):
    """The network of `fixtures.small`, in torch."""

    def __init__(self, outputs: int = 5):
        super().__init__()
        block = nn.Module()
        block.bn1 = nn.BatchNorm2d(4, eps=1.001e-5)
        block.conv1 = nn.Conv2d(4, 6, 1, bias=False)
        block.bn2 = nn.BatchNorm2d(6, eps=1.001e-5)
        block.conv2 = nn.Conv2d(6, 6, 3, groups=2, bias=False)
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.ModuleList([block])
        self.bn_out = nn.BatchNorm2d(6, eps=1.001e-5)
        self.fc = nn.Linear(6, outputs)

    def forward(self, x):
        block = self.layer1[0]
        x = block.conv2(block.bn2(block.conv1(block.bn1(self.conv1(x)))))
        return self.fc(self.bn_out(x).mean(dim=(2, 3)))


def refusal(path: Path, model: nn.Module | None = None) -> str:
    with pytest.raises(BadCheckpoint) as error:
        load_weights(model or Small(), path, head="fc.")
    return str(error.value)


@pytest.fixture
def edited(tmp_path):
    """edited(name, change): a copy of a genuine file after change(h5py.File)."""

    def edit(name: str, change) -> Path:
        path = tmp_path / name
        path.write_bytes((HERE / name).read_bytes())
        with h5py.File(path, "r+") as file:
            change(file)
        return path

    return edit


@pytest.mark.parametrize("name", GENUINE)
def test_a_file_that_keras_wrote_gives_its_logits(name):
    model = Small()

    note = load_weights(model, HERE / name, head="fc.").note

    expected = torch.tensor(json.loads((HERE / name).with_suffix(".json").read_text())["logits"])
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images(2, 8, 8, 3)), expected, rtol=1e-5, atol=1e-6)
    assert note.startswith("loaded all 18 tensors of")


DEFAULT = (("keras2", "ResNet50V2"), ("keras3", "ResNet50"))  # each layout and each kind of block once


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(layout, name, marks=() if (layout, name) in DEFAULT else pytest.mark.slow)
        for layout in ("keras2", "keras3")
        for name in fixtures.APPLICATIONS
    ],
)
def test_logits_are_those_of_keras_applications(written, name, layout):
    config = ArchConfig(arch=f"keras_{name.lower()}", weights=str(written(name, layout)))
    model = network(config)

    config.start_from(model)

    expected = torch.tensor(MODELS[name]["logits"])
    with torch.no_grad():
        found = model.eval()(images(*fixtures.IMAGES))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_another_network_with_the_same_weights_gives_other_logits(written):
    config = dataclasses.replace(OURS["keras_resnet50"], weights=str(written("ResNet50")))
    source = network(config)
    config.start_from(source)
    expected = torch.tensor(MODELS["ResNet50"]["logits"])
    differences = []
    for change in ({}, {"version": "v1.5"}, {"padding": "same"}, {"padding": "same_but_stem"}, {"bn_eps": 1e-3}):
        with torch.device("meta"):
            model = dataclasses.replace(config, **change).build(classes(fixtures.CLASSES))
        model.load_state_dict(source.state_dict(), assign=True)

        with torch.no_grad():
            found = model.eval()(images(*fixtures.IMAGES))
        differences.append((found - expected).abs().max().item())

    assert differences[0] < 1e-4 and min(differences[1:]) > 1e-3, differences


def test_zeros_before_the_pool_of_keras_v2_are_seen():
    with torch.device("meta"):
        model = ArchConfig(arch="keras_resnet50v2").build(classes(2))
    x = -torch.rand(1, 4, 9, 8) - 1

    found = model.maxpool(x)

    assert torch.equal(found, functional.max_pool2d(functional.pad(x, (1, 1, 1, 1)), 3, 2))
    assert not torch.equal(found, functional.max_pool2d(x, 3, 2, padding=1))


def in_old_words(name: str) -> str:
    """conv3_block2_1_conv is res3b_branch2a in files of Keras before 2.2.5 and of TensorFlow's Keras script."""
    layer, _, kind = name.partition("/")
    parts = layer.split("_")
    if parts[0] == "conv1":
        old = "conv1" if parts[1] == "conv" else "bn_conv1"
    elif len(parts) == 4:
        stage, block, number, what = parts[0][4:], "abcdef"[int(parts[1][5:]) - 1], int(parts[2]), parts[3]
        old = f"{'res' if what == 'conv' else 'bn'}{stage}{block}_branch{'2' + ' abc'[number] if number else 1}"
    else:
        old = "fc1000"
    return f"{old}/{kind}"


def test_old_layer_names_give_the_same_logits(written, tmp_path):
    arrays = MODELS["ResNet50"]["arrays"]
    with h5py.File(tmp_path / "old.h5", "w") as file:
        for name, shape in arrays:
            old = in_old_words(name)
            file[f"{old.partition('/')[0]}/{old}:0"] = values(name, tuple(shape))
    names = {in_old_words(name).partition("/")[0] for name, _ in arrays}
    assert {"conv1", "bn_conv1", "res2a_branch1", "bn5c_branch2c", "res4f_branch2b", "fc1000"} <= names
    config = ArchConfig(arch="keras_resnet50", weights=str(tmp_path / "old.h5"))
    model = network(config)

    config.start_from(model)

    with torch.no_grad():
        found = model.eval()(images(*fixtures.IMAGES))
    torch.testing.assert_close(found, torch.tensor(MODELS["ResNet50"]["logits"]), rtol=1e-5, atol=1e-5)


def test_a_whole_model_and_a_model_within_one_are_read_too(tmp_path):
    model = Small()
    with h5py.File(HERE / "keras2.h5") as file:
        arrays = []
        file.visititems(lambda place, item: arrays.append((place, item)) if hasattr(item, "shape") else None)
        arrays = [(place.partition("/")[2].removesuffix(":0"), item.shape) for place, item in arrays]
    write_keras2(tmp_path / "whole.h5", arrays, prefix="model_weights/")
    write_keras2(tmp_path / "nested.h5", arrays, prefix="resnet50v2/")
    with h5py.File(tmp_path / "whole.h5", "r+") as file:
        file["optimizer_weights/adam/iteration:0"] = 3

    for name in ("whole.h5", "nested.h5"):
        assert "loaded all 18 tensors" in load_weights(model, tmp_path / name, head="fc.").note


@pytest.mark.parametrize("kind", [">f4", "<f8", "<f2"])
def test_numbers_of_other_sizes_and_byte_orders_are_read(edited, kind):
    """HDF5 keeps the byte order of the machine that wrote, and Keras the type of its policy."""

    def write_again(file):
        names = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        for name in names:
            if file[name].dtype.kind == "f":
                numbers = file[name][()]
                del file[name]
                file[name] = numbers.astype(kind)

    expected, model = Small(), Small()
    load_weights(expected, HERE / "keras2.h5", head="fc.")
    load_weights(model, edited("keras2.h5", write_again), head="fc.")
    for name, tensor in model.state_dict().items():
        wanted = expected.state_dict()[name]
        assert tensor.dtype == wanted.dtype
        torch.testing.assert_close(tensor, wanted, rtol=1e-3 if kind == "<f2" else 0, atol=1e-4 if kind == "<f2" else 0)


@pytest.mark.parametrize("name", GENUINE)
def test_a_head_of_another_size_stays_fresh(name):
    model = Small(outputs=3)
    fresh = model.fc.weight.clone()

    note = load_weights(model, HERE / name, head="fc.").note

    assert torch.equal(model.fc.weight, fresh)
    assert "the head starts at random: 5 classes there, 3 here" in note


def test_weights_of_the_other_version_are_refused_by_name(written):
    with torch.device("meta"):
        model = ArchConfig(arch="keras_resnet50").build(classes(fixtures.CLASSES))

    message = refusal(written("ResNet50V2"), model)

    assert "does not match this model (272 tensors, 373 expected; missing: bn1.weight, bn1.bias" in message
    assert "; unexpected: bn_out.bias" in message


def in_keras2(place: str, value) -> tuple:
    def change(file):
        if place in file:
            del file[place]
        if value is not None:
            file[place] = value

    return "keras2.h5", change


KERNEL = "conv1_conv/conv1_conv/kernel:0"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (*in_keras2(KERNEL, None), "missing: conv1.weight"),
        (*in_keras2("conv2_block1_3_conv/conv2_block1_3_conv/bias:0", np.ones(2, "f4")), "layer1.0.conv3.bias"),
        (*in_keras2(KERNEL, np.ones((3, 3, 3, 9), "f4")), "conv1.weight 9x3x3x3 in the file, 4x3x3x3 in the model"),
        (*in_keras2(KERNEL, np.ones((3, 3, 3), "f4")), "conv1.weight 3x3x3 in the file"),
        (*in_keras2(KERNEL, np.float32(1)), "conv1.weight scalar in the file"),
        (*in_keras2(KERNEL, h5py.Empty("f4")), "conv1.weight scalar in the file"),
        (*in_keras2(KERNEL, np.ones((3, 3, 3, 4), "i4")), "kernel of layer 'conv1_conv' has type int32"),
        (*in_keras2(KERNEL, "text"), "kernel of layer 'conv1_conv' has type object"),
        (*in_keras2("block_1_expand/block_1_expand/kernel:0", np.ones((1, 1, 2, 2), "f4")), "layer 'block_1_expand'"),
        (*in_keras2("conv1_conv/conv1_conv/scale:0", np.ones(4, "f4")), "holds scale of layer 'conv1_conv'"),
        (*in_keras2("conv1_conv/conv1_conv/kernel", np.ones((3, 3, 3, 4), "f4")), "kernel of layer 'conv1_conv' twice"),
        (*in_keras2("predictions/predictions/kernel:0", None), "has 0 dense layers (no top); expected one"),
        (*in_keras2("second/second/kernel:0", np.ones((2, 2), "f4")), "has 2 dense layers (predictions, second)"),
        ("keras3.weights.h5", lambda f: f["layers/conv2d/vars"].attrs.__delitem__("name"), "does not name its layers"),
        ("keras3.weights.h5", lambda f: f.move("layers/conv2d/vars/0", "layers/conv2d/vars/7"), "layer 'conv1_conv'"),
        ("keras3.weights.h5", lambda f: f["layers"].clear(), "holds no layer weights"),
    ],
)
def test_what_does_not_fit_is_named(edited, name, change, message):
    assert message in refusal(edited(name, change))


def place_outside(file, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(432))
    del file[KERNEL]
    file.create_dataset(KERNEL, (3, 3, 3, 4), "f4", external=[(str(tmp_path / "secret"), 0, 432)])


def place_virtually(file, tmp_path):
    layout = h5py.VirtualLayout((3, 3, 3, 4), "f4")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "data", (3, 3, 3, 4))
    del file[KERNEL]
    file.create_virtual_dataset(KERNEL, layout)


def place_compressed(file, tmp_path):
    del file[KERNEL]
    file.create_dataset(KERNEL, data=np.zeros((3, 3, 3, 4), "f4"), compression="gzip")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (place_outside, "compressed, chunked or in another file"),
        (place_virtually, "compressed, chunked or in another file"),
        (place_compressed, "compressed, chunked or in another file"),
    ],
)
def test_arrays_that_are_elsewhere_or_can_expand_are_refused(edited, tmp_path, change, message):
    assert message in refusal(edited("keras2.h5", lambda file: change(file, tmp_path)))


def test_links_are_not_followed(edited, tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["kernel"] = np.ones((3, 3, 3, 4), "f4")

    def change(file):
        del file[KERNEL]
        file[KERNEL] = h5py.ExternalLink(str(tmp_path / "other.h5"), "kernel")

    assert "missing: conv1.weight" in refusal(edited("keras2.h5", change))


def declare(place: str, *shape: int):
    def change(file):
        del file[place]
        file.create_dataset(place, shape, "f4")  # takes no room in the file while nothing is written

    return change


def test_declared_sizes_are_not_allocated(edited):
    kernel = edited("keras2.h5", declare(KERNEL, 3, 3, 3, 2**36))
    assert "conv1.weight 68719476736x3x3x3 in the file, 4x3x3x3 in the model" in refusal(kernel)

    head = edited("keras2.h5", declare("predictions/predictions/kernel:0", 6, 2**40))
    assert "1099511627776 classes there" in load_weights(Small(), head, head="fc.").note


def test_a_heap_that_hdf5_would_walk_over_for_ever_is_refused(tmp_path):
    data = bytearray((HERE / "keras3.weights.h5").read_bytes())
    heap = data.index(b"GCOL\x01")
    place = heap + 16
    while number := int.from_bytes(data[place : place + 2], "little"):  # to the part that is free
        place += 16 + -(-int.from_bytes(data[place + 8 : place + 16], "little") // 8) * 8
    assert number == 0
    data[place + 8 : place + 16] = bytes(8)
    (tmp_path / "w.h5").write_bytes(data)

    assert f"the strings at byte {heap} do not fill their heap" in refusal(tmp_path / "w.h5")


def test_heaps_are_walked_once_however_many_there_are(tmp_path):
    """HDF5 never puts one into another; 100,000 in a file of 1.6 MB took more than 30 seconds."""
    heap = keras_weights.HEAP + struct.pack("<Q", 16)
    (tmp_path / "w.h5").write_bytes(heap * 100_001)
    assert "w.h5 holds more than 100000 strings; save the weights of the network alone" in refusal(tmp_path / "w.h5")
    outer = keras_weights.HEAP + struct.pack("<Q", 48) + struct.pack("<HHIQ", 1, 0, 0, 16) + heap
    (tmp_path / "w.h5").write_bytes(outer)
    assert "the strings at byte 32 do not fill their heap" in refusal(tmp_path / "w.h5")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("name", GENUINE)
def test_truncated_files_are_refused_with_their_path(tmp_path, name, share):
    data = (HERE / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * share)])

    assert f"{tmp_path / name} is not a complete HDF5 file" in refusal(tmp_path / name)


@pytest.mark.parametrize("name", GENUINE)
def test_damaged_bytes_end_in_our_error_or_load(tmp_path, name):
    data, dice, refused = (HERE / name).read_bytes(), random.Random(0), 0
    for number in range(60):
        damaged = bytearray(data)
        for _ in range(dice.choice((1, 20, 100))):
            damaged[dice.randrange(len(data))] = dice.randrange(256)
        path = tmp_path / f"{number}.h5"
        path.write_bytes(damaged)
        try:
            load_weights(Small(), path, head="fc.")
        except BadCheckpoint:
            refused += 1

    assert refused > 6


def test_without_h5py_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)  # what an import finds where the package is absent

    with pytest.raises(UsageError, match=r"pip install sightline\[keras\]"):
        load_weights(Small(), HERE / "keras2.h5", head="fc.")


MEASURED = """
import resource, sys
from pathlib import Path
import h5py
from sightline.errors import BadCheckpoint
from sightline.models.keras_weights import read_keras

limit = resource.getrlimit(resource.RLIMIT_DATA)
for path in sys.argv[1:]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read_keras(Path(path), {})
    except BadCheckpoint as error:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
assert resource.getrlimit(resource.RLIMIT_DATA) == limit
"""


def measured(folder: Path, *files: Path) -> list[tuple[int, str]]:
    """Return MiB and the refusal of each file, read in a process of its own."""
    (folder / "program.py").write_text(MEASURED)
    done = warm.python(folder, "program.py", *files, environ={**os.environ, "PYTHONPATH": str(warm.HERE.parent)})
    assert done.returncode == 0, done.stderr
    return [(int(kib) // 1024, error) for kib, error in (line.split(" ", 1) for line in done.stdout.splitlines())]


@pytest.mark.skipif(sys.platform != "linux", reason="bounded by Linux")
@pytest.mark.parametrize(
    ("address", "number"), [(2048, 4), (2048, 500), (57005, 1)], ids=["text", "no text", "no heap"]
)
def test_the_length_of_a_name_is_not_believed(tmp_path, address, number):
    """HDF5 allocates it before it looks at the heap, whether that is there or not."""
    data = bytearray((HERE / "keras3.weights.h5").read_bytes())
    honest = struct.pack("<IQI", len("conv2_block1_preact_bn"), data.index(keras_weights.HEAP), 4)
    at = data.index(honest)
    data[at : at + len(honest)] = struct.pack("<IQI", 2**32 - 1, address, number)
    (tmp_path / "w.h5").write_bytes(data)

    ((mib, error),) = measured(tmp_path, tmp_path / "w.h5")
    assert "w.h5 is not a complete HDF5 file (OSError: " in error and "memory allocation failed" in error
    assert mib < 100  # 4,100 without a bound


def test_a_file_of_very_many_arrays_is_refused_before_it_fills_memory(tmp_path: Path):
    """Every array that is open takes 15 kB."""
    path = tmp_path / "many.h5"
    with h5py.File(path, "w", libver="latest") as file:
        for number in range(15_000):
            file.create_dataset(f"a{number}/kernel:0", shape=(2,), dtype="f4")
    ((mib, error),) = measured(tmp_path, path)
    assert "many.h5 holds more than 10000 folders and arrays" in error and "save_weights" in error
    assert mib < 180  # 220 MB without a bound


def test_folders_in_each_other_are_not_followed_for_ever(tmp_path):
    path = tmp_path / "w.h5"
    with h5py.File(path, "w") as file:
        file["d/" * 3000 + "kernel:0"] = np.zeros(2, "f4")
    assert "w.h5 holds more than 64 folders in each other; save the weights" in refusal(path)


def test_a_heap_is_walked_to_its_end(tmp_path):
    """HDF5's format specification, "Level 1E - Global Heap": objects of 16 bytes and data filled up to eight; number 0
    is free space, whose size has its header in it."""

    def of(number: int, size: int, room: int) -> bytes:
        return number.to_bytes(2, "little") + bytes(6) + size.to_bytes(8, "little") + bytes(room)

    def strings(*objects: bytes, more: int = 0) -> int:
        body = b"".join(objects)
        data = bytes(24) + b"GCOL\x01\0\0\0" + (16 + len(body) + more).to_bytes(8, "little") + body
        return keras_weights._strings(data, 24)  # type: ignore[arg-type]

    assert strings(of(1, 3, 8), of(2, 8, 8), of(3, 9, 16), of(4, 0, 0)) == 4
    assert strings(of(1, 3, 8), of(0, 40, 24)) == strings(of(1, 3, 8), bytes(15)) == 1
    assert strings(of(1, 3, 8), more=1) == strings(of(1, 3, 8), of(2, 9, 8)) == strings(of(1, 3, 8), of(0, 15, 0)) == -1
    assert strings(of(1, 3, 8), of(0, 16, 0)) == 1
