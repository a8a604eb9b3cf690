"""The Triton kernel that sums taps, as Triton's interpreter runs it on the CPU, against float64.

test_instance_norm.py runs this file in a process of its own: the interpreter must be chosen before Triton is imported.
"""

import pytest
import torch

from sightline.kernels import taps, taps_triton


def test_the_check_of_every_run_passes():
    assert taps.why_wrong(torch.device("cpu")) == ""


@pytest.mark.parametrize("axis", [2, 3, 4])
def test_half_precision_is_summed_in_fp32(axis):
    """Along axes of one voxel and of more than a program's, with several programs for each sample."""
    image = torch.randn(2, 2, 1, 3, 1100).half()
    n = image.shape[axis]
    places, weights = torch.randint(n, (2, 3, n), dtype=torch.int32), torch.randn(2, 3, n)
    found = taps_triton.sum_taps(image, places, weights, axis)
    expected = taps.plain(image.double(), places, weights.double(), axis)
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)


def test_the_check_sees_a_wrong_place(monkeypatch):
    right = taps_triton.sum_taps
    monkeypatch.setattr(taps_triton, "sum_taps", lambda image, places, *rest: right(image, places.clamp(min=1), *rest))
    assert taps.why_wrong(torch.device("cpu")).startswith("the sum along axis 2 has a relative error")
