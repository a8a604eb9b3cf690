"""What the TensorFlow originals do their own way: the training crop, the evaluation size, the resize, the mean colour.

Called by classification.py where `crop` is tf or `interpolation` is legacy, and by detection.py where `resize` is tf;
checked against TensorFlow itself.
"""

import math

import numpy as np
import torch

# Their networks see the picture in 0..255 less this colour, undivided. `mean` and `std` are of values in 0..1.
TF_MEAN = (123.68 / 255, 116.78 / 255, 103.94 / 255)
TF_STD = (1 / 255, 1 / 255, 1 / 255)
_TRIES = 100
COVERED_ONE_IN = 10  # min_object_covered 0.1, where the only object is the whole picture


def draw_box(
    random: np.random.Generator, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """sample_distorted_bounding_box's (top, left, height, width): uniform ratio, then uniform height.

    So large crops are rarer than with a uniform area. Its last row and column are never reached by a smaller crop.
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
    """Height and width of a crop with this ratio, or None where the picture has room for none."""
    least, most = (share * height * width for share in scale)
    tallest = round(math.sqrt(most / ratio))
    if round(tallest * ratio) > width:
        tallest = int((width + 0.5) / ratio)
        tallest -= round(tallest * ratio) > width
    tallest = min(tallest, height)
    shortest = min(round(math.sqrt(least / ratio)), tallest)
    drawn = int(random.integers(shortest, tallest + 1))
    # Rounding may put the area just outside its limits; one row more or less may mend that.
    if drawn * round(drawn * ratio) < least:
        drawn += 1
    if drawn * round(drawn * ratio) > most:
        drawn -= 1
    across = round(drawn * ratio)
    fits = 0 < drawn <= height and 0 < across <= width
    return (drawn, across) if fits and least <= drawn * across <= most else None


def resized_sides(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Both sides times one factor, cut to whole pixels.

    In 32 bits as there: for one short side in eight the product falls below `short_side` and one pixel is lost.
    """
    factor = np.float32(short_side) / np.float32(min(height, width))
    return max(1, int(np.float32(height) * factor)), max(1, int(np.float32(width) * factor))


def resize_legacy(
    box: np.ndarray, resized: tuple[int, int], corner: tuple[int, int], size: int, flip: bool
) -> np.ndarray:
    """The square of `size` at `corner` of the box resized as TensorFlow 1 did: (size, size, 3) uint8.

    Bilinear between the two nearest pixels however much smaller the result (no antialiasing), pixel i at
    i * length / resized (no half-pixel centres). Black where the resized box does not reach.
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
    """tf.image.crop_and_resize of one box (top, left, bottom, right in 0..1): (size, size, 3) uint8, rounded once.

    The outermost pixels of the result lie on the edges of the box, those of the picture on 0 and 1. `height` is the
    picture's, of which rows below the box may be missing in `pixels`.
    """
    rows = _corner_aligned(box[0], box[2], height, size)
    columns = _corner_aligned(box[1], box[3], pixels.shape[1], size)
    return _between_pixels(pixels, rows, columns[::-1] if flip else columns)


def _corner_aligned(low: float, high: float, length: int, size: int) -> np.ndarray:
    """Where the pixels of the result lie along one axis; in 32 bits, as there."""
    start, stop, last = np.float32(low), np.float32(high), np.float32(length - 1)
    if size == 1:
        return np.asarray([np.float32(0.5) * (start + stop) * last], np.float32)
    at = start * last + np.arange(size, dtype=np.float32) * ((stop - start) * last / np.float32(size - 1))
    return np.clip(at, 0, last)


def _between_pixels(pixels: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Bilinear values at these places: (rows, columns, 3) uint8; beyond the last pixel there is that pixel."""
    above, below, down = _neighbours(rows, len(pixels))
    left, right, across = _neighbours(columns, pixels.shape[1])
    # Rows of whole pixels are gathered first, because that is copying memory; columns then as single numbers.
    upper, lower = (torch.from_numpy(pixels[chosen].reshape(len(chosen), -1)).float() for chosen in (above, below))
    lines = upper.lerp_(lower, torch.from_numpy(down)[:, None])  # (rows, 3 * width)
    first, second = (
        lines.index_select(1, torch.from_numpy((chosen[:, None] * 3 + np.arange(3)).ravel()))
        for chosen in (left, right)
    )
    values = first.lerp_(second, torch.from_numpy(across.repeat(3)))
    # By way of int16, because from float to uint8 torch is four times as slow.
    return values.round_().to(torch.int16).to(torch.uint8).numpy().reshape(len(rows), len(columns), 3)


def _neighbours(at: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two pixels around each place along an axis, and the share of the second."""
    first = np.minimum(at.astype(np.int64), length - 1)
    return first, np.minimum(first + 1, length - 1), at - first.astype(np.float32)
