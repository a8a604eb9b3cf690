"""Items that hold several samples, as a volume holds slices: batches, steps, schedules and counts go by samples."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sightline import api
from sightline.commands.inspect_facts import inspect
from sightline.config import Recipe, Run, TrainConfig
from sightline.data.loading.order import TrainOrder
from sightline.data.loading.static import StaticDataset, dump
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.measure.benchmark import OurStep
from sightline.parts import Batch, Bound, DataConfig, Dataset, DataSpec, ModelConfig, Split
from sightline.tasks.classification import Classification
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig

SPEC = DataSpec(("ant", "bee"), 2, (3, 3), (0.0,), (1.0,))
CPU = devices.select("cpu")


class Strips(Dataset):
    """Each training item is a strip of images, as many as a batch of `strips` strips needs."""

    spec = SPEC
    fingerprint = "strips"

    def __init__(self, split: Split, strips: int, count: int):
        self.split, self.strips, self.count = split, strips, count

    def samples_per_item(self, global_batch: int) -> int:
        return global_batch // self.strips if self.split == "train" else 1

    def bind(self, device: devices.Device, global_batch: int) -> Bound:
        each = self.samples_per_item(global_batch)
        layout = {"image": ((each, 2, 3, 3), "float32"), "label": ((each,), "int64")}
        return Bound(self, layout, partial(self.load, each), self.finish, samples_per_item=each)

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"{self.split}{index}"

    def load(self, each: int, epoch: int, index: int) -> dict[str, np.ndarray]:
        labels = (np.arange(each) + index) % 2
        noise = np.random.default_rng(index).normal(size=(each, 2, 3, 3))
        return {"image": (noise + labels[:, None, None, None]).astype(np.float32), "label": labels}

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        flat = {key: batch[key].flatten(0, 1) for key in ("image", "label")}
        return {**batch, **flat, "image": flat["image"].to(dtype)}


@dataclasses.dataclass(frozen=True)
class StripData(DataConfig):
    """Five strips for training."""

    strips: int = 2
    path: str = "here"
    on_bad_sample: str = "fail"
    max_bad_samples: int = 0

    def open(self, split: Split, seed: int) -> Strips:
        return Strips(split, self.strips, 5 if split == "train" else 3)

    def declared(self):
        return None if self.path else (SPEC, 5)

    def declared_per_item(self, global_batch: int) -> int:
        return global_batch // self.strips


@dataclasses.dataclass(frozen=True)
class Net(ModelConfig):
    """One layer."""

    def build(self, spec: DataSpec) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(18, len(spec.classes)))


def recipe(strips: int = 2, **train) -> Recipe:
    return Recipe(
        name="strips",
        model=Net(),
        data=StripData(strips),
        task=Classification(),
        optimizer=OptimizerConfig("sgd", lr=0.1),
        schedule=ScheduleConfig("cosine", epoch_steps="exact"),
        train=TrainConfig(**{"epochs": 2, "global_batch": 8, "precision": "fp32", **train}),
    )


def run_in(folder: Path) -> Run:
    return Run(out=str(folder), device="cpu", workers=0, log_every_steps=1, channels_last=False)


def events(folder: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == kind]


def test_an_item_of_four_samples_counts_four(tmp_path: Path, capsys):
    """Five strips of four, two in a batch: two steps of eight samples, and every evaluation sample once."""
    scores = api.train(recipe(), run_in(tmp_path))
    assert scores.values["samples"] == 3
    assert [event["step"] for event in events(tmp_path, "train")] == [1, 2, 3, 4]
    start = events(tmp_path, "start")[0]
    assert (start["local_batch"], start["steps"]) == (8, 4)
    said = capsys.readouterr()
    assert "20 training and 3 evaluation samples\n2 epochs of 2 steps, batch 8, base rate " in said.out


def test_the_step_and_the_length_of_a_run_count_samples():
    bound = StripData().open("train", 0).bind(CPU, 8)
    ours = OurStep(recipe(), Run(channels_last=False), bound, CPU, False, print, timed=(0, 1))
    ours.advance()
    facts = ours.facts()  # two more, for the time from one start to the next
    ours.close()
    assert (facts["calls"], facts["images_trained"], len(facts["latency_s"])) == (4, 32, 1)
    assert ours.length.samples == 20 and ours.length.steps_per_epoch == 2


@pytest.mark.parametrize("path", ["here", ""])
def test_inspect_counts_steps_of_items(path: str):
    made = dataclasses.replace(recipe(), data=StripData(path=path))
    found = inspect(made, Run(), ranks=2)
    assert (found["samples"], found["steps_per_epoch"], found["steps"]) == (20, 2, 4)


def test_accumulation_cuts_between_items(tmp_path: Path):
    """Two parts of one strip make the update that one part of two makes."""
    losses = []
    for parts in (1, 2):
        folder = tmp_path / str(parts)
        api.train(recipe(accumulation=parts), run_in(folder))
        losses.append([event["loss"] for event in events(folder, "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    with pytest.raises(UsageError, match="accumulation=2 does not divide the 1 volumes of 8 slices.* --data.nvol 2"):
        api.train(recipe(strips=1, accumulation=2), run_in(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("batch", "each", "ranks", "text"),
    [
        (10, 4, 1, "global_batch=10 is not a whole number of volumes of 4 slices; .*--train.global-batch 8"),
        (64, 64, 8, "1 volumes of 64 slices, which cannot be split over 8 devices; .*--data.nvol 8$"),
        (64, 32, 6, "global_batch=64 cannot be split over 6 devices; .*--train.global-batch 60 or 66$"),
        (20, 4, 4, "5 volumes of 4 slices, which cannot be split over 4 devices; .*--data.nvol 20$"),
        (12, 4, 2, "3 volumes of 4 slices, which cannot be split over 2 devices; .*--data.nvol 4$"),
        (24, 4, 1, "takes 6 volumes of 4 slices and there are 5 to train on.*smaller --data.nvol"),
    ],
)
def test_items_that_do_not_come_out_even_are_refused(batch: int, each: int, ranks: int, text: str):
    with pytest.raises(UsageError, match=text):
        TrainOrder(5, batch, 0, ranks=ranks, samples_per_item=each)


def test_an_order_of_items_is_that_of_as_many_samples():
    """Only the unit differs: eight samples in items of four are two items."""
    for last in ("drop", "pad", "wrap"):
        items = [TrainOrder(5, 8, 3, last, rank, 2, samples_per_item=4) for rank in range(2)]
        plain = [TrainOrder(5, 2, 3, last, rank, 2) for rank in range(2)]
        for mine, other in zip(items, plain, strict=True):
            assert (mine.local_batch, mine.local_samples, mine.samples_per_epoch) == (1, 4, 20)
            assert mine.steps_per_epoch == other.steps_per_epoch
            for step in range(7):
                assert [a.tolist() for a in mine.batch(step)] == [a.tolist() for a in other.batch(step)]


def test_written_batches_of_items_are_replayed(tmp_path: Path):
    dump(StripData(), tmp_path / "b", batch=8, steps=2, seed=0, progress=lambda *_: None)
    replayed = StaticDataset(tmp_path / "b")
    assert len(replayed) == 16 and replayed.bind(CPU, 8).samples_per_item == 1
    batch = replayed.finish({k: torch.as_tensor(v) for k, v in replayed.draw_batch(0, 1).items()}, torch.float32)
    strips = StripData().open("train", 0).bind(CPU, 8)
    indices = TrainOrder(5, 8, 0, samples_per_item=4).batch(1)[1]
    expected = np.concatenate([strips.load(0, int(index))["image"] for index in indices])
    assert np.array_equal(batch["image"].numpy(), expected)
    assert batch["index"].tolist() == indices.repeat(4).tolist() and batch["label"].shape == (8,)
