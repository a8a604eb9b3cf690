"""Volumes and images given by the user, prepared like the volumes that the network was trained on, one at a time.

For `sightline predict` and `sightline evaluate --labels`; `inference/volume_files.py` writes the results.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from sightline.data.decode import is_grey, pixels_of
from sightline.data.formats.nifti import MAX_VOXELS, Header, Scan
from sightline.data.inputs import Files
from sightline.data.volumes.files import UNPLACED, is_image, read_header, read_scan
from sightline.data.volumes.geometry import Triple, new_shape, prepare_image
from sightline.errors import BadSample, UsageError
from sightline.parts import Arrays, Batch, Bound, Dataset, DataSpec, Layout

# Volumes of a batch: so many, unless their images or scores, padded to the largest sides of all, take more memory. Nor
# do their scores in the geometry of their files, which may be larger, take more at once, except those of one volume.
AT_ONCE, AT_ONCE_BYTES = 16, 2**27

if TYPE_CHECKING:
    import torch

    from sightline.hardware.devices import Device


class VolumeFiles(Dataset):
    """Whole volumes of any size. A batch holds one, or as many as are small together; `finish` gives them their shape.

    Batch keys after finish(): image (batch, channels, depth, height, width), the largest sides of all, zero outside of
    a volume; extent (batch, 3): its own depth, height and width; original, start, end (batch, 3): the shape of the file
    and the box that was cut out of it; flat (batch,): whether it is a 2D image.
    """

    def __init__(self, files: Files, spec: DataSpec):
        self.spec = spec
        self._names = list(files)
        self._given = [each if isinstance(each, Path) else scan_of(each, spec, name) for name, each in files.items()]
        joined = "\0".join(str(each) if isinstance(each, Path) else "" for each in self._given)
        self.fingerprint = hashlib.sha256(joined.encode("utf-8", "surrogateescape")).hexdigest()
        triple = ((3,), "int64")
        shapes = np.array([self._expected_shape(index) for index in range(len(files))])
        values = max(1, max(spec.channels, len(spec.classes)) * int(shapes.max(0).prod()))
        self.predict_batch = max(1, min(AT_ONCE, AT_ONCE_BYTES // (4 * values)))
        self.layout: Layout = {
            "image": ((max(1, spec.channels * int(shapes.prod(1).max())),), "float32"),
            "volume": ((), "int64"),
            "flat": ((), "bool"),
            **dict.fromkeys(("extent", "original", "start", "end"), triple),
        }

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return self._names[index]

    def bind(self, device: Device, global_batch: int) -> Bound:
        return Bound(self, self.layout, self.load, self.finish)

    def load(self, epoch: int, index: int) -> Arrays:
        """Prepare a volume; return its voxels in one row, and where they lie in the file."""
        name = self._names[index]
        given, channels = self._given[index], self.spec.channels
        expected_shape(self._header(index), self.spec, name)  # before anything is allocated
        scan = read_scan(given, name, channels) if isinstance(given, Path) else given
        image, geometry = prepare_image(scan, self.spec, name)
        if image.size > self.layout["image"][0][0]:
            raise BadSample(name, f"{given} has grown while it was read; predict it again")
        places = {"extent": geometry.shape, "original": geometry.original, "start": geometry.start, "end": geometry.end}
        return {
            "image": image.reshape(-1),
            "volume": np.array(index),
            "flat": np.array(is_image(given) if isinstance(given, Path) else is_flat(given)),
            **{key: np.array(value, np.int64) for key, value in places.items()},
        }

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Turn rows of voxels into volumes. Synchronises with the device, because sizes differ from file to file."""
        extents, channels = batch["extent"].tolist(), self.spec.channels
        if len(extents) == 1:
            image = batch["image"][:, : channels * math.prod(extents[0])].view(1, channels, *extents[0])
            return {**batch, "image": image.to(dtype)}
        sides = [max(1, *of_all) for of_all in zip(*extents, strict=True)]  # those of padding and bad files are 0
        image = batch["image"].new_zeros(len(extents), channels, *sides, dtype=dtype)
        for row, (depth, height, width) in enumerate(extents):
            voxels = batch["image"][row, : channels * depth * height * width]
            image[row, :, :depth, :height, :width] = voxels.view(channels, depth, height, width)
        return {**batch, "image": image}

    def _header(self, index: int) -> Header:
        given = self._given[index]
        if isinstance(given, Path):
            return read_header(given, self._names[index], self.spec.channels)
        channels, *sides = given.voxels.shape
        return Header(
            (channels, sides[0], sides[1], sides[2]), given.spacing, given.affine, given.voxels.dtype, 0, None
        )

    def _expected_shape(self, index: int) -> Triple:
        try:
            return expected_shape(self._header(index), self.spec, self._names[index])
        except BadSample:  # `load` reports it
            return (0, 0, 0)


def scan_of(given: np.ndarray | Image.Image, spec: DataSpec, name: str) -> Scan:
    """Return an image or volume in memory as the scan that its file would be. An array is an image, (height, width) or
    (height, width, 3) uint8, or a volume, (depth, height, width) or with channels first, with the network's spacing."""
    if isinstance(given, Image.Image):
        has_one = is_grey(given) and spec.channels != 3  # as a file is read
        return _flat(pixels_of(given, name, grey=has_one))
    if given.dtype.kind not in "uif" or given.ndim not in (2, 3, 4) or not given.size:
        raise UsageError(
            f"{name} is an array of shape {given.shape} and type {given.dtype}; give numbers as (height, width), "
            "(height, width, 3) uint8, (depth, height, width) or (channels, depth, height, width)"
        )
    if not np.isfinite(given).all():
        raise UsageError(f"{name} holds values that are not finite; replace them, e.g. by numpy.nan_to_num")
    if given.ndim == 2:
        return _flat(given[..., None].repeat(3, 2) if spec.channels == 3 else given[..., None])
    if given.ndim == 3 and given.dtype == np.uint8 and given.shape[2] == 3:
        return _flat(given)
    depth, height, width = (*[1.0] * (3 - len(spec.spacing)), *spec.spacing)  # a network of slices has two
    voxels = np.ascontiguousarray(given if given.ndim == 4 else given[None], np.float32)
    return Scan(voxels, (depth, height, width), np.diag([width, height, depth, 1.0]))


def is_flat(scan: Scan) -> bool:
    """Return whether a scan is a 2D image, which has no place."""
    return np.array_equal(scan.affine, UNPLACED)


def _flat(pixels: np.ndarray) -> Scan:
    """Return an image (height, width, channels) as a volume of one slice."""
    return Scan(np.moveaxis(pixels, 2, 0)[:, None].astype(np.float32, order="C"), (1.0, 1.0, 1.0), UNPLACED)


def expected_shape(header: Header, spec: DataSpec, name: str) -> Triple:
    """Return the largest sides of a prepared volume; raise BadSample if the file does not fit network or memory."""
    if header.shape[0] != spec.channels:
        found = f"has {header.shape[0]} channels, the network expects {spec.channels}"
        raise BadSample(name, f"{found}; give a file with as many")
    shape: Triple = header.shape[1:]
    if len(spec.size) == 3:
        shape = new_shape(shape, header.spacing, spec.spacing)
    if spec.channels * math.prod(shape) > MAX_VOXELS:
        sides = " x ".join(map(str, shape))
        raise BadSample(
            name,
            f"would have {sides} voxels at the spacing {spec.spacing}; {MAX_VOXELS} are allowed, so fix the voxel "
            f"size of {header.spacing} mm in its header",
        )
    return shape
