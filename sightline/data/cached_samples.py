"""Images with a label, from memory where they were read before: decoded, or as they lie on disk, after their label."""

from __future__ import annotations

import contextlib
import math

import numpy as np

from sightline.data.decode import Header, decode_rgb, read_header
from sightline.data.loading.cache import SAMPLED, SIDES, Form, ImageCache, as_pixels, estimated, with_sides
from sightline.data.sources import Sample, Source, spread
from sightline.errors import BadSample


def forms(source: Source, keeps_decoded: bool) -> list[Form]:
    """Return the ways to keep these images in memory, from the sizes of some; none where nothing is encoded."""
    encoded, decoded, label = [], [], _label_bytes(source)
    for index in spread(len(source), SAMPLED):
        with contextlib.suppress(BadSample):
            sample, header = read(source, index)
            if header is None:
                return []
            encoded.append(label + len(sample.data))
            decoded.append(label + SIDES + math.prod(header.shape))
    kept = [estimated("decoded images", decoded, len(source), is_decoded=True)] if keeps_decoded else []
    return [*kept, estimated("encoded images", encoded, len(source))]


def read(source: Source, index: int, cache: ImageCache | None = None) -> tuple[Sample, Header | None]:
    """Return a sample and, if it is encoded, its header."""
    if cache and (kept := cache.view(index)) is not None:
        sample = _unpacked(source, kept, cache.is_decoded)
        return sample, None if cache.is_decoded else _header(source, index, sample)
    sample = source.read(index)
    header = _header(source, index, sample)
    if cache and cache.is_decoded and isinstance(sample.data, bytes):
        try:
            sample, header = Sample(decode_rgb(sample.data, source.name(index), header), sample.label), None
        except BadSample:  # perhaps only below the crop
            return sample, header
    if cache:
        label = np.asarray(sample.label, np.uint8 if source.is_multi_label else np.int64).tobytes()
        cache.put(index, label, *([sample.data] if isinstance(sample.data, bytes) else with_sides(sample.data)))
    return sample, header


def shape_of(source: Source, index: int) -> tuple[int, ...]:
    """Return the shape that an image has once it is decoded."""
    sample, header = read(source, index)
    return header.shape if header else np.shape(sample.data)


def decoded(source: Source, index: int) -> tuple[np.ndarray, int | np.ndarray]:
    """Return the pixels of a whole image, and its label."""
    sample, header = read(source, index)
    data = sample.data
    return decode_rgb(data, source.name(index), header) if isinstance(data, bytes) else data, sample.label


def _header(source: Source, index: int, sample: Sample) -> Header | None:
    return read_header(sample.data, source.name(index)) if isinstance(sample.data, bytes) else None


def _label_bytes(source: Source) -> int:
    return len(source.classes) if source.is_multi_label else 8


def _unpacked(source: Source, kept: np.ndarray, is_decoded: bool) -> Sample:
    first, rest = np.split(kept, [_label_bytes(source)])
    label = first.copy() if source.is_multi_label else int(first.view(np.int64)[0])
    return Sample(as_pixels(rest) if is_decoded else rest.tobytes(), label)
