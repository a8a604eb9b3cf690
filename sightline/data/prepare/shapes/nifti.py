"""The bytes of .nii.gz files in NIfTI-1, so that drawing volumes needs no library.

Field order and offsets are those of nifti1.h: a 348-byte header, four bytes saying "no extension", then the voxels.
"""

import gzip
import struct

import numpy as np

_HEADER = struct.Struct("<i 10s 18s i h s B 8h 3f 4h 8f 3f h 2B 4f 2i 80s 24s 2h 6f 12f 16s 4s")
_DATATYPE = {np.dtype(np.uint8): 2, np.dtype(np.int16): 4, np.dtype(np.float32): 16}
_VOXEL_OFFSET = 352
_UNITS_MM = 2
_ALIGNED_TO_SCANNER = 1

assert _HEADER.size == 348, "the header table does not add up to NIfTI-1's 348 bytes"


def encode_nifti(voxels: np.ndarray, affine: np.ndarray, path: str) -> bytes:
    """Return a 3D or 4D array and its voxel-to-mm affine as a file; equal input gives equal bytes. `path` names it in
    errors."""
    if voxels.dtype not in _DATATYPE:
        known = ", ".join(str(dtype) for dtype in _DATATYPE)
        raise TypeError(f"{path}: voxels are {voxels.dtype}, this writer knows {known}; convert them first")
    if voxels.ndim not in (3, 4) or affine.shape != (4, 4):
        raise ValueError(
            f"{path}: voxels of shape {voxels.shape} with an affine of shape {affine.shape}; "
            "pass a 3D or 4D array and a 4x4 affine"
        )
    # NIfTI counts x fastest, which is NumPy's Fortran order; files are little-endian whatever the machine.
    content = voxels.astype(voxels.dtype.newbyteorder("<"), copy=False).tobytes(order="F")
    # mtime=0: the clock would otherwise be the one thing that differs between two draws.
    return gzip.compress(_header(voxels, affine) + bytes(4) + content, compresslevel=4, mtime=0)


def _header(voxels: np.ndarray, affine: np.ndarray) -> bytes:
    dim = [voxels.ndim, *voxels.shape] + [1] * (7 - voxels.ndim)
    spacing = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    pixdim = [1.0, *spacing, 1.0, 1.0, 1.0, 1.0]
    return _HEADER.pack(
        348, b"", b"", 0, 0, b"r", 0,  # sizeof_hdr ... regular, dim_info
        *dim,
        0.0, 0.0, 0.0,  # intent_p1 to p3
        0, _DATATYPE[voxels.dtype], 8 * voxels.dtype.itemsize, 0,  # intent_code, datatype, bitpix, slice_start
        *pixdim,
        _VOXEL_OFFSET, 1.0, 0.0,  # vox_offset, scl_slope, scl_inter: voxel values are stored as they are
        0, 0, _UNITS_MM,  # slice_end, slice_code, xyzt_units
        0.0, 0.0, 0.0, 0.0, 0, 0,  # cal_max ... glmin
        b"sightline prepare shapes", b"",
        0, _ALIGNED_TO_SCANNER,  # qform_code, sform_code: the affine below is the only geometry
        *([0.0] * 6),
        *affine[:3].ravel(),
        b"", b"n+1\0",
    )  # fmt: skip
