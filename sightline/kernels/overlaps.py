"""For each anchor the box that it overlaps most, and for each box the anchor: one operation of tasks/matching.py.

Plain torch compares each anchor with all 200 places for boxes of an image, because shapes are static. The kernels stop
at the last box: images of COCO have seven. Checked at the first call against plain torch.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from sightline import kernels
from sightline.boxes import iou
from sightline.kernels import self_check
from sightline.kernels.operation import operation, refuse_gradient

# Overlaps that lie in memory at once where no kernel or compiler keeps them out of it, by the kind of device: a CPU's
# caches hold 8 MB, and a GPU is slow in small pieces.
CELLS, CELLS_OF_GPU = 2**21, 2**27
HAS_TRITON = find_spec("triton") is not None


def applies(boxes: Tensor) -> bool:
    """Return whether the operation is used for these boxes."""
    return HAS_TRITON and kernels.are_allowed() and boxes.is_cuda and boxes.dtype == torch.float32


@operation("best_overlaps")
def best_overlaps(boxes: Tensor, used: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """Return the box of each anchor (batch, anchors) and the anchor of each box (batch, n); of equal ones the first.

    `boxes` (batch, n, 4) are zeros where there is none, `used` (batch,) counts the places up to the last box, and
    `corners` (anchors, 4) are the anchors.
    """
    if not self_check.passes("matching of boxes", boxes.device, lambda: why_wrong(boxes.device)):
        return plain(boxes, corners)
    from sightline.kernels import overlaps_triton

    return overlaps_triton.best_overlaps(boxes.contiguous(), used, corners.contiguous())


@torch.library.register_fake(best_overlaps)
def _(boxes: Tensor, used: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    batch, n = boxes.shape[:2]
    return used.new_empty((batch, len(corners)), dtype=torch.int64), used.new_empty((batch, n), dtype=torch.int64)


refuse_gradient(best_overlaps)


def plain(boxes: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same in plain torch.

    Two maxima over one table (batch, n, anchors) would make a compiler store it, 0.9 GB for 128 images of 200 places;
    each over a table of its own is one loop.
    """
    return _best(corners, boxes), _best(boxes, corners)


def _best(each: Tensor, among: Tensor) -> Tensor:
    """Return which box in `among` each overlaps most, row by row; without a compiler in pieces of rows, which are those
    of the whole to the bit."""
    batch = len(each if each.ndim == 3 else among)
    cells = CELLS if each.device.type == "cpu" else CELLS_OF_GPU
    rows = max(1, cells // max(1, batch * among.shape[-2]))
    if torch.compiler.is_compiling() or rows >= each.shape[-2]:
        return iou(each, among).argmax(2)
    return torch.cat([iou(part, among).argmax(2) for part in each.split(rows, dim=-2)], 1)


def why_wrong(device: torch.device) -> str:
    """Return what the kernels match otherwise than plain torch on the CPU; "" if nothing.

    Corners are multiples of 1/16, so that many overlaps are equal; some images have no box, some a place without one.
    """
    from sightline.kernels import overlaps_triton

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        low, high = torch.randint(0, 17, (2, *shape, 2), generator=generator).sort(dim=0).values
        return torch.cat([low, high], -1) / 16

    corners, boxes, used = drawn(1100), drawn(4, 9), torch.tensor([9, 0, 5, 1])
    boxes = torch.where(torch.arange(9)[None, :, None] < used[:, None, None], boxes, 0.0)
    boxes[0, 3] = 0.0
    found = overlaps_triton.best_overlaps(boxes.to(device), used.to(device), corners.to(device))
    for name, ours, theirs in zip(("box", "anchor"), found, plain(boxes, corners), strict=True):
        if apart := int((ours.cpu() != theirs).sum()):
            return f"the best {name} differs in {apart} of {theirs.numel()} places"
    return ""
