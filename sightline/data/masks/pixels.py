"""Pixels of images with masks, and the mean and deviation by which they are normalised. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from sightline.data.decode import decode_channels, decode_rgb, is_grey, pixels_of, read_header
from sightline.data.inputs import as_pixels
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


def decode_given(data: bytes, name: str, channels: int, bits: int) -> np.ndarray:
    """Decode a file that a user gives, as (height, width, channels) of 8 or 16 bits. Raises BadSample."""
    header = read_header(data, name)
    if channels != 3 and header.channels != channels:
        raise BadSample(
            name, f"has {header.channels} channels, the network expects {channels}; give an image with as many"
        )
    if channels != 4 and (header.depth < 16 or (channels, bits) == (3, 8)):
        return with_bits(decode_rgb(data, name, header)[..., :channels], bits)
    return with_bits(decode_channels(data, name, header, channels, 16 if header.depth == 16 else 8), bits)


def as_channels(image: np.ndarray | Image.Image, name: str, channels: int, bits: int) -> np.ndarray:
    """Return an image in memory as (height, width, channels) of 8 or 16 bits."""
    if (channels, bits) == (3, 8):
        return as_pixels(image, name)
    if isinstance(image, Image.Image):
        found = np.asarray(image) if image.mode == "RGBA" else pixels_of(image, name, grey=is_grey(image))
    else:
        found = image[..., None] if image.ndim == 2 else image
    if found.ndim != 3 or found.dtype not in (np.uint8, np.uint16) or found.shape[2] != channels or not found.size:
        raise UsageError(
            f"{name} has the shape {found.shape} and type {found.dtype}; give (height, width, {channels}) of "
            f"uint{bits}{', or (height, width)' if channels == 1 else ''}"
        )
    return with_bits(np.ascontiguousarray(found), bits)


def with_bits(pixels: np.ndarray, bits: int) -> np.ndarray:
    """Return pixels of 8 or 16 bits with so many: black and white stay black and white."""
    if 8 * pixels.dtype.itemsize == bits:
        return pixels
    return pixels.astype(np.uint16) * 257 if bits == 16 else (pixels >> 8).astype(np.uint8)


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
