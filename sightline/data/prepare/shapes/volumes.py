"""The volumes of `prepare shapes`: four-channel "brains" with nested lesions, in the manner of BraTS.

Anatomy is laid out in millimetres and sampled on each volume's own grid, so sizes and spacings vary independently.
"""

import math

import numpy as np

from sightline.data.draws import generator
from sightline.data.prepare.shapes.images import smooth_noise

CHANNELS = ("FLAIR", "T1w", "t1gd", "T2w")
LABELS = ("background", "edema", "non-enhancing tumor", "enhancing tumour")

# Brightness of each tissue in each channel, after how the four MR contrasts look: fluid is dark in FLAIR and bright
# in T2w, only the enhancing part lights up in t1gd, so no single channel distinguishes all labels.
_BRIGHTNESS = {
    "grey": (0.60, 0.50, 0.52, 0.62),
    "white": (0.50, 0.72, 0.74, 0.45),
    "fluid": (0.18, 0.22, 0.24, 1.00),
    "edema": (0.95, 0.44, 0.46, 0.88),
    "non-enhancing": (0.78, 0.30, 0.34, 0.80),
    "enhancing": (0.82, 0.42, 1.10, 0.74),
}
# Where a lesion's parts end, in units of its radius. The wobble added to the inner two is 0.08 at most, so each
# part stays strictly inside the one around it.
_EDEMA_END, _CORE_END, _ENHANCING_END, _WOBBLE = 1.0, 0.68, 0.42, 0.08


def volume(seed: int, split: str, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (image (x, y, z, 4) int16, label (x, y, z) uint8, affine (4, 4)); the image is 0 outside the brain
    only."""

    def rng(aspect: str) -> np.random.Generator:
        return generator(seed, 0, index, f"shapes segmentation {split} {aspect}")

    shape, spacing, affine = _grid(rng("grid"))
    # Broadcastable millimetre coordinates around the centre of the grid.
    x, y, z = np.ogrid[tuple(slice(0, n) for n in shape)]
    millimetres = [
        ((axis - (n - 1) / 2) * step).astype(np.float32)
        for axis, n, step in zip((x, y, z), shape, spacing, strict=True)
    ]
    anatomy = rng("anatomy")
    radii = anatomy.uniform(0.40, 0.46, 3) * spacing * np.array(shape)
    radial = _ellipsoid(millimetres, np.zeros(3), radii)
    radial = radial + np.float32(0.05) * smooth_noise(anatomy, shape, (4, 4, 3))
    brain = radial < 1
    whole, core, enhancing = _lesion_fields(rng("lesion"), millimetres, radii, shape)
    inside = brain & (whole < _EDEMA_END)
    label = inside.astype(np.uint8)
    label[inside & (core < _CORE_END)] = 2
    label[inside & (enhancing < _ENHANCING_END)] = 3

    # Each tissue covers the ones before it, with soft borders as partial volumes have.
    covers = {
        "white": _soft(0.72 - radial - np.float32(0.22) * smooth_noise(anatomy, shape, (9, 9, 5)), 0.04),
        "fluid": _soft(1 - _ventricles(anatomy, millimetres, radii), 0.06),
        "edema": _soft(_EDEMA_END - whole, 0.04),
        "non-enhancing": _soft(_CORE_END - core, 0.03),
        "enhancing": _soft(_ENHANCING_END - enhancing, 0.03),
    }
    return _scan(rng("scanner"), brain, covers), label, affine


def _grid(rng: np.random.Generator) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Return voxel counts near 64 x 64 x 24, their size in mm, and the affine; x and y run backwards as in BraTS."""
    shape = tuple(int(n) for n in rng.integers([60, 60, 22], [69, 69, 27]))
    in_plane = round(float(rng.uniform(1.1, 1.3)), 3)
    spacing = np.array([in_plane, in_plane, round(float(rng.uniform(2.3, 2.8)), 3)])
    affine = np.diag([-spacing[0], -spacing[1], spacing[2], 1.0])
    affine[:3, 3] = np.round(rng.uniform([20, 20, -50], [60, 60, -10]), 2)
    return shape, spacing, affine


def _ellipsoid(millimetres: list[np.ndarray], centre: np.ndarray, radii: np.ndarray) -> np.ndarray:
    """Return the distance from the centre in units of the radii: 1 on the surface."""
    x, y, z = ((m - np.float32(c)) / np.float32(r) for m, c, r in zip(millimetres, centre, radii, strict=True))
    return np.sqrt(x * x + y * y + z * z)


def _ventricles(rng: np.random.Generator, millimetres: list[np.ndarray], radii: np.ndarray) -> np.ndarray:
    aside, size = rng.uniform(0.14, 0.2), rng.uniform(0.8, 1.2) * radii * [0.1, 0.34, 0.24]
    left, right = (_ellipsoid(millimetres, radii * [side * aside, 0.05, 0.1], size) for side in (-1, 1))
    return np.minimum(left, right)


def _lesion_fields(
    rng: np.random.Generator, millimetres: list[np.ndarray], radii: np.ndarray, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distance fields of a whole lesion, its core and its enhancing part; a quarter of the brains has two."""
    lesions = []
    for _ in range(2 if rng.random() < 0.25 else 1):
        direction = rng.normal(size=3)
        centre = radii * direction / math.sqrt((direction**2).sum()) * rng.uniform(0.25, 0.55)
        size = rng.uniform(0.32, 0.5) * radii.min() * rng.uniform(0.8, 1.25, 3)
        lesions.append(_ellipsoid(millimetres, centre, size))
    field = np.min(lesions, axis=0) + np.float32(0.2) * smooth_noise(rng, shape, (8, 8, 6))
    core, enhancing = (field + np.float32(_WOBBLE) * smooth_noise(rng, shape, (10, 10, 8)) for _ in range(2))
    return field, core, enhancing


def _soft(depth: np.ndarray, width: float) -> np.ndarray:
    """Return 0 outside, 1 inside, a ramp of this width at the border."""
    return np.clip(depth / np.float32(2 * width) + np.float32(0.5), 0, 1)


def _scan(rng: np.random.Generator, brain: np.ndarray, covers: dict[str, np.ndarray]) -> np.ndarray:
    """Return the four channels, each with its own gain, slow shading and noise: (x, y, z, 4) int16."""
    channels = []
    for channel in range(len(CHANNELS)):
        signal = np.full(brain.shape, _BRIGHTNESS["grey"][channel], np.float32)
        for tissue, cover in covers.items():
            brightness = np.float32(_BRIGHTNESS[tissue][channel] + rng.normal(0, 0.02))
            signal += (brightness - signal) * cover
        signal *= np.exp(np.float32(0.15) * smooth_noise(rng, brain.shape, (2, 2, 2)))
        signal += rng.standard_normal(brain.shape, np.float32) * np.float32(rng.uniform(0.03, 0.06))
        # Scanner units are arbitrary, so every volume and channel has its own gain. At least 1 inside the brain:
        # zero means "no data" to every reader of BraTS.
        gain = np.float32(rng.uniform(250, 1200))
        channels.append(np.where(brain, np.maximum(np.rint(signal * gain), 1), 0).astype(np.int16))
    return np.stack(channels, axis=3)
