"""Volumes and images given by the user, prepared like the volumes that the network was trained on, one at a time.

For `sightline predict` and `sightline evaluate --labels`; `report/volumes.py` writes the results.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sightline.data.formats.nifti import MAX_VOXELS, Header
from sightline.data.volumes.files import read_header, read_scan
from sightline.data.volumes.geometry import Triple, new_shape, prepare_image
from sightline.errors import BadSample
from sightline.parts import Arrays, Batch, Bound, Dataset, DataSpec, Layout

if TYPE_CHECKING:
    import torch

    from sightline.hardware.devices import Device


class VolumeFiles(Dataset):
    """Whole volumes of any size. A batch holds one; `finish` gives it its shape.

    Batch keys after finish(): image (1, channels, depth, height, width), extent (1, 3) the same depth, height and
    width; original, start, end (1, 3): the shape of the file and the box that was cut out of it.
    """

    predict_batch = 1

    def __init__(self, files: Mapping[str, Path], spec: DataSpec):
        self.spec = spec
        self._names = list(files)
        self._paths = list(files.values())
        joined = "\0".join(map(str, self._paths))
        self.fingerprint = hashlib.sha256(joined.encode("utf-8", "surrogateescape")).hexdigest()
        triple = ((3,), "int64")
        self.layout: Layout = {
            "image": ((max(map(self._room, range(len(files)))),), "float32"),
            "volume": ((), "int64"),
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
        path, channels = self._paths[index], self.spec.channels
        expected_voxels(read_header(path, name, channels), self.spec, name)  # before anything is allocated
        image, geometry = prepare_image(read_scan(path, name, channels), self.spec, name)
        if image.size > self.layout["image"][0][0]:
            raise BadSample(name, f"{path} has grown while it was read; predict it again")
        places = {"extent": geometry.shape, "original": geometry.original, "start": geometry.start, "end": geometry.end}
        return {
            "image": image.reshape(-1),
            "volume": np.array(index),
            **{key: np.array(value, np.int64) for key, value in places.items()},
        }

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Turn a row of voxels into a volume. Synchronises with the device, because sizes differ from file to file."""
        shape = (self.spec.channels, *batch["extent"][0].tolist())
        return {**batch, "image": batch["image"][:1, : math.prod(shape)].view(1, *shape).to(dtype)}

    def _room(self, index: int) -> int:
        try:
            header = read_header(self._paths[index], self._names[index], self.spec.channels)
            return self.spec.channels * expected_voxels(header, self.spec, self._names[index])
        except BadSample:  # `load` reports it
            return 1


def expected_voxels(header: Header, spec: DataSpec, name: str) -> int:
    """Return the most voxels of a prepared channel; raise BadSample if the file does not fit network or memory."""
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
    return math.prod(shape)
