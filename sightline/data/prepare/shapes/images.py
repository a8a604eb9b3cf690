"""The images of `prepare shapes`: one textured, lit, partly hidden shape (classification) or several (detection).

Each aspect of an image draws from its own generator, named by (seed, split, image, aspect).
"""

import colorsys
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from sightline.data.draws import generator
from sightline.data.prepare.shapes import outlines
from sightline.data.prepare.shapes.outlines import Outline, Patch

CLASSIFICATION_SIZE = 64  # px
# The gaps are on purpose: like COCO's 1..90 for 80 classes, they catch readers that take an id for an index.
CATEGORY_IDS = dict(zip(outlines.OUTLINES, (1, 2, 4, 7, 13, 16, 25, 46, 70, 90), strict=True))
_EMPTY_EVERY = 16  # every 16th detection image shows no object
_HIDDEN_AT_MOST = 0.25  # of an object, by a strip across the image
_VISIBLE_AT_LEAST = 0.6  # of an object, under the objects drawn after it

Colour = np.ndarray  # (3,) float32, 0..1
Pattern = tuple[Colour, Colour]


@dataclass(frozen=True)
class DrawnObject:
    """One object as its annotation needs it; the outline is cut at the image's borders."""

    name: str
    outline: Outline


def classification_image(seed: int, split: str, name: str, index: int) -> np.ndarray:
    """Return an image of one shape, (64, 64, 3) uint8."""

    def rng(aspect: str) -> np.random.Generator:
        return generator(seed, 0, index, f"shapes classification {split} {name} {aspect}")

    size = CLASSIFICATION_SIZE
    canvas, pattern = _background(rng("background"), size, size)
    place = rng("place")
    outline = outlines.pose(place, name, radius=place.uniform(0.28, 0.46) * size)
    left, top, right, bottom = outlines.extent(outline)
    # Up to a tenth of the box may leave the image: what shows is enough to name the shape.
    spare_x, spare_y = 0.1 * (right - left), 0.1 * (bottom - top)
    x = place.uniform(-left - spare_x, max(size - right + spare_x, -left))
    y = place.uniform(-top - spare_y, max(size - bottom + spare_y, -top))
    patch = outlines.rasterise(outlines.moved(outline, x, y), size, size)
    _paint(canvas, patch, pattern, rng("paint"))
    hide = rng("strip")
    if hide.random() < 0.35:
        _paint_strip(canvas, [patch], hide)
    return _photograph(canvas, rng("camera"))


def detection_image(seed: int, split: str, index: int) -> tuple[np.ndarray, list[DrawnObject]]:
    """Return an image of none to six shapes, (height, width, 3) uint8, and the shapes in drawing order."""

    def rng(aspect: str) -> np.random.Generator:
        return generator(seed, 0, index, f"shapes detection {split} {aspect}")

    place = rng("place")
    height, width = int(place.integers(112, 145)), int(place.integers(144, 193))
    if place.random() < 0.2:
        height, width = width, height
    canvas, pattern = _background(rng("background"), height, width)
    wanted = 0 if index % _EMPTY_EVERY == _EMPTY_EVERY // 2 else int(place.integers(1, 7))
    drawn: list[DrawnObject] = []
    patches: list[Patch] = []
    for number in range(wanted):
        found = _find_place(place, height, width, patches)
        if found is None:
            continue
        name, outline, patch = found
        patches.append(patch)
        _paint(canvas, patch, pattern, rng(f"paint {number}"))
        drawn.append(DrawnObject(name, outlines.clipped(outline, height, width)))
    hide = rng("strip")
    if hide.random() < 0.3:
        _paint_strip(canvas, patches, hide)
    return _photograph(canvas, rng("camera")), drawn


def annotation(drawn: DrawnObject, annotation_id: int, image_id: int) -> dict[str, Any]:
    """Return the COCO record of an object: box, area and polygon of its whole outline inside the image.

    Parts hidden behind other objects count, parts outside the image do not, so a box never changes with its
    neighbours. A ring's hole is cut out of polygon and area.
    """
    points = np.round(outlines.polygon(drawn.outline), 2)
    (left, top), (right, bottom) = points.min(axis=0), points.max(axis=0)
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": CATEGORY_IDS[drawn.name],
        "bbox": [round(float(v), 2) for v in (left, top, right - left, bottom - top)],
        "area": round(outlines.area(points), 2),
        "iscrowd": 0,
        "segmentation": [[round(float(v), 2) for v in points.ravel()]],
    }


def _find_place(
    rng: np.random.Generator, height: int, width: int, earlier: list[Patch]
) -> tuple[str, Outline, Patch] | None:
    """Return a shape where it stays recognisable and leaves the earlier ones so; None when the image is too full."""
    name = str(rng.choice(list(outlines.OUTLINES)))
    for _ in range(8):
        radius = math.exp(rng.uniform(math.log(9), math.log(34)))
        outline = outlines.moved(outlines.pose(rng, name, radius), rng.uniform(0, width), rng.uniform(0, height))
        left, top, right, bottom = outlines.extent(outline)
        inside_x, inside_y = min(right, width) - max(left, 0), min(bottom, height) - max(top, 0)
        if inside_x < 0.8 * (right - left) or inside_y < 0.8 * (bottom - top):
            continue
        patch = outlines.rasterise(outline, height, width)
        if _all_stay_visible([*earlier, patch], height, width):
            return name, outline, patch
    return None


def _all_stay_visible(patches: list[Patch], height: int, width: int) -> bool:
    """Return whether enough of every object shows when they are painted in this order."""
    clear = np.ones((height, width), np.float32)  # 1 where nothing painted later covers a pixel
    for patch in reversed(patches):
        seen = float((patch.coverage * clear[patch.window]).sum())
        if seen < _VISIBLE_AT_LEAST * float(patch.coverage.sum()):
            return False
        clear[patch.window] *= 1 - patch.coverage
    return True


def smooth_noise(rng: np.random.Generator, shape: tuple[int, ...], cells: tuple[float, ...]) -> np.ndarray:
    """Return random values in -1..1 on a coarse grid of `cells` per axis, blended smoothly to `shape` (2D or 3D)."""
    field = rng.uniform(-1, 1, [math.ceil(c) + 1 for c in cells]).astype(np.float32)
    for axis, (length, count) in enumerate(zip(shape, cells, strict=True)):
        position = np.arange(length, dtype=np.float32) * np.float32(count / length)
        cell = position.astype(np.int64)
        t = position - cell
        t = (t * t * (3 - 2 * t)).reshape([-1 if a == axis else 1 for a in range(len(shape))])
        low, high = np.take(field, cell, axis), np.take(field, cell + 1, axis)
        field = low + (high - low) * t
    return field


def _texture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return a pattern in 0..1, (height, width), that blends the two colours of a surface."""
    kind = rng.choice(["plain", "gradient", "stripes", "checks", "dots", "clouds"])
    if kind == "plain":
        return np.zeros((height, width), np.float32)
    if kind == "clouds":
        cells = rng.uniform(2, 7)
        coarse = smooth_noise(rng, (height, width), (cells, cells))
        fine = smooth_noise(rng, (height, width), (2.7 * cells, 2.7 * cells))
        return np.clip(0.5 + 0.6 * coarse + 0.3 * fine, 0, 1)
    angle = rng.uniform(0, 2 * math.pi)
    x, y = np.arange(width, dtype=np.float32)[None, :], np.arange(height, dtype=np.float32)[:, None]
    u = x * np.float32(math.cos(angle)) + y * np.float32(math.sin(angle))
    if kind == "gradient":
        return (u - u.min()) / (u.max() - u.min())
    v = y * np.float32(math.cos(angle)) - x * np.float32(math.sin(angle))
    frequency, phase = np.float32(2 * math.pi / rng.uniform(6, 20)), np.float32(rng.uniform(0, 2 * math.pi))
    waves_u, waves_v = np.sin(u * frequency + phase), np.sin(v * frequency + phase)
    if kind == "stripes":
        return np.clip(0.5 + 1.5 * waves_u, 0, 1)
    if kind == "checks":
        return np.clip(0.5 + 4 * waves_u * waves_v, 0, 1)
    return np.clip(2 * (waves_u + waves_v) - 1.6, 0, 1)


def _colour(rng: np.random.Generator) -> Colour:
    return np.array(colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.1, 0.9), rng.uniform(0.15, 1)), np.float32)


def _standing_out(candidates: list[Colour], others: Pattern, enough: float) -> Colour:
    """Return the first candidate that contrasts enough with all the others, or else the one that contrasts most.

    Contrast is mostly a difference in brightness, because JPEG blurs what differs in colour alone.
    """
    difference = np.stack(candidates)[:, None] - np.stack(others)  # (candidates, others, 3)
    brightness = np.abs((difference * np.array([0.3, 0.59, 0.11], np.float32)).sum(axis=2))
    contrast = (brightness + np.float32(0.3) * np.abs(difference).max(axis=2)).min(axis=1)
    return candidates[int(np.argmax(np.minimum(contrast, enough)))]


def _neighbour(rng: np.random.Generator, colour: Colour, spread: float) -> Colour:
    return np.clip(colour + rng.uniform(-spread, spread, 3), 0, 1).astype(np.float32)


def _mixed(pattern: Pattern, texture: np.ndarray) -> np.ndarray:
    first, second = pattern
    return first + (second - first) * texture[:, :, None]


def _blend(canvas: np.ndarray, colours: np.ndarray, alpha: np.ndarray) -> None:
    canvas += (colours - canvas) * alpha[:, :, None]


def _background(rng: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, Pattern]:
    """Return a textured ground with scratches on it, (height, width, 3) float32, and its two colours."""
    base = _colour(rng)
    pattern = (base, _neighbour(rng, base, 0.18))
    canvas = _mixed(pattern, _texture(rng, height, width))
    for _ in range(rng.integers(0, 3)):
        scratch = outlines.strip(rng, height, width, half_width=rng.uniform(0.3, 1.2))
        _blend(canvas, _neighbour(rng, base, 0.35), scratch)
    return canvas, pattern


def _paint(canvas: np.ndarray, patch: Patch, ground: Pattern, rng: np.random.Generator) -> None:
    """Paint a shape in colours that stand out from the ground: shadow, textured fill, rim, light from one side."""
    target, coverage, distance = canvas[patch.window], patch.coverage, patch.distance
    fill = _standing_out([_colour(rng) for _ in range(12)], ground, enough=0.42)
    second = _standing_out([_neighbour(rng, fill, 0.3) for _ in range(4)], ground, enough=0.42)
    light = rng.uniform(0, 2 * math.pi)
    direction = np.array([math.cos(light), math.sin(light)], np.float32)
    if rng.random() < 0.5:
        dx, dy = (round(rng.uniform(1.5, 4) * -d) for d in direction)
        shadow = np.clip(0.5 - _shifted(distance, dy, dx) / 4, 0, 1)
        target *= 1 - np.float32(rng.uniform(0.25, 0.5)) * shadow[:, :, None]
    surface = _mixed((fill, second), _texture(rng, *coverage.shape))
    if rng.random() < 0.4:
        rim = np.clip(distance + np.float32(rng.uniform(1.5, 2.5)), 0, 1)
        _blend(surface, fill * np.float32(rng.uniform(0.35, 0.7)), rim)
    if rng.random() < 0.5:
        slope_y, slope_x = np.gradient(distance)
        near_edge = np.exp(-np.abs(distance) / np.float32(rng.uniform(2, 5)))
        bevel = (slope_x * direction[0] + slope_y * direction[1]) * near_edge
        surface = np.clip(surface + np.float32(0.22) * bevel[:, :, None], 0, 1)
    _blend(target, surface, coverage)


def _shifted(distance: np.ndarray, dy: int, dx: int) -> np.ndarray:
    """Return the field moved by whole pixels; what comes in from outside is far from the shape."""
    height, width = distance.shape
    moved = np.full_like(distance, 1e3)
    moved[max(dy, 0) : height + min(dy, 0), max(dx, 0) : width + min(dx, 0)] = distance[
        max(-dy, 0) : height + min(-dy, 0), max(-dx, 0) : width + min(-dx, 0)
    ]
    return moved


def _paint_strip(canvas: np.ndarray, objects: list[Patch], rng: np.random.Generator) -> None:
    """Lay a band over the image that hides a little of the objects; of four tries the first that does, if any."""
    height, width = canvas.shape[:2]
    colours = (_colour(rng), _colour(rng))
    for _ in range(4):
        band = outlines.strip(rng, height, width, half_width=rng.uniform(0.02, 0.06) * min(height, width))
        hidden = [float((band[patch.window] * patch.coverage).sum() / patch.coverage.sum()) for patch in objects]
        if objects and 0.04 <= max(hidden) <= _HIDDEN_AT_MOST:
            _blend(canvas, _mixed(colours, _texture(rng, height, width)), band)
            return


def _photograph(canvas: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Add uneven light, a little blur and sensor noise: (height, width, 3) uint8."""
    height, width = canvas.shape[:2]
    light = 1 + np.float32(rng.uniform(0, 0.25)) * smooth_noise(rng, (height, width), (1.5, 1.5))
    exposed = canvas * light[:, :, None] * np.float32(rng.uniform(0.85, 1.1))
    pixels = (np.clip(exposed, 0, 1) * 255).astype(np.uint8)
    if rng.random() < 0.3:
        blurred = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(rng.uniform(0.4, 0.8)))
        pixels = np.asarray(blurred)
    grain = rng.standard_normal(canvas.shape, np.float32) * np.float32(rng.uniform(1, 9))
    return np.clip(pixels + grain + 0.5, 0, 255).astype(np.uint8)
