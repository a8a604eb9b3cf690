"""NIfTI files against nibabel, and what is wrong with a file is said before anything is allocated for it."""

import gzip
import struct

import nibabel
import numpy as np
import pytest

from sightline.data import nifti
from sightline.data.nifti import read_header, read_label, read_scan, write_volume
from sightline.errors import BadSample

AFFINE = np.array([[-0.8, 0.1, 0, 40], [0.1, 0.9, 0, -30], [0, 0, 2.5, 7], [0, 0, 0, 1.0]])


@pytest.fixture
def save(tmp_path):
    """save(voxels) -> path of a file that nibabel wrote."""

    def write(voxels, name="a.nii.gz", affine=AFFINE, kind=nibabel.Nifti1Image, scale=None):
        image = kind(voxels, affine)
        if scale:
            image.header.set_slope_inter(*scale)
        nibabel.save(image, tmp_path / name)
        return tmp_path / name

    return write


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.float64])
def test_scan_as_nibabel_reads_it(save, name, kind, dtype):
    path = save(np.random.default_rng(0).integers(0, 200, (5, 7, 4)).astype(dtype), name, kind=kind)
    found, image = read_scan(path, "a"), nibabel.load(path)
    assert found.voxels.dtype == np.float32 and found.voxels.shape == (1, 4, 7, 5)
    assert np.array_equal(found.voxels[0].transpose(2, 1, 0), image.get_fdata(dtype=np.float32))
    assert np.allclose(found.affine, image.affine)
    assert found.spacing == pytest.approx(image.header.get_zooms()[::-1])


def test_channels_come_first(save):
    voxels = np.random.default_rng(0).normal(size=(5, 7, 4, 3)).astype(np.float32)
    found = read_scan(save(voxels), "a")
    assert np.array_equal(found.voxels, voxels.transpose(3, 2, 1, 0))
    assert read_header(save(voxels), "a").shape == (3, 4, 7, 5)


def test_scaled_values_as_nibabel_scales_them(save):
    voxels = np.random.default_rng(0).integers(-900, 900, (5, 7, 4)).astype(np.int16)
    path = save(voxels, scale=(0.37, -11.5))
    assert np.array_equal(read_scan(path, "a").voxels[0].T, nibabel.load(path).get_fdata().astype(np.float32))


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_label(save, dtype):
    voxels = np.random.default_rng(0).integers(0, 4, (5, 7, 4))
    label, affine = read_label(save(voxels.astype(dtype)), "a")
    assert label.dtype == np.uint8 and np.array_equal(label.T, voxels) and np.allclose(affine, AFFINE)


@pytest.mark.parametrize(("value", "said"), [(0.5, "0.5"), (-1, "-1"), (256, "256"), (np.nan, "nan")])
def test_label_that_is_no_class_number(save, value, said):
    voxels = np.zeros((3, 3, 3), np.float32)
    voxels[1, 2, 0] = value
    with pytest.raises(BadSample, match=f"^case 7: a label of {said}.*0 to 255"):
        read_label(save(voxels), "case 7")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scan_that_is_not_finite(save, value):
    voxels = np.ones((3, 3, 3, 2), np.float32)
    voxels[1, 2, 0, 1] = value
    with pytest.raises(BadSample, match="^case 7: 1 of its 54 voxels are NaN or infinite"):
        read_scan(save(voxels), "case 7")


@pytest.mark.parametrize("shape", [(4, 7, 5), (3, 4, 7, 5)])
@pytest.mark.parametrize("name", ["mask.nii", "mask.nii.gz"])
def test_written_as_nibabel_reads_it(tmp_path, shape, name):
    voxels = np.random.default_rng(0).integers(0, 5, shape).astype(np.uint8)
    write_volume(tmp_path / name, voxels, AFFINE)
    image = nibabel.load(tmp_path / name)
    assert np.array_equal(np.asarray(image.dataobj), voxels.T) and np.allclose(image.affine, AFFINE)
    assert image.header.get_xyzt_units()[0] == "mm" and image.get_data_dtype() == np.uint8
    assert [path.name for path in tmp_path.iterdir()] == [name]
    first = (tmp_path / name).read_bytes()
    write_volume(tmp_path / name, voxels, AFFINE)
    assert (tmp_path / name).read_bytes() == first


def change(path, offset, form, value):
    """Packs a value into the header of a .nii.gz."""
    content = bytearray(gzip.decompress(path.read_bytes()))
    struct.pack_into(form, content, offset, value)
    path.write_bytes(gzip.compress(bytes(content)))


# Offsets as nifti1.h has them: dim at 40, datatype at 70, pixdim at 76, vox_offset at 108, sform's rows at 280.
@pytest.mark.parametrize(
    ("offset", "form", "value", "said"),
    [
        (0, "<i", 17, "is no NIfTI file"),
        (40, "<h", 2, "a volume of 2 axes"),
        (40, "<h", 5, "a volume of 5 axes"),
        (42, "<h", -3, "-3 x 7 x 4 voxels"),
        (42, "<h", 0, "0 x 7 x 4 voxels"),
        (42, "<h", 30000, "which .* cannot hold"),
        (70, "<h", 128, "voxels are"),  # colours
        (70, "<h", 32, "voxels are complex64"),
        (70, "<h", 999, "header is damaged"),
        (80, "<f", 0.0, "voxels of"),
        (80, "<f", float("nan"), "voxels of"),
        (108, "<f", 1e9, "begin at byte"),
        (108, "<f", 20.0, "begin at byte"),
        (280, "<f", float("nan"), "affine that is not finite"),
        (344, "<4s", b"ni1\0", "lie in another file"),
    ],
)
def test_headers_that_cannot_be(save, offset, form, value, said):
    path = save(np.zeros((5, 7, 4), np.int16))
    change(path, offset, form, value)
    with pytest.raises(BadSample, match=f"^case 7: .*{said}"):
        read_scan(path, "case 7")


def test_a_header_cannot_ask_for_memory(save, monkeypatch):
    path = save(np.zeros((5, 7, 4), np.uint8))
    content = bytearray(gzip.decompress(path.read_bytes()))
    struct.pack_into("<4h", content, 40, 3, 32000, 32000, 32000)
    path.write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(BadSample, match=f"1 to {nifti.MAX_VOXELS} in all"):
        read_scan(path, "a")
    plain = path.with_name("plain.nii")
    struct.pack_into("<4h", content, 40, 3, 512, 512, 512)
    plain.write_bytes(content)
    with pytest.raises(BadSample, match="claims 134218080 bytes, which 492 cannot hold"):
        read_scan(plain, "a")


def test_a_small_file_cannot_be_unpacked_without_end(save):
    path = save(np.ones((5, 7, 4), np.uint8))
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content + bytes(99)))
    assert (read_scan(path, "a").voxels == 1).all()  # what some programs leave there harms nobody
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(content)
        for _ in range(40):
            file.write(bytes(2**20))
    with pytest.raises(BadSample, match="a: .* goes on for more than 16777216 bytes after its voxels"):
        read_scan(path, "a")


def test_damaged_files(save, tmp_path):
    path = save(np.random.default_rng(0).integers(0, 1000, (16, 16, 16)).astype(np.int16))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadSample, match="damaged"):
        read_scan(path, "a")
    flipped = bytearray(whole)
    flipped[-6] ^= 1  # of gzip's checksum
    path.write_bytes(flipped)
    with pytest.raises(BadSample, match="damaged .*CRC"):
        read_scan(path, "a")
    for content in (b"", b"\x1f\x8b", b"no such thing"):
        path.write_bytes(content)
        with pytest.raises(BadSample, match="^a: "):
            read_scan(path, "a")
    with pytest.raises(BadSample, match="is not there"):
        read_scan(tmp_path / "none.nii.gz", "a")
    with pytest.raises(BadSample, match="no regular file"):
        read_scan(tmp_path, "a")
    plain = save(np.zeros((8, 8, 8), np.int16), "b.nii")
    plain.write_bytes(plain.read_bytes()[:-10])
    with pytest.raises(BadSample, match="cannot hold"):
        read_scan(plain, "a")


def test_label_with_channels(save):
    with pytest.raises(BadSample, match="a label with 2 channels"):
        read_label(save(np.zeros((3, 3, 3, 2), np.uint8)), "a")


def test_writes_what_nifti_holds_only(tmp_path):
    with pytest.raises(TypeError, match="int64 of shape"):
        write_volume(tmp_path / "a.nii", np.zeros((3, 3, 3), np.int64), AFFINE)
    assert not list(tmp_path.iterdir())
