"""The search for a batch, on devices whose steps are given as numbers, and the sizes that data can come in."""

from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import pytest
from torch import Tensor, nn

from sightline import config
from sightline.data.classification import ClassificationData
from sightline.data.loading.static import StaticDataset, dump
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.parts import DataConfig, Dataset, DataSpec, ModelConfig, Split
from sightline.train import batch_size
from sightline.train.batch_size import (
    Choice,
    Probe,
    choose,
    fewest_parts,
    measure_accumulation,
    measure_batch,
    possible_sizes,
)

SIZES = sorted({2**k for k in range(10)} | {3 * 2**k for k in range(9)})
CPU = devices.select("cpu")


class Made:
    """A device with a fixed cost for each step, one for each sample, and so much memory; notes what it is asked."""

    def __init__(self, step_s: float = 0.01, sample_s: float = 0.001, slow_from: int = 1000, fits: float = 1e9):
        self.step_s, self.sample_s, self.slow_from, self.fits = step_s, sample_s, slow_from, fits
        self.asked: list[int] = []

    def __call__(self, size: int) -> Probe:
        self.asked.append(size)
        seconds = self.step_s + size * self.sample_s * (2 if size >= self.slow_from else 1)
        return Probe(seconds, (0.1 + 0.9 * size / self.fits) if size <= 2 * self.fits else float("inf"))


@pytest.mark.parametrize(
    ("device", "batch", "limit"),
    [
        (Made(), 768, ""),  # all sizes
        (Made(fits=100), 96, "memory"),
        (Made(fits=64), 64, "memory"),
        (Made(slow_from=128), 64, "rate"),
        (Made(sample_s=0.03), 128, "time"),
        (Made(fits=1.5), 1, "memory"),
        (Made(fits=2.5), 2, "memory"),
        (Made(step_s=60), 2, "time"),
    ],
)
def test_the_largest_batch_that_fits_and_is_not_slower(device: Made, batch: int, limit: str):
    found = choose(SIZES, 1, 5.0, device)
    assert found is not None and (found.batch, found.limit) == (batch, limit)
    assert found.probe == device(batch)
    if limit == "memory" and batch > 2:  # it was foreseen: no step was tried that the host has no memory for
        assert max(device.asked) <= 1.2 * device.fits


def test_a_step_that_somebody_else_slowed_down_is_measured_again():
    device = Made()
    disturbed = {16}

    def probe(size: int) -> Probe:
        seconds, memory = device(size)
        slow = size in disturbed
        disturbed.discard(size)
        return Probe(10 * seconds if slow else seconds, memory)

    found = choose(SIZES, 1, 5.0, probe)
    assert found is not None and found.batch == 768 and device.asked.count(16) == 2


def test_nothing_is_chosen_where_not_even_the_smallest_fits():
    device = Made(fits=0.2)
    assert choose(SIZES, 1, 5.0, device) is None and device.asked == [2, 1]


def test_every_size_is_a_multiple_of_the_accumulation():
    sizes = [5 * size for size in SIZES]
    assert choose(sizes, 5, 5.0, Made(fits=200)) == Choice(160, Made(fits=200)(160), "memory")


def sizes_of(name: str, *flags: str, ranks: int = 1) -> tuple[list[int], str]:
    recipe, run = config.load(name, ["--train.global-batch=auto", "--run.workers=0", *flags])
    return possible_sizes(recipe, run, recipe.data.open("train", 0), CPU, World(size=ranks))


def test_an_epoch_keeps_ten_steps():
    data = "--data.path=synthetic:classes=10,samples=170,size=24"
    sizes, end = sizes_of("demo_classification", data)
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16]
    assert end == "a larger one leaves fewer than 10 steps in an epoch of 170 samples"
    assert sizes_of("demo_classification", data, ranks=2)[0] == [1, 2, 3, 4, 6, 8]
    assert sizes_of("demo_classification", data, "--train.accumulation=3")[0] == [3, 6, 9, 12]
    few = "--data.path=synthetic:classes=10,samples=9,size=24"
    assert sizes_of("demo_classification", few)[0] == [1, 2]  # batch-norm may need two


def test_slices_come_from_whole_volumes():
    sizes, _ = sizes_of("unet2d", "--data.path=synthetic:samples=64", "--data.nvol=2")
    assert sizes[:4] == [2, 3, 4, 6]  # one slice cannot come from two volumes
    for size in sizes:
        recipe, _ = config.load("unet2d", ["--data.path=synthetic:samples=64", "--data.nvol=2"])
        recipe.data.open("train", 0).bind(CPU, size)


def test_batches_for_loader_processes_must_have_room_in_shared_memory(monkeypatch):
    """Four batches in flight for training and four for evaluation, 64 MiB as docker gives."""
    flags = ["--data.path=synthetic:classes=10,samples=9000,size=224", "--data.size=224", "--run.workers=2"]
    usage = type("Usage", (), {"free": 64 * 2**20})
    monkeypatch.setattr(batch_size.shutil, "disk_usage", lambda path: usage)
    sizes, end = sizes_of("demo_classification", *flags)
    held = max(sizes) * 8 * 224 * 224 * 3
    assert held < 0.8 * 64 * 2**20 < 2 * held and "no room in /dev/shm" in end


def test_data_that_come_in_no_size_say_why():
    recipe, run = config.load("unet2d", ["--data.path=synthetic:samples=64", "--train.global-batch=auto"])
    wide = replace(recipe, data=replace(recipe.data, nvol=2**20))
    with pytest.raises(UsageError, match="nvol=1048576 volumes cannot share a batch"):
        possible_sizes(wide, run, wide.data.open("train", 0), CPU, World())


@pytest.mark.parametrize(
    ("items", "fits", "parts"), [(64, 1e9, 1), (64, 20, 4), (96, 40, 3), (7, 3, 7), (1, 9, 1), (8, 0.1, 0)]
)
def test_the_fewest_parts_that_fit(items: int, fits: float, parts: int):
    device = Made(fits=fits)
    assert fewest_parts(items, lambda count: device(items // count)) == parts
    assert max(device.asked) <= max(2 * fits, 7)  # memory of a host runs out at most by a little


class Noting(nn.Module):
    """Adds up all pixels; notes the images that it gets at once, and how many of them differ."""

    def __init__(self, classes: int):
        super().__init__()
        self.fc = nn.Linear(1, classes)
        self.seen: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((len(x), len({image.numpy().tobytes() for image in x})))
        return self.fc(x.sum((1, 2, 3))[:, None])


@dataclass(frozen=True)
class Noted(ModelConfig):
    built: tuple = ()

    def build(self, spec: DataSpec) -> nn.Module:
        self.built[0].append(Noting(len(spec.classes)))
        return self.built[0][0]


@dataclass(frozen=True)
class Replayed(ClassificationData):
    folder: Path = Path()

    def open(self, split: Split, seed: int) -> Dataset:
        return StaticDataset(self.folder)


def data_flags(samples: int) -> list[str]:
    sizes = [f"--data.{name}=16" for name in ("size", "eval-resize", "eval-size")]
    return [f"--data.path=synthetic:classes=10,samples={samples},size=16", *sizes]


@pytest.fixture
def steps_of(monkeypatch):
    """steps_of(measure, samples, *flags): what it answers, and (images at once, different ones) of its steps."""
    monkeypatch.setattr(batch_size, "TIMED_S", 0.0)  # as many steps as are needed; no time decides here
    monkeypatch.setattr(batch_size, "NOT_SLOWER", 0.0)

    def run(measure, samples: int, *flags: str, data: DataConfig | None = None):
        recipe, run = config.load("demo_classification", [*data_flags(samples), "--train.precision=fp32", *flags])
        built: list[Noting] = []
        recipe = replace(recipe, model=Noted(built=(built,)), data=data or recipe.data)
        answer = measure(recipe, run, CPU, World())
        assert len(built) == 1, "one network for all steps"
        return answer, [seen for seen, _ in groupby(built[0].seen)]

    return run


def test_a_measured_batch_is_tried_in_the_parts_of_the_recipe(steps_of):
    (batch, line), steps = steps_of(measure_batch, 90, "--train.global-batch=auto", "--train.accumulation=2")
    assert batch == 8 and line.startswith("batch 8: a larger one leaves fewer than 10 steps in an epoch of 90 samples")
    assert steps == [(2, 2), (4, 4)]  # of 4 and of 8; 6 and 12 are neither needed nor possible


def test_steps_that_are_measured_are_not_compiled(steps_of, monkeypatch):
    monkeypatch.setattr("torch.compile", None)
    flags = "--train.global-batch=auto", "--run.compile=on"
    assert steps_of(measure_batch, 30, *flags)[0][0] == 3


def test_parts_are_tried_from_the_smallest_up_to_the_whole_batch(steps_of):
    answer, steps = steps_of(measure_accumulation, 90, "--train.global-batch=12", "--train.accumulation=auto")
    assert answer[0] == 1 and "accumulation 1: all 12 samples of a device at once: they fit" in answer[1]
    assert steps == [(size, size) for size in (2, 3, 4, 6, 12)]


def test_few_images_are_read_and_repeated_for_a_large_batch(steps_of, monkeypatch):
    monkeypatch.setattr(batch_size, "DISTINCT", 4)
    _, steps = steps_of(measure_accumulation, 90, "--train.global-batch=9", "--train.accumulation=auto")
    assert steps == [(3, 3), (9, 4)]


def test_batches_of_a_fixed_size_are_read_whole(steps_of, monkeypatch, tmp_path):
    monkeypatch.setattr(batch_size, "DISTINCT", 4)
    recipe, _ = config.load("demo_classification", data_flags(90))
    dump(recipe.data, tmp_path, batch=9, steps=2, seed=0, progress=lambda *_: None)
    flags = "--train.global-batch=9", "--train.accumulation=auto"
    assert steps_of(measure_accumulation, 90, *flags, data=Replayed(folder=tmp_path))[1] == [(3, 3), (9, 9)]


def test_a_process_takes_a_share_of_the_memory_that_is_free(monkeypatch):
    class Fixed(devices.Device):
        def memory_bytes(self) -> tuple[int, int]:
            return (1 * 10**9, 9 * 10**9) if self.kind != "odd" else (0, 0)

    share, of_host = batch_size.SHARE, batch_size.HOST_SHARE
    assert 0 < of_host < share < 1
    assert batch_size._room(Fixed("odd"), World()) == (float("inf"), "fits")
    room, said = batch_size._room(Fixed("xpu"), World())
    assert room == pytest.approx(share * 10e9)
    assert said == f"fits in {100 * share:.0f} % of 10 GB, the most it may take"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    room, said = batch_size._room(Fixed("cpu", is_shared=True), World(size=3))
    assert room == pytest.approx(1e9 + of_host * 3e9)
    assert said == f"fits in {100 * of_host:.0f} % of the 3 GB that are free, the most it may take"


def test_a_step_that_is_too_long_although_it_was_not_foreseen_ends_the_search():
    seconds = {2: 0.5, 4: 5.0}
    found = choose([1, 2, 4, 8], 1, 3.0, lambda size: Probe(seconds[size], 0.1))
    assert found == Choice(2, Probe(0.5, 0.1), "time")


def test_data_may_come_in_no_larger_batch(monkeypatch):
    """Every size that is tried is one that the data come in."""
    recipe, run = config.load("demo_classification", ["--data.path=synthetic:classes=4,samples=200000000,size=8"])
    dataset = recipe.data.open("train", 1)
    monkeypatch.setattr(batch_size, "_fits_shared_memory", lambda *words: True)
    sizes, why = possible_sizes(recipe, run, dataset, CPU, World())
    assert sizes == sorted({2**k for k in range(17)} | {3 * 2**k for k in range(15)})
    assert why == "the data come in no larger one"


def test_a_batch_of_just_the_rate_that_counts_as_not_slower_is_taken_at_once():
    """At 0.95 of the best rate; below, it is measured once more and refused."""
    for seconds, expected, asked in ((4 / 95, 4, [2, 4]), (4 / 94.9, 2, [2, 4, 4])):
        tried: list[int] = []

        def probe(size: int, seconds: float = seconds, tried: list[int] = tried) -> Probe:
            tried.append(size)
            return Probe({2: 0.02, 4: seconds}[size], 0.1)

        found = choose([1, 2, 4], 1, 5.0, probe)
        assert found is not None and (found.batch, tried) == (expected, asked)
