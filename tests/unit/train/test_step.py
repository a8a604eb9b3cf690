"""One optimizer update against plain loops with torch's own optimizers, clipping and GradScaler."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sightline.config import Recipe, Run, TrainConfig
from sightline.engine.model import build_model
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.hardware.precision import LossScale
from sightline.hardware.world import World
from sightline.parts import Bound, DataConfig, Dataset, DataSpec, Loss, ModelConfig
from sightline.tasks.classification import Classification
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import RunLength, ScheduleConfig
from sightline.train.state import TrainState
from sightline.train.step import Step, build_step

CPU = devices.select("cpu")
PLAN = RunLength(epochs=1, steps_per_epoch=1)
SPEC = DataSpec(("ant", "bee", "cat"), 2, (3, 3), (0.0,), (1.0,))
BATCH = 8


@dataclasses.dataclass(frozen=True)
class SmallNet(ModelConfig):
    """A convolution and a head."""

    norm: bool = False
    dropout: float = 0.0

    def build(self, spec: DataSpec) -> nn.Module:
        layers = [nn.Conv2d(spec.channels, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, len(spec.classes))]
        if self.norm:
            layers.insert(1, nn.BatchNorm2d(8))
        if self.dropout:
            layers.insert(-1, nn.Dropout(self.dropout))
        return nn.Sequential(*layers)


class NoData(DataConfig):
    """Batches are made by the test."""

    def open(self, split, seed):
        raise NotImplementedError

    def declared(self):
        return SPEC


class Ready(Dataset):
    """Whose batches only need the right type."""

    def __len__(self):
        return 0

    def name(self, index):
        return str(index)

    def bind(self, device, global_batch):
        return Bound(self, {}, self.load, self.finish)

    def load(self, epoch, index):
        raise NotImplementedError

    def finish(self, batch, dtype):
        return {**batch, "image": batch["image"].to(dtype)}


READY = Ready().bind(CPU, BATCH)


@dataclasses.dataclass(frozen=True)
class SteepTask(Classification):
    """A finite loss whose gradient is not: the slope of a square root at 0."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        zero = model(torch.zeros_like(batch["image"])).sum() * 0
        return Loss(loss.total + zero.abs().sqrt(), loss.sums)


PLAIN = Recipe(
    name="plain",
    model=SmallNet(),
    data=NoData(),
    task=Classification(),
    optimizer=OptimizerConfig("sgd", lr=0.1, weight_decay=0.01),
    schedule=ScheduleConfig("constant"),
    train=TrainConfig(epochs=1, global_batch=BATCH, precision="fp32"),
)


def recipe_with(model=PLAIN.model, task=PLAIN.task, optimizer=PLAIN.optimizer, **train) -> Recipe:
    changed = dataclasses.replace(PLAIN.train, **train)
    return dataclasses.replace(PLAIN, model=model, task=task, optimizer=optimizer, train=changed)


def built(
    recipe: Recipe,
    run: Run = Run(channels_last=False),  # noqa: B008  # frozen
    device: devices.Device = CPU,
) -> tuple[Step, TrainState]:
    state = TrainState(recipe, build_model(recipe, run, SPEC, device), device, PLAN)
    return build_step(recipe, run, device, World(), state, READY), state


def batch_of(number: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(number)
    return {
        "image": torch.from_numpy(random.normal(size=(BATCH, 2, 3, 3)) * scale).float(),
        "label": torch.from_numpy(random.integers(0, 3, BATCH)),
        "index": torch.arange(BATCH) + BATCH * number,
    }


def poisoned(number: int, value: float = math.nan) -> dict[str, torch.Tensor]:
    batch = batch_of(number)
    batch["image"][3, 0, 1, 1] = value
    return batch


def plain_model(recipe: Recipe) -> nn.Module:
    torch.manual_seed(recipe.train.seed)
    return recipe.model.build(SPEC)


def assert_close(ours: nn.Module, theirs: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for (name, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def all_tensors(state: TrainState) -> dict[str, str]:
    """sha256 of every tensor a checkpoint would hold."""
    return {
        f"{stem}/{name}": hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        for stem, named in state.tensors().items()
        for name, tensor in named.items()
    }


# Updates


@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
def test_an_update_is_the_plain_one_with_torchs_clipping(clip: float):
    recipe = recipe_with(model=SmallNet(norm=True), clip=clip)
    step, state = built(recipe)
    model = plain_model(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    norms = []
    for number in range(6):
        rate = 0.1 / (number + 1)
        step(batch_of(number), number, rate)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(model(batch_of(number)["image"]), batch_of(number)["label"]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)))
        optimizer.step()
    assert_close(state.model, model)
    assert step.read_totals(World())["grad_norm"] == pytest.approx(sum(norms), rel=1e-5)  # before clipping
    assert clip != 0.05 or min(norms) > clip  # or nothing was tested


def test_accumulation_changes_the_memory_and_not_the_update():
    states, totals = [], []
    for parts in (1, 4):
        step, state = built(recipe_with(accumulation=parts, clip=0.5))
        for number in range(5):
            step(batch_of(number), number, 0.1)
        states.append(state.model)
        totals.append(step.read_totals(World()))
    assert_close(*states, rtol=1e-5, atol=1e-6)
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    assert totals[1]["samples"] == 5 * BATCH and totals[1]["steps"] == 5


def test_accumulation_hands_numbers_of_the_whole_batch_to_every_part():
    mixed = {**batch_of(0), "mix": torch.tensor(1.0)}  # a share of 1 does not mix
    step, state = built(recipe_with(accumulation=2))
    step(mixed, 0, 0.1)
    reference, expected = built(recipe_with())
    reference(batch_of(0), 0, 0.1)
    assert_close(state.model, expected.model)


def test_totals_are_sums_since_the_last_reading():
    """A rate of 0 leaves the weights alone, so the expected numbers are those of the initial model."""
    recipe = recipe_with()
    step, _ = built(recipe)
    model = plain_model(recipe)
    for numbers in ((0, 1, 2), (3,)):
        for number in numbers:
            step(batch_of(number), number, 0.0)
        losses, hits, norms = [], 0, []
        for number in numbers:
            batch = batch_of(number)
            logits = model(batch["image"])
            loss = F.cross_entropy(logits, batch["label"])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            losses.append(float(loss.detach()))
            hits += int((logits.argmax(1) == batch["label"]).sum())
            norms.append(math.sqrt(sum(float(g.square().sum()) for g in grads)))
        got = step.read_totals(World())
        assert got == pytest.approx(
            {
                "loss": sum(losses) * BATCH,
                "samples": len(numbers) * BATCH,
                "bad_steps": 0,
                "grad_norm": sum(norms),
                "steps": len(numbers),
                "top1": hits,
            },
            rel=1e-5,
        )


def test_the_average_follows_the_loop_it_is_defined_by():
    decay = 0.8
    step, state = built(recipe_with(model=SmallNet(norm=True), ema=decay))
    expected = {name: t.double().numpy().copy() for name, t in state.model.state_dict().items()}
    for number in range(6):
        step(batch_of(number), number, 0.1)
        for name, tensor in state.model.state_dict().items():
            if tensor.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * tensor.double().numpy()
            else:
                expected[name] = tensor.numpy().copy()
    for name, average in state.ema.model.state_dict().items():
        np.testing.assert_allclose(average.numpy(), expected[name], rtol=1e-5, atol=1e-6)
        assert average.dtype == state.model.state_dict()[name].dtype
    assert state.evaluated_model is state.ema.model
    assert not any(p.requires_grad for p in state.ema.model.parameters())


@pytest.mark.parametrize(
    ("optimizer", "schedule", "lr"),
    [
        (
            OptimizerConfig("sgd_keras"),
            ScheduleConfig("step", warmup_from="zero", warmup_epochs=0.1, drop_epochs=(1,)),
            0.1,
        ),
        (OptimizerConfig("lars", eps=1e-7), ScheduleConfig("polynomial", warmup_from="zero", warmup_epochs=0.1), 9.5),
        (
            OptimizerConfig("sgd"),
            ScheduleConfig("cosine", warmup_from="zero", warmup_epochs=0.1, cosine_from="start"),
            0.1,
        ),
    ],
    ids=["sgd_keras", "lars", "sgd"],
)
def test_the_originals_updates_and_schedules_learn_a_batch_by_heart(optimizer, schedule, lr: float):
    step, _ = built(recipe_with(model=SmallNet(norm=True), optimizer=optimizer))
    plan = RunLength(epochs=2, steps_per_epoch=60)
    for number in range(120):
        step(batch_of(0), number, schedule.rate(number, lr, plan))
        if number == 118:
            step.read_totals(World())
    totals = step.read_totals(World())
    assert totals["top1"] == BATCH and totals["loss"] / BATCH < 0.1


# Precision


def test_the_loss_scale_moves_as_gradscalers_does():
    script = [True] * 3 + [False] + [True] * 2001 + [False, False] + [True] * 5
    ours = LossScale(torch.device("cpu"), enabled=True)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(()))  # which makes its tensors
    seen = []
    for finite in script:
        ours.update(torch.tensor(finite))
        parameter.grad = torch.tensor([1.0, 1.0 if finite else math.inf])
        theirs.step(optimizer)
        theirs.update()
        seen.append((float(ours.scale), theirs.get_scale()))
    assert [mine for mine, _ in seen] == [other for _, other in seen]
    assert {65536.0, 32768.0, 16384.0} == {mine for mine, _ in seen}


def test_the_loss_scale_grows_above_its_start_and_is_off_where_it_is_not_needed(monkeypatch):
    monkeypatch.setattr(LossScale, "GROWTH_INTERVAL", 2)
    scale = LossScale(torch.device("cpu"), enabled=True)
    for _ in range(5):
        scale.update(torch.tensor(True))
    assert (float(scale.scale), float(scale.good_steps)) == (65536.0 * 4, 1.0)
    off = LossScale(torch.device("cpu"), enabled=False)
    off.update(torch.tensor(False))
    assert float(off.scale) == 1.0


def test_fp16_is_autocast_with_gradscaler():
    """Over batches of which some overflow: the same scales, the same skipped steps, the same weights."""
    recipe = recipe_with(precision="fp16", clip=1.0)
    step, state = built(recipe)
    model = plain_model(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    scales = []
    for number in range(12):
        batch = batch_of(number, scale=300.0 if number in (2, 3, 7) else 1.0)
        step(batch, number, 0.1)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(batch["image"].half()).float()
            loss = F.cross_entropy(logits, batch["label"])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append((float(state.loss_scale.scale), scaler.get_scale()))
    assert [mine for mine, _ in scales] == [other for _, other in scales]
    assert 1 < len({mine for mine, _ in scales}) < 12  # some overflowed, some did not
    assert_close(state.model, model, rtol=1e-3, atol=1e-4)
    skipped = int(math.log2(65536.0 / scales[-1][0]))
    # An overflow is fp16's daily life: not counted as bad, and its samples not as trained on.
    totals = step.read_totals(World())
    assert totals["bad_steps"] == 0 and step.take_bad_steps() == 0
    assert totals["steps"] == 12 - skipped and totals["samples"] == (12 - skipped) * BATCH


def test_fp16_with_a_vanished_scale_is_bad():
    step, state = built(recipe_with(precision="fp16", task=SteepTask()))
    before = all_tensors(state)
    for number in range(30):
        step(batch_of(number), number, 0.1)
    assert float(state.loss_scale.scale) == 65536.0 * 0.5**30
    assert step.take_bad_steps() == 4  # 2**-11 ... 2**-14 are below the smallest
    changed = {name for name, sha in all_tensors(state).items() if sha != before[name]}
    assert changed == {"loss_scale/scale"}


def test_bf16_is_autocast_over_fp32_weights():
    recipe = recipe_with(precision="bf16")
    step, state = built(recipe)
    model = plain_model(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for number in range(6):
        step(batch_of(number), number, 0.1)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch_of(number)["image"].bfloat16()).float()
        F.cross_entropy(logits, batch_of(number)["label"]).backward()
        optimizer.step()
    assert {p.dtype for p in state.model.parameters()} == {torch.float32}
    assert_close(state.model, model)
    in_fp32, reference = built(recipe_with())
    for number in range(6):
        in_fp32(batch_of(number), number, 0.1)
    assert not torch.equal(reference.model[0].weight, state.model[0].weight)


# Steps that are not finite


@pytest.mark.parametrize(("first", "value"), [(0, math.nan), (3, math.inf)], ids=["first step", "later step"])
@pytest.mark.parametrize(
    "optimizer",
    [
        PLAIN.optimizer,
        OptimizerConfig("sgd", momentum=0.0),
        OptimizerConfig("sgd", weight_decay=0.01, decay_form="decoupled"),
        OptimizerConfig("sgd_keras", nesterov=True),
        OptimizerConfig("sgd_keras", weight_decay=0.01, decay_form="decoupled"),
        OptimizerConfig("lars"),
        OptimizerConfig("adamw", lr=0.01),
        OptimizerConfig("rmsprop", lr=0.01),
        OptimizerConfig("radam", lr=0.01),
    ],
    ids=lambda optimizer: f"{optimizer.kind}-{optimizer.decay_form}-{optimizer.momentum}",
)
def test_a_step_that_is_not_finite_changes_nothing(first: int, optimizer: OptimizerConfig, value: float):
    step, state = built(recipe_with(model=SmallNet(norm=True), optimizer=optimizer, clip=1.0))
    for number in range(first):
        step(batch_of(number), number, 0.1)
    assert step.take_bad_steps() == 0 and step.last_bad_step == -1
    before = all_tensors(state)
    step(poisoned(first, value), first, 0.1)
    assert all_tensors(state) == before  # weights, batch-norm statistics and counters, optimizer
    assert step.take_bad_steps() == 1 and step.last_bad_step == first
    assert step.take_bad_steps() == 0
    step(batch_of(first + 1), first + 1, 0.1)
    after = all_tensors(state)
    # A norm takes a bias before it away again, so its gradient is but rounding; lars lets it not decay either.
    still = {"model/0.bias"} if optimizer.kind == "lars" else set()
    assert all(after[name] != sha for name, sha in before.items() if name not in still)
    assert step.take_bad_steps() == 0 and step.last_bad_step == first


class LateEvent:
    """As of a device with streams: what was recorded has happened once somebody has waited."""

    def record(self) -> None:
        """Nothing to note on a device that is never late."""

    def synchronize(self) -> None:
        """Nothing to wait for either."""


def test_the_last_step_of_a_device_with_streams_is_looked_at_where_one_waits(monkeypatch):
    monkeypatch.setattr(torch.cpu, "Event", LateEvent, raising=False)
    late = dataclasses.replace(CPU, has_streams=True)
    step, _ = built(recipe_with(), device=late)
    for number in range(3):
        step(batch_of(number) if number < 2 else poisoned(2), number, 0.1)
        assert step.take_bad_steps() == 0
    assert step.take_bad_steps(waits=True) == 1 and step.last_bad_step == 2
    step(batch_of(3), 3, 0.1)
    assert step.take_bad_steps() == step.take_bad_steps(waits=True) == 0, "counted once"
    step(poisoned(4), 4, 0.1)
    assert step.take_bad_steps() == 0
    step(batch_of(5), 5, 0.1)
    assert step.take_bad_steps() == 1 and step.last_bad_step == 4, "known one step later without a wait"


def test_a_finite_loss_with_gradients_that_are_not_changes_nothing():
    step, state = built(recipe_with(model=SmallNet(norm=True), task=SteepTask()))
    before = all_tensors(state)
    step(batch_of(0), 0, 0.1)
    assert all_tensors(state) == before
    assert step.take_bad_steps() == 1


def test_a_step_that_is_not_finite_leaves_the_average_alone():
    step, state = built(recipe_with(model=SmallNet(norm=True), ema=0.9))
    for number in range(3):
        step(batch_of(number), number, 0.1)
    before = all_tensors(state)
    step(poisoned(3), 3, 0.1)
    assert all_tensors(state) == before


class Tied(nn.Sequential):
    """Two buffers in the same memory that the forward pass changes."""

    def __init__(self, *layers: nn.Module):
        super().__init__(*layers)
        both = torch.arange(6.0).view(2, 3)
        self.register_buffer("all", both)
        self.register_buffer("last", both[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.all += 1
        return super().forward(x)


def test_a_buffer_that_is_a_view_of_another_is_put_back_once():
    class TiedNet(SmallNet):
        def build(self, spec: DataSpec) -> nn.Module:
            return Tied(*super().build(spec))

    step, state = built(recipe_with(model=TiedNet()))
    step(batch_of(0), 0, 0.1)
    step(poisoned(1), 1, 0.1)
    assert state.model.all.tolist() == [[1, 2, 3], [4, 5, 6]]
    step(batch_of(2), 2, 0.1)
    assert state.model.last.tolist() == [5, 6, 7]


def test_what_comes_after_a_bad_step_is_as_if_it_had_not_been():
    recipe = recipe_with(model=SmallNet(norm=True), clip=0.1)
    (with_bad, one), (without, other) = built(recipe), built(recipe)
    for number in range(6):
        with_bad(poisoned(number) if number == 2 else batch_of(number), number, 0.1)
        if number != 2:
            without(batch_of(number), number, 0.1)
    assert all_tensors(one) == all_tensors(other)
    mine, theirs = with_bad.read_totals(World()), without.read_totals(World())
    assert mine.pop("bad_steps") == 1 and theirs.pop("bad_steps") == 0
    assert mine == theirs and mine["samples"] == 5 * BATCH  # a NaN in a sum would stay for ever


def test_bad_steps_are_counted_over_the_whole_run():
    step, _ = built(recipe_with())
    for number, bad in enumerate([False, True, True, False, True]):
        step(poisoned(number) if bad else batch_of(number), number, 0.1)
        if number == 1:
            assert step.read_totals(World())["bad_steps"] == 1
    assert step.take_bad_steps() == 3 and step.last_bad_step == 4
    assert step.read_totals(World())["bad_steps"] == 3


# Dropout


def losses(recipe: Recipe, steps: list[int], rank: int = 0) -> list[float]:
    """Return losses of one and the same batch and weights: only the masks can make a difference."""
    step, _ = built(recipe)
    step.seed = (recipe.train.seed, rank)
    seen = []
    for number in steps:
        step(batch_of(0), number, 0.0)
        seen.append(step.read_totals(World())["loss"])
    return seen


def test_dropout_differs_by_step_seed_and_rank_and_repeats_for_the_same():
    recipe = recipe_with(model=SmallNet(dropout=0.5))
    first = losses(recipe, [0, 1, 2, 3])
    assert len(set(first)) == 4
    torch.rand(17)  # whatever else draws
    assert losses(recipe, [3, 0, 2]) == [first[3], first[0], first[2]]  # a resumed run
    assert not set(losses(recipe, [0, 1, 2, 3], rank=1)) & set(first)
    assert len(set(losses(recipe_with(), [0, 1, 2, 3]))) == 1


# What was asked for


def test_the_network_is_put_back_into_training_after_an_evaluation():
    step, state = built(recipe_with(model=SmallNet(norm=True)))
    state.model.eval()
    step(batch_of(0), 0, 0.1)
    assert state.model.training and int(state.model[1].num_batches_tracked) == 1


def test_compile_on_compiles_and_auto_does_not_on_a_cpu(monkeypatch):
    compiled = []

    def record(function, **options):
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", record)
    for compile, expected in (("auto", []), ("off", []), ("on", [{"dynamic": False, "backend": "inductor"}])):
        run = Run(compile=compile)
        built(PLAIN, run)
        assert compiled == expected


def test_a_step_compiled_in_mid_run_goes_on_with_the_same_bits(monkeypatch):
    """Whatever a compiler does takes long; the update that makes it happen early is undone."""
    compiled, ends = [], []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(function) or function)
    for number, is_compiled in enumerate((False, True)):
        step, state = built(recipe_with(model=SmallNet(norm=True), ema=0.9))
        step(batch_of(0), 0, 0.1)
        if is_compiled:
            step.compile(batch_of(1))
        step(batch_of(1), 1, 0.1)
        ends.append((all_tensors(state), step.read_totals(World())))
        assert len(compiled) == number
    assert ends[0] == ends[1]


def test_a_graph_that_cannot_be_had_is_refused():
    run = Run(graph="on")
    with pytest.raises(UsageError, match="graph"):
        built(PLAIN, run)


def test_a_compiler_that_a_device_lacks_is_refused():
    with pytest.raises(UsageError, match="--run.compile on: there is no compiler for cpu; use auto or off"):
        built(PLAIN, Run(compile="on"), dataclasses.replace(CPU, compile_backend=""))


@pytest.mark.slow
def test_a_compiled_step_is_the_plain_one():
    states = []
    for compile in ("off", "on"):
        run = Run(compile=compile, channels_last=False)
        recipe = recipe_with(model=SmallNet(norm=True))
        step, state = built(recipe, run)
        for number in range(4):
            step(poisoned(number) if number == 1 else batch_of(number), number, 0.1)
        assert step.take_bad_steps() == 1
        states.append(state.model)
    assert_close(*states)


# State


def test_channels_last_is_a_layout_and_not_another_model():
    layouts = {}
    for channels_last in (True, False):
        state = TrainState(PLAIN, build_model(PLAIN, Run(channels_last=channels_last), SPEC, CPU), CPU, PLAN)
        layouts[channels_last] = state.model[0].weight
        assert state.model[0].weight.is_contiguous(memory_format=torch.channels_last) is channels_last
    assert torch.equal(*layouts.values())


def test_initial_weights_are_a_function_of_the_seed():
    torch.rand(3)
    first = all_tensors(built(recipe_with(seed=1))[1])
    torch.rand(5)
    assert all_tensors(built(recipe_with(seed=1))[1]) == first
    assert all_tensors(built(recipe_with(seed=2))[1])["model/0.weight"] != first["model/0.weight"]


@pytest.mark.parametrize("kind", ["sgd", "sgd_keras", "lars", "adamw"])
def test_a_state_loaded_from_another_continues_with_the_same_bits(kind: str):
    optimizer = OptimizerConfig(kind, lr=0.01, weight_decay=0.01)
    recipe = recipe_with(model=SmallNet(norm=True), optimizer=optimizer, ema=0.9, precision="fp16")
    step, state = built(recipe)
    for number in range(3):
        step(batch_of(number), number, 0.01)
    state.progress.step, state.progress.scores = 3, {"top1": 0.5}
    copied = {stem: {n: t.clone() for n, t in named.items()} for stem, named in state.tensors().items()}
    assert set(copied) == {"model", "optimizer", "ema", "loss_scale"}
    resumed, other = built(dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, seed=9)))
    other.load(copied, state.progress_json())
    resumed.seed = step.seed
    assert all_tensors(other) == all_tensors(state) and other.progress == state.progress
    for number in range(3, 6):
        step(batch_of(number), number, 0.01)
        resumed(batch_of(number), number, 0.01)
    assert all_tensors(other) == all_tensors(state)


def test_optimizer_tensors_are_named_by_parameter():
    _, state = built(recipe_with(optimizer=OptimizerConfig("adamw")))
    names = set(state.tensors()["optimizer"])
    assert names == {f"{p}:{k}" for p, _ in state.model.named_parameters() for k in ("step", "exp_avg", "exp_avg_sq")}


def test_weights_that_are_not_finite_are_noticed():
    _, state = built(recipe_with(model=SmallNet(norm=True)))
    assert state.weights_are_finite()
    state.model[1].running_var[2] = math.inf
    assert not state.weights_are_finite()
