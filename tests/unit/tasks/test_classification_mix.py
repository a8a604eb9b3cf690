"""Erasing, mixup and cutmix from the drawn numbers to the loss, as torchvision's MixUp and CutMix with soft labels."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.transforms import v2

from sightline.data.augment.classification import CUT_KEYS
from sightline.data.classification import ClassificationData
from sightline.tasks.classification import Classification
from sightline.train.step import _split

CLASSES, SIDE, BATCH = 10, 12, 6
SMALL = {"path": "synthetic:classes=10,samples=24,size=16", "size": SIDE, "eval_resize": SIDE, "eval_size": SIDE}
NUMBERS = {"mix", "label_share", *CUT_KEYS}


def opened(split: str = "train", **fields):
    return ClassificationData(**SMALL, **fields).open(split, seed=1)


def batch_of(dataset, step: int = 0, rows: int = BATCH) -> dict[str, torch.Tensor]:
    """Return a batch of a dataset as the loader makes it, without workers."""
    samples = [dataset.load(0, index) for index in range(rows)]
    assert all(set(sample) == set(dataset.layout) for sample in samples)
    for key, (shape, dtype) in dataset.layout.items():
        assert all(sample[key].shape == shape and sample[key].dtype == dtype for sample in samples)
    batch = {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}
    numbers = {key: torch.as_tensor(value) for key, value in dataset.draw_batch(0, step).items()}
    return {**batch, "index": torch.arange(rows), **numbers}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES))


def by_torchvision(plain: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, soft labels) of torchvision's transform, given the share or box that was drawn."""
    top, left, bottom, right = (int(batch[key]) if key in batch else 0 for key in CUT_KEYS)
    params = {"labels": batch["label"], "batch_size": len(plain), "lam": float(batch["mix"])}
    mixer: v2.Transform = v2.MixUp(num_classes=CLASSES)
    if bottom > top:
        mixer = v2.CutMix(num_classes=CLASSES)
        share = 1 - (bottom - top) * (right - left) / SIDE**2
        params |= {"box": (left, top, right, bottom), "lam_adjusted": share}
    return mixer.transform(plain, params), mixer.transform(batch["label"], params)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("fields", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}], ids=str)
def test_images_and_loss_are_torchvisions(fields, smoothing: float):
    dataset, plain_dataset, network = opened(**fields), opened(), model()
    kinds = set()
    for step in range(24):
        batch = batch_of(dataset, step)
        assert set(batch) == {"image", "label", "index"} | (NUMBERS if "cutmix" in fields else {"mix"})
        plain = plain_dataset.finish(batch_of(plain_dataset), torch.float32)["image"]
        expected, target = by_torchvision(plain, batch)
        finished = dataset.finish(batch, torch.float32)
        torch.testing.assert_close(finished["image"], expected, atol=1e-6, rtol=0)
        loss = Classification(smoothing).loss(network, finished)
        logits = network(expected)
        torch.testing.assert_close(loss.total, F.cross_entropy(logits, target, label_smoothing=smoothing))
        tied = abs(float(batch.get("label_share", batch["mix"])) - 0.5) < 1e-6
        assert tied or int(loss.sums["top1"]) == int((logits.argmax(1) == target.argmax(1)).sum())
        kinds.add("cut" if "cut_top" in batch and batch["cut_bottom"] > batch["cut_top"] else "mix")
    assert kinds >= {name.replace("mixup", "mix").replace("cutmix", "cut") for name in fields}


def test_a_batch_split_for_accumulation_keeps_its_numbers():
    dataset = opened(cutmix=1.0, mixup=0.3, random_erase=1.0)
    for step in range(6):
        batch = batch_of(dataset, step)
        for part in _split(batch, 2):
            assert set(part) == set(batch) and all(torch.equal(part[key], batch[key]) for key in NUMBERS)
            assert part["erase"].shape == (3, 4)
            loss = Classification().loss(model(), dataset.finish(part, torch.float32))
            assert loss.total.isfinite()


def test_erasing_comes_after_normalisation_and_before_mixing():
    dataset, plain_dataset = opened(random_erase=1.0, mixup=0.4), opened()
    batch = batch_of(dataset)
    plain = plain_dataset.finish(batch_of(plain_dataset), torch.float32)["image"]
    for row, (top, left, bottom, right) in enumerate(batch["erase"].tolist()):
        assert bottom > top and right > left
        plain[row, :, top:bottom, left:right] = 0
    expected, _ = by_torchvision(plain, batch)
    torch.testing.assert_close(dataset.finish(batch, torch.float32)["image"], expected, atol=1e-6, rtol=0)


def test_what_is_off_leaves_no_trace():
    everything = {"policy": "augmix", "random_erase": 1.0, "cutmix": 1.0, "mixup": 0.3}
    plain = opened()
    assert set(plain.layout) == {"image", "label"} and plain.draw_batch(0, 0) == {}
    off, base_off = opened(augment="off", **everything), opened(augment="off")
    val, base_val = opened("val", **everything), opened("val")
    for changed, base in ((off, base_off), (val, base_val)):
        assert changed.layout == base.layout and changed.draw_batch(0, 0) == {}
        for index in range(3):
            ours, theirs = changed.load(0, index), base.load(0, index)
            assert set(ours) == set(theirs) and all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_a_policy_changes_the_images_and_nothing_else():
    plain = opened()
    for name in ("autoaugment", "randaugment", "trivialaugment", "augmix"):
        dataset = opened(policy=name)
        assert dataset.layout == plain.layout
        pairs = [(dataset.load(0, index), plain.load(0, index)) for index in range(12)]
        assert all(np.array_equal(ours["label"], theirs["label"]) for ours, theirs in pairs)
        assert sum(not np.array_equal(ours["image"], theirs["image"]) for ours, theirs in pairs) > 4
        again = [opened(policy=name).load(0, index)["image"] for index in range(12)]
        assert all(np.array_equal(ours["image"], image) for (ours, _), image in zip(pairs, again, strict=True))


def test_repeated_epochs_augment_each_copy_in_its_own_way():
    dataset = opened(policy="randaugment")
    images = {dataset.load(epoch * 3 + copy, 4)["image"].tobytes() for epoch in range(2) for copy in range(3)}
    assert len(images) == 6
