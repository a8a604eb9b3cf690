"""Images and masks of any form as volumes, compared with what Pillow and NumPy read."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.decode import decode_values
from sightline.data.volumes.files import channel_files, read_header, read_label, read_scan
from sightline.data.volumes.layouts import pair_files, without_end

MASK = np.arange(7 * 9, dtype=np.uint8).reshape(7, 9) % 3


def encoded(image: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


def palette(mask: np.ndarray) -> Image.Image:
    image = Image.fromarray(mask)
    image.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
    return image


FORMS = {
    "grey": Image.fromarray(MASK),
    "palette": palette(MASK),
    "grey as RGB": Image.fromarray(np.dstack([MASK] * 3)),
    "grey and alpha": Image.merge("LA", [Image.fromarray(MASK), Image.fromarray(MASK * 80)]),
    "16 bits": Image.fromarray(MASK.astype(np.uint16)),
}


@pytest.mark.parametrize("name", ["m.png", "m.tif"])
@pytest.mark.parametrize("form", FORMS)
def test_masks_hold_numbers_however_they_are_stored(tmp_path: Path, form: str, name: str):
    FORMS[form].save(tmp_path / name)
    label, _ = read_label(tmp_path / name, "m")
    assert label.dtype == np.uint8 and label.shape == (1, 7, 9)
    np.testing.assert_array_equal(label[0], MASK)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_masks_of_few_bits_keep_their_numbers(bits: int):
    values = MASK % 2**bits
    np.testing.assert_array_equal(decode_values(encoded(palette(values), format="PNG", bits=bits), "m"), values)
    # Pillow writes grey of 8 bits only; a grey PNG of fewer is a palette PNG with another colour type and no palette.
    import zlib

    from sightline.data.formats.image_headers import PNG_SIGNATURE

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    rows = b"".join(b"\0" + np.packbits(np.unpackbits(row[:, None], axis=1)[:, -bits:]).tobytes() for row in values)
    header = (9).to_bytes(4, "big") + (7).to_bytes(4, "big") + bytes([bits, 0, 0, 0, 0])
    png = PNG_SIGNATURE + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    np.testing.assert_array_equal(decode_values(png, "m"), values)


def test_black_and_white_are_two_classes_but_not_one_of_three(tmp_path: Path):
    Image.fromarray((MASK > 0).astype(np.uint8) * 255).save(tmp_path / "m.png")
    np.testing.assert_array_equal(read_label(tmp_path / "m.png", "m", classes=2)[0][0], MASK > 0)
    for classes in (0, 3):
        assert set(np.unique(read_label(tmp_path / "m.png", "m", classes)[0])) == {0, 255}


def test_images_have_the_channels_that_a_network_wants(tmp_path: Path):
    colours = np.random.default_rng(0).integers(0, 255, (7, 9, 3), np.uint8)
    deep = np.random.default_rng(0).integers(0, 65535, (7, 9), np.uint16)
    Image.fromarray(colours).save(tmp_path / "colour.png")
    Image.fromarray(colours[..., 0]).save(tmp_path / "grey.png")
    Image.fromarray(deep).save(tmp_path / "deep.png")
    for name, channels, expected in (
        ("colour", 3, colours.transpose(2, 0, 1)),
        ("colour", 1, colours.transpose(2, 0, 1)),  # refused by its header
        ("grey", 1, colours[None, ..., 0]),
        ("grey", 3, np.stack([colours[..., 0]] * 3)),
        ("deep", 1, deep[None]),
    ):
        path = tmp_path / f"{name}.png"
        scan = read_scan(path, name, channels)
        assert scan.voxels.dtype == np.float32 and read_header(path, name, channels).shape == scan.voxels.shape
        np.testing.assert_array_equal(scan.voxels[:, 0], expected)


def test_channels_of_a_case():
    files = channel_files(Path("in/a_0000.nii.gz"), 3)
    assert [path.name for path in files] == ["a_0000.nii.gz", "a_0001.nii.gz", "a_0002.nii.gz"]
    for path, channels in (("a_0000.nii.gz", 1), ("a_0001.nii.gz", 3), ("a.nii.gz", 3), ("a_0000.png", 3)):
        assert channel_files(Path(path), channels) == [Path(path)]


@pytest.mark.parametrize(
    ("stem", "case"),
    [("a_seg", "a"), ("a-mask", "a"), ("a.label", "a"), ("a_Segmentation", "a"), ("aseg", "aseg"), ("_seg", "_seg")],
)
def test_ends_of_labels(stem: str, case: str):
    assert without_end(stem) == case


def test_a_label_of_the_same_name_comes_first(tmp_path: Path):
    for name in ("images/a_seg.nii.gz", "images/b.nii.gz", "labels/a_seg.nii.gz", "labels/b_mask.nii"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = pair_files(tmp_path / "images", tmp_path / "labels", tmp_path)
    assert found.problems == () and [tuple(pair) for pair in found.cases] == [
        ("a_seg", "images/a_seg.nii.gz", "labels/a_seg.nii.gz"),
        ("b", "images/b.nii.gz", "labels/b_mask.nii"),
    ]
