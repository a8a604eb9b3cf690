"""Advice where memory runs out: whether the batch, the network or an evaluation was too large, and what helps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from sightline.data.loading.order import EvalOrder
from sightline.errors import OutOfMemory
from sightline.hardware.devices import Device, is_out_of_memory
from sightline.hardware.world import World
from sightline.parts import DataSpec
from sightline.recipe.recipe import Recipe
from sightline.train.state import TrainState

MOST = 0.5  # share of the peak from which on the network is what is too large
SMALLER = "use a smaller network, fewer classes, or another --run.device"


@contextlib.contextmanager
def advised(device: Device, advice: Callable[[], str]) -> Iterator[None]:
    """Raise OutOfMemory with this advice where memory runs out inside."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(told(error, device, advice())) from error


def told(error: BaseException, device: Device, advice: str) -> str:
    """Return the text of an OutOfMemory."""
    return f"{device.name()} ran out of memory (peak {device.peak_memory_bytes() / 1e9:.1f} GB) {advice} ({error})"


def building(recipe: Recipe, spec: DataSpec) -> str:
    """Say how large the network is that could not be built."""
    size = ""
    with contextlib.suppress(Exception), torch.device("meta"):  # of a user's own model, which may compute on the way
        size = f". It has {_size_of(recipe.model.build(spec))}"
    return f"while the network was built, before any batch{size}; {SMALLER}"


def training(recipe: Recipe, state: TrainState, world: World) -> str:
    """Say what a step takes most memory for, and how it needs less."""
    cfg = recipe.train
    each = cfg.global_batch // world.size
    told = f"with {each // cfg.accumulation} samples at once per device"
    fixed = sum(t.nbytes for tensors in state.tensors().values() for t in tensors.values())
    fixed += sum(p.nbytes for p in state.model.parameters() if p.requires_grad)  # their gradients
    if fixed >= MOST * state.device.peak_memory_bytes() > 0:
        return (
            f"{told}, but most of it is the network, which takes {fixed / 1e9:.1f} GB with its gradients and "
            f"optimizer for any batch. It has {_size_of(state.model)}; {SMALLER}"
        )
    more = next((parts for parts in range(cfg.accumulation + 1, each + 1) if each % parts == 0), 0)
    if not more:
        return f"{told}; use smaller images or a smaller network"
    return (
        f"{told}; --train.accumulation auto --run.override finds the most that fit, --train.accumulation {more} "
        f"--run.override tries the next number of parts. Both keep the batch of {cfg.global_batch}; batch-norm, "
        f"where the network has it, then takes its statistics from fewer samples, which are noisier"
    )


def evaluating(order: EvalOrder, spec: DataSpec) -> str:
    """Say how much an evaluation takes at once."""
    return (
        f"in an evaluation of {order.local_batch} samples at once per device and {len(spec.classes):,} classes. It "
        "takes the batch of training whole, also with --train.accumulation; use a smaller --train.global-batch with "
        "--run.override, smaller images or a smaller network"
    )


def starting() -> str:
    """Say that neither batch nor network were there yet."""
    return "before the network was built, so no smaller batch helps; use --data.cache off, or a host with more memory"


def _size_of(model: nn.Module) -> str:
    sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    numbers = {name: p.numel() for name, p in model.named_parameters()}
    largest = max(numbers, key=lambda name: numbers[name], default="")
    shape = " x ".join(map(str, sizes.get(largest, ())))
    return f"{sum(numbers.values()):,} parameters, {numbers.get(largest, 0):,} of them in {largest} ({shape})"
