"""Kernels that sum taps of crops and match boxes, on CUDA and fresh random numbers: against float64 and plain torch."""

import pytest
import torch

from sightline import kernels
from sightline.kernels import overlaps, taps
from sightline.tasks.matching import match

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("fresh_cuda")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("shape", "axis"), [((8, 4, 1, 192, 160), 3), ((8, 4, 1, 192, 160), 4), ((2, 1, 50, 30, 7), 2)]
)
def test_taps_are_summed_as_in_float64(shape, axis, dtype):
    image, n = torch.randn(shape, device="cuda").to(dtype), shape[axis]
    places = torch.randint(n, (shape[0], 11, n), device="cuda", dtype=torch.int32)
    weights = torch.randn(shape[0], 11, n, device="cuda")
    assert taps.applies(image)
    found, expected = (
        taps.sum_taps(image, places, weights, axis),
        taps.plain(image.double(), places, weights.double(), axis),
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)


def test_equal_overlaps_are_matched_as_by_plain_torch():
    """To the bit, at the size of an SSD's step; corners are multiples of 1/64, so that many overlaps are equal."""
    low, high = torch.randint(0, 65, (2, 32, 200, 2), device="cuda").sort(dim=0).values
    boxes, labels, anchors = (
        torch.cat([low, high], -1) / 64,
        drawn_labels(),
        torch.randint(1, 64, (8732, 4)).cuda() / 64,
    )
    assert overlaps.applies(boxes)
    found = match(boxes, labels, anchors)
    kernels.use("off")
    assert all(torch.equal(*pair) for pair in zip(found, match(boxes, labels, anchors), strict=True))


def test_a_compiled_step_matches_the_same_anchors():
    """Except where rounding decides whether an overlap is enough: the compiler divides less exactly."""
    boxes, labels = torch.rand(32, 200, 4, device="cuda").sort(dim=2).values, drawn_labels()
    anchors = torch.rand(8732, 4, device="cuda")
    found = torch.compile(match, fullgraph=True, dynamic=False)(boxes, labels, anchors)[0]
    kernels.use("off")
    torch._dynamo.reset()
    expected = match(boxes, labels, anchors)[0]
    assert int((expected > 0).sum()) > 1000 and int((found != expected).sum()) <= 3


def drawn_labels() -> torch.Tensor:
    """Return classes of 32 images with up to 200 places; some of them are empty, the last ones always."""
    used = torch.randint(0, 201, (32, 1), device="cuda")
    return torch.randint(0, 81, (32, 200), device="cuda") * (torch.arange(200, device="cuda") < used)
