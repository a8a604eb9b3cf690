"""Files and folders from the command line -> files with unique names; images in memory -> pixels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sightline import terminal
from sightline.data.decode import decode_channels, decode_rgb, is_grey, pixels_of, read_header
from sightline.data.sources.layouts import IMAGES, counted, suffix_of
from sightline.data.volumes.layouts import images_beside_labels
from sightline.errors import BadSample, UsageError

Files = Mapping[str, Path | np.ndarray | Image.Image]  # images and volumes to predict, by the names that results carry

# In the folder of a Decathlon task, or of data in its form, the first of these image folders that holds files is used.
# Label files end like scans and are never used.
_TASK = "dataset.json"
_IMAGES = ("imagesTs", "imagesTr")
_LABELS = ("labelsTs", "labelsTr")
_VOLUMES = (".nii.gz", ".nii")


def list_files(
    inputs: Sequence[Path], suffixes: tuple[str, ...], leave_out: Path, say: Callable[[str], None] = terminal.say
) -> dict[str, Path]:
    """Return files by name: the file's own name, or its path from the folder that was given. If two names are equal,
    all files are named by their path from the folder that they have in common.

    Folders are searched recursively, in sorted order, for these suffixes; hidden entries, circular links and the folder
    `leave_out`, into which results go, are skipped. In the folder of a task (dataset.json) only images are used, those
    of imagesTs or, if it holds none, of imagesTr; of folders of images beside labels only the images; `say` reports
    that, and how many files of other endings a folder has. If a folder has volumes, 2D images in it are left out. A
    file given twice counts once.
    """
    named: dict[str, str] = {}  # absolute path -> name
    for given in inputs:
        if given.is_dir():
            before, others = len(named), Counter[str]()
            part = _images_of(given, suffixes, say)
            top = given / part  # cases are named as if this folder had been given
            found = list(_below(top, "", suffixes, {os.path.realpath(leave_out)}, say, others))
            for relative in _not_drawings(found):
                named.setdefault(os.path.abspath(top / relative), relative)
            if len(named) == before and not any(Path(path).is_relative_to(given.absolute()) for path in named):
                raise UsageError(
                    f"{given} holds no file that ends in {', '.join(suffixes)}"
                    + (f", but {counted(others)}" if others else "")
                    + "; give files, or folders that hold some"
                )
            if others:
                say(f"{given}: ignored {counted(others)}")
        elif given.is_file():
            named.setdefault(os.path.abspath(given), given.name)
        else:
            what = "is neither a file nor a folder" if given.exists() else "does not exist"
            raise UsageError(f"{given} {what}; give files, or folders of {', '.join(suffixes)}")
    if len(set(named.values())) < len(named):
        root = os.path.commonpath([os.path.dirname(path) for path in named])
        named = {path: os.path.relpath(path, root) for path in named}
    return {name: Path(path) for path, name in named.items()}


def as_pixels(image: np.ndarray | Image.Image, name: str) -> np.ndarray:
    """Return an image in memory as (height, width, 3) uint8; an array may also be grey or have an alpha channel."""
    if isinstance(image, Image.Image):
        return pixels_of(image, name)
    array = image[..., None] if image.ndim == 2 else image
    if array.ndim != 3 or array.dtype != np.uint8 or array.shape[2] not in (1, 3, 4) or not array.size:
        raise UsageError(
            f"{name} is an array of shape {image.shape} and type {image.dtype}; give (height, width, 3) uint8 RGB, or "
            "(height, width) grey"
        )
    return array.repeat(3, 2) if array.shape[2] == 1 else np.ascontiguousarray(array[..., :3])


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


def _not_drawings(names: Sequence[str]) -> Sequence[str]:
    """Leave out images that lie with volumes: they are drawings of them."""
    if not any(name.lower().endswith(_VOLUMES) for name in names):
        return names
    return [name for name in names if not name.lower().endswith(IMAGES)]


def _images_of(folder: Path, suffixes: tuple[str, ...], say: Callable[[str], None]) -> str:
    """Return the image folder to use inside the folder of a task; "" for any other folder."""
    is_task = (folder / _TASK).is_file()
    beside_labels = images_beside_labels(folder) if _VOLUMES[0] in suffixes else ""
    if not is_task and not beside_labels:
        return ""
    why = f"is the folder of a task (it has a {_TASK})" if is_task else "has images beside labels"
    for part in (*_IMAGES, beside_labels):
        if part and (folder / part).is_dir() and any(_is_meant(each, suffixes) for each in _entries(folder / part)):
            say(f"{folder} {why}: only its {part} is taken")
            return part
    return ""


def _below(
    root: Path,
    relative: str,
    suffixes: tuple[str, ...],
    seen: set[str],
    say: Callable[[str], None],
    others: Counter[str],
) -> Iterator[str]:
    """Yield paths relative to `root`, sorted; a folder already seen is not entered again. Count other files."""
    folder = root / relative
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    part = _images_of(folder, suffixes, say)
    for entry in _entries(folder):
        is_label = entry.name in _LABELS and (folder / _TASK).is_file()
        if entry.name.startswith(".") or is_label or (part and entry.name != part):
            continue
        path = os.path.join(relative, entry.name)
        if _is_folder(entry):
            yield from _below(root, path, suffixes, seen, say, others)
        elif _is_meant(entry, suffixes):
            yield path  # also a dangling link: it is reported as unreadable, not skipped
        else:
            others[suffix_of(entry.name)] += 1


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"{folder} cannot be listed: {error.strerror}; fix that or leave it out") from error


def _is_meant(entry: os.DirEntry[str], suffixes: tuple[str, ...]) -> bool:
    return not entry.name.startswith(".") and entry.name.lower().endswith(suffixes)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
