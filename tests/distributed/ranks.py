"""Run by warm.py on every rank: does what test_ranks.py asks about and writes what it saw as OUT/RANK.json."""

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from sightline import api
from sightline.config import Recipe, Run, TrainConfig
from sightline.data.classification import ClassificationData
from sightline.data.loading.loader import BadSamples, Loader, Order
from sightline.data.loading.order import EvalOrder, TrainOrder
from sightline.engine.evaluate import evaluate
from sightline.engine.model import build_model
from sightline.engine.orders import eval_order
from sightline.hardware import devices
from sightline.hardware.world import World, connect, detect
from sightline.metrics.average_precision import AveragePrecision
from sightline.metrics.topk import TopK
from sightline.parts import Bound, Dataset, DataSpec, ModelConfig
from sightline.tasks.classification import Classification
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import RunLength, ScheduleConfig
from sightline.train.state import TrainState
from sightline.train.step import build_step

CPU = devices.select("cpu")
DATA = ClassificationData(path="synthetic:classes=4,samples=30,size=12", size=8, eval_resize=8, eval_size=8)
BATCH = 8
MANY = 1500  # classes, more than have a matrix


@dataclasses.dataclass(frozen=True)
class Normed(ModelConfig):
    """A convolution with batch-norm."""

    def build(self, spec: DataSpec) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, len(spec.classes)))


def recipe_with(**train: Any) -> Recipe:
    return Recipe(
        name="ranks",
        model=Normed(),
        data=DATA,
        task=Classification(),
        optimizer=OptimizerConfig("sgd", lr=0.1),
        schedule=ScheduleConfig("constant"),
        train=TrainConfig(epochs=1, global_batch=BATCH, **{"precision": "fp32", **train}),
    )


def collectives(world: World) -> dict[str, Any]:
    mine = float(world.rank + 1)
    matrix = torch.full((1, 2, 2, 2), mine).to(memory_format=torch.channels_last)
    vector, whole = torch.tensor([mine, 10 * mine]), torch.tensor([world.rank + 5])
    averaged = [vector.clone(), matrix.clone()]
    world.average(averaged)
    copied = [vector.clone(), whole.clone()]
    world.copy_from_main(copied)
    flag, work = world.start_max(15 if world.rank == 1 else 0)
    work.wait()
    world.barrier()
    return {
        "rank": world.rank,
        "sum": world.sum(vector.clone()).tolist(),
        "gather": world.gather(vector[None]).tolist(),
        "average": [t.flatten().tolist() for t in averaged],
        "layout": averaged[1].is_contiguous(memory_format=torch.channels_last),
        "copied": [t.tolist() for t in copied],
        "max": flag.tolist(),
        "texts": world.gather_texts("ü" * (1 + 3 * world.rank)),
    }


def listening() -> list[str]:
    """Return the addresses at which this rank can be reached."""
    return sorted({link.laddr.ip for link in psutil.Process().net_connections("tcp") if link.status == "LISTEN"})


def metric(world: World, classes: int = 12) -> dict[str, Any]:
    """Return the scores of 101 made-up predictions, of which this rank counts a part."""
    random = torch.Generator().manual_seed(0)
    label = torch.randint(0, 12, (101,), generator=random)
    logits = torch.randn(101, classes, generator=random)
    logits[torch.arange(101), label] += 1.5
    merged = TopK(tuple(map(str, range(classes))), 0.1, torch.device("cpu"))
    order = EvalOrder(101, 16, world.rank, world.size)
    for step in range(order.steps_per_epoch):
        index = torch.from_numpy(order.batch(step)[1])
        rows = index.clamp(min=0)
        batch = {"label": label[rows], "index": index, "valid": index >= 0}
        merged.update({"logits": logits[rows]}, batch)
    merged.merge(world)
    return dataclasses.asdict(merged.result())


def several_labels(world: World) -> dict[str, Any]:
    """Return the scores of the same with several labels each."""
    random = torch.Generator().manual_seed(0)
    label = (torch.rand(101, 5, generator=random) < 0.3).to(torch.uint8)
    logits = torch.randn(101, 5, generator=random) + label
    merged = AveragePrecision(tuple(map(str, range(5))), 0.1, torch.device("cpu"))
    order = EvalOrder(101, 16, world.rank, world.size)
    for step in range(order.steps_per_epoch):
        index = torch.from_numpy(order.batch(step)[1])
        rows = index.clamp(min=0)
        merged.update({"logits": logits[rows]}, {"label": label[rows], "index": index, "valid": index >= 0})
    merged.merge(world)
    return dataclasses.asdict(merged.result())


def batch_norm(world: World) -> dict[str, Any]:
    """Rank r has the statistics r + 1 everywhere, in its weights and in their average."""
    found = {}
    for rule in ("averaged", "rank0", "local"):
        recipe = recipe_with(ema=0.5)
        state = TrainState(recipe, build_model(recipe, Run(), DATA.open("train", 0).spec, CPU), CPU, RunLength(1, 1))
        for buffer in state.batch_norm_statistics():
            buffer.fill_(world.rank + 1)
        state.share_batch_norm(rule, world)
        found[rule] = sorted({v for buffer in state.batch_norm_statistics() for v in buffer.tolist()})
    return found


def loader_of(feed: str, bound: Bound, order: Order) -> Loader:
    return Loader({feed: (bound, order)}, Run(workers=0), CPU, World(), BadSamples("fail", 0, print), lambda: None)


def indices(world: World) -> dict[str, Any]:
    """Return the samples that the loader hands out, step by step."""
    found = {}
    for last in ("drop", "pad", "wrap"):
        dataset = DATA.open("train", 0)
        order = TrainOrder(len(dataset), BATCH, 0, last, world.rank, world.size)
        loader = loader_of("train", dataset.bind(CPU, BATCH), order)
        loader.seek("train", 0, 9)
        found[last] = [loader.next("train")["index"].tolist() for _ in range(9)]
        loader.close()
    return found


def ready_made(dataset: Dataset) -> Bound:
    """Whose batches are floats already."""
    bound = dataset.bind(CPU, BATCH)
    return dataclasses.replace(bound, finish=lambda batch, dtype: {**batch, "image": batch["image"].to(dtype)})


def bad_steps(world: World) -> dict[str, Any]:
    """Train three steps; in the second, only the images of rank 1 have values that are not finite."""
    found = {}
    for precision in ("fp32", "fp16"):
        recipe = recipe_with(precision=precision)
        dataset = DATA.open("train", 0)
        state = TrainState(recipe, build_model(recipe, Run(), dataset.spec, CPU), CPU, RunLength(1, 1))
        step = build_step(recipe, Run(), CPU, world, state, ready_made(dataset))
        for number in range(3):
            torch.manual_seed(100 * number + world.rank)
            image = torch.randn(BATCH // world.size, 3, 8, 8)
            if number == 1 and world.rank == 1:
                image[0] = torch.nan
            label = torch.arange(BATCH // world.size) % 4
            step({"image": image, "label": label, "index": label.clone()}, number, 0.1)
        weights = {name: t.double().sum().item() for name, t in state.model.named_parameters()}
        found[precision] = {"bad": step.take_bad_steps(), "last": step.last_bad_step, "weights": weights}
        found[precision]["totals"] = step.read_totals(world)
    return found


def evaluations(world: World) -> dict[str, Any]:
    """Return scores with statistics of each rank's own, and the samples that this rank evaluated."""
    found = {}
    for shards in ("sharded", "full"):
        recipe = recipe_with(eval_shards=shards, bn_eval="local")
        data = dataclasses.replace(DATA, path="synthetic:classes=4,samples=104,size=12")
        dataset = data.open("val", 0)
        state = TrainState(recipe, build_model(recipe, Run(), dataset.spec, CPU), CPU, RunLength(1, 1))
        for buffer in state.batch_norm_statistics():
            buffer.fill_(world.rank + 1)
        order = eval_order(recipe.train, len(dataset), world)
        bound = dataset.bind(CPU, BATCH)
        loader = loader_of("val", bound, order)
        scores = evaluate(state.model, recipe, bound, loader, CPU, world, lambda done, total: None)
        given = [int(i) for step in range(order.steps_per_epoch) for i in order.batch(step)[1] if i >= 0]
        found[shards] = {"values": scores.values, "given": given}
        loader.close()
    return found


def head_only(world: World) -> dict[str, Any]:
    """Two steps in which only the head learns: what changed, and to what."""
    recipe = recipe_with(trainable="head")
    dataset = DATA.open("train", 0)
    state = TrainState(recipe, build_model(recipe, Run(), dataset.spec, CPU), CPU, RunLength(1, 1))
    before = {name: t.clone() for name, t in state.model.state_dict().items()}
    step = build_step(recipe, Run(), CPU, world, state, ready_made(dataset))
    rows = BATCH // world.size
    for number in range(2):
        torch.manual_seed(number)
        image = torch.randn(BATCH, 3, 8, 8)[world.rank * rows : (world.rank + 1) * rows]
        label = torch.arange(BATCH)[world.rank * rows : (world.rank + 1) * rows] % 4
        step({"image": image, "label": label, "index": label.clone()}, number, 0.1)
    after = state.model.state_dict()
    changed = sorted(name for name in after if not torch.equal(after[name], before[name]))
    return {"changed": changed, "head": state.model[3].weight.flatten().tolist()}


def compiled_in_mid_run(world: World) -> dict[str, Any]:
    """Four steps, never compiled and compiled after the second, by a backend that changes no operation: the state."""
    device = dataclasses.replace(CPU, compile_backend="eager")
    recipe = recipe_with()
    dataset = DATA.open("train", 0)
    found = {}
    for switch_at in (-1, 1):
        state = TrainState(recipe, build_model(recipe, Run(), dataset.spec, device), device, RunLength(1, 1))
        step = build_step(recipe, Run(compile="off"), device, world, state, ready_made(dataset))
        for number in range(4):
            torch.manual_seed(100 * number + world.rank)
            label = torch.arange(BATCH // world.size) % 4
            batch = {"image": torch.randn(len(label), 3, 8, 8), "label": label, "index": label.clone()}
            step(batch, number, 0.1)
            if number == switch_at:
                step.compile(batch)
        tensors = {name: t.flatten().tolist() for name, t in state.model.state_dict().items()}
        found[str(switch_at)] = {"totals": step.read_totals(world), "tensors": tensors}
    return found


def main(out: Path) -> None:
    world = connect(detect(), CPU)
    seen: dict[str, Any] = {"collectives": collectives(world), "metric": metric(world), "batch_norm": batch_norm(world)}
    seen |= {"several_labels": several_labels(world), "many_classes": metric(world, MANY)}
    seen |= {"listening": listening(), "indices": indices(world), "bad_steps": bad_steps(world)}
    seen |= {"evaluations": evaluations(world), "head_only": head_only(world)}
    seen |= {"compiled_in_mid_run": compiled_in_mid_run(world)}
    gc.collect()  # DDP keeps a group alive
    world.close()
    seen["evaluate"] = dataclasses.asdict(api.evaluate(str(out / "run"), ["--run.workers=0", "--run.device=cpu"]))
    (out / f"{world.rank}.json").write_text(json.dumps(seen))
