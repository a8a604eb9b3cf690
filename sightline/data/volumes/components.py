"""Connected components of masks: a class keeps its largest one, as nnU-Net cleans its predictions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def keep_largest(mask: np.ndarray, numbers: Iterable[int]) -> np.ndarray:
    """Return the mask in which each of these classes has only its largest component, all of them if several are equally
    large; the rest is background. Voxels belong together where their faces touch.
    """
    from scipy import ndimage  # half a second that runs without volumes need not wait for

    kept = mask.copy()
    for number in numbers:
        parts, count = ndimage.label(mask == number)
        if count > 1:
            sizes = np.bincount(parts.reshape(-1))
            sizes[0] = sizes[1:].max()  # what is not of this class stays
            kept[sizes[parts] < sizes[0]] = 0
    return kept
