"""Image files with a mask each: what masks.py, coco.py and yolo.py share, wherever the masks come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sightline.data.contents import PathsBelow
from sightline.data.decode import decode_channels, decode_rgb
from sightline.data.formats.image_headers import Header, first_header, read_header
from sightline.data.sources import IGNORED, MaskSource, SourceOptions, index_files, spread
from sightline.data.sources.box_images import drawn
from sightline.data.sources.layouts import Place, Splits
from sightline.errors import BadData, BadSample, first_of
from sightline.files.image_bytes import read_bytes
from sightline.files.regular import regular
from sightline.parts import Split

MOST_CLASSES = IGNORED
_FIRST_BYTES = 2**16
_LOOKED_AT = 64  # images whose headers tell the channels of all, where nothing else reads them
_OPAQUE = 16  # images whose alpha is looked at


@dataclass(frozen=True)
class Pixels:
    """The form of the images of a dataset."""

    channels: int = 3
    bits: int = 8


class MaskImages(MaskSource):
    """Images of one folder, with the sizes of their masks."""

    def __init__(self, kind: str, place: Place, names: index_files.Names, sizes: np.ndarray, pixels: Pixels):
        self.kind = kind
        self.place = place
        self.root = place.images.parent  # names begin with the folder
        self.names = names
        self.sizes = sizes  # (n, 2): height, width
        self.channels, self.bits = pixels.channels, pixels.bits
        self.files = PathsBelow(place.images, names)

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return f"{self.place.images.name}/{self.names[index]}"

    def size(self, index: int) -> tuple[int, int]:
        height, width = self.sizes[index].tolist()
        return height, width

    def image(self, index: int) -> bytes | np.ndarray:
        """Return an image encoded if `decode_rgb` gives its pixels, which then have the size of the mask."""
        name = self.name(index)
        data = read_bytes(self.files[index], name)
        stored = read_header(data, name)
        header = self._fitting(stored, name, index)
        if self.bits != 8 or self.channels not in (1, 3):
            return decode_channels(data, name, header, self.channels, self.bits)
        return data if header is stored else decode_rgb(data, name, header)

    def _fitting(self, header: Header, name: str, index: int) -> Header:
        """Return the header of an image of the size of its mask, which may belong to it as stored or the right way
        up."""
        size = self.size(index)
        if header.shape[:2] != size and (header.height, header.width) == size:
            header = replace(header, orientation=1)
        if header.shape[:2] != size:
            height, width = size
            raise BadSample(
                name,
                f"{header.shape[1]}x{header.shape[0]} pixels, its mask {width}x{height}; store both at one size",
            )
        return header


def split_rows(
    names: Sequence[bytes], layout: Splits, split: Split, options: SourceOptions, what: str
) -> tuple[np.ndarray, index_files.Names | None]:
    """Return the rows of a place's images that belong to a split, and the names of those that validate if they were
    drawn."""
    if not layout.draws(split):
        return np.arange(len(names)), None
    is_val = drawn(list(names), options, what, split)
    held_out = index_files.Names.of([names[row] for row in np.flatnonzero(is_val).tolist()])
    return np.flatnonzero(is_val == (split == "val")), held_out


def peek(path: Path) -> Header:
    """Return the header of an image, out of its first bytes if they tell. Raises OSError or BadSample."""
    with open(path, "rb", opener=regular) as file:
        if header := first_header(file.read(_FIRST_BYTES)):
            return header
    return read_header(read_bytes(path, path.name), path.name)


def pixels_of(files: Sequence[Path]) -> Pixels:
    """Return the form of images, of which some are looked at."""
    headers = []
    for row in spread(len(files), _LOOKED_AT):
        try:
            headers.append(peek(files[row]))
        except (OSError, BadSample):  # said when it is read
            continue
    found = [(header.channels, header.depth if header.depth == 16 else 8) for header in headers]
    return common_pixels(files, np.asarray(found, np.int64).reshape(-1, 2))


def common_pixels(files: Sequence[Path], found: np.ndarray) -> Pixels:
    """Return the form that images with these (channels, bits) have in common. Alpha is a channel if all images have one
    that says something. Raises BadData where some have 8 and others 16 bits."""
    if not len(found):
        return Pixels()
    channels, bits = found.T
    if len(set(bits.tolist())) > 1:
        rows = np.flatnonzero(bits == 16)
        shown = first_of([files[row].name for row in rows[:5].tolist()]) if len(files) == len(found) else ""
        raise BadData(
            f"{len(rows)} of {len(bits)} images have 16 bits a channel{f' ({shown})' if shown else ''}, the others 8; "
            "store all alike"
        )
    most = 1 if (channels == 1).all() else 4 if (channels == 4).all() and not _is_opaque(files) else 3
    return Pixels(most, int(bits[0]))


def _is_opaque(files: Sequence[Path]) -> bool:
    """Return whether the fourth channel of some images is one number throughout."""
    for row in spread(len(files), _OPAQUE):
        try:
            data = read_bytes(files[row], files[row].name)
            header = read_header(data, files[row].name)
            fourth = decode_channels(data, files[row].name, header, 4, header.depth)[..., 3]
        except BadSample:
            continue
        if fourth.min() != fourth.max():
            return False
    return True
