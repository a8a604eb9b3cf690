"""Top-1, top-5, loss, accuracy per class and worst samples against torchmetrics and torch.

Merging over ranks is tested in tests/distributed, over real ones.
"""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from sightline.hardware.world import World
from sightline.metrics.topk import BINS, DENSE_MOST, MATRIX_MOST, WORST, TopK

CPU = torch.device("cpu")
SMOOTHING = 0.1


def case(classes: int, samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits that are right about half of the time, and labels; the last class has no sample."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(0, max(1, classes - 1), (samples,), generator=random)
    logits = torch.randn(samples, classes, generator=random)
    logits[torch.arange(samples), label] += 1.5
    return logits, label


def counted(logits: torch.Tensor, label: torch.Tensor, index: torch.Tensor, batch: int, classes: int) -> TopK:
    """Yield batches of `batch`, the last one filled with rows that are not valid and would all be wrong."""
    metric = TopK(tuple(f"class{i}" for i in range(classes)), SMOOTHING, CPU)
    for start in range(0, len(label), batch):
        rows = slice(start, start + batch)
        missing = batch - len(label[rows])
        noise = torch.full((missing, classes), 5.0)
        metric.update(
            {"logits": torch.cat([logits[rows], noise])},
            {
                "label": F.pad(label[rows], (0, missing)),
                "index": F.pad(index[rows], (0, missing), value=-1),
                "valid": F.pad(torch.ones(len(label[rows]), dtype=torch.bool), (0, missing)),
            },
        )
    return metric


@pytest.mark.parametrize("classes", [1, 2, 3, 5, 6, 10, 1000])
@pytest.mark.parametrize("batch", [7, 64])
def test_against_torchmetrics(classes: int, batch: int):
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassConfusionMatrix,
        MulticlassF1Score,
        MulticlassPrecision,
    )

    logits, label = case(classes, 150)
    scores = counted(logits, label, torch.arange(150), batch, classes).result()
    values = scores.values
    assert values["samples"] == 150
    if classes > 1:
        accuracy = MulticlassAccuracy(classes, average="micro")(logits, label)
        assert values["top1"] == pytest.approx(float(accuracy), abs=1e-7)
        per_class = MulticlassAccuracy(classes, average=None)(logits, label)
        precision = MulticlassPrecision(classes, average=None)(logits, label)
        f1 = MulticlassF1Score(classes, average=None)(logits, label)
        macro = MulticlassF1Score(classes, average="macro")(logits, label)
        assert values["macro_f1"] == pytest.approx(float(macro), abs=1e-6)
        matrix = MulticlassConfusionMatrix(classes)(logits, label)
        if classes <= MATRIX_MOST:
            assert [row["predicted"] for row in scores.tables["matrix"]] == matrix.tolist()
        else:
            assert "matrix" not in scores.tables
        for number, row in enumerate(scores.tables["classes"]):
            assert row["class"] == f"class{number}" and row["samples"] == int(matrix[number].sum())
            if row["samples"]:
                assert row["top1"] == pytest.approx(float(per_class[number]), abs=1e-6)
            else:
                assert row["top1"] is None
            if matrix[:, number].sum():
                assert row["precision"] == pytest.approx(float(precision[number]), abs=1e-6)
            else:
                assert row["precision"] is None
            if row["samples"] or matrix[:, number].sum():
                assert row["f1"] == pytest.approx(float(f1[number]), abs=1e-6)
            else:
                assert row["f1"] is None
        occurs = matrix.sum(1) > 0
        assert values["balanced_accuracy"] == pytest.approx(float(per_class[occurs].mean()), abs=1e-6)
        mistakes = {(r["class"], r["predicted"]): r["samples"] for r in scores.tables["confusion"]}
        for (true, predicted), count in mistakes.items():
            assert matrix[int(true[5:]), int(predicted[5:])] == count and true != predicted
        assert sorted(mistakes.values(), reverse=True) == list(mistakes.values())
        assert len(mistakes) == min(WORST, int((matrix.fill_diagonal_(0) > 0).sum()))
    else:
        assert values["top1"] == values["balanced_accuracy"] == values["macro_f1"] == 1.0
    if classes > 5:
        top5 = MulticlassAccuracy(classes, average="micro", top_k=5)(logits, label)
        assert values["top5"] == pytest.approx(float(top5), abs=1e-7)
    else:
        assert "top5" not in values  # it would be 1 and say nothing
    expected = F.cross_entropy(logits.double(), label, label_smoothing=SMOOTHING)
    assert values["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert tuple(values) == counted(logits, label, torch.arange(150), batch, classes).names()


def by_numpy(label: np.ndarray, predicted: np.ndarray, classes: int) -> tuple[list, list, list]:
    """Return recall, precision and F1 of every class; None where there is nothing to divide by."""
    recall, precision, f1 = [], [], []
    for number in range(classes):
        right = np.sum((label == number) & (predicted == number))
        true, found = np.sum(label == number), np.sum(predicted == number)
        recall.append(right / true if true else None)
        precision.append(right / found if found else None)
        f1.append(right / ((true + found) / 2) if true + found else None)
    return recall, precision, f1


@pytest.mark.parametrize(
    ("label", "predicted"),
    [
        ([0, 0, 1, 1], [0, 1, 1, 1]),  # classes 2 and 3 are neither true nor predicted
        ([0, 0, 1, 1], [2, 0, 1, 2]),  # 2 is predicted, but not true
        ([0, 3, 3, 1], [0, 0, 1, 1]),  # 3 is true, but not predicted
        ([2, 2, 2], [2, 2, 2]),  # one class alone
        ([2, 2, 2], [1, 1, 1]),  # all wrong
        ([3], [3]),  # one sample
    ],
)
def test_classes_that_are_absent_from_the_truth_or_the_answers(label: list[int], predicted: list[int]):
    logits = 5.0 * F.one_hot(torch.tensor(predicted), 4)
    scores = counted(logits, torch.tensor(label), torch.arange(len(label)), 3, 4).result()
    expected = by_numpy(np.array(label), np.array(predicted), 4)
    for name, values in zip(("top1", "precision", "f1"), expected, strict=True):
        for row, value in zip(scores.tables["classes"], values, strict=True):
            assert row[name] is None if value is None else row[name] == pytest.approx(value)
    recall, _, f1 = ([value for value in values if value is not None] for values in expected)
    assert scores.values["balanced_accuracy"] == pytest.approx(np.mean(recall))
    assert scores.values["macro_f1"] == pytest.approx(np.mean(f1))


def test_one_frequent_class_does_not_decide_the_balanced_scores():
    """As scikit-learn counts: 96 of 100 right, of the rare class none."""
    label = torch.tensor([0] * 96 + [1] * 4)
    values = counted(torch.tensor([[1.0, 0.0]] * 100), label, torch.arange(100), 50, 2).result().values
    assert values["top1"] == 0.96 and values["balanced_accuracy"] == 0.5
    assert values["macro_f1"] == pytest.approx((2 * 96 / 196 + 0) / 2)


def test_precision_over_recall_is_that_of_answers_above_a_probability():
    logits, label = case(10, 300)
    metric = counted(logits, label, torch.arange(300), 64, 10)
    metric.merge(World())
    [row] = metric.result().tables["precision_recall"]
    probability, predicted = logits.softmax(1).max(1)
    is_right = predicted == label
    best = [0.0] * 101  # at each recall or above
    for threshold in range(BINS):
        answered = probability >= threshold / BINS
        if answered.any():
            recall = int((is_right & answered).sum()) / 300
            for place in range(101):
                if recall >= place / 100:
                    best[place] = max(best[place], int((is_right & answered).sum()) / int(answered.sum()))
    assert row["class"] is None and row["precision"] == pytest.approx(best, abs=1e-4)
    assert row["precision"][0] > 0.8 > 0.1 > row["precision"][90] == 0


def test_a_thousand_classes_take_little_room():
    logits, label = case(1000, 2000)
    scores = counted(logits, label, torch.arange(2000), 500, 1000).result()
    assert len(scores.tables["precision_recall"]) == 1
    assert len(json.dumps(scores.tables)) < 120_000


@pytest.mark.parametrize("classes", [3, 60, DENSE_MOST])
def test_mistakes_of_equal_count_are_listed_as_the_largest_of_the_whole_matrix(classes: int):
    """Runs of earlier versions listed them so."""
    logits, label = case(classes, 400)
    listed = counted(logits, label, torch.arange(400), 64, classes).result().tables["confusion"]
    matrix = torch.zeros(classes, classes, dtype=torch.int64)
    matrix.index_put_((label, logits.argmax(1)), torch.ones(400, dtype=torch.int64), accumulate=True)
    most, cells = matrix.fill_diagonal_(0).view(-1).topk(min(WORST, classes**2))
    expected = [(*divmod(cell, classes), count) for count, cell in zip(most.tolist(), cells.tolist(), strict=True)]
    found = [(int(row["class"][5:]), int(row["predicted"][5:]), row["samples"]) for row in listed]
    assert found == [row for row in expected if row[2]]


def test_many_classes_are_counted_as_pairs_one_by_one():
    """Ten classes of 300,000 occur; a matrix of all pairs would take 720 GB."""
    classes, samples = 300_000, 96
    random = torch.Generator().manual_seed(0)
    some = torch.randint(0, classes, (10,), generator=random)
    label, predicted = (some[torch.randint(0, 10, (samples,), generator=random)] for _ in range(2))
    metric = TopK(tuple(map(str, range(classes))), SMOOTHING, CPU)
    for rows in torch.arange(samples).split(8):
        logits = torch.zeros(len(rows), classes)
        logits[torch.arange(len(rows)), predicted[rows]] = 9.0
        valid = torch.ones(len(rows), dtype=torch.bool)
        metric.update({"logits": logits}, {"label": label[rows], "index": rows, "valid": valid})
    metric.merge(World())
    scores = metric.result()
    pairs = list(zip(map(str, label.tolist()), map(str, predicted.tolist()), strict=True))
    totals, found = (Counter(pair[side] for pair in pairs) for side in (0, 1))
    right = Counter(true for true, said in pairs if true == said)
    assert scores.values["top1"] == sum(right.values()) / samples
    for row in scores.tables["classes"]:
        name = row["class"]
        assert row["samples"] == totals[name]
        assert row["top1"] == (right[name] / totals[name] if totals[name] else None)
        assert row["precision"] == (right[name] / found[name] if found[name] else None)
    mistakes = Counter(pair for pair in pairs if pair[0] != pair[1])
    listed = {(row["class"], row["predicted"]): row["samples"] for row in scores.tables["confusion"]}
    assert listed == {pair: mistakes[pair] for pair in listed} and len(listed) == WORST
    assert sorted(listed.values()) == sorted(count for _, count in mistakes.most_common(WORST))


def test_samples_that_are_not_valid_count_nowhere():
    """Wherever they stand in a batch, and also where what they hold is not finite."""
    logits, label = case(10, 60)
    valid = torch.arange(60) % 3 != 1
    spoilt = torch.where(valid[:, None], logits, torch.inf)
    metric = TopK(tuple(map(str, range(10))), SMOOTHING, CPU)
    metric.update({"logits": spoilt}, {"label": label, "index": torch.arange(60), "valid": valid})
    only = counted(logits[valid], label[valid], torch.arange(60)[valid], 64, 10)
    only.classes = metric.classes
    got, expected = metric.result(), only.result()
    assert got.values == pytest.approx(expected.values)
    assert got.tables == expected.tables
    assert [row["index"] for row in got.worst] == [row["index"] for row in expected.worst]


def test_the_worst_samples_are_the_wrong_ones_with_the_largest_loss():
    logits, label = case(10, 200)
    index = torch.randperm(5000, generator=torch.Generator().manual_seed(1))[:200]
    worst = counted(logits, label, index, 16, 10).result().worst
    loss = F.cross_entropy(logits, label, label_smoothing=SMOOTHING, reduction="none")
    wrong = [i for i in loss.argsort(descending=True).tolist() if logits[i].argmax() != label[i]][:WORST]
    assert [row["index"] for row in worst] == index[wrong].tolist()
    assert [row["class"] for row in worst] == [f"class{label[i]}" for i in wrong]
    assert [row["predicted"] for row in worst] == [f"class{logits[i].argmax()}" for i in wrong]
    assert [row["loss"] for row in worst] == pytest.approx(loss[wrong].tolist(), rel=1e-6)


def test_fewer_mistakes_than_places_are_listed_without_filling():
    logits = torch.eye(6) * 9
    label = torch.tensor([0, 1, 2, 3, 4, 0])
    scores = counted(logits, label, torch.arange(6), 6, 6).result()
    assert [(row["index"], row["class"], row["predicted"]) for row in scores.worst] == [(5, "class0", "class5")]
    assert scores.tables["confusion"] == [{"class": "class0", "predicted": "class5", "samples": 1}]


@pytest.mark.parametrize(("right", "wrong", "precision"), [(0.5006, 0.5004, 0.5), (0.5011, 0.5009, 1.0)])
def test_probabilities_are_told_apart_in_thousandths(right: float, wrong: float, precision: float):
    metric = TopK(("a", "b"), 0.0, torch.device("cpu"))
    logits = torch.tensor([[share, 1 - share] for share in (right, wrong)], dtype=torch.float64).log()
    label, index = torch.tensor([0, 1]), torch.arange(2)
    metric.update({"logits": logits}, {"label": label, "valid": torch.ones(2, dtype=torch.bool), "index": index})
    [row] = metric.result().tables["precision_recall"]
    assert row["precision"][0] == precision
