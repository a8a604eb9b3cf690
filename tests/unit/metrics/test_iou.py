"""Scores of masks against torchmetrics, with pixels that do not count; ranks and images that cannot be read."""

import pytest
import torch
import torchmetrics.classification as reference
from torch.nn import functional as F
from torchmetrics.segmentation import DiceScore

from sightline.errors import BadData
from sightline.metrics import iou
from sightline.metrics.iou import MeanIou
from sightline.parts import IGNORED

CLASSES = ("ground", "road", "car", "nowhere")  # the last is neither true nor found
CPU = torch.device("cpu")


def made(images: int = 5, seed: int = 0, sides: tuple[int, int] = (13, 17)) -> tuple[dict, dict]:
    """Predictions and a batch of random masks, in which a tenth of the pixels does not count."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 3, (images, *sides), generator=random)
    logits = torch.randn(images, len(CLASSES), *sides, generator=random)
    logits[:, 3] = -30.0
    logits += 1.5 * F.one_hot(label, len(CLASSES)).movedim(3, 1)
    label[torch.rand(label.shape, generator=random) < 0.1] = IGNORED
    batch = {"label": label, "valid": torch.ones(images, dtype=torch.bool), "index": torch.arange(images) + 10 * seed}
    return {"logits": logits, "classes": logits.argmax(1).to(torch.uint8)}, batch


def scored(*parts: tuple[dict, dict]):
    metric = MeanIou(CLASSES, 1.0, CPU)
    for predictions, batch in parts:
        metric.update(predictions, batch)
    return metric.result()


def test_scores_are_those_of_torchmetrics():
    parts = [made(seed=1), made(seed=2)]
    found = scored(*parts)
    guess, truth = (torch.cat([part[at][key] for part in parts]) for at, key in ((0, "classes"), (1, "label")))
    guess = guess.long()
    options = {"num_classes": 4, "ignore_index": IGNORED}
    assert found.values["miou"] == pytest.approx(
        float(reference.MulticlassJaccardIndex(**options, average="macro")(guess, truth))
    )
    each = reference.MulticlassJaccardIndex(**options, average="none")(guess, truth).tolist()
    rows = found.tables["classes"]
    assert [row["miou"] for row in rows[:3]] == pytest.approx(each[:3]) and rows[3]["miou"] is None
    kept = truth != IGNORED
    dice = DiceScore(4, average="none", input_format="index", aggregation_level="global")
    f1 = reference.MulticlassF1Score(**options, average="none")(guess, truth).tolist()
    assert [row["dice"] for row in rows[:3]] == pytest.approx(f1[:3])
    assert [row["dice"] for row in rows[:3]] == pytest.approx(dice(guess[kept][None], truth[kept][None]).tolist()[:3])
    assert found.values["dice"] == pytest.approx(sum(f1[:3]) / 3)
    accuracy = reference.MulticlassAccuracy(**options, average="micro")(guess, truth)
    assert found.values["pixel_accuracy"] == pytest.approx(float(accuracy))
    matrix = reference.MulticlassConfusionMatrix(**options)(guess, truth).tolist()
    assert [row["predicted"] for row in found.tables["matrix"]] == matrix
    for key, measure in (("precision", reference.MulticlassPrecision), ("recall", reference.MulticlassRecall)):
        assert [row[key] for row in rows[:3]] == pytest.approx(
            measure(**options, average="none")(guess, truth).tolist()[:3]
        )
    assert [row["pixels"] for row in rows] == [int((truth == n).sum()) for n in range(4)]


def test_the_loss_is_cross_entropy_and_dice_of_all_pixels_that_count():
    parts = [made(seed=3), made(images=2, seed=4)]
    logits = torch.cat([each["logits"].movedim(1, 3).flatten(0, 2) for each, _ in parts]).double()
    label = torch.cat([batch["label"].flatten() for _, batch in parts])
    kept = label != IGNORED
    chances, truth = logits[kept].softmax(1), F.one_hot(label[kept], 4).double()
    dice = 1 - 2 * (chances * truth).sum(0) / (chances.sum(0) + truth.sum(0))
    expected = F.cross_entropy(logits, label, ignore_index=IGNORED) + dice[:3].mean()
    assert scored(*parts).values["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_the_worst_images_have_the_lowest_iou():
    predictions, batch = made(images=4, seed=5)
    batch["label"][1] = torch.where(batch["label"][1] == IGNORED, IGNORED, predictions["classes"][1])  # perfect
    batch["label"][2] = IGNORED  # nothing to get wrong
    worst = scored((predictions, batch)).worst
    alone = {
        index: scored(({k: v[row : row + 1] for k, v in predictions.items()}, _row(batch, row))).values["miou"]
        for row, index in ((0, 50), (3, 53))
    }
    assert [(row["index"], pytest.approx(row["iou"])) for row in worst] == sorted(alone.items(), key=lambda kv: kv[1])


def _row(batch: dict, row: int) -> dict:
    return {key: value[row : row + 1] for key, value in batch.items()}


def test_images_that_cannot_be_read_do_not_count():
    (predictions, batch), other = made(seed=6), made(seed=7)
    batch["valid"][:] = False
    assert scored((predictions, batch), other).values == scored(other).values
    with pytest.raises(BadData, match="not one image"):
        scored((predictions, batch))
    other[1]["label"][:] = IGNORED
    with pytest.raises(BadData, match="ignore every pixel"):
        scored(other)


def test_large_images_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch):
    part = made(seed=8)
    whole = scored(part)
    monkeypatch.setattr(iou, "AT_ONCE", 7)
    again = scored(part)
    assert again.tables == whole.tables and again.worst == whole.worst
    assert again.values == pytest.approx(whole.values)


def test_two_ranks_count_like_one(monkeypatch: pytest.MonkeyPatch):
    """Their counts are added, and the worst images are those of both."""
    parts = [made(seed=1), made(seed=2)]
    first, second = (MeanIou(CLASSES, 1.0, CPU) for _ in parts)
    for metric, part in zip((first, second), parts, strict=True):
        metric.update(*part)

    class Both:
        def sum(self, tensor: torch.Tensor) -> torch.Tensor:
            other = second._counts if tensor is first._counts else second._soft
            return tensor.add_(other)

        def gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat([tensor, second._worst])

    first.merge(Both())
    together, alone = first.result(), scored(*parts)
    assert together.tables == alone.tables and together.values == pytest.approx(alone.values)
    assert together.worst == alone.worst


def test_its_names_are_known_before():
    assert MeanIou(CLASSES, 1.0, CPU).names() == tuple(scored(made()).values)
