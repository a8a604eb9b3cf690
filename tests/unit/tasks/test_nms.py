"""Suppression and the choice of detections against torchvision and a plain loop."""

import numpy as np
import pytest
import torch
from torchvision import ops

from sightline.boxes import iou
from sightline.tasks.nms import best_boxes, suppress

PLAIN = {"score_threshold": 0.05, "nms_iou": 0.5, "candidates": 200, "per_image": 200}


def random_boxes(*shape: int, seed: int = 0) -> torch.Tensor:
    """Corner boxes that overlap often."""
    random = torch.Generator().manual_seed(seed)
    centre = 0.3 + 0.4 * torch.rand(*shape, 2, generator=random)
    half = 0.05 + 0.2 * torch.rand(*shape, 2, generator=random)
    return torch.cat([centre - half, centre + half], dim=-1)


def random_scores(*shape: int, seed: int = 1, levels: int = 0) -> torch.Tensor:
    scores = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) ** 3
    return (scores * levels).round() / levels if levels else scores


def by_loops(boxes: torch.Tensor, scores: torch.Tensor, score_threshold, nms_iou, candidates, per_image):
    """One image: (box, score, label) of each detection, one class and one candidate at a time."""
    overlap = iou(boxes, boxes).numpy()
    found = []
    for number, of_class in enumerate(scores.numpy()):
        order = [a for a in np.argsort(-of_class, kind="stable")[:candidates] if of_class[a] > score_threshold]
        kept: list[int] = []
        for anchor in order:
            if all(overlap[anchor, other] < nms_iou for other in kept):
                kept.append(anchor)
        found += [(float(of_class[anchor]), number + 1, int(anchor)) for anchor in kept]
    found = sorted(found, key=lambda f: -f[0])[:per_image]  # stable: lower classes first
    return [(boxes[anchor].tolist(), score, label) for score, label, anchor in found]


def listed(boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor) -> list:
    """Return the detections of one image; everything after them must be empty."""
    count = int((labels > 0).sum())
    assert not labels[count:].any() and not scores[count:].any() and not boxes[count:].any()
    return list(zip(boxes[:count].tolist(), scores[:count].tolist(), labels[:count].tolist(), strict=True))


@pytest.mark.parametrize("levels", [0, 20], ids=["all differ", "many are equal"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"score_threshold": 0.4}, {"nms_iou": 0.2}, {"nms_iou": 1.0}, {"candidates": 9}, {"per_image": 7}],
    ids=str,
)
def test_batches_as_by_loops(fields: dict, levels: int):
    options = {**PLAIN, **fields}
    boxes, scores = random_boxes(3, 250), random_scores(3, 6, 250, levels=levels)
    scores[1] *= 0.049  # nothing to be found in the second image
    scores[2, 3] = 0.0
    results = best_boxes(boxes, scores.mT, **options)
    assert results[0].shape == (3, min(options["per_image"], 6 * options["candidates"]), 4)
    found = [listed(*(r[image] for r in results)) for image in range(3)]
    assert found == [by_loops(boxes[i], scores[i], **options) for i in range(3)]
    assert found[0] and not found[1] and found[2]


def test_static_shapes_give_the_same_in_one_graph():
    """On a device nothing is left out, because that would need the host."""
    boxes, scores = random_boxes(4, 120), random_scores(4, 5, 120, levels=30)
    scores[0] = 0
    options = {**PLAIN, "candidates": 8}
    expected = best_boxes(boxes, scores.mT, **options)
    compiled = torch.compile(
        lambda b, s: best_boxes(b, s, **options, static=True), fullgraph=True, dynamic=False, backend="eager"
    )
    for got in (best_boxes(boxes, scores.mT, **options, static=True), compiled(boxes, scores.mT)):
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_suppression_is_torchvisions(threshold: float):
    boxes, scores = random_boxes(8, 60, seed=3), random_scores(8, 60, seed=4).sort(descending=True).values
    kept = suppress(boxes, torch.ones(8, 60, dtype=torch.bool), threshold)
    dropped = 0
    for row in range(8):
        expected = ops.nms(boxes[row], scores[row], threshold)  # drops above the threshold; no overlap equals it here
        assert kept[row].nonzero()[:, 0].tolist() == sorted(expected.tolist())
        dropped += 60 - len(expected)
    assert dropped > 40


def test_detections_are_torchvisions():
    boxes, scores = random_boxes(2, 400, seed=5), random_scores(2, 8, 400, seed=6)
    found = best_boxes(boxes, scores.mT, **{**PLAIN, "candidates": 400, "per_image": 60})
    for image in range(2):
        label, anchor = (scores[image] > 0.05).nonzero(as_tuple=True)
        theirs = boxes[image, anchor]
        kept = ops.batched_nms(theirs, scores[image, label, anchor], label, 0.5)[:60]
        assert torch.equal(found[0][image], theirs[kept])
        assert torch.equal(found[1][image], scores[image, label, anchor][kept])
        assert torch.equal(found[2][image], label[kept] + 1)


def test_a_dropped_box_drops_nothing():
    """A overlaps B, B overlaps C, A does not overlap C: B goes and C stays."""
    boxes = torch.tensor([[[0, 0, 1, 1.0], [0, 0.3, 1, 1.3], [0, 0.6, 1, 1.6]]])
    assert suppress(boxes, torch.ones(1, 3, dtype=torch.bool), 0.5).tolist() == [[True, False, True]]
    # Neither does one that is not there.
    assert suppress(boxes, torch.tensor([[False, True, True]]), 0.5).tolist() == [[False, True, False]]


def test_limits_by_hand():
    """The score must be above its threshold; an overlap of exactly nms_iou is too much; classes do not touch."""
    boxes = torch.tensor([[[0, 0, 0.5, 0.5], [0, 0, 0.25, 0.5], [0.5, 0.5, 0.75, 0.75], [0.5, 0.5, 1, 1]]])
    scores = torch.tensor([[[0.9, 0.8, 0.05, 0.0], [0.0, 0.7, 0.0500001, 0.04]]])
    boxes_found, scores_found, labels = best_boxes(boxes, scores.mT, **PLAIN)
    assert labels[0].tolist() == [1, 2, 2, *[0] * 5]  # two classes of four anchors cannot give 200
    assert scores_found[0, :3].tolist() == pytest.approx([0.9, 0.7, 0.0500001])
    assert boxes_found[0, :3].tolist() == [boxes[0, i].tolist() for i in (0, 1, 2)]


def test_the_cap_takes_the_best_of_all_classes():
    """More than 200 boxes that do not touch, in three classes."""
    corner = torch.cartesian_prod(torch.arange(20.0), torch.arange(20.0)) / 20
    boxes = torch.cat([corner, corner + 0.04], dim=1)[None]
    scores = random_scores(1, 3, 400, seed=9) * 0.9 + 0.06
    _, found, labels = best_boxes(boxes, scores.mT, **PLAIN)
    per_class = scores[0].sort(descending=True).values[:, :200]  # as many candidates has a class
    assert found[0].tolist() == per_class.flatten().sort(descending=True).values[:200].tolist()
    assert set(labels[0].tolist()) == {1, 2, 3}


def test_scores_and_boxes_that_are_not_finite():
    """A network that has diverged: nothing is found where the score is not a number, and nothing breaks."""
    boxes, scores = random_boxes(1, 30), random_scores(1, 2, 30) * 0.5 + 0.3
    scores[0, 0, :15] = torch.nan
    boxes[0, 20] = torch.tensor([-torch.inf, -torch.inf, torch.inf, torch.inf])
    _, found, labels = best_boxes(boxes, scores.mT, **PLAIN)
    assert found.isfinite().all() and (labels > 0).any()


def test_an_overlap_of_exactly_the_limit_is_dropped_and_a_score_of_exactly_the_threshold_is_left_out():
    boxes = torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.25], [0.0, 0.0, 0.5, 0.125]]])
    scores = torch.tensor([[[0.75], [0.5], [0.25]]])
    assert suppress(boxes, torch.ones(1, 3, dtype=torch.bool), 0.5).tolist() == [[True, False, True]]
    for static in (False, True):
        found = best_boxes(boxes, scores, 0.25, 0.5, 9, 9, static)
        assert found[1].tolist() == [[0.75, 0, 0]] and found[2].tolist() == [[1, 0, 0]]
