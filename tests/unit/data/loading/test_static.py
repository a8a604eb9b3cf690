"""Static batches hold what the loader gives, with the numbers that are drawn for a whole batch."""

from pathlib import Path

import pytest
import torch

from sightline.config import Run
from sightline.data.classification import ClassificationData
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import TrainOrder
from sightline.data.loading.static import StaticDataset, dump
from sightline.errors import BadData
from sightline.hardware import devices
from sightline.hardware.world import World

MIXED = ClassificationData(path="synthetic:classes=4,samples=24,size=20", size=16, mixup=0.3)


def test_a_file_is_the_batch_that_the_loader_gives(tmp_path: Path):
    done: list[tuple[str, int, int]] = []
    counts = dump(MIXED, tmp_path / "b", batch=6, steps=5, seed=3, progress=lambda *step: done.append(step))
    assert counts == {"batches": 5, "samples": 30} and done == [("batches", step, 5) for step in range(1, 6)]
    cpu, static = devices.select("cpu"), StaticDataset(tmp_path / "b").bind(devices.select("cpu"), 6)
    bound = MIXED.open("train", 3).bind(cpu, 6)
    feeds = {"train": (bound, TrainOrder(len(bound.dataset), 6, 3))}
    loader = Loader(feeds, Run(workers=0), cpu, World(), BadSamples("fail", 0, print), lambda: None)
    try:
        loader.seek("train", 0, 5)
        shares = set()
        for step in range(5):
            expected = bound.finish(loader.next("train"), torch.float32)
            stored = {key: torch.from_numpy(value) for key, value in static.draw_batch(0, step).items()}
            found = static.finish(stored, torch.float32)
            assert found.keys() == expected.keys() and "mix" in found
            for key, value in expected.items():
                torch.testing.assert_close(found[key].reshape(value.shape), value, rtol=0, atol=0)
            shares.add(found["mix"].item())
    finally:
        loader.close()
    assert len(shares) == 5, "each batch has a draw of its own"


@pytest.mark.parametrize("steps", [1, 4])
def test_batches_repeat_after_the_last_one(tmp_path: Path, steps: int):
    dump(MIXED, tmp_path / "new" / "b", batch=6, steps=steps, seed=3, progress=lambda *_: None)
    static = StaticDataset(tmp_path / "new" / "b").bind(devices.select("cpu"), 6)
    first, again = static.draw_batch(0, 0), static.draw_batch(5, steps)
    assert all((first[key] == again[key]).all() for key in first)


def test_a_number_of_batches_without_files_is_refused_at_the_first_that_is_missing(tmp_path: Path):
    dump(MIXED, tmp_path / "b", batch=6, steps=2, seed=3, progress=lambda *_: None)
    facts = tmp_path / "b/batches.json"
    facts.write_text(facts.read_text().replace('"batches": 2', '"batches": 1000000000000'))
    with pytest.raises(BadData, match="batch-000002.safetensors is missing"):
        StaticDataset(tmp_path / "b")
