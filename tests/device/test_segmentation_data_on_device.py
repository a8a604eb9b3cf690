"""Crops of volumes augmented on an accelerator: the host's within the stated tolerance, also captured and compiled."""

import dataclasses

import pytest
import torch

from sightline.config import Run
from sightline.data.augment.segmentation import TOLERANCE
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import TrainOrder
from sightline.data.segmentation import SegmentationData
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.parts import Bound

pytestmark = pytest.mark.device

BUSY = dict.fromkeys(("zoom", "rotation", "noise", "blur", "brightness", "contrast", "gamma", "gamma_inverted"), 0.5)
CONFIG = SegmentationData(path="synthetic:samples=16", task="04", nvol=4, **BUSY)  # type: ignore[arg-type]


def nothing(*_: object) -> None:
    pass


def batches(config: SegmentationData, device: devices.Device, count: int) -> list[dict[str, torch.Tensor]]:
    """Finished, and brought to the host."""
    bound = config.open("train", 3).bind(device, 64)
    order = TrainOrder(len(bound.dataset), 64, 3, samples_per_item=bound.samples_per_item)
    bad_samples = BadSamples("fail", 0, nothing)
    loader = Loader({"train": (bound, order)}, Run(workers=1), device, World(), bad_samples, nothing)
    try:
        loader.seek("train", 0, count)
        finished = (bound.finish(loader.next("train"), torch.float32) for _ in range(count))
        return [{key: value.cpu().clone() for key, value in batch.items()} for batch in finished]
    finally:
        loader.close()


@pytest.mark.parametrize("dim", [2, 3])
def test_the_device_makes_what_the_host_makes(dim: int):
    config = dataclasses.replace(CONFIG, dim=dim, nvol=4 if dim == 2 else 1)
    if dim == 3:
        config = dataclasses.replace(config, path="synthetic:samples=64")
    found = batches(config, devices.select(), 2)
    expected = batches(dataclasses.replace(config, augment_on="host"), devices.select("cpu"), 2)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert torch.equal(one["label"], other["label"])
        assert (one["image"] - other["image"]).abs().max() <= TOLERANCE * other["image"].abs().max()


def on_device(bound: Bound, device: devices.Device, first: int) -> dict[str, torch.Tensor]:
    rows = [bound.load(0, index) for index in range(first, first + 4)]
    return {key: torch.stack([torch.from_numpy(row[key]) for row in rows]).to(device.torch_device) for key in rows[0]}


@pytest.mark.parametrize("compiled", [False, True])
def test_the_device_half_can_be_captured(compiled: bool):
    device = devices.select()
    if device.kind != "cuda":
        pytest.skip(f"written for cuda, this is {device.kind}")
    bound = CONFIG.open("train", 3).bind(device, 64)
    first, second = (on_device(bound, device, at) for at in (0, 4))

    def plain(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return bound.finish(batch, torch.float32)

    finish = torch.compile(plain, fullgraph=True, dynamic=False) if compiled else plain
    static = {key: value.clone() for key, value in first.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the batch is still copied: kernels would read anything
    with torch.cuda.stream(stream):
        for _ in range(2):
            finish(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = finish(static)
    for key, value in second.items():
        static[key].copy_(value)
    graph.replay()
    expected = plain(second)
    assert torch.equal(captured["label"], expected["label"])
    largest = expected["image"].abs().max()
    assert (captured["image"] - expected["image"]).abs().max() <= TOLERANCE * largest
