"""Images and volumes in the memory of an accelerator: the batches of the loader, pixels within stated bounds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from sightline.config import Run
from sightline.data.classification import ClassificationData
from sightline.data.detection import DetectionData
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import EvalOrder, TrainOrder
from sightline.data.segmentation import SegmentationData
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.hardware.world import World

pytestmark = pytest.mark.device
IMAGES, BATCH = 24, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(IMAGES):
            place = root / split / f"c{number % 3}" / f"{number:02d}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(0, 256, (*rng.integers(60, 160, 2), 3), dtype=np.uint8)
            Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3)).save(place, quality=92)
    return root


def batches(config, split: str, count: int, workers: int = 2) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    device = devices.select()
    bound = config.open(split, 3).bind(device, BATCH)
    each = bound.samples_per_item
    order = TrainOrder(len(bound.dataset), BATCH, 3, samples_per_item=each) if split == "train" else None
    feeds = {split: (bound, order or EvalOrder(len(bound.dataset), BATCH))}
    loader = Loader(feeds, Run(workers=workers), device, World(), BadSamples("fail", 0, print), lambda: None)
    try:
        loader.seek(split, 0, count)
        return [{k: v.cpu().clone() for k, v in loader.next(split).items()} for _ in range(count)], loader.notes
    finally:
        loader.close()


def assert_close(config, kept, split: str, count: int, levels: int) -> None:
    expected, _ = batches(config, split, count)
    found, notes = batches(kept, split, count)
    assert any("cache ON: " in note and "are free" in note for note in notes), notes  # others may come before it
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        far = (one.pop("image").double() - other.pop("image").double()).abs()
        assert far.max() <= levels, far.max()
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "legacy"])
@pytest.mark.parametrize("crop", ["area", "shift"])
def test_classification(folder, split, interpolation, crop):
    fields = {"path": str(folder), "decoder": "cpu", "size": 64, "eval_resize": 72, "eval_size": 64}
    fields |= {"crop": crop, "crop_padding": 9}
    plain = ClassificationData(**fields, interpolation=interpolation, cache="off")
    kept = ClassificationData(**fields, interpolation=interpolation, cache="gpu")
    assert_close(plain, kept, split, 3 if split == "val" else 6, levels=2)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("resize", ["tf", "antialias"])
def test_detection(split, resize):
    fields = {"path": "synthetic:classes=5,samples=24,size=90", "size": 64, "resize": resize, "max_boxes": 50}
    plain, kept = (DetectionData(**fields, cache=mode) for mode in ("off", "gpu"))
    assert_close(plain, kept, split, 2, levels=1 if resize == "tf" else 2)


@pytest.mark.parametrize("mode", ["off", "gpu"])
def test_a_repeated_batch_stays_the_first(mode):
    fields = {"path": "synthetic:classes=5,samples=24,size=90", "size": 64, "max_boxes": 50, "fake": True}
    first, *others = batches(DetectionData(**fields, cache=mode), "train", 9)[0]
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)


@pytest.mark.parametrize("split", ["train", "val"])
def test_volumes(split):
    plain, kept = (SegmentationData(path="synthetic:samples=10", task="04", cache=mode) for mode in ("off", "gpu"))
    assert_close(plain, kept, split, 2, levels=0)


def test_what_does_not_fit_is_refused_before_anything_is_read(folder, monkeypatch):
    monkeypatch.setattr(devices.Device, "memory_bytes", lambda self: (0, 2**20))
    with pytest.raises(UsageError, match=r"--data.cache gpu: 24 decoded images of train need .*, 1.0 MiB are free"):
        ClassificationData(path=str(folder), cache="gpu").open("train", 3).bind(devices.select(), BATCH)
