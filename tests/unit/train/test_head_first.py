"""The head before the trunk, a lower rate for the trunk, and epochs of a small dataset."""

import dataclasses
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny
from torch import nn

from sightline import api
from sightline.data.loading.order import TrainOrder
from sightline.engine import checkpoint
from sightline.engine.model import build_model, head_of
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.parts import DataSpec, ModelConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import FIELDS_OF_KIND, OptimizerConfig
from sightline.train.schedules import RunLength
from sightline.train.state import TrainState
from sightline.train.step import build_step
from sightline.train.torch_optimizer import set_rate

TINY = [*tiny(4), "--train.epochs=2", "--run.keep=50", "--run.checkpoint-every-steps=1"]
HEAD = ("fc.",)
KINDS = [kind for kind in FIELDS_OF_KIND if kind != "lars"]
DECOUPLED = [(kind, "decoupled") for kind in KINDS if "decay_form" in FIELDS_OF_KIND[kind]]
ADAMW = ["--optimizer.kind=adamw", "--optimizer.lr=0.01"]


def train(folder: Path, *flags: str) -> Path:
    api.train(*api.load("demo_classification", [*TINY, f"--run.out={folder}", *flags]))
    return folder


def tensors(folder: Path, step: int, file: str = "model") -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"ckpt-{step:08d}" / f"{file}.safetensors")


# A rate for the trunk


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 2))


def updated(config: OptimizerConfig, share: float, head: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return weights after three updates whose rate falls, times `share`."""
    model = two_layers()
    optimizer = config.build(model, torch.device("cpu"), head)
    for step in range(3):
        set_rate(optimizer, share * config.lr * (1 - step / 4))
        for parameter in model.parameters():
            parameter.grad = (step + 1) * torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("kind", "form"), [*((kind, "gradient") for kind in KINDS), *DECOUPLED])
def test_the_trunk_learns_as_if_the_rate_were_lower_and_the_head_as_before(kind: str, form: str):
    options = {"lr": 0.01, "weight_decay": 0.1, "norm_weight_decay": 0.0, "decay_form": form}
    plain = OptimizerConfig(kind, **options)
    scaled = updated(OptimizerConfig(kind, trunk_lr_scale=0.25, **options), 1.0, head=("2.",))
    trunk, head = updated(plain, 0.25), updated(plain, 1.0)
    for name, weight in scaled.items():
        assert torch.equal(weight, head[name] if name.startswith("2.") else trunk[name]), name
        assert not torch.equal(trunk[name], head[name]), name


def test_without_a_scale_there_are_the_groups_of_before():
    ours, named = (OptimizerConfig("adamw").build(two_layers(), torch.device("cpu"), head) for head in ((), ("2.",)))
    for optimizer in (ours, named):
        assert len(optimizer.param_groups) == 1 and "lr_scale" not in optimizer.param_groups[0]


def test_lars_has_no_rate_for_the_trunk_and_no_kind_has_one_of_zero():
    with pytest.raises(UsageError, match="trunk_lr_scale=0.5 belongs to kind=sgd, not to kind=lars"):
        OptimizerConfig("lars", trunk_lr_scale=0.5)
    with pytest.raises(UsageError, match=r"trunk_lr_scale=0.0 must be .*, above 0; .* --train.trainable head"):
        OptimizerConfig("sgd", trunk_lr_scale=0.0)


# The head first


@pytest.mark.parametrize("kind", [[], ADAMW], ids=str)
def test_the_trunk_stays_until_its_time_and_its_statistics_move(kind: list[str], tmp_path: Path):
    run = train(tmp_path / "run", "--train.head-epochs=1", "--run.checkpoint-initial", *kind)
    start, switch, end = (tensors(run, step) for step in (0, 3, 6))
    moved = {name for name in start if not torch.equal(start[name], switch[name])}
    statistics = {name for name in start if "running_" in name or "num_batches" in name}
    assert moved == {"fc.weight", "fc.bias"} | statistics
    kept = tensors(run, 3, "optimizer")
    assert all(not tensor.any() for name, tensor in kept.items() if not name.startswith(HEAD))  # moments and counts
    assert all(tensor.any() for name, tensor in kept.items() if name.startswith("fc.weight"))
    weights = {name for name in start if name not in statistics}
    assert {name for name in weights if torch.equal(switch[name], end[name])} == set()


def test_the_head_learns_as_it_does_alone(tmp_path: Path):
    flags = ["--train.max-steps=3", "--train.accumulation=2", "--train.ema=0.9", "--train.clip=1"]
    first = train(tmp_path / "first", "--train.head-epochs=1", *flags)
    alone = train(tmp_path / "alone", "--train.trainable=head", *flags)
    for file in ("model", "ema"):
        ours, theirs = tensors(first, 3, file), tensors(alone, 3, file)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("flags", [[*ADAMW, "--train.ema=0.9", "--optimizer.trunk-lr-scale=0.1"]], ids=["all"])
def test_resumed_before_at_or_after_the_switch_it_ends_with_the_same_bits(flags: list[str], tmp_path: Path):
    whole = train(tmp_path / "whole", "--train.head-epochs=1", *flags)
    for step in (2, 3, 4):
        copy = tmp_path / f"from {step}"
        shutil.copytree(whole, copy)
        for later in range(step + 1, 7):
            shutil.rmtree(copy / "checkpoints" / f"ckpt-{later:08d}")
        train(copy, "--train.head-epochs=1", *flags)
        for file in sorted(checkpoint.find(whole, "latest").glob("*.safetensors")):
            assert file.read_bytes() == (copy / "checkpoints" / "ckpt-00000006" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"head_epochs": 3}, "head_epochs=3 leaves none of train.epochs=3 for the whole network; use more epochs"),
        ({"head_epochs": -1}, "head_epochs=-1 must be at least 0"),
        ({"head_epochs": 1, "trainable": "head"}, "leave one of them out"),
        ({"min_epoch_steps": 9}, "train.last_batch=drop cannot; add --train.last-batch wrap"),
        ({"min_epoch_steps": 9, "last_batch": "wrap", "steps_per_epoch": 5}, "is above train.steps_per_epoch=5"),
        ({"min_epoch_steps": -9}, "min_epoch_steps=-9 must be at least 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(fields: dict, told: str):
    with pytest.raises(UsageError) as refusal:
        TrainConfig(epochs=3, global_batch=8, **fields)
    assert told in str(refusal.value)


class Plain(ModelConfig):
    """A model that names no head."""

    def build(self, spec: DataSpec) -> nn.Module:
        return two_layers()


def test_the_head_of_a_model_that_names_none_is_its_last_linear_layer():
    assert head_of(Plain(), two_layers()) == ("2.",)
    for model in (nn.Conv2d(1, 1, 1), nn.Sequential(nn.Linear(2, 2))):
        with pytest.raises(UsageError, match="need a head and a trunk.* add --train.head-epochs 0"):
            head_of(Plain(), model)


# Epochs of a small dataset


@pytest.mark.parametrize("samples", [5, 50])
def test_a_small_dataset_comes_several_times_in_an_epoch(samples: int):
    order = TrainOrder(samples, 8, seed=0, last="wrap", least=25)
    assert order.steps_per_epoch == 25
    seen = np.concatenate([order.batch(step)[1] for step in range(25)])
    counts = np.bincount(seen, minlength=samples)
    assert counts.sum() == 200 and set(counts) <= {200 // samples, -(-200 // samples)}
    passes = {(int(e), int(i)) for step in range(25) for e, i in zip(*order.batch(step), strict=True)}
    assert len(passes) == 200  # each copy is augmented in its own way


def test_a_large_dataset_has_the_epochs_that_it_has():
    assert TrainOrder(800, 8, seed=0, last="wrap", least=25).steps_per_epoch == 100
    assert TrainOrder(800, 8, seed=0, last="wrap", least=25, cap=30).steps_per_epoch == 30


def weights_after_each_step(compile: str) -> list[dict[str, torch.Tensor]]:
    """Return those of two steps of the head and one of all layers; compiled without the slow code generator."""
    recipe, run = api.load("demo_classification", [*TINY, "--train.head-epochs=1", f"--run.compile={compile}"])
    device = dataclasses.replace(devices.select("cpu"), compile_backend="aot_eager")
    bound = recipe.data.open("train", 0).bind(device, 8)
    state = TrainState(recipe, build_model(recipe, run, bound.dataset.spec, device), device, RunLength(2, 2))
    step = build_step(recipe, run, device, World(), state, bound, head_steps=2)
    loaded = [bound.load(0, index) for index in range(8)]
    batch = {key: torch.stack([torch.as_tensor(each[key]) for each in loaded]) for key in loaded[0]}
    seen = []
    for number in range(3):
        step({**batch, "index": torch.arange(8)}, number, 0.1)
        seen.append({name: parameter.detach().clone() for name, parameter in state.model.named_parameters()})
    return seen


@pytest.mark.slow
def test_a_compiled_step_learns_what_an_eager_one_does():
    torch.compiler.reset()
    compiled, eager = weights_after_each_step("on"), weights_after_each_step("off")
    torch.compiler.reset()
    for ours, theirs in zip(compiled, eager, strict=True):
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    moved = [{name for name in a if not torch.equal(a[name], b[name])} for a, b in itertools.pairwise(compiled)]
    assert moved[0] == {"fc.weight", "fc.bias"} and moved[1] == set(compiled[0])
