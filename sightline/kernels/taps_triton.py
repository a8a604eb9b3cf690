"""Triton kernel of taps.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VOXELS = 1024  # of a program


def sum_taps(image: Tensor, places: Tensor, weights: Tensor, axis: int) -> Tensor:
    """Return what taps.sum_taps does; all tensors are contiguous."""
    out = torch.empty(image.shape, dtype=torch.float32, device=image.device)
    samples, voxels = len(image), image[0].numel()
    inner = image.stride(axis)  # voxels from one place of the axis to the next
    grid = (triton.cdiv(voxels, VOXELS), samples)  # the second axis is limited to 65,535
    with torch.cuda.device_of(image):
        sum_taps_of_voxels[grid](
            image, places, weights, out, voxels, image.shape[axis], inner, TAPS=places.shape[1], VOXELS=VOXELS
        )
    return out


@triton.jit
def sum_taps_of_voxels(  # type: ignore[no-untyped-def]
    image, places, weights, out, voxels, n, inner, TAPS: tl.constexpr, VOXELS: tl.constexpr
):
    """Make VOXELS outputs of one sample, each from TAPS inputs that differ in their place on the axis alone."""
    sample = tl.program_id(1).to(tl.int64)
    voxel = tl.program_id(0) * VOXELS + tl.arange(0, VOXELS)
    inside = voxel < voxels
    at = voxel // inner % n
    line = image + sample * voxels + (voxel - at * inner)  # the start of the axis through this voxel
    entry = sample * TAPS * n + at
    total = tl.zeros((VOXELS,), tl.float32)
    for tap in tl.static_range(TAPS):
        place = tl.load(places + entry + tap * n, mask=inside, other=0)
        weight = tl.load(weights + entry + tap * n, mask=inside, other=0.0)
        total += weight * tl.load(line + place * inner, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + sample * voxels + voxel, total, mask=inside)
