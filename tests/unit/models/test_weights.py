"""Loading foreign weights: strict by name and shape, forgiving about wrappers, and safe from what files contain."""

import argparse
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.torch_version import TorchVersion

from sightline.errors import BadCheckpoint
from sightline.models.weights import load_weights


class Small(nn.Module):
    def __init__(self, classes: int = 4, width: int = 6):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.bn = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, classes)


class Payload:
    """Creates a file when it is unpickled by anything that runs what it reads."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture
def source() -> Small:
    model = Small()
    for buffer in model.buffers():
        buffer.fill_(3)
    return model


def load(model: nn.Module, path: Path) -> str:
    return load_weights(model, path, head="fc.")


def assert_equal(model: nn.Module, source: nn.Module, *, but: str = "nothing") -> None:
    for key, tensor in source.state_dict().items():
        if not key.startswith(but):
            assert torch.equal(model.state_dict()[key], tensor), key


def refusal(path: Path, model: nn.Module | None = None) -> str:
    with pytest.raises(BadCheckpoint) as error:
        load(model or Small(), path)
    return str(error.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_every_format_loads_by_name(tmp_path, source, suffix):
    path, model = tmp_path / f"w{suffix}", Small()
    (save_file if suffix == ".safetensors" else torch.save)(source.state_dict(), path)

    assert load(model, path) == f"loaded all 9 tensors of {path}"
    assert_equal(model, source)


def test_files_of_old_torch_without_zip_load(tmp_path, source):
    path, model = tmp_path / "w.pth", Small()
    torch.save(source.state_dict(), path, _use_new_zipfile_serialization=False)

    load(model, path)

    assert_equal(model, source)


@pytest.mark.parametrize("wrapper", ["model", "state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_and_prefixes_are_removed(tmp_path, source, wrapper, prefix):
    path, model = tmp_path / "w.pth", Small()
    state = {prefix + key: tensor for key, tensor in source.state_dict().items()}
    torch.save({wrapper: state, "epoch": 3}, path)

    load(model, path)

    assert_equal(model, source)


def test_half_precision_weights_are_widened(tmp_path, source):
    path, model = tmp_path / "w.safetensors", Small()
    save_file(source.to(torch.bfloat16).state_dict(), path)

    load(model, path)

    assert model.conv.weight.dtype == torch.float32
    assert torch.equal(model.conv.weight, source.conv.weight.float())


def test_batch_counters_may_be_missing(tmp_path, source):
    path, model = tmp_path / "w.safetensors", Small()
    save_file({key: t for key, t in source.state_dict().items() if "num_batches" not in key}, path)

    load(model, path)

    assert_equal(model, source, but="bn.num_batches_tracked")


def test_a_head_of_another_size_stays_fresh_and_is_reported(tmp_path, source):
    path, model = tmp_path / "w.pth", Small(classes=7)
    torch.save(source.state_dict(), path)
    fresh = model.fc.weight.clone()

    summary = load(model, path)

    assert_equal(model, source, but="fc.")
    assert torch.equal(model.fc.weight, fresh)
    assert summary.startswith(f"loaded 7 tensors of {path}; the head is not loaded (")
    assert summary.endswith("(fc.weight is 4x6 there, 7x6 here, fc.bias is 4 there, 7 here)")


def test_a_head_is_loaded_as_a_whole_or_not_at_all(tmp_path, source):
    path, model = tmp_path / "w.pth", Small()
    state = source.state_dict() | {"fc.weight": torch.zeros(4, 9)}
    torch.save(state, path)
    fresh = model.fc.bias.clone()

    load(model, path)

    assert torch.equal(model.fc.bias, fresh)


def test_missing_and_unexpected_keys_are_named(tmp_path, source):
    path = tmp_path / "w.safetensors"
    state = source.state_dict()
    state["fc2.weight"] = state.pop("conv.weight")
    save_file(state, path)

    message = refusal(path)

    assert "missing: conv.weight" in message
    assert "unexpected: fc2.weight" in message
    assert "choose the model the file was made with" in message


def test_a_missing_head_is_an_error_too(tmp_path, source):
    path = tmp_path / "w.safetensors"
    save_file({key: t for key, t in source.state_dict().items() if not key.startswith("fc.")}, path)

    assert "missing: fc.weight, fc.bias" in refusal(path)


def test_long_lists_of_keys_are_cut(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({f"block{number}": torch.zeros(1) for number in range(9)}, path)

    assert "unexpected: block0, block1, block2, block3 and 5 more" in refusal(path)


def test_wrong_shapes_in_the_body_are_errors_and_change_nothing(tmp_path, source):
    path, model = tmp_path / "w.pth", Small(width=8)
    torch.save(source.state_dict(), path)
    before = {key: t.clone() for key, t in model.state_dict().items()}

    message = refusal(path, model)

    assert "conv.weight 6x3x3x3 in the file, 8x3x3x3 in the model" in message
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())


def test_integers_are_no_weights(tmp_path, source):
    path = tmp_path / "w.pth"
    torch.save(source.state_dict() | {"conv.weight": torch.ones(6, 3, 3, 3, dtype=torch.int8)}, path)

    assert "conv.weight 6x3x3x3 int8 in the file" in refusal(path)


@pytest.mark.parametrize("tensor", [torch.zeros(6, device="meta"), torch.zeros(6).to_sparse()], ids=["meta", "sparse"])
def test_tensors_without_plain_values_are_refused(tmp_path, source, tensor):
    path = tmp_path / "w.pth"
    torch.save(source.state_dict() | {"conv.bias": tensor}, path)

    assert "conv.bias" in refusal(path)


def test_a_key_that_appears_twice_is_refused(tmp_path, source):
    path = tmp_path / "w.pth"
    torch.save(source.state_dict() | {"module.fc.bias": torch.zeros(4)}, path)

    assert "holds 'fc.bias' twice" in refusal(path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_hostile_pickle_does_not_run(tmp_path, source, zipped, wrapped):
    path, marker = tmp_path / "w.pth", tmp_path / "executed"
    payload = Payload(marker)
    content = {"model": source.state_dict(), "args": payload} if wrapped else payload
    torch.save(content, path, _use_new_zipfile_serialization=zipped)

    message = refusal(path)

    assert not marker.exists()
    assert str(path) in message
    assert "state dict" in message


def test_a_pickled_model_is_refused_in_one_sentence(tmp_path, source):
    """Without torch's advice how to run what is in it."""
    torch.save(source, tmp_path / "w.pth")
    told = refusal(tmp_path / "w.pth")
    assert "(UnpicklingError: Weights only load failed); if you trust" in told and "\x1b" not in told


def test_a_bare_hostile_pickle_does_not_run(tmp_path):
    path, marker = tmp_path / "w.pt", tmp_path / "executed"
    path.write_bytes(pickle.dumps(Payload(marker), protocol=2))

    refusal(path)

    assert not marker.exists()
    pickle.loads(path.read_bytes())  # the payload is a real one
    assert marker.exists()


def test_objects_beside_the_weights_get_a_remedy(tmp_path, source):
    path = tmp_path / "w.pth"
    torch.save({"model": source.state_dict(), "args": argparse.Namespace(lr=0.1)}, path)

    assert "save only its state dict again" in refusal(path)


def test_old_torch_is_refused_for_pickles_only(tmp_path, source, monkeypatch):
    torch.save(source.state_dict(), tmp_path / "w.pth")
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))

    load(Small(), tmp_path / "w.safetensors")

    assert "torch 2.9.1 cannot read safely; use torch 2.10 or newer" in refusal(tmp_path / "w.pth")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_files_are_refused_with_their_path(tmp_path, source, suffix, share):
    path = tmp_path / f"w{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(source.state_dict(), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])

    assert str(path) in refusal(path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's remarks about pickles it then refuses
@pytest.mark.parametrize(("suffix", "zipped"), [(".safetensors", True), (".pth", True), (".pth", False)])
def test_damaged_bytes_end_in_our_error_or_load(tmp_path, source, suffix, zipped):
    path, dice = tmp_path / f"w{suffix}", random.Random(0)
    if suffix == ".safetensors":
        save_file(source.state_dict(), path)
    else:
        torch.save(source.state_dict(), path, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()

    refused = 0
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(dice.choice((1, 3, 20))):
            damaged[dice.randrange(len(data))] = dice.randrange(256)
        path.unlink()  # a file that is still mapped must not change
        path.write_bytes(damaged)
        try:
            load(Small(), path)
        except BadCheckpoint:
            refused += 1

    assert refused > 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "holds a list; expected a state dict"),
        ({}, "holds an empty dict; expected a state dict"),
        ({"epoch": 3, "weights": {"a": torch.zeros(2)}}, "holds more than tensors: epoch (a int), weights (a dict)"),
    ],
)
def test_a_file_that_is_not_a_state_dict_is_refused(tmp_path, content, message):
    path = tmp_path / "w.pth"
    torch.save(content, path)

    assert message in refusal(path)


def test_paths_that_cannot_be_weights_are_refused(tmp_path):
    (tmp_path / "w.onnx").touch()

    assert "does not exist" in refusal(tmp_path / "absent.pth")
    assert "is not a file" in refusal(tmp_path)
    assert "expected .safetensors, .pth, .pt or .h5" in refusal(tmp_path / "w.onnx")
