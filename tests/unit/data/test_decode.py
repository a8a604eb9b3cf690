"""Every kind of image becomes right RGB, every kind of damage BadSample; bombs are stopped by their header."""

import io
import itertools
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from sightline.data import decode
from sightline.data.decode import MAX_BYTES, MAX_PIXELS, decode_rgb, read_header
from sightline.data.formats import image_headers
from sightline.errors import BadSample

PHOTOS = Path(__file__).resolve().parents[3] / "../shared/data/imagenet-photos"


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    """Run a test with each JPEG decoder; which one a machine takes depends on what is installed there."""
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
        assert decode._simplejpeg()
    else:
        monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    return request.param


def smooth_rgb(height=48, width=64):
    """An image that survives JPEG almost unharmed, different in every corner."""
    rows, columns = np.mgrid[0:height, 0:width]
    planes = (255 * columns / max(width - 1, 1), 255 * rows / max(height - 1, 1), 128 + 0 * rows)
    return np.stack(planes, axis=2).astype(np.uint8)


def encode(image, format="JPEG", **options):
    stream = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(stream, format, **options)
    return stream.getvalue()


def png_chunk(kind, payload):
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png(width, height, bits, colour, rows, extra=b""):
    """A PNG written by hand, for what Pillow cannot write; `extra` chunks come before the pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")


def with_size(jpeg, width, height):
    """The same JPEG with another size in its frame header."""
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4 :]


def exif(orientation):
    tags = Image.Exif()
    tags[0x010F], tags[0x0112], tags[0x0131] = "maker", orientation, "program"  # as a camera writes them
    return tags.tobytes()


def assert_close(pixels, expected, tolerance):
    assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous and pixels.flags.writeable
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected.astype(int)).max() <= tolerance


def assert_refused(data, *words):
    for function in (read_header, decode_rgb):
        with pytest.raises(BadSample, match=r"^photo\.jpg: ") as refusal:
            function(data, "photo.jpg")
        for word in words:
            assert word in refusal.value.reason


def test_import_stays_light():
    code = "import sys, sightline.data.decode; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Right pixels


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_blocks": 2}])
def test_jpeg_equals_pillow(decoder, options):
    data = encode(smooth_rgb(), quality=95, **options)
    assert_close(decode_rgb(data, "a"), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), 0)
    assert_close(decode_rgb(data, "a"), smooth_rgb(), 12)


def test_real_photos_equal_pillow(decoder):
    if not PHOTOS.is_dir():
        pytest.skip(f"no photos at {PHOTOS}")
    photos = sorted(PHOTOS.iterdir())[:12]
    assert photos
    for path in photos:
        expected = np.asarray(Image.open(path).convert("RGB"))
        assert_close(decode_rgb(path.read_bytes(), path.name), expected, 0)


@pytest.mark.parametrize(
    "options",
    [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True}, {"restart_marker_blocks": 3}],
)
@pytest.mark.parametrize("mode", ["RGB"])
def test_the_upper_rows_alone_are_the_same_bits(decoder, mode, options):
    noise = np.random.default_rng(0).integers(0, 256, (90, 50, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise).convert(mode), quality=90, **options)
    whole = decode_rgb(data, "a")
    heights = []
    for rows in range(1, 91):
        upper = decode_rgb(data, "a", rows=rows)
        heights.append(len(upper))
        assert len(upper) >= rows and np.array_equal(upper[:rows], whole[:rows])
    if decoder == "simplejpeg" and "progressive" not in options:
        assert heights[9] <= 12  # that it stops right below
    else:
        assert heights[0] == 90


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_turned_image_is_decoded_whole(decoder, orientation):
    data = encode(smooth_rgb(), exif=exif(orientation))
    assert np.array_equal(decode_rgb(data, "a", rows=5)[:5], decode_rgb(data, "a")[:5])


def test_grey_jpeg(decoder):
    grey = smooth_rgb()[:, :, 0]
    assert_close(decode_rgb(encode(grey), "a"), np.repeat(grey[:, :, None], 3, 2), 8)


@pytest.mark.parametrize(
    ("format", "orientation"), [*(("JPEG", number) for number in range(1, 9)), ("PNG", 6), ("WEBP", 8)]
)
def test_exif_orientation(decoder, format, orientation):
    data = encode(smooth_rgb(), format, exif=exif(orientation))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert_close(decode_rgb(data, "a"), expected, 0)
    header = read_header(data, "a")
    assert (header.format, header.width, header.height, header.orientation) == (format, 64, 48, orientation)
    assert header.shape == expected.shape


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_impossible_orientation_is_ignored(orientation):
    assert read_header(encode(smooth_rgb(), exif=exif(orientation)), "a").orientation == 1


def test_big_endian_and_broken_exif(decoder):
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    big_endian = b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01" + entry + bytes(4)
    assert read_header(encode(smooth_rgb(), exif=big_endian), "a").orientation == 6
    broken = b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff" + struct.pack("<HHII", 0x011A, 5, 10**6, 10**9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_rgb(encode(smooth_rgb(), exif=broken), "a").shape == (48, 64, 3)


def test_cmyk_jpeg():
    inks = np.dstack([smooth_rgb(), np.full((48, 64), 40, np.uint8)])
    data = encode(Image.fromarray(inks, "CMYK"), quality=95, subsampling=0)
    expected = (255 - inks[:, :, :3].astype(int)) * (255 - 40) // 255
    assert_close(decode_rgb(data, "a"), expected, 8)
    assert not read_header(data, "a").is_plain_jpeg


def test_ycck_jpeg():
    """Photoshop's form: inks as inverted YCbCr + K, marked by transform 2 in the Adobe segment."""
    inks = smooth_rgb()
    stored = np.dstack([np.asarray(Image.fromarray(inks).convert("YCbCr")), np.full((48, 64), 255 - 40, np.uint8)])
    data = encode(Image.fromarray(255 - stored, "CMYK"), quality=95, subsampling=0)
    at = data.index(b"Adobe") + 11
    assert data[at] == 0
    data = data[:at] + b"\x02" + data[at + 1 :]
    assert_close(decode_rgb(data, "a"), (255 - inks.astype(int)) * (255 - 40) // 255, 10)


def test_transparency_is_dropped():
    rgb = smooth_rgb()
    alpha = np.zeros((48, 64), np.uint8)
    assert_close(decode_rgb(encode(np.dstack([rgb, alpha]), "PNG"), "a"), rgb, 0)
    assert_close(decode_rgb(encode(np.dstack([rgb, alpha]), "WEBP", lossless=True, exact=True), "a"), rgb, 0)
    grey = Image.merge("LA", [Image.fromarray(rgb[:, :, 0]), Image.fromarray(alpha)])
    assert_close(decode_rgb(encode(grey, "PNG"), "a"), np.repeat(rgb[:, :, :1], 3, 2), 0)


@pytest.mark.parametrize("transparency", [None, 3, bytes(range(16))])
def test_palette_png(transparency):
    image = Image.fromarray(smooth_rgb()).quantize(16)
    expected = np.asarray(image.convert("RGB"))
    options = {} if transparency is None else {"transparency": transparency}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(decode_rgb(encode(image, "PNG", **options), "a"), expected, 0)


def test_16_bit_png():
    grey = np.linspace(0, 65535, 60).astype(np.uint16).reshape(6, 10)
    expected = np.repeat((grey / 257)[:, :, None], 3, 2)
    pixels = decode_rgb(encode(grey, "PNG"), "a")
    assert_close(pixels, expected.round(), 1)
    colour = np.repeat(grey[:, :, None], 3, 2)
    rows = b"".join(b"\x00" + row.astype(">u2").tobytes() for row in colour)
    assert_close(decode_rgb(png(10, 6, 16, 2, rows), "a"), pixels, 0)


def test_one_bit_png_and_bmp():
    bits = smooth_rgb()[:, :, 0] > 127
    expected = np.repeat(bits[:, :, None], 3, 2) * np.uint8(255)
    for format in ("PNG", "BMP"):
        assert_close(decode_rgb(encode(Image.fromarray(bits), format), "a"), expected, 0)


def test_bmp_rows_in_both_directions():
    data = encode(smooth_rgb(), "BMP")
    assert_close(decode_rgb(data, "a"), smooth_rgb(), 0)
    start = struct.unpack("<I", data[10:14])[0]
    stride = 64 * 3
    rows = [data[start + i * stride : start + (i + 1) * stride] for i in range(48)]
    top_down = data[:22] + struct.pack("<i", -48) + data[26:start] + b"".join(reversed(rows))
    assert_close(decode_rgb(top_down, "a"), smooth_rgb(), 0)


@pytest.mark.parametrize("options", [{"quality": 90}, {"lossless": True}, {"quality": 90, "exif": exif(1)}])
def test_webp(options):
    assert_close(decode_rgb(encode(smooth_rgb(), "WEBP", **options), "a"), smooth_rgb(), 16)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_animations_give_their_first_frame(format):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue")]
    data = encode(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
    assert_close(decode_rgb(data, "a"), np.asarray(frames[0]), 0)


@pytest.mark.parametrize("size", [(1, 1), (30000, 1), (1, 30000)])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_extreme_shapes(decoder, format, size):
    data = encode(Image.new("RGB", size, (10, 200, 30)), format)
    assert_close(decode_rgb(data, "a"), np.broadcast_to((10, 200, 30), (size[1], size[0], 3)), 3)


def test_content_counts_not_the_name():
    assert_close(decode_rgb(encode(smooth_rgb(), "PNG"), "n02105855_2933.JPEG"), smooth_rgb(), 0)


# Refusals


@pytest.mark.parametrize(
    ("share", "options"),
    [(0.0, {}), (0.02, {}), (0.3, {"progressive": True}), (0.9, {}), (0.999, {"progressive": True})],
)
def test_cut_and_zeroed_jpegs(decoder, share, options):
    data = encode(np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8), **options)
    kept = data[: int(share * len(data))]
    assert_refused(kept)
    assert_refused(kept + bytes(len(data) - len(kept)))


def test_cut_jpeg_with_a_whole_thumbnail(decoder):
    """The end marker of a thumbnail in the metadata must not pass for that of the image."""
    tags = exif(1) + encode(smooth_rgb(8, 8))
    data = encode(smooth_rgb(), exif=tags)
    assert decode_rgb(data, "a").shape == (48, 64, 3)
    assert_refused(data[:-40], "without its end marker")


def test_bytes_after_the_end_are_ignored(decoder):
    data = encode(smooth_rgb())
    assert_close(decode_rgb(data + bytes(50) + b"motion\xff\xda\x00", "a"), decode_rgb(data, "a"), 0)


def test_a_users_leniency_does_not_reach_us(decoder, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert_refused(encode(smooth_rgb())[:-40])
    assert_refused(encode(smooth_rgb(), "PNG")[:-40])


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP"])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
def test_cut_files_of_other_formats(format, share):
    data = encode(smooth_rgb(), format)
    with pytest.raises(BadSample, match=r"^a: "):
        decode_rgb(data[: int(share * len(data))], "a")


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"\n <!DOCTYPE html><html>404</html>", "HTML"),
        (b"<?xml version='1.0'?><svg/>", "HTML or XML"),
        (bytes(1000), "is not a JPEG, PNG, BMP, WebP or TIFF image"),
        (b"GIF89a" + bytes(50), "a GIF file"),
        (b"II+\x00" + bytes(50), "a BigTIFF file"),
        (b"MM\x00+" + bytes(50), "a BigTIFF file"),
        (b"%PDF-1.4" + bytes(50), "a PDF file"),
        (b"\x1f\x8b" + bytes(50), "a gzip file"),
        (b"II*\x00" + bytes(50), "inside its header"),
        (b"\xff\xd8\xff", "without its end marker"),
        (b"\xff\xd8\xff\xd9", "no image"),
        (b"\xff\xd8\xff\xe0\x00\x01\xff\xd9", "claims 1 bytes"),
        (b"BM", "inside its header"),
        (b"RIFF\x04\x00\x00\x00WEBP", "starts with"),
        (b"\x89PNG\r\n\x1a\n", "inside its header"),
        (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IEND", b""), "instead of its header"),
    ],
)
def test_what_is_not_an_image(data, word):
    assert_refused(data, word)


@pytest.mark.parametrize("chunk", [b"IHDR", b"IDAT", b"IEND"])
def test_png_checksums(chunk):
    data = encode(smooth_rgb(), "PNG")
    at = data.index(chunk) - 4
    end = at + 8 + struct.unpack(">I", data[at : at + 4])[0]
    damaged = data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :]
    with pytest.raises(BadSample, match=f"{chunk.decode()} chunk at byte {at} fails its checksum"):
        decode_rgb(damaged, "a")


def test_zero_sized_images():
    for size in ((0, 48), (64, 0)):
        assert_refused(with_size(encode(smooth_rgb()), *size), "no pixel")
    assert_refused(png(0, 5, 8, 2, b""), "no pixel")


def test_bombs_are_stopped_by_their_header():
    """A real 20000x20000 PNG of some kB, and the largest JPEG: nothing of their size is ever allocated."""
    bomb = png(20000, 20000, 1, 0, bytes(2501 * 20000))
    assert len(bomb) < 60_000
    jpeg = encode(smooth_rgb())
    padded = with_size(jpeg[:-2] + bytes(3_000_000) + jpeg[-2:], 65500, 65500)
    tracemalloc.start()
    assert_refused(bomb, "20000x20000", str(MAX_PIXELS))
    assert_refused(padded, "65500x65500", str(MAX_PIXELS))
    assert_refused(with_size(jpeg, 10000, 10000), "cannot hold the 10000x10000 pixels")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_caps_on_bytes_scans_and_segments(monkeypatch):
    jpeg = encode(smooth_rgb())
    scan = jpeg[jpeg.index(b"\xff\xda") : -2]
    assert_refused(jpeg[:-2] + scan * 101 + jpeg[-2:], "102 scans")
    assert_refused(jpeg[:2] + b"\xff\xfe\x00\x02" * 100_001 + jpeg[2:], "more than 100000 segments")
    monkeypatch.setattr(image_headers, "MAX_BYTES", 1000)
    assert_refused(bytes(1001), "1001 bytes, more than the 1000 allowed")
    assert MAX_BYTES == 256 * 2**20


def with_sampling(jpeg, *factors):
    """The same JPEG with other sampling factors in its frame header; its bits then mean another image."""
    at = jpeg.index(b"\xff\xc0") + 11
    changed = bytearray(jpeg)
    changed[at : at + 3 * len(factors) : 3] = bytes(factors)
    return bytes(changed)


@pytest.mark.parametrize("factors", [(0x42, 0x11, 0x11), (0x31, 0x11, 0x11), (0x11, 0x22, 0x22)])
@pytest.mark.parametrize("rows", [None, 9])
def test_odd_sampling_is_read_by_every_decoder(decoder, factors, rows):
    data = with_sampling(encode(smooth_rgb(), subsampling=0), *factors)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    pixels = decode_rgb(data, "odd.jpg", rows=rows)
    np.testing.assert_array_equal(pixels[:rows], expected[:rows])


def rgb_of(planes):
    """JFIF's colours of Y, Cb and Cr, before they are rounded."""
    y, blue, red = planes[..., 0], planes[..., 1] - 128.0, planes[..., 2] - 128.0
    return np.stack([y + 1.402 * red, y - 0.344136 * blue - 0.714136 * red, y + 1.772 * blue], axis=2).clip(0, 255)


@pytest.mark.parametrize("rows", [None, 9])
def test_chroma_of_half_height_is_read_by_every_decoder(decoder, rows):
    """libjpeg-turbo 3.1 and 3.2 stretch it to values one level apart, and Pillow may bring another than the decoder."""
    data = with_sampling(encode(smooth_rgb(), subsampling=0), 0x22, 0x21, 0x11)
    image = Image.open(io.BytesIO(data))
    image.draft("YCbCr", image.size)
    planes = np.asarray(image)[:rows].astype(int)
    pixels = decode_rgb(data, "odd.jpg", rows=rows)[:rows]
    near = [rgb_of(planes + np.array([0, blue, red])) for blue in (-1, 0, 1) for red in (-1, 0, 1)]
    assert np.any([np.all(abs(pixels - each) < 0.51, axis=2) for each in near], axis=0).all()


@pytest.mark.parametrize("rows", [None, 9])
def test_what_libjpeg_only_warns_of_is_read_by_every_decoder(decoder, rows):
    image = encode(smooth_rgb())
    revision = image.index(b"JFIF\x00") + 5
    newer = image[:revision] + b"\x63" + image[revision + 1 :]
    scan = image.index(b"\xff\xda")
    for data in (newer, image[:scan] + b"junk" + image[scan:]):
        np.testing.assert_array_equal(decode_rgb(data, "a.jpg", rows=rows)[:rows], decode_rgb(image, "b.jpg")[:rows])


def test_an_error_after_a_warning_is_an_error(decoder):
    """TurboJPEG calls it a warning, after which nothing of the image may have been written."""
    progressive = encode(smooth_rgb(), progressive=True)
    second_scan = progressive.index(b"\xff\xda", progressive.index(b"\xff\xda") + 2)
    baseline = encode(smooth_rgb())
    scan = baseline.index(b"\xff\xda")
    # A scan of the first component alone; the two others come in none.
    one_component = baseline[:scan] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + baseline[scan + 14 :]
    junk = b"junk\xff\x3a\x00\x02"
    # Huffman tables that are not there, after a first coefficient of which libjpeg only warns.
    no_tables = bytearray(baseline)
    no_tables[scan + 6], no_tables[scan + 11] = 0x33, 0xFE
    for damaged in (
        progressive[:second_scan] + junk + progressive[second_scan:],
        one_component[:-2] + junk + one_component[-2:],
        bytes(no_tables),
    ):
        for rows, downscale in itertools.product((None, 9), (1, 2)):
            with pytest.raises(BadSample):
                decode_rgb(damaged, "photo.jpg", rows=rows, downscale=downscale)


def test_second_frame_header_is_refused(decoder):
    """Two sizes in one file: whichever the guard read, a decoder might believe the other."""
    jpeg = encode(smooth_rgb())
    at = jpeg.index(b"\xff\xc0")
    assert_refused(jpeg[:at] + jpeg[at : at + 19] + jpeg[at:], "second")


def test_large_images_do_not_warn(monkeypatch):
    """Pillow warns above MAX_IMAGE_PIXELS and refuses above twice that; our cap is the second."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 64 * 2 // 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for format in ("JPEG", "PNG", "BMP", "WEBP"):
            assert decode_rgb(encode(smooth_rgb(), format), "a").shape == (48, 64, 3)


def test_decoder_errors_name_the_file_and_the_cause(decoder):
    jpeg = encode(smooth_rgb())
    at = jpeg.index(b"\xff\xc4")
    damaged = jpeg[: at + 4] + b"\x7f" + jpeg[at + 5 :]  # Huffman table 127
    with pytest.raises(BadSample, match=r"^n01/x\.jpg: broken JPEG: ") as refusal:
        decode_rgb(damaged, "n01/x.jpg")
    assert ".cpp" not in refusal.value.reason
