"""Loading foreign weights: strict by name and shape, forgiving about wrappers, and safe from what files contain."""

import argparse
import fractions
import os
import pickle
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.torch_version import TorchVersion

from sightline.errors import BadCheckpoint
from sightline.models.weight_files import load_weights


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
    return load_weights(model, path, head="fc.").note


def assert_equal(model: nn.Module, source: nn.Module, *, but: str = "nothing") -> None:
    for key, tensor in source.state_dict().items():
        if not key.startswith(but):
            assert torch.equal(model.state_dict()[key], tensor), key


def refusal(path: Path, model: nn.Module | None = None) -> str:
    with pytest.raises(BadCheckpoint) as error:
        load(model or Small(), path)
    return str(error.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".pth.tar", ".ckpt", ".bin"])
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
    assert summary == f"loaded 7 tensors of {path}; the head starts at random: 4 classes there, 7 here"


def test_a_head_is_loaded_as_a_whole_or_not_at_all(tmp_path, source):
    path, model = tmp_path / "w.pth", Small()
    state = source.state_dict() | {"fc.weight": torch.zeros(4, 9)}
    torch.save(state, path)
    fresh = model.fc.bias.clone()

    assert "the head starts at random: fc.weight is 4x9 there, 4x6 here" in load(model, path)

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
    assert "test_weights.Small" in told and "); if you trust" in told and "\x1b" not in told


def test_a_bare_hostile_pickle_does_not_run(tmp_path):
    path, marker = tmp_path / "w.pt", tmp_path / "executed"
    path.write_bytes(pickle.dumps(Payload(marker), protocol=2))

    refusal(path)

    assert not marker.exists()
    pickle.loads(path.read_bytes())  # the payload is a real one
    assert marker.exists()


def test_objects_beside_the_weights_are_named_with_a_remedy(tmp_path, source):
    path = tmp_path / "w.ckpt"
    hyper = {"root": Path("data"), "seed": np.float64(1.0), "also": fractions.Fraction(1, 2)}
    torch.save({"state_dict": source.state_dict(), "hyper_parameters": hyper}, path)

    told = refusal(path)

    assert "objects, which can run code: fractions.Fraction, numpy." in told
    assert "pathlib" in told and "save only its state dict again" in told


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_function_that_torch_blocks_is_named(tmp_path, source, is_zip: bool):
    path = tmp_path / "w.pth"
    torch.save({"model": source.state_dict(), "args": os.system}, path, _use_new_zipfile_serialization=is_zip)
    assert f"it holds objects, which can run code: {os.name}.system)" in refusal(path)


def test_a_pickle_of_an_odd_kind_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "w.pth"
    path.write_bytes(pickle.dumps({"a": {1}}, protocol=4))
    assert "(UnpicklingError: Unsupported operand " in refusal(path)


def test_flags_of_a_script_may_not_hold_objects(tmp_path, source):
    """argparse.Namespace is allowed, not what is in it."""
    path, marker = tmp_path / "w.pth", tmp_path / "executed"
    torch.save({"model": source.state_dict(), "args": argparse.Namespace(lr=Payload(marker))}, path)

    assert "objects, which can run code" in refusal(path) and not marker.exists()


# Files as public training scripts write them


def torchvision_script(model: nn.Module, path: Path, average: nn.Module | None = None) -> None:
    """Save as references/classification/train.py does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    main = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 3, 6])
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main], milestones=[5])
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(model="resnet50", lr=0.1, data_path="/data", amp=True, weights=None),
    }
    if average is not None:
        checkpoint["model_ema"] = torch.optim.swa_utils.AveragedModel(average, use_buffers=True).state_dict()
    checkpoint["scaler"] = torch.amp.GradScaler("cpu").state_dict()
    torch.save(checkpoint, path)


def timm_script(model: nn.Module, path: Path, average: nn.Module) -> None:
    """Save as timm's CheckpointSaver does."""
    state = {"epoch": 7, "arch": "resnet50", "state_dict": model.state_dict(), "optimizer": {}, "version": 2}
    state |= {"args": argparse.Namespace(model="resnet50", lr=None), "amp_scaler": {}, "metric": 71.5}
    torch.save(state | {"state_dict_ema": average.state_dict()}, path)


def examples_script(model: nn.Module, path: Path) -> None:
    """Save as imagenet/main.py of pytorch/examples does, under DistributedDataParallel."""
    state = {f"module.{key}": tensor for key, tensor in model.state_dict().items()}
    best = {"epoch": 9, "arch": "resnet18", "state_dict": state, "best_acc1": torch.tensor(69.7)}
    torch.save(best | {"optimizer": {}, "scheduler": {"gamma": 0.1}}, path)


def lightning(model: nn.Module, path: Path, prefix: str = "model.", **others: torch.Tensor) -> None:
    """Save as Trainer.save_checkpoint does for a module that holds the network as `model`."""
    state = {f"{prefix}{key}": tensor for key, tensor in model.state_dict().items()}
    content = {"epoch": 1, "global_step": 20, "pytorch-lightning_version": "2.5.0", "state_dict": {**state, **others}}
    loops = {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}}
    callbacks = {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5), "dirpath": "/x"}}
    hyper = {"hparams_name": "kwargs", "hyper_parameters": {"args": argparse.Namespace(lr=0.1), "lr": 0.1}}
    torch.save({**content, "loops": loops, "callbacks": callbacks, "optimizer_states": [], **hyper}, path)


def test_the_checkpoint_of_torchvisions_script_loads(tmp_path, source):
    path, model = tmp_path / "checkpoint.pth", Small()
    torchvision_script(source, path)

    assert load(model, path) == f"loaded all 9 tensors of {path}"
    assert_equal(model, source)


@pytest.mark.parametrize(
    ("write", "key", "other"),
    [(torchvision_script, "model_ema", "model"), (timm_script, "state_dict_ema", "state_dict")],
)
def test_the_average_is_taken_of_two_and_the_note_says_so(tmp_path, source, write, key, other):
    path, model, average = tmp_path / "model_best.pth.tar", Small(), Small()
    write(source, path, average)

    assert load(model, path) == f"loaded all 9 tensors of {path}: '{key}', the averaged weights, not '{other}'"
    assert_equal(model, average)


def test_the_checkpoint_of_pytorchs_examples_loads(tmp_path, source):
    path, model = tmp_path / "model_best.pth.tar", Small()
    examples_script(source, path)

    load(model, path)

    assert_equal(model, source)


@pytest.mark.parametrize("prefix", ["model.", "model._orig_mod."])
def test_lightnings_checkpoint_loads_and_other_tensors_are_reported(tmp_path, source, prefix):
    path, model = tmp_path / "last.ckpt", Small()
    lightning(source, path, prefix, **{"loss.weight": torch.ones(4)})

    note = load(model, path)

    assert note == (f"loaded 9 tensors of {path}: those of its attribute 'model'; not used: loss.weight")
    assert_equal(model, source)


def test_a_network_that_lightning_holds_twice_is_refused(tmp_path, source):
    path = tmp_path / "last.ckpt"
    state = {f"{name}.{key}": t for name in ("student", "teacher") for key, t in source.state_dict().items()}
    torch.save({"state_dict": state}, path)

    assert "holds this network 2 times, as student, teacher; save the state dict of one" in refusal(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_and_change_nothing(tmp_path, source, value):
    path, model = tmp_path / "w.safetensors", Small()
    source.conv.weight.data[0, 0, 0, :2] = value
    save_file(source.state_dict(), path)
    before = model.conv.weight.clone()

    assert "holds values that are not finite: conv.weight (2 of 162); its training had diverged" in refusal(path, model)
    assert torch.equal(model.conv.weight, before)


def test_a_zip_that_would_expand_is_refused(tmp_path, source):
    torch.save({**source.state_dict(), "zeros": torch.zeros(2**19)}, tmp_path / "w.pth")
    packed = tmp_path / "packed.pth"
    with zipfile.ZipFile(tmp_path / "w.pth") as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out:
        for name in plain.namelist():
            out.writestr(name, plain.read(name))

    assert "grows from" in refusal(packed)


def test_the_table_says_what_became_of_every_tensor(tmp_path, source):
    path, model = tmp_path / "w.safetensors", Small(classes=7)
    state = {key: t for key, t in source.half().state_dict().items() if key != "bn.num_batches_tracked"}
    save_file({**state, "bn.running_mean": torch.zeros(6)}, path)

    rows = {row.name: (row.state, row.there, row.here) for row in load_weights(model, path, head="fc.").tensors}

    assert list(rows) == list(model.state_dict())
    assert rows["bn.running_mean"] == ("loaded", "6", "6")
    assert rows["conv.weight"] == ("converted", "6x3x3x3 float16", "6x3x3x3")
    assert rows["fc.weight"] == ("at random", "4x6 float16", "7x6")
    assert rows["bn.num_batches_tracked"] == ("kept", "", "scalar int64")


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
    assert "is a folder, but neither of a run (no checkpoints/ in it) nor of a checkpoint" in refusal(tmp_path)
    assert "expected .safetensors, .pth, .pt, .tar, .ckpt, .bin or .h5, a run folder" in refusal(tmp_path / "w.onnx")
    (tmp_path / "model.ckpt-7.index").touch()
    assert f"give the prefix of a TensorFlow checkpoint, e.g. {tmp_path / 'model.ckpt-7'}" in refusal(tmp_path)
