"""Files of images and labels, whatever their form, as volumes: NIfTI; channels in files of their own (CASE_0000.nii.gz,
CASE_0001.nii.gz, ...); and 2D images with masks, which are volumes of one slice.

`prepare`, `predict` and `evaluate --labels` read through here, so that they cannot drift apart.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from sightline.data import decode
from sightline.data.formats import nifti
from sightline.data.formats.nifti import Header, Scan
from sightline.data.sources.layouts import IMAGES
from sightline.errors import BadSample, first_of
from sightline.files.image_bytes import read_bytes

SUFFIXES = (".nii.gz", ".nii")
MASK = "_mask.png"  # the end of a mask that `predict` writes for a 2D image
SAME_PLACE_VOXELS = 0.1  # how far the corners of a label, or of a channel, may lie from those of its image
FIRST_CHANNEL = "_0000"  # nnU-Net's ending of the first file of a case
UNPLACED = np.diag([-1.0, -1.0, 1.0, 1.0])  # affine of a 2D image, which has no place; rows run down


def case_name(file: str) -> str:
    """Return the name of a volume or image: its file name without its ending."""
    for suffix in (*SUFFIXES, *IMAGES):
        if file.lower().endswith(suffix) and len(file) > len(suffix):
            return file[: -len(suffix)]
    return file


def is_image(path: Path) -> bool:
    """Return whether a file is a 2D image, by its ending."""
    return path.name.lower().endswith(IMAGES)


def channel_files(path: Path, channels: int) -> list[Path]:
    """Return the files of a case: CASE_0000.nii.gz stands for all of its channels; any other file for itself."""
    stem = case_name(path.name)
    if channels < 2 or is_image(path) or not stem.endswith(FIRST_CHANNEL):
        return [path]
    ending = path.name[len(stem) :]
    return [path.with_name(f"{stem[:-4]}{number:04d}{ending}") for number in range(channels)]


def read_header(path: Path, name: str, channels: int) -> Header:
    """Read the header of an image, for a network of this many channels; 0: as the file has them. Raises BadSample."""
    if is_image(path):
        return _image_header(path, name, channels)
    header = nifti.read_header(path, name)
    others = channel_files(path, channels)[1:] if header.shape[0] == 1 else []
    for other in others:
        found = nifti.read_header(other, name)
        if found.shape != header.shape or apart(header, found) > SAME_PLACE_VOXELS:
            raise BadSample(
                name,
                f"{other.name} has {_sides(found)} voxels or another place than {path.name} with {_sides(header)}; all "
                "channels of a case must be on one grid, so resample it",
            )
        if found.dtype.itemsize > header.dtype.itemsize:
            header = replace(header, dtype=found.dtype)  # the memory for reading is estimated from it
    return replace(header, shape=(header.shape[0] + len(others), *header.shape[1:]))


def read_scan(path: Path, name: str, channels: int) -> Scan:
    """Read an image whose header was checked by `read_header`, with all of its channels; raises BadSample."""
    if is_image(path):
        header = _image_header(path, name, channels)
        data = read_bytes(path, name)
        if header.shape[0] == 1 and decode.read_header(data, name).format in ("PNG", "TIFF"):
            pixels = decode.decode_values(data, name)[..., None]  # all 16 bits, if there are as many
        else:
            pixels = decode.decode_rgb(data, name)[..., : header.shape[0]]
        return Scan(np.moveaxis(pixels, 2, 0)[:, None].astype(np.float32, order="C"), header.spacing, header.affine)
    scan = nifti.read_scan(path, name)
    files = channel_files(path, channels) if scan.voxels.shape[0] == 1 else [path]
    if len(files) == 1:
        return scan
    others = [nifti.read_scan(file, name).voxels for file in files[1:]]
    return replace(scan, voxels=np.concatenate([scan.voxels, *others]))


def read_label(path: Path, name: str, classes: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Read a label or mask as ((depth, height, width) uint8, affine); raises BadSample.

    If there are two `classes` and it holds nothing but 0 and 255, the latter is class 1.
    """
    label, affine = (_read_mask(path, name), UNPLACED) if is_image(path) else nifti.read_label(path, name)
    if classes == 2 and label.max(initial=0) == 255 and not ((label > 0) & (label < 255)).any():
        label = label // 255
    return label, affine


def read_label_header(path: Path, name: str) -> Header:
    """Read the header of a label or mask; raises BadSample."""
    if not is_image(path):
        return nifti.read_header(path, name)
    header = _image_header(path, name, 1)
    return replace(header, shape=(1, *header.shape[1:]))  # grey may be stored as RGB


def apart(one: Header, other: Header) -> float:
    """Return the largest distance between the same corner of two volumes of one shape, in voxels."""
    depth, height, width = one.shape[1:]
    corners = np.array([(x, y, z, 1) for x in (0, width - 1) for y in (0, height - 1) for z in (0, depth - 1)])
    between = corners @ (one.affine - other.affine).T  # (8, 4) mm
    return float(np.linalg.norm(between, axis=1).max() / min(one.spacing))


def _image_header(path: Path, name: str, channels: int) -> Header:
    """Describe a 2D image as a volume of one slice: one channel if it is grey, unless three are wanted."""
    header = decode.read_header(read_bytes(path, name), name)
    found = 1 if header.is_grey and channels != 3 else 3
    return Header((found, 1, *header.shape[:2]), (1.0, 1.0, 1.0), UNPLACED, np.dtype(np.uint8), 0, None)


def _read_mask(path: Path, name: str) -> np.ndarray:
    data = read_bytes(path, name)
    kind = decode.read_header(data, name).format
    if kind not in ("PNG", "BMP", "TIFF"):
        raise BadSample(
            name, f"{path} is a mask stored as {kind}, which changes its numbers at edges; store masks as PNG"
        )
    values = decode.decode_values(data, name)
    if values.ndim == 3:
        if (values != values[..., :1]).any():
            colours = np.unique(values.reshape(-1, 3), axis=0)
            shown = first_of([tuple(colour) for colour in colours.tolist()])
            raise BadSample(
                name,
                f"{path} is a mask of {len(colours)} colours ({shown}); the number of its class was expected in "
                "every pixel, so store it as a grey or palette PNG",
            )
        values = values[..., 0]  # grey that was stored as RGB
    if values.max() > 255:
        raise BadSample(name, f"{path} is a mask with a {values.max()}; numbers from 0 to 255 were expected")
    return np.ascontiguousarray(values, np.uint8)[None]


def _sides(header: Header) -> str:
    return " x ".join(map(str, header.shape[1:]))
