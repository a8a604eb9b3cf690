"""NIfTI files: read into arrays of (channel, depth, height, width) with every claim of the header checked first, and
written. Axes stay as they lie in the file, (x, y, z) reversed; nothing is turned to another orientation.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sightline.data.whole_files import folder_below, written_whole
from sightline.errors import BadSample

MAX_VOXELS = 2**30  # of one file, all channels: four times the Decathlon's largest, 4 GB as float32
_MAX_SIDE = 2**15
_MAX_OFFSET = 16 * 2**20  # of the voxels in the file: a header and its extensions
_MAX_TAIL = 16 * 2**20  # bytes after the voxels: a small file may unpack to any amount of them
_DEFLATE_RATIO = 1032  # bytes that one byte of a gzip file can become at most
_SPACING_MM = (1e-4, 1e4)
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Scan:
    """A volume as it was taken."""

    voxels: np.ndarray  # (channel, depth, height, width) float32
    spacing: tuple[float, float, float]  # mm along depth, height, width
    affine: np.ndarray  # (4, 4) float64: (x, y, z) of the file -> mm


@dataclass(frozen=True)
class Header:
    """What a file says of itself, in the order of the arrays here."""

    shape: tuple[int, int, int, int]  # (channel, depth, height, width)
    spacing: tuple[float, float, float]
    affine: np.ndarray
    dtype: np.dtype
    offset: int
    scale: tuple[float, float] | None  # slope and intercept, None where values are stored as they are

    @property
    def voxels(self) -> int:
        """Of all channels."""
        return math.prod(self.shape)


def read_header(path: Path, name: str) -> Header:
    """The header alone, checked; raises BadSample."""
    with _opened(path, name) as file:
        return _header(file, path, name)


def read_scan(path: Path, name: str) -> Scan:
    """An image of one or several channels; raises BadSample for what is damaged, not finite or no NIfTI."""
    header, stored = _read(path, name)
    if header.scale is None:
        voxels = stored.astype(np.float32)
    else:
        slope, intercept = map(np.float64, header.scale)
        voxels = np.empty(stored.shape, np.float32)
        with np.errstate(over="ignore"):
            for plane, out in zip(stored.reshape(-1, *stored.shape[2:]), _planes(voxels), strict=True):
                out[...] = plane * slope + intercept
    broken = sum(int(np.count_nonzero(~np.isfinite(plane))) for plane in _planes(voxels))
    if broken:
        raise BadSample(name, f"{broken} of its {voxels.size} voxels are NaN or infinite; mend or remove the volume")
    return Scan(voxels, header.spacing, header.affine)


def read_label(path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """((depth, height, width) uint8, affine) of a file of class numbers; raises BadSample."""
    header, stored = _read(path, name)
    if header.shape[0] != 1:
        raise BadSample(name, f"a label with {header.shape[0]} channels; one number a voxel was expected")
    values = stored[0]
    if header.scale is not None:
        values = values * np.float64(header.scale[0]) + np.float64(header.scale[1])
    with np.errstate(invalid="ignore"):
        label = values.astype(np.uint8)
    differing = label != values  # NaN differs from everything
    if differing.any():
        found = values[differing].ravel()[0]
        raise BadSample(name, f"a label of {found}; whole numbers from 0 to 255 were expected")
    return label, header.affine


def write_volume(path: Path, voxels: np.ndarray, affine: np.ndarray) -> None:
    """(depth, height, width), or (classes, depth, height, width), as PATH.nii or PATH.nii.gz; whole or not at all."""
    import nibabel

    if voxels.dtype not in (np.uint8, np.int16, np.float32) or voxels.ndim not in (3, 4):
        raise TypeError(f"{path}: {voxels.dtype} of shape {voxels.shape}; pass 3 or 4 axes of uint8, int16 or float32")
    image = nibabel.Nifti1Image(voxels.T, np.asarray(affine, np.float64))
    image.set_sform(image.affine, code=1)  # as the scanner says
    image.header.set_xyzt_units("mm")
    content = image.to_bytes()
    if path.name.endswith(".gz"):  # mtime=0: equal volumes make equal files
        content = gzip.compress(content, compresslevel=4, mtime=0)
    with folder_below(path.parent, path.name) as (folder, last), written_whole(folder, last, str(path)) as file:
        file.write(content)


def _planes(voxels: np.ndarray) -> np.ndarray:
    """Slice by slice, so that what is computed on the way stays small."""
    return voxels.reshape(-1, *voxels.shape[2:])


def _opened(path: Path, name: str) -> BinaryIO:
    try:
        if not path.is_file():  # reading a pipe would wait for ever
            raise BadSample(name, f"{path} is {'no regular file' if path.exists() else 'not there'}; give a NIfTI file")
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        return gzip.open(path) if is_packed else path.open("rb")  # type: ignore[return-value]  # a BufferedIOBase
    except OSError as error:
        raise BadSample(name, f"{path} cannot be read: {error.strerror}") from error


def _read(path: Path, name: str) -> tuple[Header, np.ndarray]:
    """The header and the voxels (channel, depth, height, width) as stored."""
    with _opened(path, name) as file:
        header = _header(file, path, name)
        size = header.voxels * header.dtype.itemsize
        try:
            file.seek(header.offset)
            content = bytearray(size)
            filled, view = 0, memoryview(content)
            while filled < size and (count := file.readinto(view[filled : filled + _CHUNK])):  # type: ignore[attr-defined]
                filled += count
            tail = 0
            while part := file.read(_CHUNK):  # to the end, where gzip's checksum stands
                tail += len(part)
                if tail > _MAX_TAIL:
                    raise BadSample(
                        name, f"{path} goes on for more than {_MAX_TAIL} bytes after its voxels; write it anew"
                    )
        except (OSError, EOFError, zlib.error) as error:
            raise BadSample(name, f"{path} is damaged ({error}); fetch it again") from error
    if filled < size:
        raise BadSample(name, f"{path} ends after {filled} of {size} bytes of voxels, it was cut off; fetch it again")
    return header, np.frombuffer(content, header.dtype).reshape(header.shape)


def _header(file: BinaryIO, path: Path, name: str) -> Header:
    import nibabel
    from nibabel.spatialimages import HeaderDataError

    def refuse(reason: str) -> BadSample:
        return BadSample(name, f"{path}: {reason}")

    try:
        begin = file.read(540)
    except (OSError, EOFError, zlib.error) as error:
        raise refuse(f"is damaged ({error}); fetch it again") from error
    kinds: dict[int, Any] = {348: nibabel.Nifti1Header, 540: nibabel.Nifti2Header}
    lengths = {int.from_bytes(begin[:4], "little"), int.from_bytes(begin[:4], "big")} & kinds.keys()
    if not lengths or len(begin) < max(lengths):
        raise refuse("is no NIfTI file; give .nii or .nii.gz")
    length = lengths.pop()
    try:
        # Unchecked by nibabel, which mends silently what is told here.
        found = kinds[length].from_fileobj(io.BytesIO(begin[:length]), check=False)
        dtype = found.get_data_dtype()
        slope, intercept = found.get_slope_inter()
        affine = np.asarray(found.get_best_affine(), np.float64)
    except (HeaderDataError, KeyError, ValueError, ArithmeticError) as error:
        raise refuse(f"its header is damaged ({error}); fetch it again") from error
    if not found["magic"].item().startswith(b"n+"):
        raise refuse("its voxels lie in another file (.hdr with .img); convert it to one .nii.gz")
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise refuse(f"its voxels are {dtype}; integers or floats of at most 64 bits were expected")
    shape = _shape(found["dim"].tolist(), refuse)
    spacing = tuple(abs(float(mm)) for mm in found["pixdim"][3:0:-1])
    if not all(_SPACING_MM[0] <= mm <= _SPACING_MM[1] for mm in spacing) or not np.isfinite(affine).all():
        raise refuse(f"voxels of {spacing} mm, or an affine that is not finite; mend its header")
    offset = float(found["vox_offset"])
    if not length <= offset <= _MAX_OFFSET:
        raise refuse(f"its voxels begin at byte {offset}; {length} to {_MAX_OFFSET} were expected, it is damaged")
    header = Header(
        shape,
        (spacing[0], spacing[1], spacing[2]),
        affine,
        dtype,
        int(offset),
        None if slope is None or (slope, intercept) == (1, 0) else (slope, intercept or 0.0),
    )
    _check_size(header, isinstance(file, gzip.GzipFile), path.stat().st_size, refuse)
    return header


def _shape(dim: list[int], refuse: Any) -> tuple[int, int, int, int]:
    axes = dim[0]
    sizes = dim[1 : axes + 1] if 1 <= axes <= 7 else []
    if len(sizes) not in (3, 4):
        raise refuse(f"a volume of {axes} axes; three, or four with the channels last, were expected")
    if not all(1 <= n <= _MAX_SIDE for n in sizes) or math.prod(sizes) > MAX_VOXELS:
        raise refuse(f"{' x '.join(map(str, sizes))} voxels; 1 to {MAX_VOXELS} in all were expected")
    x, y, z, *channels = sizes
    return (channels[0] if channels else 1, z, y, x)


def _check_size(header: Header, is_packed: bool, stored: int, refuse: Any) -> None:
    """Nothing is allocated because a header says so: the file must be able to hold it."""
    wanted = header.offset + header.voxels * header.dtype.itemsize
    if wanted > (stored * _DEFLATE_RATIO if is_packed else stored):
        raise refuse(f"its header claims {wanted} bytes, which {stored} cannot hold; it was cut off, fetch it again")
