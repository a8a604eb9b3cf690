"""Operations as in the TensorFlow originals: the training crop, the evaluation size, the resize, the mean colour.

Used by classification.py if `crop` is tf or `interpolation` is legacy, and by detection.py if `resize` is tf; tests
compare them with TensorFlow itself.
"""

import math

import numpy as np
import torch

from sightline.data.augment.fields import COVERED_ONE_IN
from sightline.data.augment.fields import TF_MEAN as TF_MEAN
from sightline.data.augment.fields import TF_STD as TF_STD

_TRIES = 100


def draw_box(
    random: np.random.Generator, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Draw sample_distorted_bounding_box's (top, left, height, width): uniform ratio, then uniform height.

    Large crops are rarer than with a uniform area. A crop smaller than the image never reaches its last row or column.
    """
    for _ in range(_TRIES):
        wanted = random.uniform(*ratio)
        box = _draw_size(random, height, width, scale, wanted)
        if box is None or box[0] * box[1] * COVERED_ONE_IN < height * width:
            continue
        top = int(random.integers(height - box[0])) if box[0] < height else 0
        left = int(random.integers(width - box[1])) if box[1] < width else 0
        return top, left, *box
    return 0, 0, height, width


def _draw_size(
    random: np.random.Generator, height: int, width: int, scale: tuple[float, float], ratio: float
) -> tuple[int, int] | None:
    """Draw the height and width of a crop with this ratio; None if none fits."""
    least, most = (share * height * width for share in scale)
    tallest = round(math.sqrt(most / ratio))
    if round(tallest * ratio) > width:
        tallest = int((width + 0.5) / ratio)
        tallest -= round(tallest * ratio) > width
    tallest = min(tallest, height)
    shortest = min(round(math.sqrt(least / ratio)), tallest)
    drawn = int(random.integers(shortest, tallest + 1))
    # Rounding may put the area just outside its limits; one row more or less may fix that.
    if drawn * round(drawn * ratio) < least:
        drawn += 1
    if drawn * round(drawn * ratio) > most:
        drawn -= 1
    across = round(drawn * ratio)
    fits = 0 < drawn <= height and 0 < across <= width
    return (drawn, across) if fits and least <= drawn * across <= most else None


def resized_sides(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Scale both sides by one factor and truncate to whole pixels.

    In 32 bits, as in TensorFlow: for one short side in eight the product falls below `short_side` and loses a pixel.
    """
    factor = np.float32(short_side) / np.float32(min(height, width))
    return max(1, int(np.float32(height) * factor)), max(1, int(np.float32(width) * factor))


def resize_legacy(
    box: np.ndarray, resized: tuple[int, int], corner: tuple[int, int], size: int, flip: bool
) -> np.ndarray:
    """Resize a box as TensorFlow 1 did and return its square of `size` at `corner`: (size, size, 3) uint8.

    Bilinear between the two nearest pixels, however small the result (no antialiasing); pixel i is at
    i * length / resized (no half-pixel centres). Black beyond the resized box.
    """
    from_row, to_row = max(corner[0], 0), min(corner[0] + size, resized[0])
    from_column, to_column = max(corner[1], 0), min(corner[1] + size, resized[1])
    rows = np.arange(from_row, to_row, dtype=np.float32) * (np.float32(len(box)) / np.float32(resized[0]))
    columns = np.arange(from_column, to_column, dtype=np.float32) * (np.float32(box.shape[1]) / np.float32(resized[1]))
    shown = _between_pixels(box, rows, columns[::-1] if flip else columns)
    if shown.shape == (size, size, 3):
        return shown
    framed = np.zeros((size, size, 3), np.uint8)
    before_row = from_row - corner[0]
    before_column = size - (to_column - corner[1]) if flip else from_column - corner[1]
    framed[before_row : before_row + len(rows), before_column : before_column + len(columns)] = shown
    return framed


def crop_and_resize(
    pixels: np.ndarray, box: tuple[float, float, float, float], height: int, size: int, flip: bool
) -> np.ndarray:
    """Apply tf.image.crop_and_resize to a box (top, left, bottom, right in 0..1): (size, size, 3) uint8, rounded once.

    The outermost pixels of the result lie on the edges of the box, those of the image on 0 and 1. `height` is the
    image's; rows below the box may be missing in `pixels`.
    """
    return _between_pixels(pixels, *crop_grid(box, height, pixels.shape[1], size, flip))


def crop_grid(
    box: tuple[float, float, float, float], height: int, width: int, size: int, flip: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return where the rows and columns of `crop_and_resize` lie in an image of this size."""
    columns = _corner_aligned(box[1], box[3], width, size)
    return _corner_aligned(box[0], box[2], height, size), columns[::-1] if flip else columns


def legacy_grid(height: int, width: int, size: int, flip: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return where the rows and columns of `resize_legacy` lie if it makes a square of a whole image."""
    shown = np.arange(size, dtype=np.float32)
    columns = shown * (np.float32(width) / np.float32(size))
    return shown * (np.float32(height) / np.float32(size)), columns[::-1] if flip else columns


def _corner_aligned(low: float, high: float, length: int, size: int) -> np.ndarray:
    """Return the positions of the result's pixels along one axis; in 32 bits, as in TensorFlow."""
    start, stop, last = np.float32(low), np.float32(high), np.float32(length - 1)
    if size == 1:
        return np.asarray([np.float32(0.5) * (start + stop) * last], np.float32)
    at = start * last + np.arange(size, dtype=np.float32) * ((stop - start) * last / np.float32(size - 1))
    return np.clip(at, 0, last)


def _between_pixels(pixels: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Interpolate at these positions: (rows, columns, 3) uint8; the last pixel is repeated beyond the edge."""
    above, below, down = _neighbours(rows, len(pixels))
    left, right, across = _neighbours(columns, pixels.shape[1])
    # Gather rows first, because whole rows are plain copies of memory; then columns as single numbers.
    upper, lower = (torch.from_numpy(pixels[chosen].reshape(len(chosen), -1)).float() for chosen in (above, below))
    lines = upper.lerp_(lower, torch.from_numpy(down)[:, None])  # (rows, 3 * width)
    first, second = (
        lines.index_select(1, torch.from_numpy((chosen[:, None] * 3 + np.arange(3)).ravel()))
        for chosen in (left, right)
    )
    values = first.lerp_(second, torch.from_numpy(across.repeat(3)))
    # Via int16, because torch is four times as slow from float to uint8.
    return values.round_().to(torch.int16).to(torch.uint8).numpy().reshape(len(rows), len(columns), 3)


def _neighbours(at: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two pixels around each position along an axis, and the share of the second."""
    first = np.minimum(at.astype(np.int64), length - 1)
    return first, np.minimum(first + 1, length - 1), at - first.astype(np.float32)
