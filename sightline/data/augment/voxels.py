"""The arithmetic of augmented volumes, for a batch on any device: resize, blur, flip, rotate, contrast, gamma, noise.

Images are (batch, channels, depth, height, width), labels without channels; numbers differ from sample to sample.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sightline.kernels import taps as sums

TURN_BITS = 22  # cosine and sine in 2^-22ths: places are whole numbers, so every device rounds alike
_WORD = 0xFFFFFFFF
_NOISE_BLOCK = 2**15  # voxels at once on the CPU, so that their numbers stay in its cache
Taps = list[tuple[Tensor, Tensor]]  # (batch, n) each: where an output reads its axis, and the weight of what it reads

# Resizing and blurring along an axis: each output is a weighted sum of a few inputs


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
        place = torch.remainder(row + (number - most), period)
        mirrored = torch.minimum(place, period - place)
        taps.append((mirrored[None].expand(len(sigma), n), weight[:, None].expand(len(sigma), n)))
    return taps


def matrix_of(taps: Taps) -> Tensor:
    """Return the matrices (batch, n, n) of taps, to be multiplied from the left."""
    column = torch.arange(taps[0][0].shape[1], device=taps[0][0].device)
    matrix = torch.zeros((), device=column.device)
    for place, weight in taps:
        matrix = matrix + weight[..., None] * (place[..., None] == column)
    return matrix


def along_axes(image: Tensor, taps: Sequence[Taps | None]) -> Tensor:
    """Resize or blur along depth, height and width of (batch, channels, depth, height, width); None: nothing there."""
    if sums.applies(image):
        for axis, found in enumerate(taps):
            image = image if found is None else sums.sum_taps(image, *tables(found), axis + 2)
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


def tables(taps: Taps) -> tuple[Tensor, Tensor]:
    """Return places (int32) and weights of taps, (batch, taps, n) each."""
    places, weights = zip(*taps, strict=True)
    return torch.stack(places, 1).int(), torch.stack(weights, 1)


def nearest(label: Tensor, windows: Tensor) -> Tensor:
    """Resize and flip labels (batch, depth, height, width) like the image, to the nearest voxel."""
    places = []
    for window, n in each_axis(windows, label.shape[1:]):
        start, length, _ = _columns(window)
        places.append(start + torch.div((2 * _places(window, n) + 1) * length, 2 * n, rounding_mode="floor"))
    z, y, x = places
    rows = torch.arange(len(label), device=label.device)
    return label[rows[:, None, None, None], z[:, :, None, None], y[:, None, :, None], x[:, None, None, :]]


def each_axis(windows: Tensor, crop: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Pair the windows (batch, 3) of each axis with its length."""
    return list(zip(windows.unbind(1), crop, strict=True))


def _columns(window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    start, length, flip = window.long()[:, :, None].unbind(1)
    return start, length, flip


def _places(window: Tensor, n: int) -> Tensor:
    """Return (batch, n): 0 to n - 1, or backwards if the axis is flipped."""
    place = torch.arange(n, device=window.device)
    return torch.where(_columns(window)[2] > 0, n - 1 - place, place)


def to_contrast(values: Tensor, factor: Tensor) -> Tensor:
    """Multiply by a factor and keep the range of values."""
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
    bits = TURN_BITS + 1
    down = cosine * y - sine * x + ((height - 1) << TURN_BITS)  # (batch, height, width), in 2^-bits of a voxel
    across = sine * y + cosine * x + ((width - 1) << TURN_BITS)

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
