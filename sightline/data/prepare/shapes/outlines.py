"""The ten shapes of `prepare shapes` as outlines, and what follows from an outline: pixels, area, COCO polygon.

An outline is a tuple of closed loops of (x, y) points; only the ring has a second loop, its hole.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Outline = tuple[np.ndarray, ...]  # loops of (points, 2)

_CURVE_POINTS = 28  # a curve of radius 30 px then strays 0.2 px from the true one
_SAMPLES_PER_PIXEL = 2
_MARGIN = 6  # px around a shape; its shadow reaches that far


class Patch(NamedTuple):
    """The pixels of a shape in a window of an image: coverage 0..1 and px to the edge, negative inside."""

    window: tuple[slice, slice]  # rows, columns
    coverage: np.ndarray
    distance: np.ndarray


def _arc(start: float, end: float, points: int, radius: float = 1.0) -> np.ndarray:
    angle = np.linspace(start, end, points, endpoint=False)
    return radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _circle(rng: np.random.Generator) -> Outline:
    return (_arc(0, 2 * math.pi, _CURVE_POINTS, 0.9),)


def _ring(rng: np.random.Generator) -> Outline:
    hole = rng.uniform(0.5, 0.64)
    return _arc(0, 2 * math.pi, _CURVE_POINTS), _arc(2 * math.pi, 0, _CURVE_POINTS, hole)


def _triangle(rng: np.random.Generator) -> Outline:
    return (_arc(0, 2 * math.pi, 3, 1.1),)


def _square(rng: np.random.Generator) -> Outline:
    return (_arc(0, 2 * math.pi, 4, 1.05),)


def _star(rng: np.random.Generator) -> Outline:
    points = _arc(0, 2 * math.pi, 10, 1.1)
    points[1::2] *= rng.uniform(0.4, 0.48)
    return (points,)


def _cross(rng: np.random.Generator) -> Outline:
    w = rng.uniform(0.26, 0.36)
    quarter = np.array([[1.0, -w], [1.0, w], [w, w]])
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    quarters = [quarter]
    for _ in range(3):
        quarters.append((quarters[-1][:, None, :] * turn).sum(axis=2))
    return (np.concatenate(quarters),)


def _crescent(rng: np.random.Generator) -> Outline:
    """Return a disc less a smaller one: the two arcs meet in the horns."""
    horn = rng.uniform(0.7, 0.85)  # half the opening, rad
    inner_radius = rng.uniform(0.76, 0.84)
    outer = _arc(horn, 2 * math.pi - horn, _CURVE_POINTS * 2 // 3)
    inner_horn = math.asin(math.sin(horn) / inner_radius)
    inner = _arc(2 * math.pi - inner_horn, inner_horn, _CURVE_POINTS // 2, inner_radius)
    inner[:, 0] += math.cos(horn) - inner_radius * math.cos(inner_horn)
    return (np.concatenate([outer, inner]),)


def _heart(rng: np.random.Generator) -> Outline:
    t = np.linspace(0, 2 * math.pi, _CURVE_POINTS, endpoint=False)
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return (np.stack([16 * np.sin(t) ** 3, -y], axis=1) / 16,)


def _arrow(rng: np.random.Generator) -> Outline:
    shaft, neck = rng.uniform(0.18, 0.26), rng.uniform(-0.05, 0.15)
    upper = np.array([[-1.1, shaft], [neck, shaft], [neck, 0.72]])
    return (np.concatenate([upper, [[1.1, 0.0]], upper[::-1] * [1, -1]]),)


def _bolt(rng: np.random.Generator) -> Outline:
    half = np.array([[0.3, -1.15], [-0.62, 0.22], [-0.1, 0.12]])
    return (np.concatenate([half, -half]),)


OUTLINES: dict[str, Callable[[np.random.Generator], Outline]] = {
    "arrow": _arrow,
    "bolt": _bolt,
    "circle": _circle,
    "crescent": _crescent,
    "cross": _cross,
    "heart": _heart,
    "ring": _ring,
    "square": _square,
    "star": _star,
    "triangle": _triangle,
}


def pose(rng: np.random.Generator, name: str, radius: float) -> Outline:
    """Return one shape of about this radius in pixels, around the origin: mirrored, stretched and turned at random."""
    outline = OUTLINES[name](rng)
    stretch, axis, turn = rng.uniform(0.86, 1.16), rng.uniform(0, math.pi), rng.uniform(0, 2 * math.pi)
    mirror = 1 if rng.random() < 0.5 else -1
    posed = []
    for points in outline:
        x, y = _turned(points[:, 0], mirror * points[:, 1], axis)
        x, y = _turned(radius * stretch * x, radius / stretch * y, turn)
        posed.append(np.stack([x, y], axis=1))
    return tuple(posed)


def _turned(x: np.ndarray, y: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    return x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)


def strip(rng: np.random.Generator, height: int, width: int, half_width: float) -> np.ndarray:
    """Return the coverage, (height, width), of a straight band that crosses the whole image."""
    x, y = rng.uniform(0.1, 0.9) * width, rng.uniform(0.1, 0.9) * height
    angle = rng.uniform(0, math.pi)
    across_x = ((np.arange(width, dtype=np.float32) + np.float32(0.5 - x)) * np.float32(math.cos(angle)))[None, :]
    across_y = ((np.arange(height, dtype=np.float32) + np.float32(0.5 - y)) * np.float32(math.sin(angle)))[:, None]
    return np.clip(np.float32(0.5 + half_width) - np.abs(across_x + across_y), 0, 1)


def moved(outline: Outline, x: float, y: float) -> Outline:
    return tuple(points + np.array([x, y]) for points in outline)


def extent(outline: Outline) -> tuple[float, float, float, float]:
    """Return (left, top, right, bottom) of the outline."""
    (left, top), (right, bottom) = outline[0].min(axis=0), outline[0].max(axis=0)
    return float(left), float(top), float(right), float(bottom)


def rasterise(outline: Outline, height: int, width: int) -> Patch:
    """Return the pixels of an outline in an image of this size, in a window with some room around the outline."""
    left, top, right, bottom = extent(outline)
    x0, x1 = max(0, math.floor(left) - _MARGIN), min(width, math.ceil(right) + _MARGIN)
    y0, y1 = max(0, math.floor(top) - _MARGIN), min(height, math.ceil(bottom) + _MARGIN)
    n = _SAMPLES_PER_PIXEL
    xs = x0 + (np.arange(n * (x1 - x0), dtype=np.float32) + np.float32(0.5)) / np.float32(n)
    ys = y0 + (np.arange(n * (y1 - y0), dtype=np.float32) + np.float32(0.5)) / np.float32(n)
    distance = _distance(outline, xs, ys)
    np.negative(distance, out=distance, where=_inside(outline, xs, ys))

    def per_pixel(samples: np.ndarray) -> np.ndarray:
        return np.mean([samples[i::n, j::n] for i in range(n) for j in range(n)], axis=0)

    coverage = per_pixel(np.clip(np.float32(0.5) - n * distance, 0, 1))
    return Patch((slice(y0, y1), slice(x0, x1)), coverage, per_pixel(distance))


def _edges(outline: Outline) -> tuple[np.ndarray, np.ndarray]:
    starts = np.concatenate(outline)
    ends = np.concatenate([np.roll(points, -1, axis=0) for points in outline])
    return starts.astype(np.float32), ends.astype(np.float32)


def _distance(outline: Outline, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    """Return the distance of every sample to the nearest edge: (len(ys), len(xs))."""
    starts, ends = _edges(outline)
    dx, dy = xs - starts[:, :1], ys - starts[:, 1:]  # (edges, columns), (edges, rows)
    lengths = np.maximum(np.hypot(*(ends - starts).T), np.float32(1e-6))
    ux, uy = ((ends - starts) / lengths[:, None]).T[:, :, None]
    along_x, along_y, across_x, across_y = dx * ux, dy * uy, -dx * uy, dy * ux
    nearest = np.full((len(ys), len(xs)), np.inf, np.float32)
    along, beyond, across = (np.empty_like(nearest) for _ in range(3))
    # One edge at a time, into the same three buffers, stays in the cache; all edges at once measured slower.
    for edge, length in enumerate(lengths):
        np.add(along_y[edge][:, None], along_x[edge], out=along)
        np.minimum(along, length, out=beyond)
        np.maximum(beyond, 0, out=beyond)
        np.subtract(along, beyond, out=beyond)
        np.add(across_y[edge][:, None], across_x[edge], out=across)
        np.multiply(across, across, out=across)
        np.multiply(beyond, beyond, out=beyond)
        np.add(across, beyond, out=across)
        np.minimum(nearest, across, out=nearest)
    return np.sqrt(nearest)


def _inside(outline: Outline, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    """Return which samples are inside by the even-odd rule: an odd number of edges lies to their left."""
    starts, ends = _edges(outline)
    crosses = (starts[:, 1:] > ys) != (ends[:, 1:] > ys)  # (edges, rows)
    edge, row = np.nonzero(crosses)
    (sx, sy), (ex, ey) = starts[edge].T, ends[edge].T
    cross_x = sx + (ys[row] - sy) * (ex - sx) / (ey - sy)
    column = np.searchsorted(xs, cross_x)
    toggles = np.zeros((len(ys), len(xs) + 1), np.int32)
    np.add.at(toggles, (row, column), 1)
    return np.cumsum(toggles, axis=1)[:, :-1] % 2 == 1


def clipped(outline: Outline, height: int, width: int) -> Outline:
    """Return the outline cut at the image's borders (Sutherland-Hodgman, one border after the other)."""
    loops = []
    for points in outline:
        for axis, limit, side in ((0, 0.0, 1), (0, float(width), -1), (1, 0.0, 1), (1, float(height), -1)):
            points = _cut(points, axis, limit, side)
        if len(points) >= 3:
            loops.append(points)
    return tuple(loops)


def _cut(points: np.ndarray, axis: int, limit: float, side: int) -> np.ndarray:
    depth = side * (points[:, axis] - limit) if len(points) else np.zeros(0)
    if (depth >= 0).all():
        return points
    kept = []
    for i, point in enumerate(points):
        before, depth_before = points[i - 1], depth[i - 1]
        if (depth[i] >= 0) != (depth_before >= 0):
            crossing = before + (point - before) * (depth_before / (depth_before - depth[i]))
            crossing[axis] = limit  # exactly, so that no box leaves the image by a rounding error
            kept.append(crossing)
        if depth[i] >= 0:
            kept.append(point)
    return np.array(kept).reshape(-1, 2)


def polygon(outline: Outline) -> np.ndarray:
    """Return all loops as the one closed loop COCO can hold: a hole is reached and left along the same cut."""
    first, *holes = outline
    for hole in holes:
        first = np.concatenate([first, first[:1], hole, hole[:1]])
    return first


def area(points: np.ndarray) -> float:
    """Return the area of one closed loop, by the shoelace formula; holes cut in by `polygon` count as holes."""
    x, y = points[:, 0], points[:, 1]
    return abs(float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum())) / 2
