"""Tiles of one sample to look at beside each other: the image, its truth, what was predicted. For the report.

by_task.py draws the most wrong samples of an evaluation with it; numbers come from batches as the network saw them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from sightline.drawing.findings import draw_boxes
from sightline.drawing.slices import grey_tile, outline_colour
from sightline.parts import DataSpec, Finding

Drawing = dict[str, str]  # what a tile shows ("truth") -> base64 of a JPEG
IMAGE_SIDE = 200  # longer side in pixels, of an image alone
BOXES_SIDE = 320  # of one with boxes
LETTERS = 12  # pixels of the names of boxes
LABELLED = 12  # boxes of an image with their names, the largest or surest: names of more would hide it
SLICE_SIDE = 240
TINT = 0.3  # share of a class's colour inside of its edge
QUALITY = 80


def image_alone(pixels: np.ndarray, spec: DataSpec) -> Drawing:
    """Draw the network's input (3, height, width), normalised, as an image."""
    return {"image": as_jpeg(_fitted(_shown(pixels, spec), IMAGE_SIDE))}


def boxes_beside(
    pixels: np.ndarray, sides: tuple[int, int], truth: Sequence[Finding], found: Sequence[Finding], spec: DataSpec
) -> Drawing:
    """Draw boxes of the truth into one image and found ones into another; `sides` are height and width of the file,
    which the network sees as a square."""
    scale = BOXES_SIDE / max(sides)
    size = max(1, round(sides[1] * scale)), max(1, round(sides[0] * scale))
    image = _shown(pixels, spec).resize(size, Image.Resampling.BICUBIC)
    by_size = sorted(truth, key=_area, reverse=True)
    return {
        "truth": as_jpeg(draw_boxes(image.copy(), by_size, LETTERS, has_scores=False, labelled=LABELLED)),
        "prediction": as_jpeg(draw_boxes(image, found, LETTERS, labelled=LABELLED)),
    }


def picture(pixels: np.ndarray, spec: DataSpec) -> Image.Image:
    """Draw the network's input (channels, height, width), normalised; what has 16 bits in shades of grey, of which it
    may use a few only."""
    return grey_tile(pixels[0], SLICE_SIDE) if spec.bits > 8 else _fitted(_shown(pixels, spec), SLICE_SIDE)


def masks_beside(pixels: np.ndarray | Image.Image, truth: np.ndarray, found: np.ndarray) -> Drawing:
    """Draw a slice (height, width) or a picture, and the classes of its voxels in colours."""
    tile = grey_tile(pixels, SLICE_SIDE) if isinstance(pixels, np.ndarray) else pixels
    return {
        "image": as_jpeg(tile),
        "truth": as_jpeg(_coloured(tile, truth)),
        "prediction": as_jpeg(_coloured(tile, found)),
    }


def mask_colours(classes: Sequence[str]) -> dict[str, str]:
    """Return the colour of every class but the background, as a style sheet writes it."""
    return {name: "#{:02x}{:02x}{:02x}".format(*outline_colour(n)) for n, name in enumerate(classes) if n}


def as_jpeg(image: Image.Image) -> str:
    """Return the image as base64 of a JPEG, with full colour at every pixel: halved, thin lines blur."""
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=QUALITY, subsampling=0)
    return base64.b64encode(packed.getvalue()).decode()


def _coloured(tile: Image.Image, classes: np.ndarray) -> Image.Image:
    """Tint each class, and draw its edge two pixels wide. Smooth outlines as of `predict` cost more."""
    size = np.asarray(Image.fromarray(classes.astype(np.uint8)).resize(tile.size, Image.Resampling.NEAREST))
    colours = np.array([outline_colour(n) if n else (0, 0, 0) for n in range(int(size.max()) + 1)], np.float32)
    padded = np.pad(size, 2)
    shifted = (padded[2 + down : -2 + down or None, 2:-2] for down in (-2, 2))
    aside = (padded[2:-2, 2 + right : -2 + right or None] for right in (-2, 2))
    is_edge = np.any([size != other for other in (*shifted, *aside)], axis=0)
    share = np.where(size > 0, np.where(is_edge, 1.0, TINT), 0.0)[..., None]
    mixed = np.asarray(tile, np.float32) * (1 - share) + colours[size] * share
    return Image.fromarray(mixed.astype(np.uint8))


def _area(finding: Finding) -> float:
    left, top, right, bottom = finding.box or (0, 0, 0, 0)
    return (right - left) * (bottom - top)


def _shown(pixels: np.ndarray, spec: DataSpec) -> Image.Image:
    """Undo the normalisation of (channels, height, width); the first three channels, or the first alone."""
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (spec.mean, spec.std))
    values = np.nan_to_num((pixels * std + mean) * 255)
    values = values[:3] if len(values) >= 3 else values[:1].repeat(3, axis=0)
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def _fitted(image: Image.Image, side: int) -> Image.Image:
    """Return an image of this longer side; small ones are enlarged so that their pixels show."""
    scale = side / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC)
