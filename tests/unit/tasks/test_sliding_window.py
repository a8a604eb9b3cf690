"""Windows over images and volumes of any size: equal to MONAI's, and what a batch of windows may not change."""

import math

import pytest
import torch
from torch import Tensor, nn

from sightline.tasks.sliding_window import sliding_window, sliding_windows, windows

CASES = [  # size, window
    ((33, 29), (16, 12)),
    ((32, 24), (16, 12)),  # divides evenly
    ((16, 30), (16, 12)),  # one axis is the window
    ((16, 12), (16, 12)),
    ((9, 31), (16, 12)),  # one axis is smaller, by an odd number
    ((5, 7), (16, 12)),
    ((19, 21, 14), (8, 10, 6)),
    ((5, 21, 7), (8, 10, 6)),
]


def network(axes: int) -> nn.Module:
    """A network that sees the edge of its window, so that the place of a window matters."""
    torch.manual_seed(axes)
    convolution = {2: nn.Conv2d, 3: nn.Conv3d}[axes]
    return nn.Sequential(convolution(2, 4, 3, padding=1), nn.Tanh(), convolution(4, 3, 3, padding=1))


def image(*size: int) -> Tensor:
    return torch.randn(2, *size, generator=torch.Generator().manual_seed(1))


class Counting:
    """The network that answers its input, and how much it was given."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, window: Tensor) -> Tensor:
        self.batches.append(len(window))
        return window


@pytest.mark.parametrize("blend", ["gaussian", "constant"])
@pytest.mark.parametrize(("size", "roi"), CASES)
def test_equals_monai(size: tuple[int, ...], roi: tuple[int, ...], blend: str):
    from monai.inferers import sliding_window_inference

    model, volume = network(len(size)), image(*size)
    for overlap in (0.5, 0.3):
        found = sliding_window(model, volume, roi, overlap, blend, 3)
        with torch.no_grad():
            expected = sliding_window_inference(volume[None], roi, 3, model, overlap, blend, sigma_scale=0.125)[0]
        assert found.shape == (3, *size) and found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("blend", ["gaussian", "constant"])
@pytest.mark.parametrize(("size", "roi"), CASES)
def test_identity_comes_back_from_as_many_windows_as_the_formula_says(size, roi, blend: str):
    volume, counting = image(*size), Counting()
    found = sliding_window(counting, volume, roi, 0.5, blend, 4)
    torch.testing.assert_close(found, volume, rtol=0, atol=1e-5)
    steps = [int(n * 0.5) for n in roi]
    expected = math.prod(math.ceil((max(n, w) - w) / step) + 1 for n, w, step in zip(size, roi, steps, strict=True))
    assert sum(counting.batches) == expected
    assert counting.batches == [4] * (expected // 4) + [expected % 4] * (expected % 4 > 0)


def test_windows_lie_inside_and_the_last_ends_at_the_edge():
    found = windows((10, 7), (4, 7), 0.5)
    assert [(rows.start, rows.stop) for rows, _ in found] == [(0, 4), (2, 6), (4, 8), (6, 10)]
    assert {(columns.start, columns.stop) for _, columns in found} == {(0, 7)}
    assert [rows.start for rows, _ in windows((11, 7), (4, 7), 0.5)] == [0, 2, 4, 6, 7]
    assert len(windows((6,), (2,), 0.9)) == 5  # a window moves by one voxel at least


@pytest.mark.parametrize("depth", [1, 5, 11])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_network_for_slices_sees_a_volume_slice_by_slice(depth: int, batch: int):
    model, volume = network(2), image(depth, 21, 10)
    found = sliding_window(model, volume, (16, 12), 0.5, "gaussian", batch)
    each = [sliding_window(model, volume[:, z], (16, 12), 0.5, "gaussian", 1) for z in range(depth)]
    torch.testing.assert_close(found, torch.stack(each, dim=1), rtol=0, atol=1e-6)


def test_windows_of_all_slices_fill_the_batches_together():
    counting = Counting()
    volume = image(5, 21, 12)  # two windows in each of five slices
    found = sliding_window(counting, volume, (16, 12), 0.5, "gaussian", 4)
    assert counting.batches == [4, 4, 2]
    torch.testing.assert_close(found, volume, rtol=0, atol=1e-5)


def test_half_precision_answers_are_added_in_full():
    volume = image(33, 29)
    found = sliding_window(lambda x: x.bfloat16(), volume, (16, 12), 0.5, "gaussian", 3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, volume.bfloat16().float(), rtol=0, atol=1e-5)


def test_what_is_kept_from_inference_serves_training_too():
    model, volume = network(2), image(33, 29)
    with torch.inference_mode():
        first = sliding_window(model, volume, (14, 11), 0.5, "gaussian", 3).clone()
    again = sliding_window(model, volume.clone().requires_grad_(), (14, 11), 0.5, "gaussian", 3)
    assert torch.equal(first, again) and not again.requires_grad


def test_window_of_other_axes_is_refused():
    with pytest.raises(ValueError, match=r"\(4, 4, 4\) do not fit a volume of shape \(2, 9, 9\)"):
        sliding_window(network(3), image(9, 9), (4, 4, 4), 0.5, "gaussian", 1)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 4, 7, 1000])
@pytest.mark.parametrize("roi", [(16, 12), (4, 16, 12)])
def test_volumes_of_any_sizes_share_batches(roi: tuple[int, ...], batch: int):
    """Each gets the scores that it has alone; the network is called as seldom as can be."""
    sizes = [(5, 20, 30), (1, 16, 12), (9, 7, 13), (2, 31, 12)]
    volumes = [image(*size) for size in sizes]
    model, calls = network(len(roi)), []

    def counting(windows_: torch.Tensor) -> torch.Tensor:
        calls.append(len(windows_))
        return model(windows_)

    found = sliding_windows(counting, volumes, roi, 0.5, "gaussian", batch)
    assert all(size == batch for size in calls[:-1]) and 0 < calls[-1] <= batch
    for volume, scores in zip(volumes, found, strict=True):
        alone = sliding_window(model, volume, roi, 0.5, "gaussian", 1)
        torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)
