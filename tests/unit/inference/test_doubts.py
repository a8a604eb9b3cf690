"""Labels that a network contradicts: the rule against ten lines that follow the paper, for one label and several."""

import math

import numpy as np
import pytest
import torch

from sightline.errors import UsageError
from sightline.inference import doubts
from sightline.parts import DataSpec


def spec_of(classes: int, several: bool = False) -> DataSpec:
    names = tuple(f"c{place}" for place in range(classes))
    return DataSpec(names, 3, (8, 8), (0.5,) * 3, (0.2,) * 3, multi_label=several)


def batches(logits: torch.Tensor, label: torch.Tensor, size: int = 7):
    """Give rows in batches whose last row is padding, with a label of no meaning."""
    for start in range(0, len(label), size):
        rows = torch.arange(start, min(start + size, len(label)))
        padded = torch.cat([rows, rows[:1]])
        valid = torch.arange(len(padded)) < len(rows)
        yield {"logits": logits[padded]}, {"label": label[padded], "index": padded, "valid": valid}


def by_the_paper(probabilities: np.ndarray, label: np.ndarray) -> set[int]:
    """Northcutt et al. 2021, equations 1 and 2, with thresholds of at most 0.75, where the class that is counted is the
    most probable one too."""
    thresholds = [
        min(0.75, probabilities[label == j, j].mean()) if (label == j).any() else 0.75
        for j in range(probabilities.shape[1])
    ]
    found = set()
    for i, row in enumerate(probabilities):
        confident = [j for j in range(len(row)) if row[j] >= thresholds[j]]
        if confident and max(confident, key=lambda j: row[j]) != label[i] and row.argmax() in confident:
            found.add(i)
    return {i for i in found if probabilities[i].argmax() != label[i]}


@pytest.mark.parametrize("seed", range(5))
def test_one_label_is_doubted_as_the_paper_says(seed: int):
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 4, (200,), generator=random)  # of five classes, so that one has no samples
    logits = torch.randn(200, 5, generator=random) + 3 * torch.nn.functional.one_hot(label, 5)
    label[::20] = (label[::20] + 1) % 4  # wrong labels
    logits[17] = float("nan")
    collected = doubts.OneLabel(spec_of(5))
    for predictions, batch in batches(logits, label):
        collected.update(predictions, batch)
    rows = collected.rows()
    known = np.delete(np.arange(200), 17)
    probabilities, given = logits.double().softmax(1).numpy(), label.numpy()
    expected = {int(known[i]) for i in by_the_paper(probabilities[known], given[known])}
    assert {row["index"] for row in rows} == expected and len(expected) > 4 and collected.count == 199
    for row in rows:
        one = probabilities[row["index"]]
        assert row["class"] == f"c{given[row['index']]}" and row["predicted"] == f"c{one.argmax()}"
        assert row["confidence"] == pytest.approx(one.max(), rel=1e-5)
        assert row["label_confidence"] == pytest.approx(one[given[row["index"]]], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_each_of_several_labels_is_a_question_of_its_own(seed: int):
    random = torch.Generator().manual_seed(seed)
    label = (torch.rand(120, 3, generator=random) < 0.4).to(torch.uint8)
    logits = torch.randn(120, 3, generator=random) + 6 * (label.float() - 0.5)
    label[::12, 1] ^= 1  # wrong labels
    collected = doubts.SeveralLabels(spec_of(3, True), 120)
    for predictions, batch in batches(logits, label):
        collected.update(predictions, batch)
    rows = {row["index"]: row for row in collected.rows()}
    yes, flipped = logits.double().sigmoid().numpy(), label.numpy().copy()
    for c in range(3):
        for i in by_the_paper(np.stack([1 - yes[:, c], yes[:, c]], 1), label[:, c].numpy()):
            flipped[i, c] ^= 1
    named = [";".join(f"c{c}" for c in np.flatnonzero(row)) for row in flipped]
    assert {i: row["predicted"] for i, row in rows.items()} == {
        i: named[i] for i in range(120) if (flipped[i] != label[i].numpy()).any()
    }
    assert all(row["confidence"] > 0.5 > row["label_confidence"] for row in rows.values()) and len(rows) > 3


def test_classes_that_the_network_does_not_know_are_named():
    label = torch.tensor([0] * 10 + [1] * 10)
    logits = torch.zeros(20, 2)
    logits[:, 0] = 3
    logits[19] = torch.tensor([0.0, 3.0])
    collected = doubts.OneLabel(spec_of(2))
    for predictions, batch in batches(logits, label):
        collected.update(predictions, batch)
    assert len(collected.rows()) == 9 and collected.unsure == ("c1",)


def test_too_many_probabilities_are_refused():
    with pytest.raises(UsageError, match="10000000 images of 1000 classes take more than 2 GiB"):
        doubts.SeveralLabels(spec_of(1000, True), 10_000_000)


def test_exactly_the_usual_confidence_is_enough_to_doubt():
    """Four samples of one class get one answer; a fifth, of another label, the same: as sure as usual."""
    label = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    logits = torch.zeros(7, 2)
    logits[:5, 0], logits[5:, 1] = 0.5, 0.5
    collected = doubts.OneLabel(spec_of(2))
    for predictions, batch in batches(logits, label):
        collected.update(predictions, batch)
    assert [(row["index"], row["class"], row["predicted"]) for row in collected.rows()] == [(4, "c1", "c0")]
    several = doubts.SeveralLabels(spec_of(1, True), 4)
    # Each of the others is sure with 0.75, which is as much as is ever asked for; one half is no answer.
    yes = torch.tensor([[3.0], [3.0], [-3.0], [3.0], [0.0]]).log().nan_to_num(0)
    yes[2] = -torch.tensor(3.0).log()
    given = torch.tensor([[1], [1], [0], [0], [0]], dtype=torch.uint8)
    for predictions, batch in batches(yes, given):
        several.update(predictions, batch)
    assert [(row["index"], row["class"], row["predicted"]) for row in several.rows()] == [(3, "", "c0")]


def test_the_mean_of_a_class_is_over_its_own_samples():
    found = doubts.mean_of_class(np.array([0, 1, 1, 3]), np.array([0.5, 0.25, 0.5, 0.0]), 5)
    assert found.tolist() == [0.5, 0.375, math.inf, 0.0, math.inf]
