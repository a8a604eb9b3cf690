"""Fused bottlenecks inside the engine, in fp16 on the CPU: their reference takes the place of the kernels."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sightline.config import Recipe, Run, TrainConfig
from sightline.data.classification import ClassificationData
from sightline.engine.model import build_model
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.kernels import bottleneck
from sightline.models.resnet import Bottleneck, ResNetConfig
from sightline.parts import Batch, Bound, Dataset, DataSpec, ModelConfig
from sightline.tasks.classification import Classification
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import RunLength, ScheduleConfig
from sightline.train.state import TrainState
from sightline.train.step import Step, build_step

CPU = devices.select("cpu")
SPEC = DataSpec(("ant", "bee"), 16, (4, 4), (0.0,), (1.0,))


class TwoBlocks(nn.Module):
    """A block with a projection, one without, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            Bottleneck(ResNetConfig(), 16, 8, 2, True),
            Bottleneck(ResNetConfig(), 32, 8, 1, False),
        )
        self.fc = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(x).mean((2, 3)))


@dataclasses.dataclass(frozen=True)
class TwoBlocksConfig(ModelConfig):
    def build(self, spec: DataSpec) -> nn.Module:
        return TwoBlocks()


class Ready(Dataset):
    """Whose batches only need the right type."""

    spec = SPEC

    def __len__(self):
        return 0

    def name(self, index):
        return str(index)

    def bind(self, device, global_batch):
        return Bound(self, {}, self.load, self.finish)

    def load(self, epoch, index):
        raise NotImplementedError

    def finish(self, batch, dtype):
        return {**batch, "image": batch["image"].to(dtype, memory_format=torch.channels_last)}


def make(is_fused: bool) -> tuple[Step, TrainState]:
    train = TrainConfig(epochs=1, global_batch=8, precision="fp16", accumulation=2, ema=0.9, clip=1.0)
    optimizer = OptimizerConfig(kind="sgd", lr=0.1, momentum=0.9)
    data = ClassificationData(classes=2)
    recipe = Recipe("two blocks", TwoBlocksConfig(), data, Classification(), optimizer, ScheduleConfig(), train)
    built = build_model(recipe, Run(), SPEC, CPU, World())
    for block in built.model.blocks:
        block.is_fused = is_fused
    state = TrainState(recipe, built, CPU, RunLength(1, 4))
    return build_step(recipe, Run(compile="off"), CPU, World(), state, Ready().bind(CPU, 8)), state


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    image = torch.randn(4, 8, 16, 12, 12, generator=generator)
    label = torch.randint(2, (4, 8), generator=generator)
    return [{"image": image[i], "label": label[i], "index": torch.arange(8)} for i in range(4)]


def test_steps_with_accumulation_average_and_scale_are_those_of_plain_blocks():
    found, changes = {}, {}
    for is_fused in (False, True):
        step, state = make(is_fused)
        before = [parameter.detach().clone() for parameter in state.model.parameters()]
        for number, batch in enumerate(batches()):
            step(batch, number, 0.05)
        after = state.model.parameters()
        changes[is_fused] = torch.cat([(new.detach() - old).flatten() for new, old in zip(after, before, strict=True)])
        found[is_fused] = state.tensors()
    # fp16 sees the other side of a ReLU here and there: plain blocks differ as much from float64.
    assert float((changes[True] - changes[False]).norm() / changes[False].norm()) < 0.1
    for stem, tensors in found[False].items():
        assert found[True][stem].keys() == tensors.keys()
    for name, expected in found[False]["model"].items():
        if "running_var" in name or "num_batches" in name:
            torch.testing.assert_close(found[True]["model"][name], expected, rtol=1e-2, atol=0)
    assert found[True]["loss_scale"]["good_steps"] == 4
    assert found[True]["model"]["blocks.1.bn3.num_batches_tracked"] == 8  # two parts of four steps


def test_an_overflow_changes_nothing_but_the_scale():
    step, state = make(is_fused=True)
    first, second, *_ = batches()
    step(first, 0, 0.05)
    before = {name: tensor.clone() for name, tensor in state.tensors()["model"].items()}
    state.loss_scale.scale.fill_(2.0**40)
    step(second, 1, 0.05)
    assert float(state.loss_scale.scale) == 2.0**39
    assert all(tensor.equal(before[name]) for name, tensor in state.tensors()["model"].items())


@pytest.fixture
def alone():
    """A group of one rank, with DDP's buckets and hooks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_takes_the_gradients_of_a_block(alone):
    model = TwoBlocks().to(memory_format=torch.channels_last).train()
    for block in model.blocks:
        block.is_fused = True
    twin = copy.deepcopy(model)
    x = batches()[0]["image"].half().contiguous(memory_format=torch.channels_last)
    assert bottleneck.applies(twin.blocks[0], x)
    # Buckets smaller than a block: its gradients fill several.
    network = DistributedDataParallel(twin, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=0.002)
    for each in (model, network):
        with torch.autocast("cpu", torch.float16):
            each(x).float().square().sum().backward()
    for (name, one), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
