"""NIfTI files against nibabel, and what is wrong with a file is said before anything is allocated for it."""

import gzip
import struct
import tracemalloc

import nibabel
import numpy as np
import pytest

from sightline.data.formats import nifti
from sightline.data.formats.nifti import read_header, read_label, read_scan, write_volume
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


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("a.nii", nibabel.Nifti1Image, np.uint8),
        ("a.nii.gz", nibabel.Nifti2Image, np.int16),
        ("a.nii.gz", nibabel.Nifti1Image, np.float32),
        ("a.nii", nibabel.Nifti2Image, np.float64),
        ("a.nii", nibabel.Nifti1Image, np.float64),
    ],
)
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
def test_label_that_is_not_a_class_number(save, value, said):
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


@pytest.mark.filterwarnings("error")
def test_numbers_that_overflow_are_reported_without_a_warning(save):
    path = save(np.full((3, 3, 3), 1e300), "a.nii")
    content = bytearray(path.read_bytes())
    content[352:360] = b"\x01\x00\x00\x00\x00\x00\xf0\x7f"  # a signalling NaN
    path.write_bytes(content)
    with pytest.raises(BadSample, match="27 of its 27 voxels are NaN or infinite"):
        read_scan(path, "a")
    path = save(np.zeros((3, 3, 3), np.uint8), "b.nii", kind=nibabel.Nifti2Image)
    content = bytearray(path.read_bytes())
    struct.pack_into("<4d", content, 104, 1.0, 1e308, 1e308, 1e308)  # pixdim
    struct.pack_into("<2i", content, 344, 1, 0)  # the affine comes from a quaternion
    struct.pack_into("<3d", content, 352, 0.5, 0.5, 0.5)
    path.write_bytes(content)
    with pytest.raises(BadSample, match="voxels of"):
        read_scan(path, "a")


@pytest.mark.parametrize("shape", [(4, 7, 5), (3, 4, 7, 5)])
@pytest.mark.parametrize("name", ["mask.nii", "mask.nii.gz"])
def test_written_as_nibabel_reads_it(tmp_path, shape, name):
    voxels = np.random.default_rng(0).integers(0, 5, shape).astype(np.uint8)
    write_volume(tmp_path / name, voxels, AFFINE)
    image = nibabel.load(tmp_path / name)
    assert np.array_equal(np.asarray(image.dataobj), voxels.T) and np.allclose(image.affine, AFFINE)
    assert image.header["sform_code"] == 1 and image.header.get_xyzt_units()[0] == "mm"
    assert image.get_data_dtype() == np.uint8
    assert [path.name for path in tmp_path.iterdir()] == [name]
    first = (tmp_path / name).read_bytes()
    write_volume(tmp_path / name, voxels, AFFINE)
    assert (tmp_path / name).read_bytes() == first


def change(path, offset, form, value):
    """Pack a value into the header of a .nii.gz."""
    content = bytearray(gzip.decompress(path.read_bytes()))
    struct.pack_into(form, content, offset, value)
    path.write_bytes(gzip.compress(bytes(content)))


# Offsets as nifti1.h has them: dim at 40, datatype at 70, pixdim at 76, vox_offset at 108, sform's rows at 280.
@pytest.mark.parametrize(
    ("offset", "form", "value", "said"),
    [
        (0, "<i", 17, "is not a NIfTI file"),
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
        file.write(content + bytes(2**20))
    with pytest.raises(BadSample, match="a: .* has more than 65536 bytes after its voxels"):
        read_scan(path, "a")


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_bytes_after_the_voxels_are_refused(save, name):
    path = save(np.ones((5, 7, 4), np.uint8), name)
    with (gzip.open if name.endswith("gz") else open)(path, "ab") as file:
        file.write(bytes(65_537))
    with pytest.raises(BadSample, match="a: .*65536 bytes after its voxels|a: .* bytes where its header claims 492"):
        read_scan(path, "a")


CT = (512, 512, 1000)


@pytest.mark.parametrize(
    ("shape", "code", "said"),
    [
        (CT, 4, None),  # int16
        (CT, 16, None),  # float32
        (CT, 64, None),  # float64
        ((512, 512, 2048), 16, None),
        ((512, 512, 2049), 2, "512 x 512 x 2049 voxels; 1 to 536870912 in all"),
        ((1024, 1024, 1024), 2, "1024 x 1024 x 1024 voxels; 1 to 536870912 in all"),
        ((512, 512, 1100), 64, "2306867200 bytes of float64 voxels, more than the 2147483648 allowed"),
    ],
)
def test_the_bound_is_on_bytes_and_ordinary_scans_stay_below(tmp_path, shape, code, said):
    header = nibabel.Nifti1Header()
    header.set_data_shape(shape)
    header.set_data_dtype(code)
    header["magic"], header["vox_offset"] = b"n+1", 352
    path = tmp_path / "a.nii.gz"
    # What does not compress, so that the file could hold the voxels.
    path.write_bytes(gzip.compress(header.binaryblock + np.random.default_rng(0).bytes(2_300_000), 1))
    if said is None:
        assert read_header(path, "a").shape == (1, *reversed(shape))
    else:
        with pytest.raises(BadSample, match=said):
            read_header(path, "a")


@pytest.mark.parametrize(("read", "kept"), [(read_scan, 4), (read_label, 1)])
@pytest.mark.parametrize("scale", [None, (2.0, 1.0)])
def test_only_what_is_kept_is_held_in_memory(save, read, kept, scale):
    """Stored as doubles, eight bytes a voxel; with a scale they would be computed in doubles once more."""
    voxels = np.random.default_rng(0).integers(0, 100, (128, 128, 128)).astype(np.float64)
    path = save(voxels, "a.nii", scale=None)
    if scale:
        content = bytearray(path.read_bytes())
        struct.pack_into("<2f", content, 112, *scale)
        path.write_bytes(content)
    tracemalloc.start()
    found = read(path, "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    array = found.voxels[0] if read is read_scan else found[0]
    expected = voxels if scale is None else voxels * scale[0] + scale[1]
    assert np.array_equal(array.T, expected)
    assert peak < kept * voxels.size + 5 * 2**20  # a block on its way


def test_damage_is_reported_before_its_consequences(save):
    """A flipped bit makes a wrong label; the reason is not the label."""
    path = save(np.zeros((64, 64, 64), np.float32))
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[400] = 0x3F
    damaged = bytearray(gzip.compress(bytes(content), 0))
    path.write_bytes(damaged)
    with pytest.raises(BadSample, match="a label of "):
        read_label(path, "a")
    damaged[-6] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(BadSample, match="damaged .*CRC"):
        read_label(path, "a")


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


def test_what_gzip_may_hold_beside_its_voxels_is_bounded(save):
    """Python's reader goes through names and empty parts a byte at a time: 50 MB of them took 40 s."""
    path = save(np.ones((5, 7, 4), np.int16))
    packed = gzip.compress(gzip.decompress(path.read_bytes()))
    empty, expected = gzip.compress(b""), read_scan(path, "a").voxels

    def named(letters: int) -> bytes:
        return packed[:3] + b"\x08" + packed[4:10] + b"a" * letters + b"\0" + packed[10:]

    for content in (packed, named(1000), empty * 1000 + packed, packed + empty * 1000, packed + bytes(2**20)):
        path.write_bytes(content)
        assert np.array_equal(read_scan(path, "a").voxels, expected)
    for content in (named(70_000), empty * 4000 + packed):
        path.write_bytes(content)
        with pytest.raises(BadSample, match="is damaged"):
            read_header(path, "a")
    for content in (packed + empty * 60_000, packed + bytes(2**20 + 2**17)):
        path.write_bytes(content)
        with pytest.raises(BadSample, match=r"has \d+ bytes where its header claims 632 unpacked; write it again"):
            read_header(path, "a")


def test_label_with_channels(save):
    with pytest.raises(BadSample, match="a label with 2 channels"):
        read_label(save(np.zeros((3, 3, 3, 2), np.uint8)), "a")


def test_writes_what_nifti_holds_only(tmp_path):
    with pytest.raises(TypeError, match="int64 of shape"):
        write_volume(tmp_path / "a.nii", np.zeros((3, 3, 3), np.int64), AFFINE)
    assert not list(tmp_path.iterdir())
