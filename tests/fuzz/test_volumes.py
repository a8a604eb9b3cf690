"""Mutated volumes, raw and prepared: each is read, or refused with BadSample."""

import gzip
import io
import math
import runpy
import struct
from contextlib import suppress
from pathlib import Path

import nibabel
import numpy as np
import pytest

from sightline.data.formats.nifti import read_header, read_label, read_scan
from sightline.data.sources.decathlon import DecathlonSource
from sightline.data.volumes.plan import Case, VolumePlan
from sightline.errors import BadSample
from sightline.inference.label_files import compare
from sightline.parts import DataSpec

fuzz = runpy.run_path(str(Path(__file__).with_name("mutate.py")))["fuzz"]
COUNTS = pytest.mark.parametrize("mutations", [20, pytest.param(3000, marks=pytest.mark.slow)])
SHAPE = (3, 5, 4)  # depth, height, width
# What stands in the fields of a NIfTI header: sizes, kinds of voxels, spacings, offsets, magic numbers.
NIFTI_TOKENS = [
    *(struct.pack("<h", value) for value in (-1, 0, 1, 2, 7, 8, 16, 64, 256, 512, 768, 1024, 1280, 1536, 2048, 32767)),
    *(struct.pack("<f", value) for value in (0.0, -1.0, 1e-9, 1e30, np.nan, np.inf, 352.0, 1e9)),
    *(struct.pack("<i", value) for value in (348, 540)),
    *(b"n+1\0", b"ni1\0", b"n+2\0"),
]
NPY_TOKENS = [
    *(b"'<f4'", b"'|O'", b"'>f8'", b"[('a', '<f4')]", b"('<f4', (2,))", b"True", b"None", b"'shape'", b"(", b"]", b"{"),
    *(b"10L", b"-" * 60, b"1e999", b"\xff\xfe", b"#", b"\\", b"'''", b"\n", b"\t", b"0x", b"lambda: 0", b"{[]: 1}"),
]


def assert_clean(outcome, mutations):
    print(outcome)
    assert not outcome.foreign, outcome
    assert mutations < 1000 or min(outcome.accepted, outcome.refused) > 10, outcome


def volume(dtype, kind=nibabel.Nifti1Image, channels=(), scale=None):
    """The bytes of a .nii file."""
    voxels = np.random.default_rng(0).integers(0, 5, (*reversed(SHAPE), *channels)).astype(dtype)
    image = kind(voxels, np.diag([1.0, 1.0, 2.5, 1.0]))
    if scale:
        image.header.set_slope_inter(*scale)
    return image.to_bytes()


def read_volume(path):
    """As an image and as a label; accepted where it is one of the two."""
    read_header(path, "fuzz")
    with suppress(BadSample):
        label, _ = read_label(path, "fuzz")
        assert label.dtype == np.uint8 and label.ndim == 3
        return
    scan = read_scan(path, "fuzz")
    assert scan.voxels.dtype == np.float32 and scan.voxels.ndim == 4 and np.isfinite(scan.voxels).all()


@COUNTS
@pytest.mark.parametrize("form", ["nii", "nii.gz", "nii inside gz"])
def test_nifti(tmp_path, form, mutations):
    """The bytes that change are those of a .nii, of a .nii.gz, or those that a .nii.gz unpacks to."""
    seeds = [
        volume(np.int16),
        volume(np.uint8, nibabel.Nifti2Image),
        volume(np.float32, channels=(2,)),
        volume(np.float64),
        volume(np.int16, scale=(0.5, -3.0)),
        nibabel.Nifti1Image(np.ones((4, 5, 3), ">i2"), np.eye(4), nibabel.Nifti1Header(endianness=">")).to_bytes(),
    ]
    path = tmp_path / "a.nii"

    def read(data):
        path.write_bytes(gzip.compress(data, 1) if form == "nii inside gz" else data)
        read_volume(path)

    seeds = [gzip.compress(seed, mtime=0) for seed in seeds] if form == "nii.gz" else seeds
    assert_clean(fuzz(read, seeds, mutations, tokens=NIFTI_TOKENS), mutations)


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@COUNTS
def test_prepared_volumes(tmp_path, mutations):
    """Half of the mutations reach the header alone, which NumPy reads as Python text."""
    spec = DataSpec(("background", "organ"), 2, SHAPE[1:], (), (), spacing=(1.0, 1.0))
    case = Case("a", SHAPE, SHAPE, (0, 0, 0), SHAPE, SHAPE, (1.0, 1.0, 1.0), "a_x.npy", "a_y.npy")
    image = npy(np.random.default_rng(0).normal(size=(2, *SHAPE)).astype(np.float32))
    for name in (case.image, case.label):
        (tmp_path / name).write_bytes(image)
    source = DecathlonSource(tmp_path, VolumePlan("04", "a", 2, "training", spec, (case,), "raw"), [case])

    def read(data):
        (tmp_path / case.image).write_bytes(data)
        assert len(source.image(0).tobytes()) == 4 * 2 * math.prod(SHAPE)

    seeds = [image, image[:128], image[:6] + b"\x02\x00\x76\x00\x00\x00" + image[10:]]
    assert_clean(fuzz(read, seeds, mutations, tokens=NPY_TOKENS), mutations)


@COUNTS
def test_probabilities_that_predict_wrote(tmp_path, mutations):
    (tmp_path / "label.nii").write_bytes(volume(np.uint8))
    predicted = tmp_path / "a.npy"

    def read(data):
        predicted.write_bytes(data)
        compare("a", predicted, tmp_path / "label.nii", 5)

    seeds = [npy(np.random.default_rng(0).random((5, *SHAPE)).astype(np.float32)), npy(np.zeros((2, *SHAPE)))]
    assert_clean(fuzz(read, seeds, mutations, tokens=NPY_TOKENS), mutations)
