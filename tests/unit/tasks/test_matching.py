"""Matching against the golden case and a plain loop over boxes and anchors; hard negatives against two argsorts."""

import numpy as np
import pytest
import torch

from sightline.boxes import decode, encode, iou, to_centres, to_corners
from sightline.models.anchors import default_boxes
from sightline.tasks.matching import hard_negatives, match

GOLDEN = [(0.1, 0.1, 0.5, 0.5), (0.4, 0.3, 0.95, 0.9), (0.02, 0.02, 0.05, 0.05)]


@pytest.fixture(scope="module")
def anchors() -> torch.Tensor:
    return default_boxes(
        300,
        (38, 19, 10, 5, 3, 1),
        (8, 16, 32, 64, 100, 300),
        (21, 45, 99, 153, 207, 261, 315),
        ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
    )


def padded(images: list[list[tuple[float, ...]]], places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return boxes and labels 1, 2, ... of a batch."""
    boxes, labels = torch.zeros(len(images), places, 4), torch.zeros(len(images), places, dtype=torch.int64)
    for number, image in enumerate(images):
        boxes[number, : len(image)] = torch.tensor(image).view(-1, 4)
        labels[number, : len(image)] = torch.arange(1, len(image) + 1)
    return boxes, labels


def assigned_by_loops(overlap: np.ndarray, lineage: str) -> dict[int, int]:
    """Anchor -> box, one image (boxes, anchors), as the two originals do it."""
    found = {}
    for anchor in range(overlap.shape[1]):
        best = max(range(len(overlap)), key=lambda box: overlap[box, anchor], default=None)
        if best is not None and (overlap[best, anchor] > 0.5 or (lineage == "tf" and overlap[best, anchor] == 0.5)):
            found[anchor] = best
    boxes = range(len(overlap))
    for box in reversed(boxes) if lineage == "tf" else boxes:  # who writes last wins
        found[int(overlap[box].argmax())] = box
    return found


@pytest.mark.parametrize("lineage", ["tf", "mlperf"])
def test_golden_case(anchors, lineage: str):
    boxes, labels = padded([GOLDEN], 5)
    overlap = iou(boxes, to_corners(anchors))[0, :3]
    assert overlap.max(1).values.tolist() == pytest.approx([0.7272, 0.6354, 0.1837], abs=5e-5)
    assert (overlap >= 0.5).sum(1).tolist() == [14, 7, 0]
    assert overlap.argmax(1).tolist() == [8075, 8645, 7]
    classes, offsets = match(boxes, labels, anchors, lineage)
    assert classes.shape == (1, 8732) and offsets.shape == (1, 8732, 4)
    assert int((classes > 0).sum()) == 22
    assert classes[0, [8075, 8645, 7]].tolist() == [1, 2, 3]  # the third is too small for any anchor to be enough
    assert torch.bincount(classes[0]).tolist() == [8732 - 22, 14, 7, 1]
    matched = classes[0] > 0
    expected = encode(boxes[0, classes[0, matched] - 1], anchors[matched])
    torch.testing.assert_close(offsets[0, matched], expected)
    assert (decode(offsets[0, matched], anchors[matched]) - boxes[0, classes[0, matched] - 1]).abs().max() < 1e-5
    assert not offsets[0, ~matched].any()


@pytest.mark.parametrize("lineage", ["tf", "mlperf"])
def test_batches_of_padded_boxes_as_by_loops(anchors, lineage: str):
    """Random boxes, some of them twice and some of them together in one cell, so that anchors are shared."""
    random = np.random.default_rng(0)
    images = []
    for count in (0, 1, 7, 12, 3):
        low, high = np.sort(random.random((2, count, 2)), axis=0)
        image = [tuple(box) for box in np.concatenate([low, high], axis=1).tolist()]
        tiny = [(0.3 + d, 0.3 + d, 0.31 + d, 0.31 + d) for d in (0.0, 0.0005, 0.001)]
        images.append([*image, *image[:2], *(tiny if count else [])])
    boxes, labels = padded(images, 20)
    classes, offsets = match(boxes, labels, anchors, lineage)
    overlaps = iou(boxes, to_corners(anchors)).numpy()
    shared = 0
    for number, image in enumerate(images):
        expected = assigned_by_loops(overlaps[number, : len(image)], lineage)
        shared += len(image) - len({int(row.argmax()) for row in overlaps[number, : len(image)]})
        assert {int(a): int(classes[number, a]) - 1 for a in classes[number].nonzero()[:, 0]} == expected
        for anchor, box in expected.items():
            torch.testing.assert_close(offsets[number, anchor], encode(boxes[number, box], anchors[anchor]))
    assert shared > 8
    assert not classes[0].any()


def test_two_boxes_that_claim_one_anchor(anchors):
    """Two boxes in one cell, smaller than any anchor: both overlap the same one most, neither by half."""
    boxes, labels = padded([[(0.30, 0.30, 0.32, 0.32), (0.301, 0.301, 0.321, 0.321)]], 4)
    overlap = iou(boxes, to_corners(anchors))[0, :2]
    assert overlap[0].argmax() == overlap[1].argmax()
    assert overlap.max() < 0.5
    anchor = int(overlap[0].argmax())
    for lineage, winner in (("tf", 1), ("mlperf", 2)):
        classes, _ = match(boxes, labels, anchors, lineage)
        assert classes[0].nonzero()[:, 0].tolist() == [anchor] and int(classes[0, anchor]) == winner


def test_exactly_one_half_is_enough_for_one_lineage_only():
    """Anchors are the whole of a box of 1/2 by 1/2, its half, and a little less than that."""
    anchors = to_centres(torch.tensor([[0, 0, 0.5, 0.5], [0, 0, 0.25, 0.5], [0, 0, 0.2499, 0.5]]))
    boxes, labels = padded([[(0, 0, 0.5, 0.5)]], 2)
    assert iou(boxes[0, :1], to_corners(anchors))[0, :2].tolist() == [1.0, 0.5]
    assert match(boxes, labels, anchors, "tf")[0].tolist() == [[1, 1, 0]]
    assert match(boxes, labels, anchors, "mlperf")[0].tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("lineage", ["tf", "mlperf"])
def test_padding_claims_nothing(lineage: str):
    """Also where it stands before the boxes, and where what it holds would overlap more."""
    anchors = to_centres(torch.tensor([[0, 0, 0.5, 0.5], [0, 0, 0.25, 0.5], [0.6, 0.6, 0.9, 0.9]]))
    boxes = torch.tensor([[[0, 0, 0.5, 0.5], [0, 0, 0.3, 0.5], [0.6, 0.6, 0.9, 0.9]]])
    assert match(boxes, torch.tensor([[0, 5, 0]]), anchors, lineage)[0].tolist() == [[5, 5, 0]]
    classes, offsets = match(boxes, torch.zeros(1, 3, dtype=torch.int64), anchors, lineage)
    assert not classes.any() and not offsets.any()


def negatives_by_argsort(losses: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """The original's two argsorts, one image; positives cannot be chosen."""
    rank = np.argsort(np.argsort(-np.where(positive, -1, losses), kind="stable"), kind="stable")
    return (rank < min(3 * positive.sum(), len(losses))) & ~positive


@pytest.mark.parametrize("share", [0.0, 0.003, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("levels", [0, 4], ids=["all differ", "many are equal"])
def test_hard_negatives_are_the_original_ones(share: float, levels: int):
    random = np.random.default_rng(1)
    losses = random.exponential(size=(6, 500)).astype("float32")
    if levels:
        losses = np.floor(losses * levels) / levels  # many zeros among them
    positive = random.random((6, 500)) < share
    got = hard_negatives(torch.from_numpy(losses), torch.from_numpy(positive)).numpy()
    expected = np.stack([negatives_by_argsort(*row) for row in zip(losses, positive, strict=True)])
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got.sum(1), np.minimum(3 * positive.sum(1), (~positive).sum(1)))


def test_a_loss_that_is_not_a_number_is_chosen():
    """Else a network that has diverged at background anchors would show a finite loss."""
    losses, positive = torch.rand(1, 50), torch.zeros(1, 50, dtype=torch.bool)
    positive[0, 4] = True
    losses[0, 9] = torch.nan
    assert hard_negatives(losses, positive)[0, 9]
    losses[0, 10:] = torch.nan
    chosen = hard_negatives(losses, positive)[0]
    assert losses[0][chosen].isnan().all() and chosen.sum() == 3


def test_an_overlap_of_exactly_one_half_is_enough_for_one_lineage_only():
    """The second anchor overlaps the box by one half; the first is the box, so that it is claimed either way."""
    anchors = torch.tensor([[0.25, 0.25, 0.5, 0.5], [0.25, 0.125, 0.5, 0.25], [0.75, 0.75, 0.25, 0.25]])
    boxes, labels = torch.tensor([[[0.0, 0.0, 0.5, 0.5]]]), torch.tensor([[3]])
    assert iou(boxes, to_corners(anchors))[0, 0].tolist() == [1.0, 0.5, 0.0]
    for lineage, expected in (("tf", [3, 3, 0]), ("mlperf", [3, 0, 0])):
        assert match(boxes, labels, anchors, lineage)[0][0].tolist() == expected
