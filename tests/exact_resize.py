"""Cut, resize, window and flip in float64 NumPy, and images to try it with; the kernel and its tests share no code."""

import dataclasses

import numpy as np
import torch

from sightline.data.augment import batched, tensorflow
from sightline.data.augment.classification import Augmentation

KINDS = ("bilinear", "bicubic", "legacy")


def exact(image: np.ndarray, row: np.ndarray, size: int, kind: str) -> np.ndarray:
    """(size, size, 3) float64, not rounded. Columns first; bicubic may leave the range of a byte, so it is clipped."""
    top, left, height, width, resized_height, resized_width, window_top, window_left, flip = map(int, row)
    box = image[top : top + height, left : left + width].astype(np.float64)
    down = _weights(height, resized_height, np.arange(size) + window_top, kind)
    columns = np.arange(size)[::-1] if flip else np.arange(size)
    across = _weights(width, resized_width, columns + window_left, kind)
    lines = np.clip(np.einsum("hwc,xw->hxc", box, across, optimize=True), 0, 255)
    return np.clip(np.einsum("yh,hxc->yxc", down, lines, optimize=True), 0, 255)


def _weights(length: int, resized: int, at: np.ndarray, kind: str) -> np.ndarray:
    scale, source = length / resized, np.arange(length)
    if kind == "legacy":
        weights = np.clip(1 - np.abs(source - np.minimum(at * scale, length - 1)[:, None]), 0, None)
    else:
        x = np.abs(source + 0.5 - ((at + 0.5) * scale)[:, None]) / max(scale, 1)
        cubic = np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, np.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0))
        weights = cubic if kind == "bicubic" else np.clip(1 - x, 0, None)
    weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-12)
    return weights * ((at >= 0) & (at < resized))[:, None]


def worst_difference(kind: str, size: int, sides: tuple[int, int], count: int, device: str = "cpu") -> float:
    """The largest difference of the kernel's values, of random crops and of windows with a border, to the exact ones.

    The images are noise; every third lies in planes, as torchvision's decoder leaves them.
    """
    rng = np.random.default_rng(count)
    augment = Augmentation(size=size, eval_resize=size * 3 // 4, eval_size=size, interpolation=kind)
    images = [rng.integers(0, 256, (*rng.integers(*sides, 2), 3), dtype=np.uint8) for _ in range(count)]
    params = [augment.draw(5, 0, number, *image.shape[:2]) for number, image in enumerate(images)]
    params[:2] = [augment.evaluation_params(*image.shape[:2]) for image in images[:2]]
    params[2] = dataclasses.replace(params[2], flip=True)
    rows = np.stack([batched.as_row(each) for each in params])
    expected = np.stack([exact(image, row, size, kind) for image, row in zip(images, rows, strict=True)])
    return float(np.abs(_resized(images, rows, size, kind, device) - expected).max())


def worst_of_grids(size: int, sides: tuple[int, int], count: int, device: str = "cpu") -> float:
    """The same for places between pixels: TensorFlow's crops, from right to left, and its resize of whole images."""
    rng = np.random.default_rng(count)
    images = [rng.integers(0, 256, (*rng.integers(*sides, 2), 3), dtype=np.uint8) for _ in range(count)]
    grids = []
    for number, image in enumerate(images):
        height, width = image.shape[:2]
        low, high = np.sort(rng.random((2, 2)), 0)
        crop = (low[0], low[1], high[0], high[1])
        grid = tensorflow.crop_grid(crop, height, width, size, True) if number else None
        grids.append(grid or tensorflow.legacy_grid(height, width, size, False))
    rows = np.stack([batched.grid_row(*image.shape[:2], *grid) for image, grid in zip(images, grids, strict=True)])
    expected = np.stack([exact_between(image, *grid) for image, grid in zip(images, grids, strict=True)])
    return float(np.abs(_resized(images, rows, size, batched.GRID, device) - expected).max())


def exact_between(image: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """(rows, columns, 3) float64, not rounded: each value between the four pixels around it."""
    down, across = (
        np.clip(1 - np.abs(np.arange(length) - np.minimum(at.astype(np.float64), length - 1)[:, None]), 0, None)
        for at, length in ((rows, len(image)), (columns, image.shape[1]))
    )
    return np.einsum("yh,hwc,xw->yxc", down, image.astype(np.float64), across, optimize=True)


def _resized(images: list[np.ndarray], rows: np.ndarray, size: int, kind: str, device: str) -> np.ndarray:
    from sightline.kernels import resize_triton  # needs Triton

    count, places, parts, offset = len(images), [], [], 0
    for number, image in enumerate(images):
        height, width = image.shape[:2]
        strides = (width, 1, height * width) if number % 3 == 2 else (3 * width, 3, 1)
        places.append((offset, *strides, count - 1 - number))
        parts.append((image.transpose(2, 0, 1) if number % 3 == 2 else image).ravel())
        offset += image.size
    out = torch.full((count, size, size, 3), 77, dtype=torch.uint8, device=device)
    given = (np.concatenate(parts), np.asarray(places), rows)
    resize_triton.resize(*(torch.from_numpy(each).to(device) for each in given), out, kind)
    return out.flip(0).cpu().numpy()
