"""What is computed on a device makes its tensors there: on the CPU the same comes out where torch's default is another
device, on which a tensor without a place of its own would lie."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.data.augment import voxels
from sightline.hardware.world import World
from sightline.metrics.coco_map import CocoMap
from sightline.metrics.dice import Dice, within
from sightline.metrics.topk import TopK
from sightline.tasks import matching
from sightline.tasks.nms import best_boxes

CPU = torch.device("cpu")
CLASSES = ("background", "a", "b", "c", "d", "e", "f")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def corners(*shape: int, seed: int = 0) -> Tensor:
    low = 0.5 * drawn(*shape, 2, seed=seed)
    return torch.cat([low, low + 0.1 + 0.4 * drawn(*shape, 2, seed=seed + 1)], -1)


VALID, INDEX = torch.tensor([True, True, False]), torch.tensor([0, 1, -1])
MASK = (7 * drawn(3, 4, 6, seed=2)).long()
FOUND = {"boxes": corners(3, 4), "labels": torch.ones(3, 4).long(), "scores": drawn(3, 4, seed=5)}
TRUTH = {"truth_boxes": 40 * corners(3, 2, seed=3), "truth_labels": torch.ones(3, 2).long()}
TRUTH |= {"truth_crowd": torch.zeros(3, 2).bool(), "truth_area": 99 * drawn(3, 2), "valid": VALID, "index": INDEX}
TRUTH |= {"height": torch.full((3,), 30), "width": torch.full((3,), 40)}
WINDOWS = torch.tensor([[[0, 4, 0], [1, 4, 1], [0, 5, 0]], [[1, 3, 0], [0, 6, 0], [2, 3, 1]]])


TURN = (torch.tensor([[0.8, 0.6], [1.0, 0.0]]) * 2**voxels.TURN_BITS).round().long()


def scores_of(make: Callable[[], Any], predictions: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    metric = make()
    for _ in range(2):
        metric.update(predictions, batch)
    metric.merge(World())
    held = [each for value in vars(metric).values() for each in (value if isinstance(value, list) else [value])]
    assert {each.device for each in held if isinstance(each, Tensor)} == {CPU}
    with CPU:  # where the host reads the sums
        return list(vars(metric.result()).values())


def zoomed(windows: Tensor) -> Tensor:
    return voxels.matrix_of(voxels.zoom_taps(windows, 6))


def blurred(sigma: Tensor) -> Tensor:
    return voxels.matrix_of(voxels.blur_taps(sigma, 8, 3))


COMPUTED: dict[str, tuple[Any, ...]] = {
    "top k": (
        scores_of,
        lambda: TopK(CLASSES, 0.1, CPU),
        {"logits": drawn(3, 7)},
        {"label": torch.tensor([1, 2, 0]), "valid": VALID, "index": INDEX},
    ),
    "COCO": (scores_of, lambda: CocoMap(CLASSES[1:], CPU), FOUND, TRUTH),
    "Dice": (
        scores_of,
        lambda: Dice(CLASSES, CPU, "none", "cross_entropy"),
        {"logits": drawn(3, 7, 4, 6), "classes": MASK.flip(1)},
        {"label": MASK, "valid": VALID, "index": INDEX, "volume": INDEX, "extent": torch.tensor([[4, 5]] * 3)},
    ),
    "extent": (within, torch.tensor([[4, 5], [1, 1]]), (6, 6)),
    "static NMS": (best_boxes, corners(2, 9), drawn(2, 9, 3), 0.3, 0.5, 6, 4, True),
    "matching": (matching.match, corners(2, 3), torch.tensor([[1, 2, 0], [3, 0, 0]]), drawn(20, 4) / 2 + 0.2),
    "negatives": (matching.hard_negatives, drawn(2, 30), drawn(2, 30, seed=1) > 0.9),
    "zoom": (zoomed, WINDOWS[:, 0]),
    "blur": (blurred, torch.tensor([0.0, 1.2])),
    "nearest": (voxels.nearest, (7 * drawn(2, 6, 6, 6)).long(), WINDOWS),
    "turn": (voxels.rotated, drawn(2, 1, 2, 5, 6), drawn(2, 2, 5, 6) > 0.5, TURN),
}


def flat(found: Any) -> list[Any]:
    if isinstance(found, dict | list | tuple):
        return [part for each in (found.values() if isinstance(found, dict) else found) for part in flat(each)]
    return [found]


@pytest.mark.parametrize("name", COMPUTED)
def test_nothing_lies_on_the_default_device(name: str):
    function, *inputs = COMPUTED[name]
    expected = flat(function(*inputs))
    torch.set_default_device("meta")
    try:
        found = flat(function(*inputs))
    finally:
        torch.set_default_device(None)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(other, Tensor) else one == other
