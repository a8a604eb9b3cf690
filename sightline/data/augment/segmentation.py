"""Crops of volumes biased to the foreground, then, in order: zoom, flips, rotation, noise, blur, brightness, contrast,
gamma. `draw` turns a key into numbers, `cut` takes the crop out of a volume, and `apply` (one crop, on the CPU) or
`finish` (a batch, on any device, with static shapes and the numbers in it) does the rest, equal within TOLERANCE. Axes
are (channel, depth, height, width). voxels.py does the arithmetic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sightline.data.augment.fields import SegmentationFields
from sightline.data.augment.voxels import (
    TURN_BITS,
    Taps,
    along_axes,
    blur_taps,
    each_axis,
    gaussian_noise,
    nearest,
    rotated,
    to_contrast,
    to_gamma,
    zoom_taps,
)
from sightline.data.draws import generator

# Largest difference of a voxel between devices, as a share of the crop's largest value: they sum in fp32 in another
# order. Labels, and crops with flips alone, are equal to the bit.
TOLERANCE = 1e-5
CARRIED: tuple[str, ...] = ("windows", "turn", "intensity", "noise_key")  # numbers that a crop brings to the device
Triple = tuple[int, int, int]
_AXES = ("depth", "height", "width")


@dataclass(frozen=True)
class Params:
    """The operations on one crop; the defaults change nothing."""

    anchor: Triple = (0, 0, 0)  # of the crop in its volume; negative if the volume is shorter
    zoom: tuple[float, float, float] = (1.0, 1.0, 1.0)  # share of each axis that is resized to the whole
    flips: tuple[bool, bool, bool] = (False, False, False)
    noise: float = 0.0  # standard deviation
    noise_key: Triple = (0, 0, 0)
    blur: float = 0.0  # sigma in voxels
    brightness: float = 1.0
    contrast: float = 1.0
    turn: float = 0.0  # degrees
    gamma_inverted: float = 1.0
    gamma: float = 1.0

    def windows(self, crop: Sequence[int]) -> np.ndarray:
        """Return (3, 3): for each axis the start and the length of the part that is kept, and whether it is flipped."""
        lengths = [max(1, int(n * share)) for n, share in zip(crop, self.zoom, strict=True)]
        starts = [(n - length + 1) // 2 for n, length in zip(crop, lengths, strict=True)]
        return np.array([starts, lengths, self.flips], np.int32).T


@dataclass(frozen=True)
class Augmentation(SegmentationFields):
    """Draws and applies the operations that the fields choose; a dataset holds one."""

    # The draw

    def draw(self, seed: int, epoch: int, index: int, label: np.ndarray, crop: Sequence[int], dim: int) -> Params:
        """Draw a crop of a volume with this label (depth, height, width), and the operations on it.

        Every operation has its own random stream: with one for all, both flips would agree.
        """
        anchor = self._draw_anchor(seed, epoch, index, label, crop)
        if self.augment == "off":
            return Params(anchor)

        def toss(operation: str, share: float, bounds: tuple[float, float], otherwise: float) -> float:
            if not share:
                return otherwise
            random = generator(seed, epoch, index, operation)
            wins, value = random.random() < share, float(random.uniform(*bounds))
            return value if wins else otherwise

        def power(operation: str, share: float) -> float:
            low, high = self.gamma_range
            if share and low < 1 < high:  # below and above 1 equally often
                is_low = generator(seed, epoch, index, f"side of {operation}").random() < 0.5
                low, high = (low, 1.0) if is_low else (1.0, high)
            return toss(operation, share, (low, high), 1.0)

        zoom = toss("zoom", self.zoom, self.zoom_range, 1.0)
        flips = [bool(generator(seed, epoch, index, f"flip {axis}").random() < self.flip) for axis in _AXES]
        first, second, third = generator(seed, epoch, index, "noise key").integers(0, 2**32, 3).tolist()
        return Params(
            anchor,
            (zoom if self.zoom_depth or dim == 3 else 1.0, zoom, zoom),
            (flips[0] and dim == 3, flips[1], flips[2]),
            toss("noise", self.noise, self.noise_std, 0.0),
            (first, second, third),
            toss("blur", self.blur, self.blur_sigma, 0.0),
            toss("brightness", self.brightness, self.brightness_range, 1.0),
            toss("contrast", self.contrast, self.contrast_range, 1.0),
            toss("rotation", self.rotation, self.rotation_range, 0.0),
            power("gamma inverted", self.gamma_inverted),
            power("gamma", self.gamma),
        )

    def _draw_anchor(self, seed: int, epoch: int, index: int, label: np.ndarray, crop: Sequence[int]) -> Triple:
        random = generator(seed, epoch, index, "crop")
        wants_foreground = random.random() < self.oversampling
        place = int(random.integers(label.size))
        if wants_foreground:  # only then is the whole label read
            foreground = np.flatnonzero(label)
            if len(foreground):
                place = int(foreground[random.integers(len(foreground))])
        centre = np.unravel_index(place, label.shape)
        depth, height, width = (
            min(max(int(c) - n // 2, 0), side - n) for c, n, side in zip(centre, crop, label.shape, strict=True)
        )
        return depth, height, width

    # The operations

    def carried(self, params: Params, crop: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the numbers that `finish` needs, as a sample brings them to the device."""
        first = (params.noise, params.blur, params.brightness, params.contrast)
        intensity = (*first, params.gamma_inverted, params.gamma)
        angle = math.radians(params.turn)
        return {
            "windows": params.windows(crop),
            "turn": np.array([round(part * 2**TURN_BITS) for part in (math.cos(angle), math.sin(angle))], np.int64),
            "intensity": np.array(intensity, np.float32),
            "noise_key": np.array(params.noise_key, np.int64),
        }

    def apply(self, params: Params, image: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Apply all operations to a crop (channels, depth, height, width) and its label, on the CPU."""
        crop = label.shape
        numbers = {key: torch.from_numpy(value)[None] for key, value in self.carried(params, crop).items()}
        noise, blur, brightness, contrast, gamma_inverted, gamma = numbers["intensity"][0]
        values, classes = torch.from_numpy(image)[None], torch.from_numpy(label)[None]
        if params.zoom != (1.0, 1.0, 1.0):
            values = along_axes(values, [zoom_taps(window, n) for window, n in each_axis(numbers["windows"], crop)])
        elif any(params.flips):
            values = values.flip([axis + 2 for axis in range(3) if params.flips[axis]])
        if params.zoom != (1.0, 1.0, 1.0) or any(params.flips):
            classes = nearest(classes, numbers["windows"])
        if params.turn:
            values, classes = rotated(values, classes, numbers["turn"])
        if params.noise:
            values = values + noise * gaussian_noise(numbers["noise_key"], values.shape)
        if params.blur:
            values = along_axes(values, self._blur(blur[None], crop))
        if params.brightness != 1:
            values = values * brightness
        if params.contrast != 1:
            values = to_contrast(values, contrast)
        if params.gamma_inverted != 1:
            values = -to_gamma(-values, gamma_inverted)
        if params.gamma != 1:
            values = to_gamma(values, gamma)
        return values[0].contiguous().numpy(), classes[0].contiguous().numpy()

    def finish(self, image: Tensor, label: Tensor, numbers: dict[str, Tensor], dim: int) -> tuple[Tensor, Tensor]:
        """Apply all operations to a batch (batch, channels, depth, height, width) fp32 with its label, on its device.

        No shape and no branch depends on a value, so it can be compiled and captured; an operation that a sample has
        not drawn runs with numbers that change nothing. Must be called outside autocast.
        """
        crop, windows = tuple(label.shape[1:]), numbers["windows"]
        intensity = numbers["intensity"][:, :, None, None, None, None].unbind(1)
        noise, blur, brightness, contrast, gamma_inverted, gamma = intensity
        if self.zoom or self.flip:
            has_depth = dim == 3 or (self.zoom > 0 and self.zoom_depth)
            resized = [
                zoom_taps(window, n) if axis or has_depth else None
                for axis, (window, n) in enumerate(each_axis(windows, crop))
            ]
            image = along_axes(image, resized)
            label = nearest(label, windows)
        if self.rotation:
            image, label = rotated(image, label, numbers["turn"])
        if self.noise:
            image = image + noise * gaussian_noise(numbers["noise_key"], image.shape)
        if self.blur:
            image = along_axes(image, self._blur(blur.flatten(), crop))
        if self.brightness:
            image = image * brightness
        if self.contrast:
            image = to_contrast(image, contrast)
        if self.gamma_inverted:
            image = -to_gamma(-image, gamma_inverted)
        return to_gamma(image, gamma) if self.gamma else image, label

    def _blur(self, sigma: Tensor, crop: Sequence[int]) -> list[Taps | None]:
        """Return taps for each axis of a crop; an axis of one voxel needs none."""
        widest = math.ceil(3 * self.blur_sigma[1])  # that can be drawn
        return [blur_taps(sigma, n, widest) if n > 1 else None for n in crop]


def view(volume: np.ndarray, anchor: Triple, crop: Sequence[int]) -> np.ndarray:
    """Return what `cut` does, without a copy where the crop lies in the volume."""
    if not _is_inside(volume, anchor, crop):
        return cut(volume, anchor, crop)
    depth, height, width = (slice(start, start + n) for start, n in zip(anchor, crop, strict=True))
    return volume[..., depth, height, width]


def cut(volume: np.ndarray, anchor: Triple, crop: Sequence[int]) -> np.ndarray:
    """Copy the crop out of the last three axes, with zeros beyond the volume. Reads nothing else."""
    empty = np.empty if _is_inside(volume, anchor, crop) else np.zeros
    found = empty((*volume.shape[:-3], *crop), volume.dtype)
    cut_into(found, volume, anchor)
    return found


def _is_inside(volume: np.ndarray, anchor: Triple, crop: Sequence[int]) -> bool:
    sides = zip(anchor, crop, volume.shape[-3:], strict=True)
    return all(start >= 0 and start + n <= side for start, n, side in sides)


def cut_into(crop: Any, volume: Any, anchor: Sequence[int]) -> None:
    """Copy what lies in the crop at `anchor` of the last three axes into it; both are arrays, or tensors."""
    inside: list[Any] = [...]
    target: list[Any] = [...]
    for start, n, side in zip(anchor, crop.shape[-3:], volume.shape[-3:], strict=True):
        low, high = max(start, 0), min(start + n, side)
        inside.append(slice(low, high))
        target.append(slice(low - start, high - start))
    crop[tuple(target)] = volume[tuple(inside)]
