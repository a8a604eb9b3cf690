"""Weighted sums of a few values along an axis, as one operation: crops that are resized or blurred on a GPU.

Called by data/augment/voxels.py. A compiler would compute places and weights again for every voxel, and split a sum of
eleven values into several passes. Checked at the first call against plain torch.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from sightline import kernels
from sightline.kernels import self_check
from sightline.kernels.operation import operation, refuse_gradient

HAS_TRITON = find_spec("triton") is not None
MOST_VOXELS = 1 << 31  # of a sample: the kernel counts them in 32 bits
LARGEST_ERROR = 1e-6


def applies(image: Tensor) -> bool:
    """Return whether the operation is used for this batch."""
    return HAS_TRITON and kernels.are_allowed() and image.is_cuda and image[0].numel() < MOST_VOXELS


@operation("sum_taps")
def sum_taps(image: Tensor, places: Tensor, weights: Tensor, axis: int) -> Tensor:
    """Return (batch, ...) fp32: along `axis`, output i is the sum of weights[:, :, i] times image at places[:, :, i].

    places (int32) and weights (fp32) are (batch, taps, n), where n is the length of the axis.
    """
    if not self_check.passes("resizing of crops", image.device, lambda: why_wrong(image.device)):
        return plain(image, places, weights, axis)
    from sightline.kernels import taps_triton

    return taps_triton.sum_taps(image.contiguous(), places.contiguous(), weights.contiguous(), axis)


@torch.library.register_fake(sum_taps)
def _(image: Tensor, places: Tensor, weights: Tensor, axis: int) -> Tensor:
    return image.new_empty(image.shape, dtype=torch.float32)


refuse_gradient(sum_taps)


def plain(image: Tensor, places: Tensor, weights: Tensor, axis: int) -> Tensor:
    """Compute the same in plain torch."""
    shape = [len(image) if at == 0 else -1 if at == axis else 1 for at in range(image.ndim)]
    total = torch.zeros((), device=image.device)
    for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        total = total + weight.reshape(shape) * image.gather(axis, place.long().reshape(shape).expand_as(image))
    return total.contiguous()


def why_wrong(device: torch.device) -> str:
    """Return along which axis the kernel deviates from plain torch in float64 on random numbers; "" if none does."""
    from sightline.kernels import taps_triton

    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 7, 37, 21, generator=generator)
    for axis in (2, 3, 4):
        n = image.shape[axis]
        places = torch.randint(n, (2, 5, n), generator=generator, dtype=torch.int32)
        weights = torch.randn(2, 5, n, generator=generator)
        expected = plain(image.double(), places, weights.double(), axis)
        with self_check.poisoned_memory():
            found = taps_triton.sum_taps(image.to(device), places.to(device), weights.to(device), axis)
        error = self_check.relative_error(found.cpu().double(), expected)
        if wrong := self_check.why_wrong([(f"the sum along axis {axis}", error, LARGEST_ERROR)]):
            return wrong
    return ""
