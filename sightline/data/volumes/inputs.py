"""NIfTI files that a user names: prepared as the network of a run knows its volumes, one whole volume at a time.

What `sightline predict` and `sightline evaluate --labels` look at; `report/volumes.py` takes what comes out of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sightline.data.formats.nifti import MAX_VOXELS, Header, read_header, read_scan
from sightline.data.volumes.geometry import Triple, new_shape, prepare_image
from sightline.errors import BadData, BadSample, UsageError
from sightline.parts import Arrays, Batch, Bound, Dataset, DataSpec, Layout

if TYPE_CHECKING:
    import torch

    from sightline.hardware.devices import Device

SUFFIXES = (".nii.gz", ".nii")
_NAMED = 5  # missing files that an error names


class VolumeFiles(Dataset):
    """Whole volumes of any size. Batches hold one; `finish` gives it the shape that it has.

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
        """The prepared voxels in one row, and where they lie in their file."""
        name = self._names[index]
        expected_voxels(read_header(self._paths[index], name), self.spec, name)  # before anything that large is made
        image, geometry = prepare_image(read_scan(self._paths[index], name), self.spec, name)
        if image.size > self.layout["image"][0][0]:
            raise BadSample(name, f"{self._paths[index]} has grown while it was read; predict it again")
        places = {"extent": geometry.shape, "original": geometry.original, "start": geometry.start, "end": geometry.end}
        return {
            "image": image.reshape(-1),
            "volume": np.array(index),
            **{key: np.array(value, np.int64) for key, value in places.items()},
        }

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """From a row of voxels to a volume; waits for its size, which no two files share."""
        shape = (self.spec.channels, *batch["extent"][0].tolist())
        return {**batch, "image": batch["image"][:1, : math.prod(shape)].view(1, *shape).to(dtype)}

    def _room(self, index: int) -> int:
        try:
            header = read_header(self._paths[index], self._names[index])
            return self.spec.channels * expected_voxels(header, self.spec, self._names[index])
        except BadSample:  # told when its turn comes
            return 1


def expected_voxels(header: Header, spec: DataSpec, name: str) -> int:
    """The most voxels of a channel, once prepared; BadSample where the file does not fit the network or the memory."""
    if header.shape[0] != spec.channels:
        raise BadSample(name, f"has {header.shape[0]} channels, the network knows {spec.channels}; give a fitting file")
    shape: Triple = header.shape[1:]
    if len(spec.size) == 3:
        shape = new_shape(shape, header.spacing, spec.spacing)
    if spec.channels * math.prod(shape) > MAX_VOXELS:
        sides = " x ".join(map(str, shape))
        raise BadSample(
            name,
            f"would have {sides} voxels at the spacing {spec.spacing}; {MAX_VOXELS} are allowed, so mend the voxel "
            f"size of {header.spacing} mm in its header",
        )
    return math.prod(shape)


def case_name(file: str) -> str:
    """What a volume is called: its file without .nii.gz or .nii."""
    for suffix in SUFFIXES:
        if file.lower().endswith(suffix) and len(file) > len(suffix):
            return file[: -len(suffix)]
    return file


def labelled_files(cases: Sequence[str], folder: Path) -> dict[str, tuple[Path, Path]]:
    """The image and the label of each case in a folder of the Decathlon, or where its labelsTr is given."""
    base = folder.parent if folder.name == "labelsTr" else folder
    if not (base / "labelsTr").is_dir() or not (base / "imagesTr").is_dir():
        raise UsageError(f"{folder} holds no imagesTr and labelsTr; give the folder of a Decathlon task with --labels")
    found = {}
    missing = []
    for case in cases:
        image, label = (_file_of(base / part, case) for part in ("imagesTr", "labelsTr"))
        if image and label:
            found[case] = image, label
        else:
            missing.append(f"{case} ({'label' if image else 'image'})")
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise BadData(
            f"{base} lacks {len(missing)} of the {len(cases)} cases of the val split: {', '.join(missing[:_NAMED])}"
            f"{more}; give the folder that the data were prepared from"
        )
    return found


def _file_of(folder: Path, case: str) -> Path | None:
    return next((path for suffix in SUFFIXES if (path := folder / f"{case}{suffix}").is_file()), None)
