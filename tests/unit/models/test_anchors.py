"""Default boxes against the golden numbers of SSD300 and a plain loop, and the box arithmetic against torchvision."""

import math

import numpy as np
import pytest
import torch
from torchvision import ops

from sightline.errors import UsageError
from sightline.models.anchors import decode, default_boxes, encode, iou, to_corners

SSD300 = {
    "size": 300,
    "feature_sizes": (38, 19, 10, 5, 3, 1),
    "steps": (8, 16, 32, 64, 100, 300),
    "scales": (21, 45, 99, 153, 207, 261, 315),
    "ratios": ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
}


@pytest.fixture(scope="module")
def anchors() -> torch.Tensor:
    return default_boxes(**SSD300)


def random_boxes(count: int, seed: int = 0) -> torch.Tensor:
    """Corner boxes of all sizes, inside the image."""
    random = np.random.default_rng(seed)
    low, high = np.sort(random.random((2, count, 2)), axis=0)
    return torch.from_numpy(np.concatenate([low, high], axis=1).astype("float32"))


def test_golden_rows_and_sums(anchors):
    assert anchors.shape == (8732, 4) and anchors.dtype == torch.float32
    rows = {
        0: (0.0133333, 0.0133333, 0.07, 0.07),
        5776: (0.0266667, 0.0266667, 0.15, 0.15),
        8731: (0.5, 0.5, 1.0, 0.6151829),
    }
    for row, expected in rows.items():
        assert anchors[row].tolist() == pytest.approx(expected, abs=1e-6), row
    sums = anchors.double().sum(0).tolist()
    assert sums == pytest.approx([4443.1467, 4443.1467, 1171.9677, 1171.9677], abs=1e-4)


def test_a_quarter_sticks_out_of_the_image(anchors):
    corners = to_corners(anchors)
    outside = ((corners < 0) | (corners > 1)).any(1).double().mean()
    assert float(outside) == pytest.approx(0.254, abs=5e-4)


def test_every_box_as_a_plain_loop_makes_it(anchors):
    """Level, row, column, anchor; the order is what the heads rely on."""
    expected = []
    levels = zip(SSD300["feature_sizes"], SSD300["steps"], SSD300["ratios"], strict=True)
    for level, (cells, step, ratios) in enumerate(levels):
        this, following = SSD300["scales"][level] / 300, SSD300["scales"][level + 1] / 300
        for row in range(cells):
            for column in range(cells):
                sides = [(this, this), (math.sqrt(this * following),) * 2]
                for ratio in ratios:
                    width, height = this * math.sqrt(ratio), this / math.sqrt(ratio)
                    sides += [(height, width), (width, height)]
                for height, width in sides:
                    box = ((row + 0.5) * step / 300, (column + 0.5) * step / 300, height, width)
                    expected.append([min(max(side, 0), 1) for side in box])
    np.testing.assert_allclose(anchors.numpy(), np.array(expected), rtol=0, atol=1e-7)
    per_level = [5776, 2166, 600, 150, 36, 4]
    assert len(expected) == sum(per_level)
    # The first box of each level is its smallest square.
    starts = np.cumsum([0, *per_level[:-1]])
    assert anchors[starts, 2].tolist() == pytest.approx([s / 300 for s in SSD300["scales"][:-1]], abs=1e-6)


def test_other_sizes_of_image():
    boxes = default_boxes(128, (16, 8), (8, 16), (10, 30, 60), ((2,), (2, 3)))
    assert len(boxes) == 16 * 16 * 4 + 8 * 8 * 6
    assert boxes[0].tolist() == pytest.approx([4 / 128, 4 / 128, 10 / 128, 10 / 128])


def test_a_table_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="6 feature sizes, 6 steps, 6 groups of ratios and 6 scales do not fit"):
        default_boxes(**{**SSD300, "scales": SSD300["scales"][:-1]})


def test_overlap_is_torchvisions():
    a, b = random_boxes(40, 1), random_boxes(50, 2)
    assert to_corners(torch.tensor([0.5, 0.4, 0.2, 0.6])).tolist() == pytest.approx([0.4, 0.1, 0.6, 0.7])
    torch.testing.assert_close(iou(a, b), ops.box_iou(a, b))
    batched = iou(torch.stack([a, a.flip(0)]), b)  # one set of anchors for a whole batch
    torch.testing.assert_close(batched[1], ops.box_iou(a.flip(0), b))
    assert iou(a, a).diagonal().tolist() == [1.0] * 40


def test_boxes_without_area_overlap_nothing():
    empty = torch.zeros(1, 4)
    assert iou(empty, empty).tolist() == [[0.0]]
    assert not iou(empty, random_boxes(20)).any()


def test_offsets_lead_back_to_the_box(anchors):
    """On the anchors a box could match: the rounding grows with how far the anchor is."""
    boxes = random_boxes(400)
    overlap = iou(boxes, to_corners(anchors))
    box, anchor = (overlap >= 0.3).nonzero(as_tuple=True)
    assert len(box) > 1000
    offsets = encode(boxes[box], anchors[anchor])
    assert (decode(offsets, anchors[anchor]) - boxes[box]).abs().max() < 1e-5


def test_offsets_by_hand():
    anchor = torch.tensor([[0.5, 0.5, 0.2, 0.4]])
    box = torch.tensor([[0.45, 0.4, 0.65, 0.8]])  # centre .55, .6, height .2, width .4
    assert encode(box, anchor)[0].tolist() == pytest.approx([0.05 / 0.2 * 10, 0.1 / 0.4 * 10, 0, 0], abs=1e-5)
    wider = torch.tensor([[0.4, 0.1, 0.6, 0.9]])
    assert encode(wider, anchor)[0].tolist() == pytest.approx([0, 0, 0, math.log(2) * 5], abs=1e-5)
    assert encode(torch.zeros(1, 4), anchor).isfinite().all()  # what pads a list of boxes must not spoil a gradient
