"""Look at all masks of a place once: their sizes and the values in them, from which the classes follow, and the sizes
of their images. What was found is kept as an index beside the masks, by the sizes and times of all files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sightline.data.decode import decode_values, palette_of
from sightline.data.formats.image_headers import MAX_PIXELS, Header, read_header
from sightline.data.sources import index_files
from sightline.data.sources.mask_images import peek
from sightline.data.sources.mask_places import MaskFiles
from sightline.errors import BadSample
from sightline.files.image_bytes import read_bytes

GREY, PALETTE, COLOURED = range(3)
NO_COLOUR = -1  # of a number above 255
MOST_VALUES = 1024  # of one mask that are noted; more are edges or noise
LOSSLESS = ("PNG", "BMP", "TIFF")
_THREADS = 8  # decoders release Python's lock
_LARGE_BYTES = 2**27  # a mask that takes more to decode is decoded alone
_VERSION = 1
_LIMITS = (  # of the numbers in an index
    *(("heights", 0, MAX_PIXELS), ("widths", 0, MAX_PIXELS), ("kinds", GREY, COLOURED), ("channels", 1, 4)),
    *(("bits", 8, 16), ("values", 0, 2**24 - 1), ("colours", NO_COLOUR, 2**24 - 1), ("counts", 1, MAX_PIXELS)),
)


class SeenMask(NamedTuple):
    """One pair: the size of the mask, which is that of its image, the values in it, and what is wrong."""

    height: int = 0
    width: int = 0
    kind: int = GREY
    channels: int = 3  # of the image
    bits: int = 8
    values: tuple[np.ndarray, ...] = ()  # numbers, their colours, and how many pixels have them
    fault: str = ""  # kind and text, separated by a colon


@dataclass(frozen=True)
class Survey:
    """All pairs of a place; a row per image that has a mask, and of the last four a row per value."""

    heights: np.ndarray
    widths: np.ndarray
    kinds: np.ndarray
    channels: np.ndarray
    bits: np.ndarray
    ends: np.ndarray  # of each mask's values
    values: np.ndarray  # the number, or the colour if there is no number
    colours: np.ndarray  # as 0xRRGGBB
    counts: np.ndarray  # pixels
    faults: index_files.Names

    def arrays(self) -> index_files.Arrays:
        """Return them as an index keeps them."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "faults"}
        return plain | self.faults.arrays("faults")

    @classmethod
    def loaded(cls, arrays: index_files.Arrays, rows: int) -> Survey:
        """Invert `arrays`; ValueError or KeyError where the parts do not fit each other."""
        plain = {each.name: arrays[each.name] for each in fields(cls) if each.name != "faults"}
        found = cls(**plain, faults=index_files.Names.loaded(arrays, "faults"))
        lengths = {len(getattr(found, name)) for name in ("heights", "widths", "kinds", "channels", "bits", "ends")}
        total = int(found.ends[-1]) if len(found.ends) else 0
        if lengths | {len(found.faults)} != {rows} or np.any(np.diff(found.ends, prepend=0) < 0):
            raise ValueError("columns of different lengths")
        if {len(found.values), len(found.colours), len(found.counts)} != {total}:
            raise ValueError("values of no mask")
        for name, least, most in _LIMITS:
            column = getattr(found, name)
            if len(column) and not (least <= column.min() and column.max() <= most):
                raise ValueError(f"{name} beyond {most}")
        return found


def survey(files: MaskFiles) -> Survey:
    """Look at all pairs, or take what an earlier run kept if no file has changed."""
    rows = [(image, mask) for image, mask in files.pairs.items() if mask]
    key = index_files.digest("masks", _VERSION, files.key)
    name = f"masks-{files.name}"
    return index_files.kept_or_read(
        files.masks,
        name,
        key,
        files.changed_ns,
        lambda kept: Survey.loaded(kept, len(rows)),
        lambda: together(list(_seen(files, rows))),
    )


def _seen(files: MaskFiles, rows: list[tuple[str, str]]) -> Iterator[SeenMask]:
    """Look at pairs in threads. A large mask waits for the one before it, so that few lie in memory together."""
    progress = index_files.ScanProgress(str(files.masks), len(rows), "masks")
    alone = threading.Lock()
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "masks") as pool:
        look = pool.map(lambda row: _look(files.images / row[0], files.masks / row[1], alone), rows)
        for number, seen in enumerate(look):
            progress(number)
            yield seen


def _look(image: Path, mask: Path, alone: threading.Lock) -> SeenMask:
    try:
        data = read_bytes(mask, mask.name)
    except BadSample as error:
        return SeenMask(fault=f"unreadable: {error.reason}")

    def header_of_image(of_mask: Header) -> Header:
        found = peek(image)
        return found if _fits(found, of_mask) else read_header(read_bytes(image, image.name), image.name)

    return look_at(data, mask.name, image.name, header_of_image, alone)


def look_at(
    data: bytes, name: str, image: str, header_of_image: Callable[[Header], Header], alone: threading.Lock | None = None
) -> SeenMask:
    """Look at the bytes of a mask; the second function gives the header of its image, knowing that of the mask."""
    try:
        header = read_header(data, name)
        if header.format not in LOSSLESS:
            text = f"is stored as {header.format}, which blurs the edges between classes; store masks as PNG"
            return SeenMask(fault=f"soft edges: {text}")
        with alone if alone and header.decoding_bytes > _LARGE_BYTES else nullcontext():
            kind, values = values_in(data, name)
    except BadSample as error:
        return SeenMask(fault=f"unreadable: {error.reason}")
    try:
        of_image = header_of_image(header)
    except (OSError, BadSample) as error:
        reason = error.reason if isinstance(error, BadSample) else f"cannot be read: {error}"
        return SeenMask(fault=f"unreadable image: {reason}")
    height, width, _ = header.shape
    fault = ""
    if not _fits(of_image, header):
        there = f"{of_image.shape[1]}x{of_image.shape[0]}"
        fault = f"size differs: is {width}x{height}, its image {image} is {there}; store both at one size"
    bits = 16 if of_image.depth == 16 else 8
    return SeenMask(height, width, kind, of_image.channels, bits, values, fault)


def _fits(image: Header, mask: Header) -> bool:
    """Return whether an image has the size of its mask, the right way up or as stored."""
    return mask.shape[:2] in (image.shape[:2], (image.height, image.width))


def values_in(data: bytes, name: str) -> tuple[int, tuple[np.ndarray, ...]]:
    """Return the kind of a mask, and (values, their colours, their pixels). Raises BadSample."""
    values = decode_values(data, name)
    if values.ndim == 3:
        packed = packed_colours(values)
        found, counts = _counted(packed.reshape(-1))
        is_grey = bool((found % 0x010101 == 0).all())
        return GREY if is_grey else COLOURED, (found % 256 if is_grey else found, found, counts)
    found, counts = _counted(values.reshape(-1))
    palette = palette_of(data, name)
    if palette is None:
        return GREY, (found, np.where(found < 256, found * 0x010101, NO_COLOUR), counts)
    colours = packed_colours(palette)
    return PALETTE, (found, colours[np.minimum(found, len(colours) - 1)].astype(np.int64), counts)


def packed_colours(colours: np.ndarray) -> np.ndarray:
    """Return colours (..., 3) as 0xRRGGBB, uint32 (...)."""
    packed = np.zeros((*colours.shape[:-1], 4), np.uint8)
    packed[..., 2::-1] = colours
    return packed.view("<u4")[..., 0]


def _counted(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different values and how many pixels have each, the most frequent of MOST_VALUES."""
    if values.dtype.itemsize <= 2:
        counts = np.bincount(values)
        found = np.flatnonzero(counts)
        counts = counts[found]
    else:  # masks are runs of equal pixels: few are left to sort
        starts = np.concatenate([[0], 1 + np.flatnonzero(values[1:] != values[:-1])])
        lengths = np.diff(starts, append=len(values))
        found, place = np.unique(values[starts], return_inverse=True)
        counts = np.bincount(place, lengths).astype(np.int64)
    if len(found) > MOST_VALUES:
        kept = np.sort(np.argsort(-counts, kind="stable")[:MOST_VALUES])
        found, counts = found[kept], counts[kept]
    return found.astype(np.int64), counts.astype(np.int64)


def together(seen: list[SeenMask]) -> Survey:
    """Return what was seen of all pairs."""

    def column(name: str) -> np.ndarray:
        return np.asarray([getattr(each, name) for each in seen], np.int64)

    nothing = np.zeros(0, np.int64)
    lists = [each.values or (nothing, nothing, nothing) for each in seen]
    return Survey(
        column("height"),
        column("width"),
        column("kind"),
        column("channels"),
        column("bits"),
        np.cumsum([len(each[0]) for each in lists], dtype=np.int64),
        np.concatenate([nothing, *(each[0] for each in lists)]),
        np.concatenate([nothing, *(each[1] for each in lists)]),
        np.concatenate([nothing, *(each[2] for each in lists)]),
        index_files.Names.of([each.fault.encode("utf-8", "surrogateescape") for each in seen]),
    )
