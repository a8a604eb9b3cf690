"""Pixels of images with masks, and the mean and deviation by which they are normalised. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from sightline.data.decode import decode_rgb
from sightline.data.sources import MaskSource, spread
from sightline.errors import BadData, BadSample, UsageError

Numbers = tuple[float, ...]
IMAGENET: tuple[Numbers, Numbers] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MEASURED = 64  # images


def read_pixels(source: MaskSource, index: int) -> np.ndarray:
    """Return an image as (height, width, channels), of 8 or 16 bits. Raises BadSample."""
    data = source.image(index)
    pixels = decode_rgb(data, source.name(index))[..., : source.channels] if isinstance(data, bytes) else data
    wanted = np.uint16 if source.bits == 16 else np.uint8
    if pixels.shape[2:] != (source.channels,) or pixels.dtype != wanted:
        raise BadSample(
            source.name(index),
            f"has {pixels.shape[2]} channels of {8 * pixels.dtype.itemsize} bits, the other images {source.channels} "
            f"of {source.bits}; store all alike",
        )
    return pixels


def normalisation(train: MaskSource) -> tuple[Numbers, Numbers]:
    """Return mean and deviation of the channels, of values in 0..1: ImageNet's for colours of 8 bits, as pretrained
    networks expect, else those of some training images."""
    if is_usual(train):
        return IMAGENET
    sums, pixels = np.zeros((2, train.channels)), 0
    for index in spread(len(train), MEASURED):
        with contextlib.suppress(BadSample):  # reported when it is trained on
            values = read_pixels(train, index).reshape(-1, train.channels) / highest_of(train.bits)
            sums += (values.sum(0), (values**2).sum(0))
            pixels += len(values)
    if not pixels:
        raise BadData("not one of the training images that were looked at can be read; `sightline check` lists them")
    mean, squares = sums / pixels
    std = np.sqrt(np.maximum(squares - mean**2, 1e-12))
    return _rounded(mean), _rounded(std)


def is_usual(source: MaskSource) -> bool:
    """Return whether images are colours of 8 bits, as pretrained networks expect them."""
    return (source.channels, source.bits) == (3, 8)


def highest_of(bits: int) -> float:
    """Return the highest value of a channel."""
    return float(2**bits - 1)


def refuse_wrong_channels(mean: Sequence[float], source: MaskSource, path: str) -> None:
    """Raise UsageError unless there is a number for each channel."""
    if len(mean) != source.channels:
        raise UsageError(
            f"--data.mean and --data.std have {len(mean)} numbers each, the images of {path} have {source.channels} "
            "channels; give as many, or leave both out"
        )


def _rounded(values: np.ndarray) -> Numbers:
    """Return numbers with the digits that are shown."""
    return tuple(float(f"{value:.6g}") for value in values)
