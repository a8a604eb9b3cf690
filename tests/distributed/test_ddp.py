"""The ways of gradients and scores: four real ranks as two hosts of two, on one level and on two, and fewer of them.

warm.py runs main() of this file on every rank.
"""

import dataclasses
import functools
import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import Tensor, nn

from sightline.config import Recipe, Run, TrainConfig
from sightline.data.classification import ClassificationData
from sightline.engine.model import build_model
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.hardware.world import World, connect, detect
from sightline.parts import DataSpec, ModelConfig
from sightline.tasks.classification import Classification
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import RunLength, ScheduleConfig
from sightline.train.state import TrainState
from sightline.train.step import build_step

HERE = Path(__file__).resolve().parent
TOPK, BOXES, DICE = (
    runpy.run_path(str(HERE / name)) for name in ("ranks.py", "test_score_ranks.py", "test_dice_world.py")
)
CPU = devices.select("cpu")
RANKS, PER_HOST, BATCH = 4, 2, 16
STEPS = 5  # torch settles on its buckets in the third
# reduce, accumulation, compile; to compile takes seconds on every rank, hence slow.
WAYS = [(reduce, accumulation, "off") for reduce in ("flat", "hierarchical") for accumulation in (1, 2)]
COMPILED = [("flat", 2, "on"), ("hierarchical", 1, "on")]
EVERY_WAY = [*WAYS, *(pytest.param(*way, marks=pytest.mark.slow) for way in COMPILED)]
SIZES = (4, 3, 2)


@dataclasses.dataclass(frozen=True)
class Wide(ModelConfig):
    """Two layers of more than a bucket together, and of an odd number of weights."""

    def build(self, spec: DataSpec) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 1501),
            nn.ReLU(),
            nn.Linear(1501, 301),
            nn.ReLU(),
            nn.Linear(301, len(spec.classes)),
        )


RECIPE = Recipe(
    name="wide",
    model=Wide(),
    data=ClassificationData(path="synthetic:classes=4,samples=32,size=12", size=8, eval_resize=8, eval_size=8),
    task=Classification(),
    optimizer=OptimizerConfig("sgd", lr=0.1),
    schedule=ScheduleConfig("constant"),
    train=TrainConfig(epochs=1, global_batch=BATCH, precision="fp32"),
)


def trained(world: World, run: Run, accumulation: int = 1) -> dict[str, Any]:
    """Return gradients of every step of this rank's share, torch's facts on the exchange, and notes for the user."""
    recipe = dataclasses.replace(RECIPE, train=dataclasses.replace(RECIPE.train, accumulation=accumulation))
    dataset = recipe.data.open("train", 0)
    state = TrainState(recipe, build_model(recipe, run, dataset.spec, CPU, world), CPU, RunLength(1, 1))
    bound = dataclasses.replace(dataset.bind(CPU, BATCH), finish=lambda batch, dtype: batch)  # ready-made floats
    # The compiler's own frontend without its slow code generator.
    device = dataclasses.replace(CPU, compile_backend="aot_eager")
    step = build_step(recipe, run, device, world, state, bound)
    rows = slice(world.rank * BATCH // world.size, (world.rank + 1) * BATCH // world.size)
    gradients = []
    for number in range(STEPS):
        torch.manual_seed(number)
        image, label = torch.randn(BATCH, 3, 8, 8), torch.arange(BATCH) % 4
        step({"image": image[rows], "label": label[rows], "index": label[rows]}, number, 0.1)
        gradients.append(torch.cat([p.grad.flatten() for p in state.model.parameters()]))
    facts = step._network._get_ddp_logging_data() if world.size > 1 else {}
    return {"gradients": gradients, "facts": facts, "notes": state.notes}


def refused(world: World, local_rank: int, ranks_of_host: int) -> str:
    """Return the error of a rank that is started as this one of its host."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_of_host)
    try:
        with pytest.raises(UsageError) as refusal:
            trained(dataclasses.replace(world, local_rank=local_rank), Run(reduce="hierarchical"))
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = str(PER_HOST)
    return str(refusal.value)


def scores(world: World) -> dict[str, Any]:
    """Each metric of made-up predictions, this rank's part of which is merged with the others'."""
    torch.manual_seed(0)
    return {
        "topk": json.dumps(TOPK["metric"](world)),
        "coco_map": BOXES["answer"](BOXES["measured"](world)),
        "dice": DICE["measured"](world),
    }


def trained_in(world: World, ways: list[tuple[str, int, str]]) -> dict[str, Any]:
    seen = {}
    for reduce, accumulation, compile in ways:
        torch._dynamo.reset()
        way = f"{reduce} {accumulation} {compile}"
        seen[way] = trained(world, Run(reduce=reduce, compile=compile, bucket_mb=1), accumulation)
    return seen


def compile_steps(out: Path) -> None:
    world = connect(detect(), CPU)
    torch.save(trained_in(world, COMPILED), out / f"{world.rank}.pt")


def main(out: Path) -> None:
    world = connect(detect(), CPU)
    seen = trained_in(world, WAYS)
    seen["default"], seen["larger"] = trained(world, Run()), trained(world, Run(bucket_mb=3))
    seen["odd"] = refused(world, world.rank % 3, 3)
    seen["unlike"] = refused(world, world.rank % 3, 1 if world.rank == 3 else 3)
    seen["mixed"] = refused(world, world.rank // 2, 2)
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    seen["one host"] = trained(dataclasses.replace(world, local_rank=world.rank), Run(reduce="hierarchical"))
    seen["scores"] = {}
    for size in SIZES:
        if size < world.size:
            warm.leave()
            # Rank 0 has opened the port where they meet, for all four; it must not try again for fewer.
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            if world.rank >= size:
                break
            world = connect(World(world.rank, size, world.rank), CPU)
        seen["scores"][str(size)] = scores(world)
    torch.save(seen, out / f"{world.rank}.pt")


@pytest.fixture(scope="module")
def seen_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """seen_of(compile): the results of each rank."""
    functions = {"off": "main", "on": "compile_steps"}

    def read(compile: str) -> list[dict[str, Any]]:
        function = functions[compile]
        make = functools.partial(warm.run, __file__, ranks=RANKS, per_host=PER_HOST, function=function)
        out = warm.once(tmp_path_factory, f"ddp-{function}", make)
        return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]

    return functools.cache(read)


@pytest.fixture(scope="module")
def seen(seen_of: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the results of each rank, less those of compiled steps."""
    return seen_of("off")


@pytest.fixture(scope="module")
def alone() -> list[Tensor]:
    """The gradients of one process with the whole batch."""
    return trained(World(), Run())["gradients"]


@pytest.mark.parametrize(("reduce", "accumulation", "compile"), EVERY_WAY)
def test_four_ranks_have_the_gradients_of_one(seen_of, alone, reduce: str, accumulation: int, compile: str):
    for rank in seen_of(compile):
        found = rank[f"{reduce} {accumulation} {compile}"]["gradients"]
        for step, (ours, whole) in enumerate(zip(found, alone, strict=True)):
            # Steps differ, or stale gradients would pass; later ones start from weights that differ by rounding.
            assert not step or (whole - alone[step - 1]).abs().max() > 1e-2
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-6 if step == 0 else 1e-5)


@pytest.mark.shows("run.reduce")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_levels_give_the_gradients_of_one(seen, accumulation: int):
    """On all ranks the same bits, or their weights would part."""
    for step in range(STEPS):
        flat, levels = (
            [rank[f"{reduce} {accumulation} off"]["gradients"][step] for rank in seen]
            for reduce in ("flat", "hierarchical")
        )
        assert all(torch.equal(flat[0], other) for other in flat)
        assert all(torch.equal(levels[0], other) for other in levels)
        torch.testing.assert_close(levels[0], flat[0], rtol=0, atol=1e-6)


def bucket_bytes(found: dict[str, Any]) -> list[int]:
    return [int(size) for size in found["facts"]["rebuilt_bucket_sizes"].split(",")]


def bytes_of_gradients() -> int:
    return 4 * sum(p.numel() for p in Wide().build(DataSpec(("a", "b", "c", "d"), 3, (8, 8), (), ())).parameters())


@pytest.mark.parametrize(("reduce", "accumulation", "compile"), EVERY_WAY)
def test_what_torch_is_asked_for(seen_of, reduce: str, accumulation: int, compile: str):
    """A hook where two levels are asked for; a static graph where no part of a batch holds its gradients back."""
    found = seen_of(compile)[0][f"{reduce} {accumulation} {compile}"]
    facts = found["facts"]
    assert facts.get("comm_hook", "") == ("_reduce" if reduce == "hierarchical" else "")
    assert facts.get("static_graph", 0) == (accumulation == 1)
    assert facts["gradient_as_bucket_view"] and not facts["broadcast_buffers"]
    assert facts["bucket_cap_bytes"] == 1 << 20
    sizes = bucket_bytes(found)
    assert len(sizes) > 1 and sum(sizes) == bytes_of_gradients()
    # One bucket that two ranks of a host cannot share evenly, and one that they can.
    assert {size // 4 % PER_HOST for size in sizes} == {0, 1}


@pytest.mark.shows("run.bucket_mb")
def test_the_size_of_a_bucket_is_a_flag(seen):
    default, larger = seen[0]["default"], seen[0]["larger"]
    assert default["facts"]["bucket_cap_bytes"] == 25 << 20 and larger["facts"]["bucket_cap_bytes"] == 3 << 20
    assert len(bucket_bytes(default)) == 2, "the first leaves early"
    assert bucket_bytes(larger) == [bytes_of_gradients()]


def test_levels_are_reported_to_the_user(seen):
    assert seen[0]["flat 1 off"]["notes"] == []
    two = "run.reduce=hierarchical: gradients are summed within 2 hosts of 2 ranks each first"
    assert seen[0]["hierarchical 1 off"]["notes"] == [two]
    one = "run.reduce=hierarchical: all 4 ranks are on one host, which leaves one level; gradients are summed flat"
    assert seen[0]["one host"]["notes"] == [one] and seen[0]["one host"]["facts"].get("comm_hook", "") == ""


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("odd", "of 4 ranks, 3 are on the host of rank 0, and rank 0 is local rank 0 of 3"),
        ("unlike", "of 4 ranks, 3 are on the host of rank 0, and rank 0 is local rank 0 of 3"),
        ("mixed", "of 4 ranks, 2 are on the host of rank 0, and rank 1 is local rank 0 of 2"),
    ],
)
def test_hosts_that_are_not_alike_are_refused_by_every_rank(seen, case: str, told: str):
    for rank in seen:
        assert told in rank[case] and "--run.reduce flat" in rank[case]


def test_one_rank_has_nothing_to_add_up():
    assert trained(World(), Run(reduce="hierarchical"))["notes"] == []


def test_a_bucket_holds_something():
    with pytest.raises(UsageError, match="run.bucket_mb=0 must be at least 1"):
        Run(bucket_mb=0)


@pytest.mark.parametrize("metric", ["topk", "coco_map", "dice"])
@pytest.mark.parametrize("size", SIZES)
def test_scores_are_those_of_one_rank(seen, one_rank: dict[str, str], metric: str, size: int):
    expected = json.loads(one_rank[metric])
    for rank in seen[:size]:
        found = json.loads(rank["scores"][str(size)][metric])
        if metric == "topk":  # a sum of floats over samples, whose order is another
            assert found["values"].pop("loss") == pytest.approx(expected["values"]["loss"], rel=1e-12)
            assert found == {**expected, "values": {k: v for k, v in expected["values"].items() if k != "loss"}}
        else:
            assert found == expected


@pytest.fixture(scope="module")
def one_rank() -> dict[str, str]:
    return scores(World())
