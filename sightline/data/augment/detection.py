"""IoU-biased crops, flips and colour jitter for detection, and the plain resize of evaluation.

`draw` turns a key into numbers, `move_boxes` and `apply` apply the geometry to boxes and pixels (CPU, uint8), and
`finish` is the batched half on the device: colours, then normalisation, in fp32, with the numbers in the batch.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sightline.data.augment import batched, tensorflow
from sightline.data.augment.classification import as_planes, normalize
from sightline.data.augment.fields import DetectionFields
from sightline.data.draws import generator

# One draw in seven keeps the whole image; the others demand one of these overlaps.
MIN_IOUS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
_SMALLEST_SIDE = 0.3  # of a crop, as a share of the image's side
_LARGEST_ASPECT = 2.0
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)  # positions in a sample's jitter numbers, and codes in its order
_GREY = (0.2989, 0.587, 0.114)
Crop = tuple[float, float, float, float]  # top, left, bottom, right as shares of the image
WHOLE: Crop = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Params:
    """The operations on one image: cut out a box, resize, flip; then colours, on the device."""

    crop: Crop = WHOLE
    flip: bool = False
    is_training: bool = False  # TensorFlow resizes differently in training and in evaluation
    jitter: tuple[float, float, float, float] = (0.0, 1.0, 1.0, 0.0)  # brightness, contrast, saturation, hue
    order: tuple[int, int, int, int] = (_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE)

    def rows(self, height: int) -> int:
        """Return how many rows of the image, from the top, the crop needs."""
        return min(height, math.floor(self.crop[2] * height) + 2)


@dataclass(frozen=True)
class Augmentation(DetectionFields):
    """Draws and applies the operations that the fields choose; a dataset holds one."""

    @property
    def jitter_keys(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Layout of the numbers that a training sample brings to the device for its colours."""
        if self.augment == "off" or self.jitter == "off":
            return {}
        numbers: dict[str, tuple[tuple[int, ...], str]] = {"jitter": ((4,), "float32")}
        return {**numbers, "jitter_order": ((4,), "int32")} if self.jitter == "mlperf" else numbers

    def draw(self, seed: int, epoch: int, index: int, boxes: np.ndarray) -> Params:
        """Draw the operations on a training image with these boxes (n, 4) of ymin, xmin, ymax, xmax in 0..1."""
        if self.augment == "off":
            return Params()
        crop = WHOLE
        if self.crop != "off":
            crop = draw_crop(generator(seed, epoch, index, "box crop"), boxes, self.crop, self.crop_tries)
        flip = bool(generator(seed, epoch, index, "flip").random() < self.flip)
        return Params(crop, flip, True, *self._draw_jitter(generator(seed, epoch, index, "jitter")))

    def carried(self, params: Params) -> dict[str, np.ndarray]:
        """Return the numbers of `jitter_keys`."""
        values = {"jitter": params.jitter, "jitter_order": params.order}
        return {key: np.asarray(values[key], dtype) for key, (_, dtype) in self.jitter_keys.items()}

    def apply(self, params: Params, pixels: np.ndarray, height: int) -> np.ndarray:
        """Apply the geometry to uint8 pixels of an image of this height, whose lowest rows may be missing.

        Returns (size, size, 3) uint8, at most half a grey level from what the original computed in floats.
        """
        if self.resize == "tf" and params.is_training:
            return tensorflow.crop_and_resize(pixels, params.crop, height, self.size, params.flip)
        if self.resize == "tf":
            return tensorflow.resize_legacy(pixels, (self.size, self.size), (0, 0), self.size, params.flip)
        top, left, bottom, right = _whole_pixels(params.crop, height, pixels.shape[1])
        planes = as_planes(pixels[top:bottom, left:right])
        sides = (self.size, self.size)
        square = functional.interpolate(planes, sides, mode="bilinear", align_corners=False, antialias=True)[0]
        return (square.flip(2) if params.flip else square).permute(1, 2, 0).contiguous().numpy()

    @property
    def interpolation(self) -> str:
        """Name what `geometry` asks a device for."""
        return "bilinear" if self.resize == "antialias" else batched.GRID

    def geometry(self, params: Params, height: int, width: int) -> np.ndarray:
        """Return what `apply` does to an image of this size, for a device: the numbers of batched.FIELDS if it is
        antialiased, else a row of batched.grid_row."""
        size = self.size
        if self.resize == "antialias":
            top, left, bottom, right = _whole_pixels(params.crop, height, width)
            numbers = (top, left, bottom - top, right - left, size, size, 0, 0, params.flip)
            return np.asarray(numbers, np.int32)
        if params.is_training:
            return batched.grid_row(height, width, *tensorflow.crop_grid(params.crop, height, width, size, params.flip))
        return batched.grid_row(height, width, *tensorflow.legacy_grid(height, width, size, params.flip))

    def finish(self, images: Tensor, jitter: Tensor | None, order: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Jitter and normalise (batch, size, size, 3) uint8 to (batch, 3, size, size) in channels_last."""
        if jitter is None:
            return normalize(images, self.mean, self.std, dtype)
        values = images.float()
        values = jitter_tf(values / 255, jitter) if order is None else jitter_mlperf(values, jitter, order) / 255
        scaled = [
            (channel - average) * (1 / deviation)
            for channel, average, deviation in zip(values.unbind(3), self.mean, self.std, strict=True)
        ]
        return torch.stack(scaled, 3).permute(0, 3, 1, 2).to(dtype)

    def _draw_jitter(
        self, random: np.random.Generator
    ) -> tuple[tuple[float, float, float, float], tuple[int, int, int, int]]:
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        brightness, contrast, saturation, hue = (float(random.uniform(-most, most)) for most in strengths)
        first, second, third, fourth = random.permutation(4).tolist()
        added = brightness if self.jitter == "tf" else 1 + brightness
        return (added, 1 + contrast, 1 + saturation, hue), (first, second, third, fourth)


# The crop


def draw_crop(random: np.random.Generator, boxes: np.ndarray, kind: str, tries: int) -> Crop:
    """Draw a crop that overlaps every box by more than a drawn IoU and holds a centre, or by chance the whole image."""
    while True:  # one draw in seven ends it
        toss = int(random.integers(len(MIN_IOUS) + 1))
        if toss == len(MIN_IOUS):
            return WHOLE
        least = MIN_IOUS[toss] if kind == "tf" or toss else -math.inf
        sides = random.uniform(_SMALLEST_SIDE, 1, (tries, 2))
        corners = random.random((tries, 2)) * (1 - sides)
        crops = np.concatenate([corners, corners + sides], 1)
        aspect = sides[:, 1] / sides[:, 0]
        fits = (aspect < _LARGEST_ASPECT) & (1 / aspect < _LARGEST_ASPECT)
        fits &= (iou(crops, boxes) > least).all(1) & holds_centre(crops, boxes).any(1)
        if fits.any():
            found = np.flatnonzero(fits)
            top, left, bottom, right = crops[found[-1 if kind == "tf" else 0]].tolist()
            return top, left, bottom, right


def iou(crops: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return (crops, boxes): intersection over union of every pair."""
    low = np.maximum(crops[:, None, :2], boxes[None, :, :2])
    high = np.minimum(crops[:, None, 2:], boxes[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0, None), 2)
    areas = [np.prod(corners[:, 2:] - corners[:, :2], 1) for corners in (crops, boxes)]
    return shared / (areas[0][:, None] + areas[1][None] - shared)


def holds_centre(crops: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return (crops, boxes): whether the centre of the box lies strictly inside the crop."""
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    return ((centres > crops[:, None, :2]) & (centres < crops[:, None, 2:])).all(2)


def move_boxes(params: Params, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Move boxes (n, 4) in 0..1 of the image along with its pixels; return them and which were kept.

    Boxes whose centre is not inside the crop are dropped; the others are clipped at its edges.
    """
    top, left, bottom, right = params.crop
    if params.crop == WHOLE:
        kept, moved = np.ones(len(boxes), bool), boxes
    else:
        kept = holds_centre(np.asarray([params.crop]), boxes)[0]
        moved = (boxes[kept] - (top, left, top, left)) / (bottom - top, right - left, bottom - top, right - left)
        moved = np.clip(moved, 0, 1)
    if params.flip:
        moved = np.stack([moved[:, 0], 1 - moved[:, 3], moved[:, 2], 1 - moved[:, 1]], 1)
    return moved, kept


def _whole_pixels(crop: Crop, height: int, width: int) -> tuple[int, int, int, int]:
    """Round every edge down, as MLPerf's reference does; keep at least one pixel."""
    top, left, bottom, right = (int(share * side) for share, side in zip(crop, (height, width) * 2, strict=True))
    top, left = min(top, height - 1), min(left, width - 1)
    return top, left, max(bottom, top + 1), max(right, left + 1)


# Colours: (batch, height, width, 3) on the device, one row of numbers per image


def jitter_tf(images: Tensor, numbers: Tensor) -> Tensor:
    """Add brightness, scale contrast about each channel's mean, saturation, hue; values may leave 0..1."""
    brightness, contrast, saturation, hue = numbers[:, :, None, None, None].unbind(1)
    values = images + brightness
    average = values.mean((1, 2), keepdim=True)
    values = (values - average) * contrast + average
    highest, lowest = values.amax(3, keepdim=True), values.amin(3, keepdim=True)
    spread = highest - lowest
    # TensorFlow scales the S of HSV and clips it to 0..1, which is this share of each channel's distance from the
    # highest; a colour that is nowhere above 0 becomes grey.
    coloured = (highest > 0) & (spread > 0)
    share = torch.minimum(saturation, highest / torch.where(coloured, spread, 1.0))
    values = highest - (highest - values) * torch.where(coloured, share, 0.0)
    return _turn_hue(values, hue)


def jitter_mlperf(images: Tensor, numbers: Tensor, order: Tensor) -> Tensor:
    """Apply torchvision's ColorJitter for 8-bit images: each image in its own order, integers in 0..255 throughout."""
    factors = numbers[:, :, None, None, None].unbind(1)
    values = images
    for place in order[:, :, None, None, None].unbind(1):
        red, green, blue = values.unbind(3)
        grey = (_GREY[0] * red + _GREY[1] * green + _GREY[2] * blue).floor()[..., None]
        is_contrast, is_saturation = place == _CONTRAST, place == _SATURATION
        other = torch.where(is_contrast, grey.mean((1, 2), keepdim=True), torch.where(is_saturation, grey, 0.0))
        factor = torch.where(
            is_contrast, factors[_CONTRAST], torch.where(is_saturation, factors[_SATURATION], factors[_BRIGHTNESS])
        )
        blended = (values * factor + other * (1 - factor)).clamp(0, 255)
        # torchvision converts back to 8 bits with this factor.
        turned = _turn_hue(values / 255, factors[_HUE]) * 255.999
        values = torch.where(place == _HUE, turned, blended).floor().clamp(0, 255)
    return values


def _turn_hue(values: Tensor, turn: Tensor) -> Tensor:
    """Rotate colours by a share of the circle; the highest and the lowest channel keep their values."""
    red, green, blue = values.unbind(3)
    highest, lowest = values.amax(3), values.amin(3)
    spread = highest - lowest
    safe = torch.where(spread > 0, spread, 1.0)
    sector = torch.where(
        red == highest,
        (green - blue) / safe,
        torch.where(green == highest, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    sector = sector + 6 * turn.squeeze(3)
    turned = []
    for offset in (5, 3, 1):  # red, green and blue fall from the highest to the lowest value in sectors of their own
        place = torch.remainder(sector + offset, 6)
        turned.append(highest - spread * torch.minimum(place, 4 - place).clamp(0, 1))
    return torch.stack(turned, 3)
