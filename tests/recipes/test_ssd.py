"""Promises of the SSD recipe beyond those of all recipes: its decay, its checkpoints, its log, and half precision."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sightline.errors import UsageError

RECIPE = "ssd_resnet34"
FULL_RATE = ("--schedule.warmup-epochs=0",)  # the tiny runs here end within its warm-up


def tensors(folder: Path, name: str, file: str = "model") -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / name / f"{file}.safetensors")


def test_every_parameter_decays_and_the_loss_does_not_tell(tmp_path: Path, train):
    """Two first steps that differ in the decay alone: what goes into the weights differs by 5e-4 of them."""
    base = ("--train.max-steps=1", "--run.checkpoint-initial", "--model.init=torch", *FULL_RATE)  # biases are not 0
    with_decay = train(RECIPE, tmp_path / "a", *base)
    without = train(RECIPE, tmp_path / "b", *base, "--optimizer.weight-decay=0")
    first, after = (tensors(with_decay.folder, name) for name in ("ckpt-00000000", "ckpt-00000001"))
    moved, plain = (tensors(run.folder, "ckpt-00000001", "optimizer") for run in (with_decay, without))
    assert len(moved) == sum("running" not in name and "num_batches" not in name for name in first)
    for key, velocity in moved.items():  # batch-norms and biases too
        name = key.removesuffix(":momentum_buffer")
        torch.testing.assert_close(velocity - plain[key], 5e-4 * first[name], atol=1e-5, rtol=1e-2, msg=name)
        torch.testing.assert_close(after[name], first[name] - 3e-3 * 8 / 32 * velocity, atol=1e-7, rtol=1e-5, msg=name)
    told = [run.events("train")[0] for run in (with_decay, without)]
    assert told[0]["loss"] == told[1]["loss"] == pytest.approx(told[0]["class_loss"] + told[0]["box_loss"])


def test_steps_may_be_given_instead_of_epochs(tmp_path: Path, train):
    """The rates stay those of the data's epochs."""
    run = train(RECIPE, tmp_path, "--train.epochs=64", "--train.max-steps=6", "--run.checkpoint-initial")
    assert [path.name for path in run.checkpoints][-1] == "ckpt-00000006"
    peak, warmup = 3e-3 * 8 / 32, 5 * 3
    assert [line["lr"] for line in run.events("train")] == pytest.approx([peak * s / warmup for s in range(6)])


def test_an_epoch_tells_its_speed_its_losses_and_its_trace(tmp_path: Path, train):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    flags = ("--train.epochs=1", "--train.global-batch=4", "--run.tensorboard", "--run.log-every-steps=2")
    run = train(RECIPE, tmp_path, *flags, "--run.profile=3,4")
    [line] = [line for line in run.shown.splitlines() if line.startswith("epoch 1/1  loss ")]
    assert "  ap 0." in line and "(best so far)" in line and line.endswith(" img/s")
    [epoch] = run.events("epoch")
    assert epoch["images_per_s"] == pytest.approx(24 / epoch["seconds"], rel=0.05)
    assert "1 epoch is done; time to train 0:0" in run.shown
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    for name in ("loss", "class_loss", "box_loss", "lr", "images_per_s", "steps_per_s"):
        assert [event.step for event in board.Scalars(f"train/{name}")] == [2, 4, 6], name
    assert {f"evaluate/{name}" for name in ("ap", "ap50", "arl")} <= set(board.Tags()["scalars"])
    with gzip.open(tmp_path / "profile" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "Optimizer.step#SGD.step" for event in events) == 2
    assert json.loads((tmp_path / "profile" / "time.json").read_text())["steps"] == [3, 4]


def test_three_steps_in_bf16_lose_as_much_as_in_fp32(tmp_path: Path, train):
    flags = ("--train.max-steps=3", "--model.width=16", *FULL_RATE)
    exact = train(RECIPE, tmp_path / "fp32", *flags)
    half = train(RECIPE, tmp_path / "bf16", *flags, "--train.precision=bf16")
    for name in ("loss", "class_loss", "box_loss"):
        expected, got = ([line[name] for line in run.events("train")] for run in (exact, half))
        assert len(got) == 3 and got != expected and got == pytest.approx(expected, rel=0.02), name


def test_a_schedule_that_watches_a_loss_is_refused_before_the_first_step(tmp_path: Path, train):
    """COCO's numbers hold none; a whole epoch would be trained before they show it."""
    refused = train("demo_detection", tmp_path / "run", "--schedule.kind=plateau", "--schedule.plateau-on=val_loss")
    assert isinstance(refused.error, UsageError) and "this task's gives ap, ap50, f1" in str(refused.error)
    assert not refused.checkpoints
