"""Mapped .npy files against np.load, and headers that would make NumPy raise what nobody catches."""

import io
import struct

import numpy as np
import pytest

from sightline.errors import BadSample
from sightline.files.arrays import map_array


def npy(header: bytes, content: bytes = bytes(48), version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + content


@pytest.mark.parametrize(
    ("dtype", "version", "order"),
    [("<f4", (1, 0), "C"), (">f8", (1, 0), "F"), ("|u1", (2, 0), "C"), ("<i2", (2, 0), "F"), ("<f4", (1, 0), "F")],
)
def test_as_numpy_reads_it(tmp_path, dtype, version, order):
    values = np.asarray(np.arange(24).reshape(2, 3, 4), dtype, order=order)
    stream = io.BytesIO()
    np.lib.format.write_array(stream, values, version)
    path = tmp_path / "a.npy"
    path.write_bytes(stream.getvalue())
    found = map_array(path, "a", "write it again")
    assert isinstance(found, np.memmap) and found.dtype == np.load(path).dtype
    assert np.array_equal(found, np.load(path)) and found.flags.f_contiguous == (order == "F")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "EOF|0 bytes"),
        (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4,\n"), "EOF"),
        (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4L), }\n"), "Python 2"),
        (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 99999999999999999999), }\n"), "int"),
        (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-3, 4), }\n"), "cannot be read"),
        (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 40), }\n"), "cannot be read"),
        (npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (3,), }\n"), "it holds object, numbers were expected"),
        (npy(b"{[]: 1}\n"), "unhashable"),
        (npy(b"(" * 3000), "cannot be read"),
        (npy(b"-" * 4000 + b"1"), "cannot be read"),
        (npy(b"{}", version=3), r"its format is \(3, 0\)"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "EOF|array header"),  # 4 GB of header
    ],
)
def test_damaged_headers_are_refused_with_the_remedy(tmp_path, content, said):
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    with pytest.raises(BadSample, match=f"^case 7: {path} cannot be read: .*; write it again$") as refusal:
        map_array(path, "case 7", "write it again")
    assert refusal.match(said)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadSample, match="No such file"):
        map_array(tmp_path / "a.npy", "a", "write it again")
