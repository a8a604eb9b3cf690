"""Detection batches on an accelerator: the CPU's samples and colours, fake and static batches, a captured finish."""

import dataclasses
from pathlib import Path

import pytest
import torch

from sightline.config import Run
from sightline.data.detection import DetectionData
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import TrainOrder
from sightline.data.loading.static import dump
from sightline.hardware import devices
from sightline.hardware.world import World

pytestmark = pytest.mark.device

CONFIG = DetectionData(path="synthetic:classes=5,samples=32,size=80", size=64, max_boxes=8)


def nothing(*_: object) -> None:
    pass


def batches(config: DetectionData, device: devices.Device, count: int) -> list[dict[str, torch.Tensor]]:
    """Finished, and brought to the host."""
    bound = config.open("train", 3).bind(device, 4)
    feeds = {"train": (bound, TrainOrder(len(bound.dataset), 4, 3))}
    loader = Loader(feeds, Run(workers=1), device, World(), BadSamples("fail", 0, nothing), nothing)
    try:
        loader.seek("train", 0, count)
        finished = (bound.finish(loader.next("train"), torch.float32) for _ in range(count))
        return [{key: value.cpu().clone() for key, value in batch.items()} for batch in finished]
    finally:
        loader.close()


@pytest.mark.parametrize("jitter", ["tf", "mlperf", "off"])
def test_batches_are_the_cpus(jitter: str):
    config = dataclasses.replace(CONFIG, jitter=jitter)
    found, expected = (batches(config, device, 4) for device in (devices.select(), devices.select("cpu")))
    for one, other in zip(found, expected, strict=True):
        for key in set(one) - {"image"}:
            assert torch.equal(one[key], other[key]), key
        difference = (one["image"] - other["image"]).abs()
        if jitter == "mlperf":  # a floor may fall to the other side: some levels of 255, rarely
            assert (difference > 1e-4).float().mean() < 0.01 and difference.max() < 4 / 255 / min(config.std)
        else:
            assert difference.max() < 1e-4


def test_fake_and_static_batches_repeat(tmp_path: Path):
    device = devices.select()
    first, *rest = batches(dataclasses.replace(CONFIG, fake=True), device, 5)
    assert all(torch.equal(batch[key], first[key]) for batch in rest for key in first)
    dump(CONFIG, tmp_path, batch=4, steps=2, seed=3, progress=nothing)
    replayed = batches(dataclasses.replace(CONFIG, static=str(tmp_path)), device, 4)
    on_cpu = batches(CONFIG, devices.select("cpu"), 2)
    for number, batch in enumerate(replayed):
        assert all(torch.equal(batch[key], on_cpu[number % 2][key]) for key in batch)


@pytest.mark.parametrize("jitter", ["tf", "mlperf"])
def test_the_device_half_can_be_captured(jitter: str):
    device = devices.select()
    if device.kind != "cuda":
        pytest.skip(f"written for cuda, this is {device.kind}")
    dataset = dataclasses.replace(CONFIG, jitter=jitter).open("train", 3)
    rows = [dataset.load(0, index) for index in range(8)]
    on_device = [
        {key: torch.stack([torch.from_numpy(row[key]) for row in part]).to(device.torch_device) for key in rows[0]}
        for part in (rows[:4], rows[4:])
    ]
    static = {key: value.clone() for key, value in on_device[0].items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dataset.finish(static, torch.bfloat16)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dataset.finish(static, torch.bfloat16)["image"]
    for key, value in on_device[1].items():
        static[key].copy_(value)
    graph.replay()
    assert torch.equal(captured, dataset.finish(on_device[1], torch.bfloat16)["image"])
