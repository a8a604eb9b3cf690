"""Two ranks with half of every batch each train as one process with the whole batch: every task, every optimizer.

Batch norms share their statistics (bn_group -1), the Dice is that of all ranks, and nothing is mixed. warm.py runs
main() of this file on every rank.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import warm
from safetensors.torch import load_file, save_file
from torch import Tensor

from sightline import config
from sightline.config import Recipe, Run
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import TrainOrder
from sightline.engine.model import build_model
from sightline.hardware import devices
from sightline.hardware.world import World, connect, detect
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import RunLength
from sightline.train.state import TrainState
from sightline.train.step import build_step

CPU = devices.select("cpu")

TASKS = {
    "demo_classification": """--model.width=4 --data.path=synthetic:classes=10,samples=48,size=28 --data.size=24
        --data.eval-resize=24 --data.eval-size=24 --train.global-batch=8 --train.bn-group=-1""".split(),
    "demo_detection": """--model.depth=18 --model.width=4 --data.path=synthetic:classes=10,samples=48,size=60
        --data.size=48 --data.max-boxes=8 --train.global-batch=4 --train.bn-group=-1""".split(),
    "unet2d": """--model.width=4 --data.path=synthetic:samples=10 --data.task=04 --data.nvol=2
        --task.dice-over=world --train.global-batch=4""".split(),
    # The head alone in the first step, then all layers: the ranks' buckets of gradients change in between.
    "finetune_classification": """--model.arch=shufflenet_v2_x0_5 --data.path=synthetic:classes=10,samples=48,size=28
        --data.size=24 --data.eval-resize=24 --data.eval-size=24 --train.global-batch=8 --train.bn-group=-1""".split(),
}
# An adaptive optimizer divides a gradient by its own size: one that is 0 but for rounding (a bias in front of a norm:
# 1e-9) would become a whole step in either direction. With this much added below the line it does not.
EPS = 0.001
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.02, "nesterov": True},
    "sgd_keras": {"lr": 0.02, "nesterov": True},
    "rmsprop": {"lr": 0.002, "eps": EPS},
    "adam": {"lr": 0.002, "eps": EPS},
    "adamw": {"lr": 0.002, "eps": EPS},
    "radam": {"lr": 0.002, "eps": EPS},
    "lars": {"lr": 0.2, "norm_weight_decay": -1.0, "bias_weight_decay": -1.0},
}
STEPS = {"radam": 6}  # in its first five it is plain momentum, from then on it divides by the root of the squares
FEW_STEPS = 2
# An optimizer sees gradients, not ranks: by default one that divides them, and the one that looks at whole layers.
FIRST = [("demo_classification", "rmsprop"), ("demo_classification", "lars")]
FIRST += [("demo_detection", "adamw"), ("unet2d", "sgd")]
OTHERS = [(task, kind) for task in list(TASKS)[:3] for kind in OPTIMIZERS if (task, kind) not in FIRST]
FIRST += [("finetune_classification", "adamw")]
NEAR = 1e-5
# A ReLU whose input is 0 but for rounding bends on one side only, on some CPUs: a thousandth of some gradients.
NEAR_OF = {"demo_detection": 3e-4}

State = dict[str, dict[str, Tensor]]


@cache
def loaded(task: str) -> tuple[Recipe, Run]:
    return config.load(task, [*TASKS[task], "--train.precision=fp32", "--run.device=cpu", "--run.workers=0"])


def trained(world: World, task: str, kind: str, states: list[State] | None = None) -> dict[str, Any]:
    """Return samples and gradients of every step; weights, statistics and optimizer before the first and after each.

    With `states`, each step starts from the one given for it instead of from where the last has ended.
    """
    recipe, run = loaded(task)
    options = {"nesterov": False, **OPTIMIZERS[kind]}
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, kind=kind, **options))
    cfg, steps = recipe.train, STEPS.get(kind, FEW_STEPS)
    data = recipe.data.open("train", 0)
    bound = data.bind(CPU, cfg.global_batch)
    items = bound.samples_per_item
    order = TrainOrder(len(data), cfg.global_batch, 0, rank=world.rank, ranks=world.size, samples_per_item=items)
    length = RunLength(1, steps, order.samples_per_epoch, cfg.global_batch)
    state = TrainState(recipe, build_model(recipe, run, data.spec, CPU, world), CPU, length)
    step = build_step(recipe, run, CPU, world, state, bound, head_steps=cfg.head_epochs)  # of one step each
    loader = Loader({"train": (bound, order)}, run, CPU, world, BadSamples("fail", 0, print), lambda: None)
    loader.seek("train", 0, steps)
    found: dict[str, Any] = {"given": [], "gradients": [], "states": [copied(state)]}
    for number in range(steps):
        if states is not None:
            state.load(states[number], {"step": 0})
        batch = loader.next("train")
        step(batch, number, recipe.optimizer.lr)
        found["given"].append(batch["index"].clone())
        learning = {name: p for name, p in state.model.named_parameters() if p.requires_grad}
        found["gradients"].append({name: p.grad.clone() for name, p in learning.items()})
        found["states"].append(copied(state))
    loader.close()
    return found


def copied(state: TrainState) -> State:
    return {stem: {name: t.clone() for name, t in named.items()} for stem, named in state.tensors().items()}


def main(out: Path, pairs: list[tuple[str, str]] = FIRST) -> None:
    world = connect(detect(), CPU)
    seen = {" ".join(pair): trained(world, *pair) for pair in pairs}
    save_file(dict(flat(seen)), out / f"{world.rank}.safetensors")


def flat(found: Any, *names: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in dictionaries and lists, by their path; torch.save takes a second for thousands of them."""
    if isinstance(found, Tensor):
        yield "|".join(names), found.contiguous()
        return
    for name, value in found.items() if isinstance(found, dict) else enumerate(found):
        yield from flat(value, *names, str(name))


def nested(file: Path) -> dict[str, Any]:
    """Rebuild what `flat` took apart."""
    found: dict[str, Any] = {}
    for path, tensor in load_file(file).items():
        *names, last = path.split("|")
        functools.reduce(lambda inner, name: inner.setdefault(name, {}), names, found)[last] = tensor
    return found


def in_order(numbered: dict[str, Any]) -> list[Any]:
    return [numbered[str(number)] for number in range(len(numbered))]


def train_others(out: Path) -> None:
    main(out, OTHERS)


Seen = list[dict[tuple[str, str], dict[str, Any]]]


def on_two_ranks(factory: pytest.TempPathFactory, function: str) -> Seen:
    """Return the results of each of them."""
    out = warm.once(factory, f"equal-{function}", lambda out: warm.run(__file__, out, 2, function=function))
    return [
        {
            tuple(pair.split()): {name: in_order(value) for name, value in found.items()}
            for pair, found in nested(out / f"{rank}.safetensors").items()
        }
        for rank in range(2)
    ]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return on_two_ranks(tmp_path_factory, "main")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return on_two_ranks(tmp_path_factory, "train_others")


def test_every_optimizer_is_here():
    assert set(OPTIMIZERS) == set(get_type_hints(OptimizerConfig)["kind"].__args__)


def test_two_ranks_have_a_volume_each_and_move_all_weights_of_the_unet(first):
    """Those of the coarser heads too, which learn from labels of their own."""
    for found in (rank["unet2d", "sgd"] for rank in first):
        assert [len(volumes) for volumes in found["given"]] == [1] * FEW_STEPS
        before, after = found["states"][0]["model"], found["states"][-1]["model"]
        assert not [name for name in after if torch.equal(after[name], before[name])]
        assert len({name.split(".")[1] for name in after if name.startswith("heads.")}) == 3


def test_two_ranks_train_the_head_before_the_trunk(first):
    head, everything = first[0]["finetune_classification", "adamw"]["gradients"]
    assert set(head) == {"fc.weight", "fc.bias"} < set(everything)


@pytest.mark.parametrize(("task", "kind"), FIRST)
def test_two_ranks_train_as_one(first, task: str, kind: str):
    assert_as_one(*(rank[task, kind] for rank in first), task, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "kind"), OTHERS)
def test_two_ranks_train_as_one_by_any_pair(others, task: str, kind: str):
    assert_as_one(*(rank[task, kind] for rank in others), task, kind)


def assert_as_one(first: dict[str, Any], second: dict[str, Any], task: str, kind: str) -> None:
    """Every step of one process from where the two ranks stood before it: on its own it would part from them by more
    than rounding as soon as that decides which anchors are hard, or where a ReLU bends."""
    near = NEAR_OF.get(task, NEAR)
    whole = trained(World(), task, kind, first["states"])
    shares = [(a.tolist(), b.tolist()) for a, b in zip(first["given"], second["given"], strict=True)]
    assert [a + b for a, b in shares] == [given.tolist() for given in whole["given"]]
    assert all(set(a).isdisjoint(b) for a, b in shares)
    assert_near(first["states"][0], whole["states"][0], 0.0)
    for number, gradients in enumerate(whole["gradients"]):
        # By the length of the whole gradient: what sums of either sign leave of it keeps fewer digits.
        length = torch.stack([g.norm() for g in gradients.values()]).norm().item()
        assert_near({"gradients": first["gradients"][number]}, {"gradients": gradients}, near * max(1.0, length))
        ours, other, after = first["states"][number + 1], second["states"][number + 1], whole["states"][number + 1]
        assert_near(ours, other, 0.0)  # shared statistics too
        assert_near(as_steps(ours, kind), as_steps(after, kind), near * max(1.0, length) if task in NEAR_OF else near)
        moved = [not torch.equal(after["model"][name], first["states"][number]["model"][name]) for name in gradients]
        assert sum(moved) > 0.9 * len(moved)


def as_steps(state: State, kind: str) -> State:
    """The velocity of rmsprop times the rate, as all others have it: gradients over their size differ by more."""
    if kind != "rmsprop":
        return state
    kept = {name: t * 0.002 if name.endswith("momentum_buffer") else t for name, t in state["optimizer"].items()}
    return {**state, "optimizer": kept}


def assert_near(found: State, expected: State, near: float) -> None:
    assert found.keys() == expected.keys()
    for stem, tensors in expected.items():
        assert found[stem].keys() == tensors.keys()
        for name, tensor in tensors.items():
            apart = (found[stem][name].double() - tensor).abs().max().item()
            assert apart <= near * max(1.0, tensor.abs().max().item()), f"{stem} {name}: {apart}"
