"""Loaders without pinned memory, optimizers that ask to be captured, lazy mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sightline_migrate.reporting import record

NUMBERS = TensorDataset(torch.arange(4.0))


def done_for(name: str) -> list[str]:
    return [each.what for each in record.records.values() if each.rule.name == name]


@pytest.mark.parametrize(
    ("args", "kwargs", "is_told"),
    [
        ((2,), {"pin_memory": True}, True),
        ((2, False, None, None, 0, None, True), {}, True),
        ((2,), {"pin_memory": True, "pin_memory_device": "cuda"}, True),
        ((2,), {"pin_memory": False}, False),
        ((2,), {}, False),
    ],
)
def test_loader_pins_nothing_and_says_nothing(
    on_cpu: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_told: bool
):
    on_cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(NUMBERS, *args, **kwargs)
        assert [batch[0].tolist() for batch in loader] == [[0.0, 1.0], [2.0, 3.0]]
    assert done_for("torch.utils.data.DataLoader.__init__") == ["without pinned memory"] * is_told


def test_loader_of_ones_own(on_cpu: Callable[..., Any]):
    on_cpu()

    class Loader(DataLoader[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, pin_memory=True, **kwargs)

    assert not Loader(NUMBERS, batch_size=2).pin_memory


OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.ASGD)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_capturable_steps_run_uncaptured(on_cpu: Callable[..., Any], kind: Any):
    weight, plain = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    without = kind([plain], lr=0.1)
    saved = kind([plain], lr=0.1, capturable=True).state_dict()
    on_cpu()
    optimizer = kind([weight], lr=0.1, capturable=True)
    for parameter, one in ((weight, optimizer), (plain, without)):
        parameter.grad = torch.tensor([1.0, 2.0, -3.0])
        one.step()
    torch.testing.assert_close(weight, plain, rtol=0, atol=0)
    assert len(done_for("torch.optim.Optimizer.add_param_group")) == 1
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert len(done_for("torch.optim.Optimizer.load_state_dict")) == 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_capturable_set_by_hand(on_cpu: Callable[..., Any], kind: Any):
    on_cpu()
    weight, plain = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, without = kind([weight], lr=0.1), kind([plain], lr=0.1)
    optimizer.param_groups[0]["capturable"] = True
    for parameter, one in ((weight, optimizer), (plain, without)):
        parameter.grad = torch.tensor([1.0, 2.0, -3.0])
        one.step()
    torch.testing.assert_close(weight, plain, rtol=0, atol=0)
    assert len(done_for("torch.optim.Optimizer.step")) == 1


def test_learning_rate_in_a_tensor_with_foreach(on_cpu: Callable[..., Any]):
    on_cpu()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.1), foreach=True, capturable=True)
    weight.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.9))


def test_fused_and_foreach_stay(on_cpu: Callable[..., Any]):
    on_cpu()
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    (group,) = torch.optim.AdamW([weight], fused=True).param_groups
    (other,) = torch.optim.AdamW([weight], foreach=True).param_groups
    assert group["fused"] and other["foreach"]
    assert not done_for("torch.optim.Optimizer.add_param_group")


# Doubles of the vendor's modules: one counts the marks, the other registers a backend, which is gloo here.
CORE = """
marks = 0

def mark_step():
    global marks
    marks += 1
"""
HCCL = """
import torch.distributed as dist
dist.Backend.register_backend("hccl", lambda *given: dist.ProcessGroupGloo(*given), devices=["cpu"])
"""
# torch.hpu comes with the vendor's package as well; the work itself stays on the CPU.
LAZY = """
import os, types, torch
import torch.distributed as dist
torch.hpu = types.ModuleType("torch.hpu")
torch.hpu.is_available = lambda: True
torch.hpu.device_count = lambda: 1
from sightline import migrate
from habana_frameworks.torch import core
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)

def train(steps):
    before = core.marks
    for _ in range(steps):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    torch.autograd.backward([weight.sum()])
    print(core.marks - before)

with migrate.migrate(target="hpu"):
    train(3)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    print(dist.get_backend())
train(3)
print(dist.get_backend())
os.environ["PT_HPU_LAZY_MODE"] = "0"
with migrate.migrate(target="hpu"):
    train(3)
dist.destroy_process_group()
"""


def test_gaudi_gets_step_marks_and_its_own_collectives(run_script: Callable[..., Any], tmp_path: Path):
    """Marks after each backward and each step: only for hpu, only in lazy mode, only while migrated."""
    package = tmp_path / "habana_frameworks" / "torch"
    (package / "distributed").mkdir(parents=True)
    (package / "core.py").write_text(CORE)
    (package / "distributed" / "hccl.py").write_text(HCCL)
    done = run_script(LAZY, plain=True, env={"PT_HPU_LAZY_MODE": "1"}, warm=True)
    assert done.stdout.split() == ["7", "nccl", "0", "hccl", "0"]
