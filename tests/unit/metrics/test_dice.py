"""Dice of volumes that come slice by slice, against MONAI on whole ones; the absent class; the loss; what is listed."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.errors import BadData
from sightline.hardware.world import World
from sightline.metrics.dice import WORST, Dice, soft_sums, within
from sightline.parts import Scores

CPU = torch.device("cpu")
CLASSES = ("background", "edema", "non-enhancing", "enhancing")
DEPTHS = (5, 3, 7, 4)


def made(depths: tuple[int, ...] = DEPTHS, classes: int = 4, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """(logits (classes, D, H, W), label (D, H, W)) of each volume, right in most voxels; volume 1 has no class 2."""
    random = torch.Generator().manual_seed(seed)
    volumes = []
    for number, depth in enumerate(depths):
        label = torch.randint(0, classes, (depth, 6, 8), generator=random)
        if number == 1:
            label[label == 2] = 0
        logits = 2 * F.one_hot(label, classes).movedim(-1, 0) + torch.randn(classes, depth, 6, 8, generator=random)
        volumes.append((logits, label))
    return volumes


def slices(volumes: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return predictions and batch of all slices of all volumes."""
    logits = torch.cat([logits.movedim(1, 0) for logits, _ in volumes])
    label = torch.cat([label for _, label in volumes])
    volume = torch.repeat_interleave(torch.arange(len(volumes)), torch.tensor([len(label) for _, label in volumes]))
    index = torch.arange(len(label))
    batch = {"label": label, "volume": volume, "index": index, "valid": torch.ones_like(index, dtype=torch.bool)}
    return {"logits": logits, "classes": logits.argmax(1).to(torch.uint8)}, batch


def rows_of(values: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {key: value[rows] for key, value in values.items()}


def measured(volumes, order: Tensor | None = None, batch_size: int = 4, regions="none", voxel_loss="ce") -> Scores:
    """In batches, of which the last is filled with rows that are not valid but not empty."""
    found, batch = slices(volumes)
    order = batch["index"] if order is None else order
    metric = Dice(CLASSES[: volumes[0][0].shape[0]], CPU, regions, voxel_loss)
    for rows in order.split(batch_size):
        filled = torch.cat([rows, torch.zeros(batch_size - len(rows), dtype=torch.int64)])
        valid = torch.arange(batch_size) < len(rows)
        metric.update(rows_of(found, filled), {**rows_of(batch, filled), "valid": valid})
    metric.merge(World())
    return metric.result()


def by_monai(volumes: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    """(volumes, foreground classes)."""
    from monai.metrics import DiceMetric

    metric = DiceMetric(include_background=False, ignore_empty=False)
    for logits, label in volumes:
        pair = (F.one_hot(t, len(logits)).movedim(-1, 0)[None] for t in (logits.argmax(0), label))
        metric(*pair)
    return metric.get_buffer().double().numpy()


def by_intersection(volumes: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    """IoU (volumes, foreground classes), voxel by voxel; 1 where a class is nowhere."""
    rows = []
    for found, true in answers(volumes):
        both = [((found == n) & (true == n), (found == n) | (true == n)) for n in range(1, len(volumes[0][0]))]
        rows.append([int(shared.sum()) / int(either.sum()) if either.any() else 1.0 for shared, either in both])
    return np.array(rows)


def test_iou_of_each_volume_is_that_of_torchmetrics():
    from torchmetrics.segmentation import MeanIoU

    volumes = made()
    for (found, true), row in zip(answers(volumes), measured(volumes).tables["volumes"], strict=True):
        metric = MeanIoU(num_classes=4, include_background=False, per_class=False, input_format="index")
        assert row["iou"] == pytest.approx(float(metric(found[None], true[None])), abs=1e-6)


def answers(volumes: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Predicted and true classes of each volume."""
    return [(logits.argmax(0), label) for logits, label in volumes]


def test_equals_monai_on_whole_volumes():
    from torchmetrics.classification import MulticlassPrecision, MulticlassRecall

    volumes, scores = made(), measured(made())
    expected = by_monai(volumes)
    assert 0.3 < expected.mean() < 0.95
    assert scores.values["dice"] == pytest.approx(expected.mean(), abs=1e-6)
    assert scores.values["dice_sum"] == pytest.approx(expected.mean(0).sum(), abs=1e-6)
    assert scores.values["samples"] == sum(DEPTHS) and scores.values["volumes"] == len(DEPTHS)
    found = [[row[f"L{n}"] for n in (1, 2, 3)] for row in scores.tables["volumes"]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert [row["volume"] for row in scores.tables["volumes"]] == [0, 1, 2, 3]
    assert [row["dice"] for row in scores.tables["volumes"]] == pytest.approx(expected.mean(1).tolist(), abs=1e-6)
    iou = by_intersection(volumes)
    assert scores.values["iou"] == pytest.approx(iou.mean(), abs=1e-12)
    assert [row["iou"] for row in scores.tables["volumes"]] == pytest.approx(iou.mean(1).tolist(), abs=1e-12)
    assert [row["iou"] for row in scores.tables["classes"]] == pytest.approx(iou.mean(0).tolist(), abs=1e-12)
    assert [(row["class"], row["label"]) for row in scores.tables["classes"]] == [
        ("edema", "L1"),
        ("non-enhancing", "L2"),
        ("enhancing", "L3"),
    ]
    assert [row["dice"] for row in scores.tables["classes"]] == pytest.approx(expected.mean(0).tolist(), abs=1e-6)
    found, truth = (torch.cat([each.flatten() for each in part]) for part in zip(*answers(volumes), strict=True))
    for name, metric in (("precision", MulticlassPrecision), ("recall", MulticlassRecall)):
        wanted = metric(4, average=None)(found, truth)[1:].tolist()
        assert [row[name] for row in scores.tables["classes"]] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("voxel_loss", ["ce", "focal"])
def test_loss_is_that_of_whole_volumes(voxel_loss: str):
    """As if each volume had been predicted at once: the sums of its slices, then the loss, then the mean."""
    from monai.losses import DiceLoss, FocalLoss

    dice = DiceLoss(
        include_background=False, to_onehot_y=True, softmax=True, batch=True, smooth_nr=1e-5, smooth_dr=1e-5
    )
    voxel = FocalLoss(gamma=2, to_onehot_y=True, use_softmax=True)
    expected = []
    for logits, label in made():
        whole = logits[None].double(), label[None, None]
        # MONAI's mean is now also one over classes, of which all but the true one are 0; the original's was not.
        second = 4 * voxel(*whole) if voxel_loss == "focal" else F.cross_entropy(whole[0], label[None])
        expected.append(float(dice(*whole) + second))
    found = measured(made(), voxel_loss=voxel_loss).values["val_loss"]
    assert found == pytest.approx(np.mean(expected), abs=1e-6)


def test_class_that_is_absent():
    """1 where it is neither true nor found, 0 where it is found though absent, 0 where it is missed."""
    label = torch.zeros(3, 2, 4, 4, dtype=torch.int64)
    found = torch.zeros(3, 2, 4, 4, dtype=torch.int64)
    label[0, :, 0], found[0, :, 0] = 1, 1  # class 1 is right, class 2 nowhere
    found[1, 1, 2, 2] = 2  # class 2 is found where there is none, class 1 nowhere
    label[2, 0, 3, 3] = 1  # missed
    volumes = [(10.0 * F.one_hot(f, 3).movedim(-1, 0), true) for f, true in zip(found, label, strict=True)]
    table = measured(volumes).tables["volumes"]
    assert [(row["L1"], row["L2"]) for row in table] == [(1, 1), (1, 0), (0, 1)]
    np.testing.assert_array_equal([[row["L1"], row["L2"]] for row in table], by_monai(volumes))
    assert [row["iou"] for row in table] == [1, 0.5, 0.5] == by_intersection(volumes).mean(1).tolist()


def test_regions_of_brain_tumours():
    """Whole tumour, core and enhancing part, counted as two-class problems."""
    volumes = made()
    expected = {}
    for name, labels in {"wt": (1, 2, 3), "tc": (2, 3), "et": (3,)}.items():
        wanted, values = torch.tensor(labels), []
        for logits, label in volumes:
            found, true = torch.isin(logits.argmax(0), wanted), torch.isin(label, wanted)
            values.append(float(2 * (found & true).sum() / (found.sum() + true.sum())))
        expected[name] = np.mean(values)
    scores = measured(volumes, regions="brats")
    assert {name: scores.values[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert scores.values["wt"] > scores.values["dice"]
    plain = measured(volumes)
    assert scores.tables == plain.tables and scores.worst == plain.worst
    assert {k: v for k, v in scores.values.items() if k not in expected} == plain.values


@pytest.mark.parametrize("batch_size", [1, 3, 19, 64])
def test_order_and_batches_change_nothing(batch_size: int):
    shuffled = torch.randperm(sum(DEPTHS), generator=torch.Generator().manual_seed(0))
    expected, found = measured(made()), measured(made(), shuffled, batch_size)
    assert json.dumps([found.values, found.tables, found.worst]) == json.dumps(
        [expected.values, expected.tables, expected.worst]
    )


def test_whole_volumes_padded_to_one_shape_count_as_their_slices():
    volumes = made()
    deep, batch = max(DEPTHS), {"index": torch.arange(4), "volume": torch.arange(4)}
    # What lies in the padding must not count, whatever it is.
    logits, label = torch.full((4, 4, deep, 7, 9), torch.nan), torch.full((4, deep, 7, 9), 3)
    classes = torch.full((4, deep, 7, 9), 2, dtype=torch.uint8)
    for number, (scores, truth) in enumerate(volumes):
        inside = (number, slice(0, len(truth)), slice(0, 6), slice(0, 8))
        logits[number, :, *inside[1:]], label[inside] = scores, truth
        classes[inside] = scores.argmax(0).to(torch.uint8)
    batch |= {"label": label, "valid": torch.ones(4, dtype=torch.bool)}
    batch["extent"] = torch.tensor([[depth, 6, 8] for depth in DEPTHS])
    metric = Dice(CLASSES, CPU, "brats", "ce")
    metric.update({"logits": logits, "classes": classes}, batch)
    metric.merge(World())
    found, expected = metric.result(), measured(volumes, regions="brats")
    assert found.values.pop("samples") == 4 and expected.values.pop("samples") == sum(DEPTHS)
    assert found.values == pytest.approx(expected.values, rel=1e-12)
    assert found.tables == expected.tables


def test_worst_volumes_by_their_worst_slice():
    random = torch.Generator().manual_seed(3)
    volumes = [
        (5.0 * F.one_hot(label, 2).movedim(-1, 0), label)
        for label in torch.randint(0, 2, (WORST + 5, 3, 6, 8), generator=random)
    ]
    for number in range(2, WORST + 5):  # the first two are right everywhere
        logits = volumes[number][0]
        logits[:, 1] = logits[:, 1].flip(0)  # one slice is all wrong
        logits[:, 2, 0, :4] = logits[:, 2, 0, :4].flip(0)  # and four voxels of another
    volumes[7][0][:, 0, :3] = volumes[7][0][:, 0, :3].flip(0)
    scores = measured(volumes)
    assert len(scores.worst) == WORST
    assert scores.worst[0] == {"index": 7 * 3 + 1, "dice": scores.tables["volumes"][7]["dice"], "volume": 7}
    dices = [row["dice"] for row in scores.worst]
    assert dices == sorted(dices) and dices == sorted(row["dice"] for row in scores.tables["volumes"])[:WORST]
    assert all(row["index"] == 3 * row["volume"] + 1 for row in scores.worst)
    assert measured(volumes[:2]).worst == []


def test_nothing_valid_is_an_error():
    found, batch = slices(made())
    metric = Dice(CLASSES, CPU, "none", "ce")
    metric.update(found, {**batch, "valid": torch.zeros(sum(DEPTHS), dtype=torch.bool)})
    metric.merge(World())
    with pytest.raises(BadData, match="not one sample"):
        metric.result()


def test_sums_of_any_layout_and_precision():
    """The logits of a network in bf16 and channels_last are read as they are and summed in full precision."""
    (logits, label), *_ = made()
    half = logits.movedim(1, 0).bfloat16()
    plain = soft_sums(half.float(), label, "ce")
    turned = soft_sums(half.contiguous(memory_format=torch.channels_last), label, "ce")
    for one, other in zip(plain, turned, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_within():
    inside = within(torch.tensor([[1, 2, 2], [2, 1, 3]]), torch.Size((2, 2, 3)))
    assert inside.tolist() == [
        [[[True, True, False], [True, True, False]], [[False] * 3, [False] * 3]],
        [[[True] * 3, [False] * 3], [[True] * 3, [False] * 3]],
    ]
