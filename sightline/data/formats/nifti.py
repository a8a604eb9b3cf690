"""NIfTI files: read into arrays of (channel, depth, height, width) with every claim of the header checked first, and
written. Axes stay as they lie in the file, (x, y, z) reversed; nothing is turned to another orientation.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sightline.errors import BadSample
from sightline.files.regular import regular
from sightline.files.whole import written_whole

MAX_BYTES = 2 * 2**30  # of one file's voxels, as stored and as float32: twice the Decathlon's largest CT
MAX_VOXELS = MAX_BYTES // 4  # of all channels
_MAX_SIDE = 2**15
_MAX_OFFSET = 16 * 2**20  # of the voxels in the file: a header and its extensions
_MAX_TAIL = 64 * 2**10  # bytes after the voxels, which some programs leave; a small file may unpack to any amount
_MAX_START = 64 * 2**10  # bytes of a packed file that its header is read from: names and empty parts may come before it
_DEFLATE_RATIO = 1032  # bytes that one byte of a gzip file can become at most
_PACKED = 1.01, 2**20  # of packed voxels: how much larger than plain they may be, as a factor and in bytes
_SPACING_MM = (1e-4, 1e4)
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Scan:
    """A volume as it was scanned."""

    voxels: np.ndarray  # (channel, depth, height, width) float32
    spacing: tuple[float, float, float]  # mm along depth, height, width
    affine: np.ndarray  # (4, 4) float64: (x, y, z) of the file -> mm


@dataclass(frozen=True)
class Header:
    """The claims of a file about itself, in the order of the arrays here."""

    shape: tuple[int, int, int, int]  # (channel, depth, height, width)
    spacing: tuple[float, float, float]
    affine: np.ndarray
    dtype: np.dtype
    offset: int
    scale: tuple[float, float] | None  # slope and intercept, None where values are stored as they are

    @property
    def voxels(self) -> int:
        """Return the voxels of all channels."""
        return math.prod(self.shape)


def read_header(path: Path, name: str) -> Header:
    """Read the header alone, checked; raises BadSample."""
    with _opened(path, name) as file:
        return _header(file, path, name)


def read_scan(path: Path, name: str) -> Scan:
    """Read an image of one or several channels; raises BadSample for a file that is damaged, not finite or not
    NIfTI."""
    with _opened(path, name) as file:
        header = _header(file, path, name)
        voxels, broken = np.empty(header.shape, np.float32), 0
        for values, out in _blocks(file, header, voxels, path, name):
            with np.errstate(over="ignore", invalid="ignore"):  # infinite or NaN, which is reported below
                out[...] = values
            broken += len(out) - int(np.count_nonzero(np.isfinite(out)))
    if broken:
        raise BadSample(name, f"{broken} of its {voxels.size} voxels are NaN or infinite; fix or remove the volume")
    return Scan(voxels, header.spacing, header.affine)


def read_label(path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Read a file of class numbers as ((depth, height, width) uint8, affine); raises BadSample."""
    wrong: np.ndarray | None = None  # reported once the whole file has proved to be undamaged
    with _opened(path, name) as file:
        header = _header(file, path, name)
        if header.shape[0] != 1:
            raise BadSample(name, f"a label with {header.shape[0]} channels; one number a voxel was expected")
        label = np.empty(header.shape[1:], np.uint8)
        for values, out in _blocks(file, header, label, path, name):
            with np.errstate(invalid="ignore"):
                out[...] = values.astype(np.uint8)
            differing = out != values  # NaN differs from everything
            if wrong is None and differing.any():
                wrong = values[differing][:1]
    if wrong is not None:
        raise BadSample(name, f"a label of {wrong[0]}; whole numbers from 0 to 255 were expected")
    return label, header.affine


def write_volume(path: Path, voxels: np.ndarray, affine: np.ndarray) -> None:
    """Write (depth, height, width), or (classes, depth, height, width), as PATH.nii or PATH.nii.gz; whole or not at
    all."""
    import nibabel

    if voxels.dtype not in (np.uint8, np.int16, np.float32) or voxels.ndim not in (3, 4):
        raise TypeError(f"{path}: {voxels.dtype} of shape {voxels.shape}; pass 3 or 4 axes of uint8, int16 or float32")
    image = nibabel.Nifti1Image(voxels.T, np.asarray(affine, np.float64))
    image.set_sform(image.affine, code=1)  # as the scanner says
    image.header.set_xyzt_units("mm")
    content = image.to_bytes()
    if path.name.endswith(".gz"):  # mtime=0: equal volumes make equal files
        content = gzip.compress(content, compresslevel=4, mtime=0)
    with written_whole(path.parent, path.name, str(path)) as file:
        file.write(content)


def _opened(path: Path, name: str) -> BinaryIO:
    try:
        if not path.is_file():  # reading a pipe would block
            raise BadSample(name, f"{path} is {'no regular file' if path.exists() else 'not there'}; give a NIfTI file")
        with open(path, "rb", opener=regular) as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        return gzip.open(path) if is_packed else path.open("rb")  # type: ignore[return-value]  # a BufferedIOBase
    except OSError as error:
        raise BadSample(name, f"{path} cannot be read: {error.strerror}") from error


def _blocks(
    file: BinaryIO, header: Header, into: np.ndarray, path: Path, name: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the values of some voxels and their place in `into`, until all were read; then look at the file's end.

    Values are scaled in double precision. A block at a time, because a whole volume as stored, or in doubles, would
    take up to three times the memory of what is kept.
    """
    flat = into.reshape(-1)
    buffer = memoryview(bytearray(_CHUNK))
    step = _CHUNK // header.dtype.itemsize
    size, filled = flat.size * header.dtype.itemsize, 0
    try:
        file.seek(header.offset)
        for start in range(0, flat.size, step):
            out = flat[start : start + step]
            wanted = buffer[: len(out) * header.dtype.itemsize]
            count = _fill(file, wanted)
            filled += count
            if count < len(wanted):
                reason = f"{path} ends after {filled} of {size} bytes of voxels, it was cut off; fetch it again"
                raise BadSample(name, reason)
            values = np.frombuffer(wanted, header.dtype)
            if header.scale is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    values = values * np.float64(header.scale[0]) + np.float64(header.scale[1])
            yield values, out
        if _fill(file, memoryview(bytearray(_MAX_TAIL + 1))) > _MAX_TAIL:
            raise BadSample(name, f"{path} has more than {_MAX_TAIL} bytes after its voxels; write it again")
    except (OSError, EOFError, zlib.error) as error:
        raise BadSample(name, f"{path} is damaged ({error}); fetch it again") from error


def _fill(file: BinaryIO, view: memoryview) -> int:
    """Return the bytes that were read: less than the view holds only at the end, where gzip's checksum is looked at."""
    filled = 0
    while filled < len(view) and (count := file.readinto(view[filled:])):  # type: ignore[attr-defined]
        filled += count
    return filled


def _header(file: BinaryIO, path: Path, name: str) -> Header:
    import nibabel
    from nibabel.spatialimages import HeaderDataError

    def refuse(reason: str) -> BadSample:
        return BadSample(name, f"{path}: {reason}")

    try:
        begin = _start(file).read(540)
    except (OSError, EOFError, zlib.error) as error:
        raise refuse(f"is damaged ({error}); fetch it again") from error
    kinds: dict[int, Any] = {348: nibabel.Nifti1Header, 540: nibabel.Nifti2Header}
    lengths = {int.from_bytes(begin[:4], "little"), int.from_bytes(begin[:4], "big")} & kinds.keys()
    if not lengths or len(begin) < max(lengths):
        raise refuse("is not a NIfTI file; give .nii or .nii.gz")
    length = lengths.pop()
    try:
        # Unchecked by nibabel, which fixes silently what is refused here.
        found = kinds[length].from_fileobj(io.BytesIO(begin[:length]), check=False)
        dtype = found.get_data_dtype()
        slope, intercept = found.get_slope_inter()
        with np.errstate(all="ignore"):  # what is not finite is refused below
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
        raise refuse(f"voxels of {spacing} mm, or an affine that is not finite; fix its header")
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


def _start(file: BinaryIO) -> BinaryIO:
    """Return the start of a file, unpacked: gzip's reader goes through names and empty parts a byte at a time."""
    if not isinstance(file, gzip.GzipFile):
        return file
    packed = file.fileobj.read(_MAX_START)
    file.fileobj.seek(0)
    return gzip.GzipFile(fileobj=io.BytesIO(packed))


def _shape(dim: list[int], refuse: Any) -> tuple[int, int, int, int]:
    axes = dim[0]
    if axes not in (3, 4):
        raise refuse(f"a volume of {axes} axes; three, or four with the channels last, were expected")
    sizes = dim[1 : axes + 1]
    if not all(1 <= n <= _MAX_SIDE for n in sizes) or math.prod(sizes) > MAX_VOXELS:
        raise refuse(
            f"{' x '.join(map(str, sizes))} voxels; 1 to {MAX_VOXELS} in all were expected; crop or resample it"
        )
    x, y, z, *channels = sizes
    return (channels[0] if channels else 1, z, y, x)


def _check_size(header: Header, is_packed: bool, stored: int, refuse: Any) -> None:
    """Refuse a size that the file cannot hold: nothing is allocated because a header says so."""
    size = header.voxels * header.dtype.itemsize
    if size > MAX_BYTES:
        raise refuse(
            f"{size} bytes of {header.dtype} voxels, more than the {MAX_BYTES} allowed; crop it, or store int16"
        )
    wanted = header.offset + size
    if wanted > (stored * _DEFLATE_RATIO if is_packed else stored):
        raise refuse(f"its header claims {wanted} bytes, which {stored} cannot hold; it was cut off, fetch it again")
    if stored > (wanted * _PACKED[0] + _PACKED[1] if is_packed else wanted) + _MAX_TAIL:
        raise refuse(f"has {stored} bytes where its header claims {wanted}{' unpacked' * is_packed}; write it again")
