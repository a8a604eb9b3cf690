"""Batch norm over four real ranks, in groups of two and all together, against torch's on the batches put together.

warm.py runs main() of this file on every rank.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import Tensor, nn
from torch.nn import functional

from sightline.config import Recipe, Run, TrainConfig
from sightline.data.classification import ClassificationData
from sightline.engine.model import build_model
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.hardware.world import World, connect, detect
from sightline.models.norm import SyncBatchNorm, convert
from sightline.models.resnet import ResNetConfig
from sightline.tasks.classification import Classification
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import RunLength, ScheduleConfig
from sightline.train.state import TrainState
from sightline.train.step import build_step

CPU = devices.select("cpu")
RANKS = 4
GROUPS = {2: [[0, 1], [2, 3]], -1: [[0, 1, 2, 3]]}

# Name -> the layer and the shape of one sample. Rank r holds ROWS[r] samples.
LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "rows": (nn.BatchNorm1d, {}, (5,)),
    "series": (nn.BatchNorm1d, {"momentum": None}, (3, 7)),
    "images": (nn.BatchNorm2d, {"momentum": 0.3, "eps": 1e-3}, (4, 6, 5)),
    "volumes": (nn.BatchNorm3d, {"affine": False}, (2, 3, 4, 5)),
    "without_statistics": (nn.BatchNorm2d, {"track_running_stats": False}, (3, 4, 4)),
    "far_from_zero": (nn.BatchNorm2d, {}, (3, 8, 8)),
}
ROWS = (3, 2, 4, 1)
STEPS = 2


def layer_of(name: str) -> nn.Module:
    kind, options, shape = LAYERS[name]
    torch.manual_seed(1)
    layer = kind(shape[0], **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1.0)
    return layer


def data_of(name: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the input of a rank, and the factors of the outputs for its loss."""
    torch.manual_seed(100 * step + rank)
    shape = (ROWS[rank], *LAYERS[name][2])
    offset = 300.0 if name == "far_from_zero" else rank
    return torch.randn(shape) + offset, torch.randn(shape)


def passes(layer: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return outputs, gradients and buffers after a pass over each batch in turn, and the output of an evaluation."""
    found = {}
    for step, (x, factor) in enumerate(batches):
        x = x.clone().requires_grad_()
        y = layer(x)
        (y * factor).sum().backward()
        found |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
    found |= {f"d{key}": p.grad for key, p in layer.named_parameters()}
    found |= {key: b.clone() for key, b in layer.named_buffers()}
    if layer.track_running_stats:
        found["evaluated"] = layer.eval()(batches[0][0])
    return found


# The engine

BATCH = 16
RECIPE = Recipe(
    name="shared",
    model=ResNetConfig(depth=18, width=4, stem="3x3"),
    data=ClassificationData(path="synthetic:classes=4,samples=32,size=12", size=8, eval_resize=8, eval_size=8),
    task=Classification(),
    optimizer=OptimizerConfig("sgd", lr=0.1),
    schedule=ScheduleConfig("constant"),
    train=TrainConfig(epochs=1, global_batch=BATCH, precision="fp32", ema=0.5, fp32_ops=("BatchNorm2d",)),
)


def train_steps(world: World, bn_group: int, rows: slice) -> tuple[dict[str, Tensor], list[str]]:
    """Return gradients and statistics after two steps with these rows of the batch, and notes for the user."""
    recipe = replace(RECIPE, train=replace(RECIPE.train, bn_group=bn_group))
    dataset = recipe.data.open("train", 0)
    state = TrainState(recipe, build_model(recipe, Run(), dataset.spec, CPU, world), CPU, RunLength(1, 1))
    bound = replace(dataset.bind(CPU, BATCH), finish=lambda batch, dtype: batch)  # ready-made floats
    step = build_step(recipe, Run(), CPU, world, state, bound)
    found: dict[str, Tensor] = {}
    for number in range(STEPS):
        torch.manual_seed(number)
        image, label = torch.randn(BATCH, 3, 8, 8), torch.arange(BATCH) % 4
        step({"image": image[rows], "label": label[rows], "index": label[rows]}, number, 0.1)
        found |= {f"{number}:{name}": p.grad.clone() for name, p in state.model.named_parameters()}
    found |= {name: b.clone() for name, b in state.model.named_buffers()}
    assert state.model.state_dict().keys() == state.ema.model.state_dict().keys()
    return found, state.notes


def compiled(world: World) -> dict[str, Tensor]:
    """Return output and gradient of a converted model, as it is and compiled; in one group only, for the time."""
    found = {}
    for kind in ("eager", "compiled"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
        convert(model, 2)
        if world.rank > 1:
            continue
        x = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(world.rank))
        is_compiled, backend = kind == "compiled", "aot_eager_default_partitioner"
        y = (torch.compile(model, backend=backend, dynamic=False) if is_compiled else model)(x)
        y.square().sum().backward()
        found |= {f"{kind} y": y.detach(), f"{kind} gradient": model[0].weight.grad}
    return found


def main(out: Path) -> None:
    world = connect(detect(), CPU)
    seen: dict[str, Any] = {}
    for size in GROUPS:
        for name in LAYERS:
            model = nn.Sequential(layer_of(name))
            assert convert(model, size) == 1 and isinstance(model[0], (SyncBatchNorm, LAYERS[name][0]))
            copied = copy.deepcopy(model)
            batches = [data_of(name, world.rank, step) for step in range(STEPS)]
            seen[f"{size} {name}"] = passes(model[0], batches)
            assert torch.equal(copied[0](batches[0][0]), seen[f"{size} {name}"]["y0"])
        share = BATCH // RANKS
        rows = slice(world.rank * share, (world.rank + 1) * share)
        seen[f"{size} train"], seen[f"{size} notes"] = train_steps(world, size, rows)
    empty = nn.Sequential(nn.BatchNorm1d(2))
    convert(empty, -1)
    seen["empty"] = empty(torch.arange(6.0).view(3, 2)[: 0 if world.rank else 3])
    local = nn.Sequential(nn.BatchNorm1d(2))
    seen["local"] = [convert(local, 0), convert(local, 1), type(local[0]) is nn.BatchNorm1d]
    for size in (3, 8, -2):
        with pytest.raises(ValueError, match=f"4 ranks cannot be split into groups of {size}"):
            convert(local, size)
    with pytest.raises(UsageError, match="train.bn_group=3 does not divide the number of ranks, 4"):
        train_steps(world, 3, slice(0, 4))
    torch.save(seen, out / f"{world.rank}.pt")


def compile_model(out: Path) -> None:
    world = connect(detect(), CPU)
    torch.save(compiled(world), out / f"{world.rank}.pt")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each rank."""
    out = warm.once(tmp_path_factory, "norm", lambda out: warm.run(__file__, out, RANKS))
    return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", GROUPS)
def test_a_group_of_ranks_normalises_as_one_rank_with_all_their_samples(seen, size, name):
    for group in GROUPS[size]:
        batches = []
        for step in range(STEPS):
            parts = [data_of(name, rank, step) for rank in group]
            batches.append(tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        # float64 knows the answer also where fp32 has few digits left, far from zero.
        layer, is_far = layer_of(name), name == "far_from_zero"
        if is_far:
            layer, batches = layer.double(), [(x.double(), factor.double()) for x, factor in batches]
        expected = passes(layer, batches)
        found = [seen[rank][f"{size} {name}"] for rank in group]
        near = {"rtol": 1e-5, "atol": 1e-4} if is_far else {"rtol": 1e-6, "atol": 2e-6}
        for step in range(STEPS):
            for key in (f"y{step}", f"dx{step}"):
                torch.testing.assert_close(
                    torch.cat([rank[key] for rank in found]), expected[key], check_dtype=False, **near
                )
        for key in expected.keys() & {"dweight", "dbias"}:
            total = sum(rank[key] for rank in found)
            torch.testing.assert_close(
                total, expected[key], check_dtype=False, rtol=1e-5, atol=2e-3 if is_far else 1e-5
            )
        for key, value in expected.items():
            if key in ("running_mean", "running_var", "num_batches_tracked"):
                for rank in found:
                    torch.testing.assert_close(rank[key], value, check_dtype=False, **near)
    assert {"y0", "dx1"} <= expected.keys()


@pytest.mark.shows("train.bn_group")
def test_all_ranks_train_as_one_process_with_the_whole_batch(seen):
    """Without shared statistics, gradients differ by far more than is allowed here."""
    expected, notes = train_steps(World(), 0, slice(0, BATCH))
    apart = [train_steps(World(), 0, slice(start, start + 4))[0] for start in range(0, BATCH, 4)]
    assert notes == []
    worst = 0.0
    for rank in range(RANKS):
        assert seen[rank]["-1 train"].keys() == expected.keys()
        for name, value in expected.items():
            near = 1e-4 if name.startswith("1:") else 1e-5  # the second step starts from weights that differ already
            torch.testing.assert_close(seen[rank]["-1 train"][name], value, rtol=near, atol=near)
            if name.startswith("0:"):
                worst = max(worst, (sum(one[name] for one in apart) / 4 - value).abs().max().item())
    assert worst > 1e-2
    assert seen[0]["-1 notes"] == ["train.bn_group: 20 batch-norms have the statistics of 4 ranks in training"]


def test_two_groups_train_as_two_processes_whose_gradients_are_averaged(seen):
    halves = [train_steps(World(), 0, slice(start, start + 8))[0] for start in (0, 8)]
    for name in halves[0]:
        if name.startswith("0:"):
            expected = (halves[0][name] + halves[1][name]) / 2
            for rank in range(RANKS):
                torch.testing.assert_close(seen[rank]["2 train"][name], expected, rtol=1e-5, atol=1e-5)
    statistics = [seen[rank]["2 train"]["bn1.running_mean"] for rank in range(RANKS)]
    assert torch.equal(statistics[0], statistics[1]) and torch.equal(statistics[2], statistics[3])
    assert not torch.equal(statistics[0], statistics[2])


@pytest.mark.slow
def test_a_compiled_model_shares_statistics_too(tmp_path: Path):
    warm.run(__file__, tmp_path, RANKS, function="compile_model")
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for key in ("y", "gradient"):
            torch.testing.assert_close(found[f"compiled {key}"], found[f"eager {key}"])


def test_a_rank_without_samples_takes_part(seen):
    assert [len(rank["empty"]) for rank in seen] == [3, 0, 0, 0]
    expected = functional.batch_norm(torch.arange(6.0).view(3, 2), None, None, training=True)
    torch.testing.assert_close(seen[0]["empty"], expected)


def test_nothing_is_replaced_where_each_rank_has_its_own(seen):
    assert all(rank["local"] == [0, 0, True] for rank in seen)


@pytest.mark.parametrize("size", [-1, 0, 1])
def test_one_process_keeps_torchs_batch_norm(size):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(2))
    assert convert(model, size) == 0
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, nn.BatchNorm1d]


@pytest.mark.parametrize("name", LAYERS)
def test_alone_it_is_torchs_batch_norm_to_the_bit(name):
    kind = LAYERS[name][0]
    ours, theirs = layer_of(name), layer_of(name)
    ours.__class__ = type(kind.__name__, (SyncBatchNorm, kind), {})
    batches = [data_of(name, 0, step) for step in range(STEPS)]
    found, expected = passes(ours, batches), passes(theirs, batches)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_one_process_refuses_a_group_that_it_cannot_fill():
    with pytest.raises(UsageError, match="train.bn_group=2 does not divide the number of ranks, 1; use 0"):
        train_steps(World(), 2, slice(0, BATCH))
    with pytest.raises(UsageError, match="train.bn_group=-2 must be at least -1"):
        replace(RECIPE.train, bn_group=-2)
    assert train_steps(World(), -1, slice(0, BATCH))[1] == []
