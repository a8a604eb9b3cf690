"""Mean average precision, F1, exact matches and loss of several labels per image, against torchmetrics and torch.

Merging over ranks is tested in tests/distributed, over real ones.
"""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sightline.errors import BadData
from sightline.metrics.average_precision import AveragePrecision, average_precision
from sightline.metrics.precision_recall import curve_table
from sightline.metrics.topk import WORST

CPU = torch.device("cpu")


def case(classes: int, samples: int, levels: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, of so many levels if there should be ties, and labels."""
    random = torch.Generator().manual_seed(classes)
    labels = torch.rand(samples, classes, generator=random) < torch.linspace(0.1, 0.7, classes)
    logits = torch.randn(samples, classes, generator=random) + 1.2 * labels - 0.5
    return (logits * levels).round() / levels if levels else logits, labels.to(torch.uint8)


def counted(logits: torch.Tensor, labels: torch.Tensor, batch: int, smoothing: float = 0.0) -> AveragePrecision:
    """Count batches of `batch`; the last is filled with rows that are not valid and would all be wrong."""
    metric = AveragePrecision(tuple(f"class{i}" for i in range(logits.shape[1])), smoothing, CPU)
    for start in range(0, len(labels), batch):
        rows = slice(start, start + batch)
        missing = batch - len(labels[rows])
        slot = {
            "label": F.pad(labels[rows], (0, 0, 0, missing)),
            "index": F.pad(torch.arange(len(labels))[rows], (0, missing), value=-1),
            "valid": F.pad(torch.ones(len(labels[rows]), dtype=torch.bool), (0, missing)),
        }
        metric.update({"logits": F.pad(logits[rows], (0, 0, 0, missing), value=9.0)}, slot)
        for tensor in slot.values():
            tensor.zero_()  # the loader fills it with the next batch
    return metric


@pytest.mark.parametrize("batch", [7, 200])
@pytest.mark.parametrize("levels", [0, 4], ids=["", "ties"])
@pytest.mark.parametrize("classes", [2, 9])
def test_against_torchmetrics(classes: int, levels: int, batch: int):
    from torchmetrics.classification import (
        MultilabelAveragePrecision,
        MultilabelExactMatch,
        MultilabelF1Score,
        MultilabelPrecision,
        MultilabelRecall,
    )

    logits, labels = case(classes, 150, levels)
    scores = counted(logits, labels, batch).result()
    probabilities, many = logits.sigmoid(), {"num_labels": classes, "average": None}
    expected = {
        "map": MultilabelAveragePrecision(**many),
        "f1": MultilabelF1Score(**many),
        "precision": MultilabelPrecision(**many),
        "recall": MultilabelRecall(**many),
    }
    at_half = torch.where(logits == 0, 0.500001, probabilities)  # torchmetrics wants more than one half
    for name, metric in expected.items():
        found = metric(probabilities if name == "map" else at_half, labels.int()).tolist()
        assert [row[name] for row in scores.tables["classes"]] == pytest.approx(found, abs=1e-6)
        if name in scores.values:
            assert scores.values[name] == pytest.approx(np.mean(found), abs=1e-6)
    macro = MultilabelF1Score(classes, average="macro")(at_half, labels.int())
    assert scores.values["macro_f1"] == scores.values["f1"] == pytest.approx(float(macro), abs=1e-6)
    assert scores.values["exact"] == pytest.approx(MultilabelExactMatch(classes)(at_half, labels.int()).item())
    assert [row["samples"] for row in scores.tables["classes"]] == labels.sum(0).tolist()
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double())
    assert scores.values["loss"] == pytest.approx(loss.item(), rel=1e-5) and scores.values["samples"] == 150
    assert tuple(scores.values) == counted(logits, labels, batch).names()


@pytest.mark.parametrize("levels", [0, 4], ids=["", "ties"])
def test_precision_over_recall_against_torchmetrics(levels: int):
    from torchmetrics.classification import MultilabelPrecisionRecallCurve

    logits, labels = case(9, 150, levels)
    mean, *worst = counted(logits, labels, 64).result().tables["precision_recall"]
    precisions, recalls, _ = MultilabelPrecisionRecallCurve(9)(logits.sigmoid(), labels.int())
    expected = []
    for precision, recall in zip(precisions, recalls, strict=True):
        # The last point, precision 1 at recall 0, is not one of a threshold.
        at = [precision[:-1][recall[:-1] >= place / 100 - 1e-6] for place in range(101)]
        expected.append([float(reached.max()) if len(reached) else 0.0 for reached in at])
    np.testing.assert_allclose(mean["precision"], np.mean(expected, 0), atol=1e-4)
    assert mean["class"] is None and len(worst) == 5
    for row in worst:
        np.testing.assert_allclose(row["precision"], expected[int(row["class"][5:])], atol=1e-4)


def test_average_precision_is_scikit_learns():
    """sum of (R_n - R_n-1) P_n over distinct thresholds, here one threshold after another."""
    random = np.random.default_rng(0)
    for _ in range(20):
        scores, labels = random.integers(0, 6, 25) / 2, random.random(25) < 0.4
        expected, before = 0.0, 0.0
        for threshold in sorted(set(scores), reverse=True):
            chosen = scores >= threshold
            recall = (chosen & labels).sum() / labels.sum()
            expected, before = expected + (recall - before) * (chosen & labels).sum() / chosen.sum(), recall
        assert average_precision(scores, labels) == pytest.approx(expected)


def test_a_class_that_does_not_occur_is_left_out():
    logits, labels = case(3, 40)
    labels[:, 1], logits[:, 1] = 0, -1.0
    scores = counted(logits, labels, 8).result()
    row = scores.tables["classes"][1]
    assert row == {"class": "class1", "map": None, "f1": None, "precision": None, "recall": None, "samples": 0}
    others = [each["map"] for each in scores.tables["classes"] if each["map"] is not None]
    assert len(others) == 2 and scores.values["map"] == pytest.approx(np.mean(others))
    assert math.isnan(counted(logits, torch.zeros_like(labels), 8).result().values["map"])


def test_worst_samples_have_a_wrong_class_and_the_largest_losses():
    logits, labels = case(4, 60)
    worst = counted(logits, labels, 16).result().worst
    losses = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").mean(1)
    wrong = ((logits >= 0) != labels.bool()).any(1)
    order = torch.where(wrong, losses, -1.0).argsort(descending=True)[: min(WORST, int(wrong.sum()))]
    assert [row["index"] for row in worst] == order.tolist()
    first = worst[0]["index"]
    assert worst[0]["class"] == ";".join(f"class{i}" for i in labels[first].nonzero().flatten().tolist())
    assert worst[0]["predicted"] == ";".join(f"class{i}" for i in (logits[first] >= 0).nonzero().flatten().tolist())


def test_nothing_that_could_be_read_is_an_error():
    metric = AveragePrecision(("a",), 0.0, CPU)
    batch = {"label": torch.zeros(2, 1, dtype=torch.uint8), "index": torch.tensor([0, -1])}
    metric.update({"logits": torch.zeros(2, 1)}, {**batch, "valid": torch.zeros(2, dtype=torch.bool)})
    with pytest.raises(BadData, match="not one sample"):
        metric.result()


def test_without_a_curve_there_is_no_table():
    assert curve_table([]) == []


def test_a_probability_of_exactly_one_half_is_an_answer():
    logits = torch.tensor([[0.0, -1.0], [0.0, 0.0], [-1.0, -1.0]])
    labels = torch.tensor([[1, 0], [1, 1], [0, 0]], dtype=torch.uint8)
    scores = counted(logits, labels, 2).result()
    assert (scores.values["exact"], scores.values["macro_f1"]) == (1, 1) and scores.worst == []
    assert [row["recall"] for row in scores.tables["classes"]] == [1, 1]
