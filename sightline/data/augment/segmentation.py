"""Crops of volumes biased to the foreground, then, in order: zoom, flips, rotation, noise, blur, brightness, contrast,
gamma. `draw` turns a key into numbers, `cut` takes the crop out of a volume, and `apply` (one crop, on the CPU) or
`finish` (a batch, on any device, with static shapes and the numbers in it) does the rest, equal within TOLERANCE. Axes
are (channel, depth, height, width); resizing and blurring are one small matrix per axis.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sightline import kernels
from sightline.data.draws import generator
from sightline.errors import UsageError
from sightline.parts import undecisive

# Largest difference of a voxel between devices, as a share of the crop's largest value: they sum in fp32 in another
# order. Labels, and crops with flips alone, are equal to the bit.
TOLERANCE = 1e-5
CARRIED: tuple[str, ...] = ("windows", "turn", "intensity", "noise_key")  # numbers that a crop brings to the device
Triple = tuple[int, int, int]
_AXES = ("depth", "height", "width")
_SHARES = (
    "oversampling",
    "zoom",
    "flip",
    "rotation",
    "noise",
    "blur",
    "brightness",
    "contrast",
    "gamma_inverted",
    "gamma",
)
_RANGES = {
    "zoom_range": (0.0, 1.0),
    "rotation_range": (-180.0, 180.0),
    "noise_std": (0.0, 100.0),
    "blur_sigma": (0.0, 20.0),
    "brightness_range": (0.0, 100.0),
    "contrast_range": (0.0, 100.0),
    "gamma_range": (0.0, 10.0),
}
_WORD = 0xFFFFFFFF
_TURN_BITS = 22  # cosine and sine in 2^-22ths: places are whole numbers, so every device rounds alike
_NOISE_BLOCK = 2**15  # voxels at once on the CPU, so that their numbers stay in its cache


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
class AugmentFields:
    """Settings: what is done to a crop of a volume in training."""

    augment: Literal["on", "off"] = "on"
    """off: only the position of the crop is random."""
    augment_on: Literal["auto", "host", "device"] = undecisive("auto")
    """Place of the augmentation: in the loader's processes, or on the device within the step; auto: on the device,
    unless it is the CPU. Voxels agree to 1e-5 of the largest."""
    oversampling: float = 0.33
    """Probability that a crop is centred on a foreground voxel instead of any voxel."""
    zoom: float = 0.15
    """Probability of a zoom: the middle of the crop, resized to its size (image cubic, label nearest)."""
    zoom_range: tuple[float, float] = (0.7, 1.0)
    """Smallest and largest share of each side that a zoom keeps."""
    zoom_depth: bool = True
    """2D networks: a zoom also resizes along the depth. The original does; NVIDIA's later release does not."""
    flip: float = 0.33
    """Probability of a flip, for width and height each, and for depth if the network is 3D."""
    rotation: float = 0.0
    """Probability of a rotation in the plane of height and width (image linear, label nearest, 0 outside). nnU-Net:
    0.2; the original has none."""
    rotation_range: tuple[float, float] = (-180.0, 180.0)
    """Smallest and largest angle of a rotation in degrees, those of nnU-Net in 2D."""
    noise: float = 0.15
    """Probability of Gaussian noise."""
    noise_std: tuple[float, float] = (0.0, 0.33)
    """Smallest and largest standard deviation of the noise."""
    blur: float = 0.15
    """Probability of a Gaussian blur along depth, height and width."""
    blur_sigma: tuple[float, float] = (0.5, 1.5)
    """Smallest and largest sigma of the blur in voxels; its kernel ends at 3 sigma, rounded up."""
    brightness: float = 0.15
    """Probability of a change of brightness: values times a factor."""
    brightness_range: tuple[float, float] = (0.7, 1.3)
    """Smallest and largest factor of brightness."""
    contrast: float = 0.15
    """Probability of a change of contrast: values times a factor, clipped to the range that the crop had."""
    contrast_range: tuple[float, float] = (0.65, 1.5)
    """Smallest and largest factor of contrast."""
    gamma: float = 0.0
    """Probability of a gamma change: values of each channel, scaled to 0..1, to a power; mean and deviation stay.
    nnU-Net: 0.3; the original has none."""
    gamma_inverted: float = 0.0
    """Probability of the same on the negative image, before it. nnU-Net: 0.1."""
    gamma_range: tuple[float, float] = (0.7, 1.5)
    """Smallest and largest power; below and above 1 equally often."""

    def __post_init__(self) -> None:
        # Every test is written so that NaN fails it.
        for field, known in (("augment", ("on", "off")), ("augment_on", ("auto", "host", "device"))):
            if getattr(self, field) not in known:
                raise UsageError(f"{field}={getattr(self, field)!r} is unknown; use one of {', '.join(known)}")
        for field in _SHARES:
            if not 0 <= getattr(self, field) <= 1:
                raise UsageError(f"{field}={getattr(self, field)} must be a probability, a number from 0 to 1")
        for field, (least, most) in _RANGES.items():
            low, high = getattr(self, field)
            if not least <= low <= high <= most:
                raise UsageError(
                    f"{field}={low} {high} must be two numbers from {least:g} to {most:g}, the smaller one first"
                )


@dataclass(frozen=True)
class Augmentation(AugmentFields):
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
            "turn": np.array([round(part * 2**_TURN_BITS) for part in (math.cos(angle), math.sin(angle))], np.int64),
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
            values = _along_axes(values, [zoom_taps(window, n) for window, n in _each(numbers["windows"], crop)])
        elif any(params.flips):
            values = values.flip([axis + 2 for axis in range(3) if params.flips[axis]])
        if params.zoom != (1.0, 1.0, 1.0) or any(params.flips):
            classes = _nearest(classes, numbers["windows"])
        if params.turn:
            values, classes = rotated(values, classes, numbers["turn"])
        if params.noise:
            values = values + noise * gaussian_noise(numbers["noise_key"], values.shape)
        if params.blur:
            values = _along_axes(values, [blur_taps(blur[None], n, self._blur_radius) for n in crop])
        if params.brightness != 1:
            values = values * brightness
        if params.contrast != 1:
            values = _contrast(values, contrast)
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
                for axis, (window, n) in enumerate(_each(windows, crop))
            ]
            image = _along_axes(image, resized)
            label = _nearest(label, windows)
        if self.rotation:
            image, label = rotated(image, label, numbers["turn"])
        if self.noise:
            image = image + noise * gaussian_noise(numbers["noise_key"], image.shape)
        if self.blur:
            image = _along_axes(image, [blur_taps(blur.flatten(), n, self._blur_radius) for n in crop])
        if self.brightness:
            image = image * brightness
        if self.contrast:
            image = _contrast(image, contrast)
        if self.gamma_inverted:
            image = -to_gamma(-image, gamma_inverted)
        return to_gamma(image, gamma) if self.gamma else image, label

    @property
    def _blur_radius(self) -> int:
        """Radius of the widest kernel that can be drawn."""
        return math.ceil(3 * self.blur_sigma[1])


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


# Resizing and blurring along an axis: each output is a weighted sum of a few inputs


Taps = list[tuple[Tensor, Tensor]]  # (batch, n) each: where an output reads its axis, and the weight of what it reads


def zoom_taps(window: Tensor, n: int) -> Taps:
    """Return taps that resize part of an axis to the whole: windows (batch, 3) of start, length and flip.

    Cubic convolution with a = -0.5 (Catmull-Rom), pixel centres at halves, edges of the part repeated.
    """
    start, length, _ = _columns(window)
    position = (2 * _places(window, n) + 1) * length - n  # in 2n-ths of a voxel, so that nothing is rounded
    whole = torch.div(position, 2 * n, rounding_mode="floor")
    t = (position - whole * (2 * n)).float() / (2 * n)
    weights = (
        ((-0.5 * t + 1.0) * t - 0.5) * t,
        (1.5 * t - 2.5) * t * t + 1.0,
        ((-1.5 * t + 2.0) * t + 0.5) * t,
        (0.5 * t - 0.5) * t * t,
    )
    places = [start + torch.minimum((whole + offset).clamp(min=0), length - 1) for offset in (-1, 0, 1, 2)]
    return list(zip(places, weights, strict=True))


def blur_taps(sigma: Tensor, n: int, most: int) -> Taps:
    """Return taps that blur along an axis: sigmas (batch,), 0 for none, kernels of at most 2 * most + 1 voxels.

    The axis is mirrored about the centre of its first and of its last voxel.
    """
    offsets = torch.arange(-most, most + 1, device=sigma.device)
    spread = torch.where(sigma > 0, sigma, 1.0)[:, None]
    kernel = torch.exp(-0.5 * (offsets / spread) ** 2) * (offsets.abs() <= torch.ceil(3 * sigma)[:, None])
    kernel = kernel / kernel.sum(1, keepdim=True)  # (batch, 2 * most + 1)
    row = torch.arange(n, device=sigma.device)
    period = max(1, 2 * (n - 1))
    taps = []
    for number, weight in enumerate(kernel.unbind(1)):
        place = row + (number - most)
        place = (
            place.abs() if most < n else torch.remainder(place, period)
        )  # a division is slow where taps are gathered
        mirrored = torch.minimum(place, period - place) if n > 1 else row
        taps.append((mirrored[None].expand(len(sigma), n), weight[:, None].expand(len(sigma), n)))
    return taps


def matrix_of(taps: Taps) -> Tensor:
    """Return the matrices (batch, n, n) of taps, to be multiplied from the left."""
    column = torch.arange(taps[0][0].shape[1], device=taps[0][0].device)
    matrix = torch.zeros((), device=column.device)
    for place, weight in taps:
        matrix = matrix + weight[..., None] * (place[..., None] == column)
    return matrix


def _along_axes(image: Tensor, taps: Sequence[Taps | None]) -> Tensor:
    """Resize or blur along depth, height and width of (batch, channels, depth, height, width)."""
    if gathers(image):
        for axis, found in enumerate(taps):
            image = image if found is None else gathered(image, found, axis + 2)
        return image
    batch, channels, depth, height, width = image.shape
    along_depth, along_height, along_width = (None if found is None else matrix_of(found) for found in taps)
    if along_width is not None:
        image = torch.bmm(image.reshape(batch, -1, width), along_width.transpose(1, 2))
    if along_height is not None:
        image = torch.matmul(along_height[:, None], image.reshape(batch, -1, height, width))
    if along_depth is not None:
        image = torch.matmul(along_depth[:, None], image.reshape(batch, channels, depth, -1))
    return image.reshape(batch, channels, depth, height, width)


def gathers(image: Tensor) -> bool:
    """Return whether to sum over taps: compiled for CUDA, where this is one pass. Eagerly the matrices are faster."""
    return kernels.are_allowed() and image.is_cuda and torch.compiler.is_compiling()


def gathered(image: Tensor, taps: Taps, axis: int) -> Tensor:
    """Return the sum over taps along an axis; the same as their matrix, up to the order of a sum."""
    shape = [len(image) if at == 0 else -1 if at == axis else 1 for at in range(image.ndim)]
    total = torch.zeros((), device=image.device)
    for place, weight in taps:
        total = total + weight.reshape(shape) * image.gather(axis, place.reshape(shape).expand_as(image))
    return total


def _nearest(label: Tensor, windows: Tensor) -> Tensor:
    """Resize and flip labels (batch, depth, height, width) like the image, to the nearest voxel."""
    places = []
    for window, n in _each(windows, label.shape[1:]):
        start, length, _ = _columns(window)
        places.append(start + torch.div((2 * _places(window, n) + 1) * length, 2 * n, rounding_mode="floor"))
    z, y, x = places
    rows = torch.arange(len(label), device=label.device)
    return label[rows[:, None, None, None], z[:, :, None, None], y[:, None, :, None], x[:, None, None, :]]


def _each(windows: Tensor, crop: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Pair the windows (batch, 3) of each axis with its length."""
    return list(zip(windows.unbind(1), crop, strict=True))


def _columns(window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    start, length, flip = window.long()[:, :, None].unbind(1)
    return start, length, flip


def _places(window: Tensor, n: int) -> Tensor:
    """Return (batch, n): 0 to n - 1, or backwards if the axis is flipped."""
    place = torch.arange(n, device=window.device)
    return torch.where(_columns(window)[2] > 0, n - 1 - place, place)


def _contrast(values: Tensor, factor: Tensor) -> Tensor:
    everywhere = (1, 2, 3, 4)
    low, high = values.amin(everywhere, keepdim=True), values.amax(everywhere, keepdim=True)
    return torch.minimum(torch.maximum(values * factor, low), high)


def to_gamma(values: Tensor, power: Tensor) -> Tensor:
    """Raise the values of each channel, scaled to 0..1, to a power, and give them back their mean and deviation.

    A power of 1 changes no bit.
    """
    space = (2, 3, 4)
    low = values.amin(space, keepdim=True)
    spread = values.amax(space, keepdim=True) - low
    bent = ((values - low) / (spread + 1e-7)) ** power * spread
    bent = bent - bent.mean(space, keepdim=True)
    scale = values.std(space, correction=0, keepdim=True) / (bent.std(space, correction=0, keepdim=True) + 1e-8)
    return torch.where(power == 1, values, bent * scale + values.mean(space, keepdim=True))


def rotated(image: Tensor, label: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate images (batch, channels, depth, height, width) and labels (batch, depth, height, width) about the middle
    of their planes: `turn` (batch, 2) is cosine and sine in 2^-22ths. Images are interpolated linearly, labels take the
    nearest voxel, and what comes from outside is 0. A turn of 0 degrees changes no bit.
    """
    batch, channels, depth, height, width = image.shape
    cosine, sine = turn[:, :, None, None].unbind(1)
    # Twice the distance from the middle, so that it is whole.
    y = 2 * torch.arange(height, device=image.device)[:, None] - (height - 1)
    x = 2 * torch.arange(width, device=image.device) - (width - 1)
    bits = _TURN_BITS + 1
    down = cosine * y - sine * x + ((height - 1) << _TURN_BITS)  # (batch, height, width), in 2^-bits of a voxel
    across = sine * y + cosine * x + ((width - 1) << _TURN_BITS)

    def taken(planes: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Return the voxels (batch, planes, height * width) at these places, 0 outside."""
        is_inside = ((row >= 0) & (row < height) & (column >= 0) & (column < width)).flatten(1)[:, None]
        place = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten(1)[:, None]
        return torch.where(is_inside, planes.gather(2, place.expand(-1, planes.shape[1], -1)), 0)

    half = 1 << (bits - 1)
    classes = taken(label.reshape(batch, depth, -1), (down + half) >> bits, (across + half) >> bits)
    planes, mask = image.reshape(batch, channels * depth, -1), (1 << bits) - 1
    row, column = down >> bits, across >> bits
    v, u = (((part & mask).float() / 2**bits).flatten(1)[:, None] for part in (down, across))
    upper = taken(planes, row, column) * (1 - u) + taken(planes, row, column + 1) * u
    lower = taken(planes, row + 1, column) * (1 - u) + taken(planes, row + 1, column + 1) * u
    return (upper * (1 - v) + lower * v).reshape(image.shape), classes.reshape(label.shape)


# Noise as a function of its key and the number of the voxel: none is copied, and every device makes the same


def gaussian_noise(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """Return standard normal numbers of this shape, whose first axis is that of the keys (batch, 3)."""
    count = math.prod(shape[1:])
    if keys.device.type != "cpu" or torch.compiler.is_compiling():
        return _normal(keys, torch.arange(count, device=keys.device)).reshape(tuple(shape))
    blocks = [torch.arange(at, min(at + _NOISE_BLOCK, count)) for at in range(0, count, _NOISE_BLOCK)]
    return torch.cat([_normal(keys, block) for block in blocks], 1).reshape(tuple(shape))


def _normal(keys: Tensor, voxels: Tensor) -> Tensor:
    """Return (batch, voxels) normal numbers, from two uniform ones each (Box-Muller)."""
    if keys.is_cuda:  # whose products of 64 bits take several instructions
        keys, voxels = keys.int(), voxels.int()
    first, second, third = keys[:, :, None].unbind(1)
    base = _mixed(voxels ^ first)
    distance = (_shifted(_mixed(base ^ second), 8) + 1).float() * 2.0**-24  # never 0, whose logarithm is infinite
    angle = _shifted(_mixed(base ^ third), 8).float() * (2 * math.pi * 2.0**-24)
    return torch.sqrt(-2 * torch.log(distance)) * torch.cos(angle)


def _mixed(word: Tensor) -> Tensor:
    """Mix the bits of 32-bit words (held in int32 or int64) by a bijection: two rounds of multiply and shift.

    The second factor is 0x846ca68b less 2**32, so that no product leaves 64 bits; of 32 bits, those that leave count
    for nothing.
    """
    word = _low((word ^ _shifted(word, 16)) * 0x7FEB352D)
    word = _low((word ^ _shifted(word, 15)) * (0x846CA68B - 2**32))
    return word ^ _shifted(word, 16)


def _low(word: Tensor) -> Tensor:
    return word if word.dtype == torch.int32 else word & _WORD


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Return the word shifted to the right, with zeros on the left, which int32 does not do by itself."""
    return (word >> bits) & (_WORD >> bits) if word.dtype == torch.int32 else word >> bits
