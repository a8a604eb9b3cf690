"""Crops of images with masks: a scale, a place, flips; then colours, and normalisation.

`draw` turns a key into numbers, `apply` cuts and resizes pixels and mask (CPU), and `finish` is the batched half on the
device. What lies beyond the image has the mean colour, and does not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sightline.data.augment.classification import as_planes, normalize
from sightline.data.augment.fields import MaskFields
from sightline.data.draws import generator
from sightline.parts import IGNORED

_GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Params:
    """The operations on one image: cut out a square, resize it, flip; then colours, on the device."""

    top: int
    left: int
    side: int  # of the square in the image, in pixels; it may reach beyond
    flip: bool = False
    flip_rows: bool = False
    colours: tuple[float, float, float] = (1.0, 1.0, 1.0)  # factors of brightness, contrast, saturation


@dataclass(frozen=True)
class Augmentation(MaskFields):
    """Draws and applies the operations that the fields choose; a dataset holds one."""

    @property
    def changes_colours(self) -> bool:
        """Return whether training crops bring numbers for their colours to the device."""
        return self.augment == "on" and any((self.brightness, self.contrast, self.saturation))

    def draw(self, seed: int, epoch: int, index: int, mask: np.ndarray) -> Params:
        """Draw the operations on a training image with this mask (height, width)."""
        if self.augment == "off":
            top, left = ((length - self.size) // 2 for length in mask.shape)
            return Params(top, left, self.size)

        def chance(operation: str) -> float:
            return float(generator(seed, epoch, index, operation).random())

        low, high = map(math.log, self.scale)
        side = max(1, round(self.size / math.exp(low + chance("scale") * (high - low))))
        top, left = self._place(seed, epoch, index, mask, side)
        flips = chance("flip") < self.flip, chance("flip rows") < self.flip_rows
        random = generator(seed, epoch, index, "colours")
        most = (self.brightness, self.contrast, self.saturation)
        brightness, contrast, saturation = (1 + float(random.uniform(-each, each)) for each in most)
        return Params(top, left, side, *flips, (brightness, contrast, saturation))

    def _place(self, seed: int, epoch: int, index: int, mask: np.ndarray, side: int) -> tuple[int, int]:
        """Draw where a square begins. It lies in the image, or the image in it, along each axis."""
        random = generator(seed, epoch, index, "crop")
        low = [min(0, length - side) for length in mask.shape]
        high = [max(0, length - side) for length in mask.shape]
        top, left = (int(random.integers(a, b + 1)) for a, b in zip(low, high, strict=True))
        random = generator(seed, epoch, index, "object")
        if random.random() >= self.oversampling:
            return top, left
        counts = np.bincount(mask.reshape(-1), minlength=IGNORED + 1)[:IGNORED]
        present = np.flatnonzero(counts)
        if not len(present):
            return top, left
        chosen = int(random.choice(present))
        at = int(np.flatnonzero(mask.reshape(-1) == chosen)[int(random.integers(counts[chosen]))])
        place = (each - side // 2 for each in divmod(at, mask.shape[1]))
        top, left = (min(max(each, a), b) for each, a, b in zip(place, low, high, strict=True))
        return top, left

    def apply(
        self, params: Params, pixels: np.ndarray, mask: np.ndarray, fill: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a crop (size, size, channels) of pixels and (size, size) of the mask; `fill` is the mean colour."""
        image = np.empty((params.side, params.side, pixels.shape[2]), pixels.dtype)
        image[:] = fill
        label = np.full((params.side, params.side), IGNORED, np.uint8)
        there, here = [], []
        for start, length in zip((params.top, params.left), mask.shape, strict=True):
            first, last = max(start, 0), min(start + params.side, length)
            there.append(slice(first, last))
            here.append(slice(first - start, last - start))
        image[here[0], here[1]] = pixels[there[0], there[1]]
        label[here[0], here[1]] = mask[there[0], there[1]]
        if params.side != self.size:
            image, label = _resized(image, self.size), _nearest(label, self.size)
        rows, columns = (slice(None, None, -1 if turned else 1) for turned in (params.flip_rows, params.flip))
        return image[rows, columns], label[rows, columns]

    def finish(self, images: Tensor, colours: Tensor | None, highest: float, dtype: torch.dtype) -> Tensor:
        """Change colours and normalise (batch, height, width, channels) of values up to `highest`, to (batch, channels,
        height, width) in channels_last."""
        if colours is None:
            return normalize(images, self.mean, self.std, dtype, highest)
        brightness, contrast, saturation = colours[:, :, None, None, None].unbind(1)
        values = images.permute(0, 3, 1, 2).float() * (brightness / highest)
        average = values.mean((1, 2, 3), keepdim=True)
        values = average + (values - average) * contrast
        if values.shape[1] == len(_GREY):
            grey = sum(share * channel for share, channel in zip(_GREY, values.unbind(1), strict=True))
            grey = torch.as_tensor(grey)[:, None]
            values = grey + (values - grey) * saturation
        # Values stay in 0..1; constants are filled in on the device.
        return normalize(values.clamp(0, 1).permute(0, 2, 3, 1), self.mean, self.std, dtype, 1.0)


def _resized(image: np.ndarray, size: int) -> np.ndarray:
    planes = as_planes(image)
    planes = planes if image.dtype == np.uint8 else torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)[None]
    resized = functional.interpolate(planes, (size, size), mode="bilinear", align_corners=False, antialias=True)[0]
    found = resized.permute(1, 2, 0).numpy()
    return found if image.dtype == np.uint8 else found.round().clip(0, 65535).astype(image.dtype)


def _nearest(label: np.ndarray, size: int) -> np.ndarray:
    at = ((np.arange(size) + 0.5) * (len(label) / size)).astype(np.int64)
    return label[at][:, at]
