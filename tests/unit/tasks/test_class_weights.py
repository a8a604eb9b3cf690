"""data.class_weights=balanced from the counts to the loss, against torch's cross entropy with weights."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sightline.data.classification import ClassificationData
from sightline.tasks.classification import Classification, MultiLabel
from sightline.train.step import _split

CLASSES = 4
SMALL = {"path": "synthetic:classes=4,samples=26,size=8", "size": 8, "eval_resize": 8, "eval_size": 8}
WEIGHT = torch.tensor([0.25, 0.5, 2.0, 3.5])


def batch_of(rows: int = 8, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    image = torch.randn(rows, CLASSES, generator=random)  # the identity is the network
    label = torch.randint(0, CLASSES, (rows,), generator=random)
    return {
        "image": image,
        "label": label,
        "class_weight": WEIGHT.expand(rows, -1),
        "index": torch.arange(rows),
        **more,
    }


def loss_of(batch: dict[str, torch.Tensor], smoothing: float = 0.0) -> torch.Tensor:
    return Classification(smoothing).loss(nn.Identity(), batch).total


def by_torch(batch: dict[str, torch.Tensor], label: torch.Tensor, smoothing: float) -> torch.Tensor:
    summed = F.cross_entropy(batch["image"], label, WEIGHT, label_smoothing=smoothing, reduction="sum")
    return summed / len(label)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_torchs_sum_over_the_number_of_images(smoothing: float):
    batch = batch_of()
    torch.testing.assert_close(loss_of(batch, smoothing), by_torch(batch, batch["label"], smoothing))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("key", ["mix", "label_share"])
def test_mixed_labels_are_weighted_each_by_its_own_class(key: str, smoothing: float):
    batch = batch_of(**{key: torch.tensor(0.3)})
    mine, theirs = (by_torch(batch, label, smoothing) for label in (batch["label"], batch["label"].roll(1, 0)))
    torch.testing.assert_close(loss_of(batch, smoothing), 0.3 * mine + 0.7 * theirs)


def test_a_share_for_each_image_mixes_weighted_losses():
    share, partner = torch.linspace(0, 1, 8), torch.arange(7, -1, -1)
    batch = batch_of(mix=share, partner=partner)
    mine, theirs = (
        F.cross_entropy(batch["image"], label, WEIGHT, reduction="none")
        for label in (batch["label"], batch["label"][partner])
    )
    torch.testing.assert_close(loss_of(batch), (share * mine + (1 - share) * theirs).mean())


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_batch_and_ranks_have_the_mean_of_the_whole(parts: int):
    batch = batch_of()
    losses = [loss_of(part, 0.1) for part in _split(batch, parts)]
    torch.testing.assert_close(torch.stack(losses).mean(), loss_of(batch, 0.1))


def test_weights_are_those_of_scikit_learn_and_have_mean_one():
    dataset = ClassificationData(**SMALL, class_weights="balanced").open("train", seed=0)
    labels = np.arange(26) % CLASSES
    expected = 26 / (CLASSES * np.bincount(labels))  # sklearn.utils.class_weight.compute_class_weight("balanced")
    loaded = dataset.load(0, 5)["class_weight"]
    assert loaded.dtype == np.float32 and dataset.layout["class_weight"] == ((CLASSES,), "float32")
    np.testing.assert_allclose(loaded, expected, rtol=1e-6)
    assert loaded[labels].mean() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(("background", "at"), [("first", 0), ("last", CLASSES)])
def test_a_class_without_images_weighs_one(background: str, at: int):
    plain, more = (
        ClassificationData(**SMALL, class_weights="balanced", background=each)
        .open("train", 0)
        .load(0, 0)["class_weight"]
        for each in ("none", background)
    )
    assert more[at] == 1 and np.delete(more, at).tolist() == plain.tolist()


def test_neither_evaluation_nor_other_runs_have_weights():
    assert "class_weight" not in ClassificationData(**SMALL, class_weights="balanced").open("val", 0).layout
    assert "class_weight" not in ClassificationData(**SMALL).open("train", 0).layout


def test_weights_of_several_labels_are_torchs_weights_of_positives():
    random = torch.Generator().manual_seed(1)
    logits, target = torch.randn(6, CLASSES, generator=random), torch.randint(0, 2, (6, CLASSES), generator=random)
    batch = {"image": logits, "label": target.to(torch.uint8), "class_weight": WEIGHT.expand(6, -1)}
    soft = target * 0.8 + 0.1
    torch.testing.assert_close(
        MultiLabel(0.2).loss(nn.Identity(), batch).total, nn.BCEWithLogitsLoss(pos_weight=WEIGHT)(logits, soft)
    )
