"""What is said where memory runs out: what took it, and what needs less."""

import pytest
import torch

from sightline import config
from sightline.engine.model import build_model
from sightline.errors import OutOfMemory
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.parts import DataSpec
from sightline.train import memory
from sightline.train.schedules import RunLength
from sightline.train.state import TrainState

CPU = devices.select("cpu")
SPEC = DataSpec(("a", "b"), 3, (24, 24), (0.5,) * 3, (0.2,) * 3)


def said(batch: int, parts: int, ranks: int) -> str:
    flags = f"--train.global-batch={batch} --train.accumulation={parts} --model.width=4 --train.precision=fp32"
    recipe, run = config.load("demo_classification", flags.split())
    state = TrainState(recipe, build_model(recipe, run, SPEC, CPU, World()), CPU, RunLength(1, 1))
    return memory.training(recipe, state, World(size=ranks))


@pytest.mark.parametrize(
    ("batch", "parts", "ranks", "at_once", "more"),
    [(12, 1, 1, 12, 2), (12, 3, 1, 4, 4), (12, 3, 2, 2, 6), (15, 3, 1, 5, 5), (7, 1, 1, 7, 7), (12, 6, 2, 1, 0)],
)
def test_the_next_number_of_parts_that_divides_the_batch_is_named(batch, parts, ranks, at_once, more):
    line = said(batch, parts, ranks)
    assert line.startswith(f"with {at_once} samples at once per device; ")
    if more:
        assert f"--train.accumulation {more} --run.override tries the next" in line and f"batch of {batch};" in line
    else:
        assert line.endswith("; use smaller images or a smaller network")


def test_a_network_that_takes_most_of_the_memory_is_named_instead(monkeypatch):
    """As if the process had taken no more than a millionth of its memory: a small network is most of that."""
    monkeypatch.setattr(memory, "MOST", 1e-6)
    recipe, _ = config.load("demo_classification", ["--model.width=4"])
    model = recipe.model.build(SPEC)
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    largest = max(names, key=lambda name: torch.Size(names[name]).numel())
    line = said(12, 1, 1)
    count = sum(p.numel() for p in model.parameters())
    shape = " x ".join(map(str, names[largest]))
    of_largest = f"{torch.Size(names[largest]).numel():,} of them in {largest} ({shape})"
    assert "most of it is the network, which takes 0.0 GB with its gradients and optimizer for any batch. " in line
    assert f"{count:,} parameters, {of_largest}; use a smaller network" in line
    built = memory.building(recipe, SPEC)
    assert built.startswith(f"while the network was built, before any batch. It has {count:,} parameters, {of_largest}")


def test_only_errors_of_memory_become_advice():
    advised = r"ran out of memory \(peak [0-9.]+ GB\) eat less \(no more pages\)"
    with pytest.raises(OutOfMemory, match=advised), memory.advised(CPU, lambda: "eat less"):
        raise MemoryError("no more pages")
    with pytest.raises(ValueError, match="^other$"), memory.advised(CPU, lambda: "eat less"):
        raise ValueError("other")
