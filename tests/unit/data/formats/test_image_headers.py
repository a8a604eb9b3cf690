"""The guard and every decoder behind it read the same header; what could be read in two ways, or costs too much for
its size, is refused before anything is allocated."""

import io
import struct
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from sightline.data import decode
from sightline.data.formats import image_headers
from sightline.data.formats.image_headers import (
    MAX_DECODING_BYTES,
    MAX_PIXELS,
    Damaged,
    Header,
    jpeg_segments,
    read_header,
)
from sightline.errors import BadSample

RGB = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
SMALL, OTHER = RGB, RGB.resize((128, 96))


def encode(image=SMALL, format="JPEG", **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def frame(jpeg):
    """(before, frame header, after)."""
    at = min(at for marker in (b"\xff\xc0", b"\xff\xc2") if (at := jpeg.find(marker)) > 0)
    return jpeg[:at], jpeg[at : at + 19], jpeg[at + 19 :]


def sized(jpeg, width, height):
    before, found, after = frame(jpeg)
    return before + found[:5] + struct.pack(">HH", height, width) + found[9:] + after


def segment(marker, payload):
    return bytes([0xFF, marker]) + struct.pack(">H", len(payload) + 2) + payload


def chunk(kind, payload):
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png(width, height, depth=8, colour=2, pixels=b"", extra=b"", tail=b""):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(pixels))
    return b"\x89PNG\r\n\x1a\n" + header + extra + body + tail + chunk(b"IEND", b"")


def bmp(width, height, bits=24, compression=0, pixels=b"", header=40):
    size = 14 + header
    fields = struct.pack("<IIIHHIIiiII", header, width, height, 1, bits, compression, len(pixels), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", size + len(pixels), 0, 0, size) + fields.ljust(header, b"\0") + pixels


def webp(width, height):
    """A blank lossless WebP: some 40 bytes, whatever its size."""
    small = bytearray(encode(Image.new("RGB", (16, 16), "red"), "WEBP", lossless=True))
    at = small.index(b"VP8L") + 9
    (bits,) = struct.unpack_from("<I", small, at)
    struct.pack_into("<I", small, at, bits & 0xF0000000 | (height - 1) << 14 | width - 1)
    return bytes(small)


def assert_refused(data, *words):
    tracemalloc.start()
    with pytest.raises(BadSample) as refusal:
        decode.decode_rgb(data, "a.jpg")
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    for word in words:
        assert word in refusal.value.reason


# One header


@pytest.mark.parametrize("place", ["extra", "tail"])
def test_png_with_two_headers_is_refused(place):
    """Pillow believes the last one before the pixels."""
    second = chunk(b"IHDR", struct.pack(">IIBBBBB", 128, 96, 8, 2, 0, 0, 0))
    data = png(64, 48, pixels=bytes(48 * 193), **{place: second})
    if place == "extra":
        assert Image.open(io.BytesIO(data)).size == (128, 96)
    assert_refused(data, "second header at byte")


@pytest.mark.parametrize("kind", [(8, 1, 0, 0, 0), (3, 2, 0, 0, 0), (8, 2, 1, 0, 0), (8, 2, 0, 1, 0), (8, 2, 0, 0, 2)])
def test_png_of_a_kind_that_there_is_not_is_refused(kind):
    data = png(64, 48, pixels=bytes(48 * 193))
    header = struct.pack(">II", 64, 48) + bytes(kind)
    assert_refused(data[:8] + chunk(b"IHDR", header) + data[33:], "of an unknown kind", str(kind))


@pytest.mark.parametrize("marker", [0x01, 0x02, 0xBF, 0xD0, 0xD7, 0xD8, 0xC8, 0xDE, 0xDF, 0xF0, 0xFD])
def test_jpeg_marker_that_may_or_may_not_have_a_length_is_refused(marker):
    """Taken for a segment it leads into another frame header, which is hidden from whoever passes over the marker."""
    _, found, _ = frame(encode(OTHER))
    jpeg = encode()
    trick = bytes([0xFF, marker, 0, 6]) + segment(0xEF, found)
    assert_refused(jpeg[:2] + trick + jpeg[2:], f"marker 0xFF{marker:02X} at byte 2")
    if marker not in (0xD0, 0xD7):  # restarts belong into a scan
        assert_refused(jpeg[:-2] + trick + jpeg[-2:], f"marker 0xFF{marker:02X} at byte {len(jpeg) - 2}")


def test_libjpeg_passes_over_the_marker_that_nvjpeg_takes_for_a_segment():
    """Why the ones above are refused: libjpeg reads 64x48, a guard that believed the length read 128x96."""
    _, found, _ = frame(encode(OTHER))
    jpeg = encode()
    data = jpeg[:2] + b"\xff\xd0\x00\x06" + segment(0xEF, found) + jpeg[2:]
    assert Image.open(io.BytesIO(data)).size == (64, 48)
    with pytest.raises(BadSample):
        read_header(data, "a.jpg")


@pytest.mark.parametrize("options", [{"quality": 98}, {"progressive": True}, {"restart_marker_blocks": 3}])
def test_markers_are_the_same_however_far_numpy_looks(monkeypatch, options):
    jpeg = encode(**options)
    monkeypatch.setattr(image_headers, "_LEAST_LOOKED_AT", 0)
    for data in (jpeg, jpeg[:-2] + b"\xff\xff" + jpeg[-2:], jpeg[:-2] + b"\xff\x00" * 3 + jpeg[-2:]):
        monkeypatch.setattr(image_headers, "_LOOKED_AT", 0)
        expected = list(jpeg_segments(data))
        for looked_at in (*range(1, 60), *range(len(data) - 700, len(data))):
            monkeypatch.setattr(image_headers, "_LOOKED_AT", looked_at)
            assert list(jpeg_segments(data)) == expected


def test_odd_jpegs_that_all_decoders_read_alike_are_read():
    jpeg = encode()
    before, found, after = frame(jpeg)
    two_images = io.BytesIO()
    SMALL.save(two_images, "MPO", save_all=True, append_images=[OTHER])
    expected = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))
    for data in (
        before + b"\xff\xff\xff" + found + after,  # padding
        before + b"\xff\x00" + found + after,
        before + b"bytes between segments" + found + after,
        jpeg[:-2] + segment(0xDC, b"\x00\x60") + jpeg[-2:],  # another number of lines, after the scan
        jpeg + encode(OTHER),
        two_images.getvalue(),
    ):
        assert read_header(data, "a.jpg").shape == (48, 64, 3)
        np.testing.assert_array_equal(decode.decode_rgb(data, "a.jpg"), expected)


def test_jpeg_frames_that_contradict_themselves_are_refused():
    jpeg = encode()
    before, found, after = frame(jpeg)
    assert_refused(before + found + frame(encode(OTHER))[1] + after, "second frame header")
    assert_refused(jpeg[:-2] + found + jpeg[-2:], "second frame header")
    assert_refused(before + after[:-2] + found + after[-2:], "without a frame")  # after its scan
    assert_refused(before + found[:4] + b"\x0c" + found[5:] + after, "12 bits a sample")
    assert_refused(before + found[:9] + b"\x02" + found[10:] + after, "frame header of 15 bytes for 2 components")
    assert_refused(before + b"\xff\xc5" + found[2:] + after, "marker 0xFFC5")  # hierarchical


@pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP", "WEBP"])
def test_pillow_is_stopped_where_it_reads_another_size(format):
    image = RGB.convert("CMYK") if format == "JPEG" else RGB  # plain JPEGs go to another decoder
    data = encode(image, format)
    header = replace(read_header(data, "a"), width=63)
    with pytest.raises(BadSample, match=r"63x48 pixels, which Pillow reads as \(64, 48\)"):
        decode.decode_rgb(data, "a", header)


# Too dear


def test_metadata_does_not_count_as_image():
    data = sized(encode(), 13000, 13000)
    for marker in (0xFE, 0xE5):
        assert_refused(data[:2] + segment(marker, bytes(65000)) * 3 + data[2:], "bytes of scans cannot hold")


def test_scans_times_pixels_are_bounded():
    progressive = encode(progressive=True)
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    dense = scan + bytes(90_000)  # as much as that many pixels take
    for scans, side, is_read in ((12, 13000, True), (13, 13000, False), (100, 4500, True), (100, 4700, False)):
        missing = scans - progressive.count(b"\xff\xda")
        data = sized(progressive[:-2] + dense + scan * (missing - 1) + progressive[-2:], side, side)
        if is_read:
            assert read_header(data, "a").width == side
        else:
            assert_refused(data, f"{scans} scans, more than the", f"for {side}x{side} pixels")


def test_the_bound_is_on_bytes_not_on_pixels_alone():
    enough = chunk(b"tEXt", b"a\0" + bytes(100_000))
    assert MAX_PIXELS >= 13377**2
    for depth, colour in ((8, 2), (8, 6), (16, 6), (8, 4)):
        assert_refused(png(13377, 13377, depth, colour, extra=enough), "bytes to decode, more than the 1073741824")
        assert read_header(png(12300, 12300, depth, colour, extra=enough), "a").decoding_bytes <= MAX_DECODING_BYTES
    for depth, colour in ((8, 0), (16, 0), (8, 3)):
        read_header(png(13377, 13377, depth, colour, extra=enough), "a")


def test_the_largest_baseline_jpeg_is_read_and_a_progressive_one_takes_its_coefficients():
    def header(jpeg, width, height):
        return read_header(sized(jpeg[:-2] + bytes(90_000) + jpeg[-2:], width, height), "a")

    assert 2 * Image.MAX_IMAGE_PIXELS == 54610 * 3277  # from where Pillow refuses
    assert header(encode(), 54610, 3277).decoding_bytes == 3 * 54610 * 3277
    with pytest.raises(BadSample, match="54611x3277 pixels is more than the 178956970 allowed"):
        header(encode(), 54611, 3277)
    # 4:2:0 has one and a half samples a pixel, 4:4:4 three; each takes two bytes until the last scan.
    assert header(encode(progressive=True, subsampling=2), 100, 200).decoding_bytes == (3 + 3) * 20_000
    assert header(encode(progressive=True, subsampling=0), 100, 200).decoding_bytes == (3 + 6) * 20_000
    assert header(encode(RGB.convert("L"), progressive=True), 100, 200).decoding_bytes == (3 + 2) * 20_000
    with pytest.raises(BadSample, match="bytes to decode"):
        header(encode(progressive=True, subsampling=0), 13000, 13000)


def test_some_bytes_cannot_be_an_image_of_36_million_pixels():
    large = webp(6000, 6000)
    assert_refused(large, f"6000x6000 pixels in {len(large)} bytes, which cannot hold an image")
    assert len(large) < 50
    np.testing.assert_array_equal(decode.decode_rgb(webp(600, 700), "a"), np.broadcast_to((255, 0, 0), (700, 600, 3)))
    assert_refused(webp(600, 700).replace(b"\x2f", b"\x2e"), "starts with a b'VP8L' chunk")


def test_bmp_that_lies_is_refused():
    assert_refused(bmp(1, 0xFE000000, pixels=bytes(4000)), "cannot hold")
    assert_refused(bmp(10_000, 10_000), "54 bytes cannot hold the 10000x10000 pixels of 24 bits")
    assert_refused(bmp(10_000_000, 1, 8, compression=1), "RLE", "convert it to PNG")
    assert_refused(bmp(10, 10, header=41), "header of 41 bytes")


def test_decoding_keeps_no_second_copy(monkeypatch):
    """Only what Python and NumPy allocate is counted, not Pillow's own 4 bytes a pixel."""
    monkeypatch.setattr(decode, "_BAND_PIXELS", 2**16)
    data = encode(Image.new("RGBA", (1000, 1000), (1, 2, 3, 4)), "PNG", compress_level=1)
    tracemalloc.start()
    pixels = decode.decode_rgb(data, "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (pixels == (1, 2, 3)).all() and pixels.nbytes == 3_000_000
    assert peak < 1.5 * pixels.nbytes


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_bands_of_rows_make_the_same_pixels(mode, monkeypatch):
    image = (
        Image.fromarray(np.asarray(RGB.convert("L")).astype(np.uint16) * 257) if mode == "I;16" else RGB.convert(mode)
    )
    data = encode(image, "PNG")
    whole = decode.decode_rgb(data, "a")
    monkeypatch.setattr(decode, "_BAND_PIXELS", 64 * 7)
    np.testing.assert_array_equal(decode.decode_rgb(data, "a"), whole)


def test_no_memory_is_not_called_a_broken_image():
    code = """if True:
        import io, resource, psutil
        from PIL import Image
        from sightline.data.decode import decode_rgb
        from sightline.errors import BadSample
        stream = io.BytesIO()
        Image.new("RGB", (4000, 4000)).save(stream, "PNG", compress_level=1)
        room = psutil.Process().memory_info().vms + 70_000_000
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        try:
            decode_rgb(stream.getvalue(), "a.png")
        except BadSample as error:
            print(error)
    """
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.startswith("a.png: no memory for the 112000000 bytes that decoding takes")


def test_header_says_what_is_returned():
    assert Header("PNG", 30, 20, orientation=6).shape == (30, 20, 3)
    assert Header("PNG", 30, 20).decoding_bytes == 1800
    assert Header("PNG", 30, 20, orientation=3).decoding_bytes == 3600  # turning makes a copy


@pytest.mark.parametrize("bits", [1, 8, 24])
def test_bmp_of_os2_has_the_sides_that_pillow_reads(bits: int):
    width, height = 11, 7
    rows = height * (-(-width * bits // 32) * 4)
    colours = bytes(3 * 2**bits) if bits < 24 else b""
    start = 14 + 12 + len(colours)
    head = b"BM" + struct.pack("<IHHI", start + rows, 0, 0, start) + struct.pack("<IHHHH", 12, width, height, 1, bits)
    data = head + colours + bytes(rows)
    found = read_header(data, "a.bmp")
    assert (found.width, found.height) == Image.open(io.BytesIO(data)).size == (width, height)
    windows = read_header(bmp(9, 9, bits, pixels=bytes(999)), "b.bmp")
    assert (found.orientation, found.bytes_per_pixel) == (1, windows.bytes_per_pixel)


def test_webp_is_upright_without_a_tag_that_says_otherwise():
    for more, orientation in (({}, 1), ({"exif": b"Exif\x00\x00II*\x00" + bytes(4)}, 1)):
        data = encode(SMALL.convert("RGBA"), "WEBP", lossless=True, icc_profile=b"x" * 7, **more)
        assert data[12:16] == b"VP8X" and read_header(data, "a.webp").orientation == orientation
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(SMALL.convert("RGBA"), "WEBP", lossless=True, icc_profile=b"x" * 7, exif=exif)
    assert read_header(data, "a.webp").orientation == 6


def test_files_of_endless_parts_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image_headers, "MAX_SEGMENTS", 3)
    assert_refused(png(1, 1, extra=chunk(b"tEXt", b"a") * 3), "PNG of more than 3 chunks")
    data = encode(SMALL.convert("RGBA"), "WEBP", lossless=True, icc_profile=b"x" * 7)
    assert_refused(data + b"JUNK\0\0\0\0" * 5, "WebP of more than 3 chunks")


def test_jpeg_that_ends_in_the_header_of_a_segment_is_refused():
    jpeg = encode()
    for kept in (2, 3):
        assert_refused(jpeg[:2] + b"\xff\xe1\x00\x08abcdef"[:kept], f"cut off after {kept + 2} bytes, inside a segment")


def test_jpeg_without_a_scan_holds_no_image():
    with pytest.raises(Damaged, match="JPEG without a scan: it holds no image"):
        decode._strip_jpeg(b"\xff\xd8" + segment(0xE0, b"JFIF") + b"\xff\xd9")


def test_a_decoder_that_returns_other_sides_is_not_believed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode, "_decode_with_pillow", lambda *_: np.zeros((1, 2, 3), np.uint8))
    with pytest.raises(BadSample, match=r"decoded to shape \(1, 2, 3\), its header says .*; remove the file"):
        decode.decode_rgb(encode(format="PNG"), "a.png")


def test_no_memory_and_a_late_error_of_a_file_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path):
    def no_room(*_):
        raise MemoryError

    monkeypatch.setattr(decode, "_decode_with_pillow", no_room)
    with pytest.raises(BadSample, match="no memory for the .* bytes that decoding takes; use fewer --run.workers"):
        decode.decode_rgb(encode(format="PNG"), "a.png")
    (tmp_path / "a.png").write_bytes(encode(format="PNG")[:2000])
    with Image.open(tmp_path / "a.png") as image, pytest.raises(BadSample, match="fetch it again or leave it out"):
        decode.pixels_of(image, "a.png")


@pytest.mark.parametrize(
    ("factors", "expected"),
    [([0x11], 2), ([0x11, 0x11, 0x11], 6), ([0x21, 0x11, 0x11], 4), ([0x22, 0x11, 0x11], 3), ([0x41, 0x11, 0x11], 3),
     ([0x22, 0x21, 0x11], 3.5), ([0x12, 0x11, 0x11], 4), ([0x44, 0x11, 0x11], 2.25), ([0x22, 0x11, 0x11, 0x22], 5)],
)  # fmt: skip
def test_coefficients_take_two_bytes_for_every_sample(factors: list[int], expected: float):
    """Samples of a component are as its factors say, as shares of the largest ones."""
    assert image_headers._coefficient_bytes(factors) == expected


def bmp_with(header: int) -> bytes:
    """A BMP of 3 x 2 pixels of 24 bits whose information header has so many bytes."""
    rows = bytes(2 * 12)
    info = struct.pack("<IiiHHIIiiII", header, 3, 2, 1, 24, 0, len(rows), 2835, 2835, 0, 0)
    info = info.ljust(header, b"\0")[:header]
    return b"BM" + struct.pack("<IHHI", 14 + header + len(rows), 0, 0, 14 + header) + info + rows


@pytest.mark.parametrize("size", [40, 52, 56, 64, 108, 124])
def test_bmps_with_each_of_microsofts_headers_are_read(size: int):
    """BITMAPINFOHEADER, its versions 2 to 5, and that of OS/2; Pillow is the reference."""
    data = bmp_with(size)
    header = image_headers.read_header(data, "some.bmp")
    assert (header.format, header.width, header.height) == ("BMP", 3, 2) == ("BMP", *Image.open(io.BytesIO(data)).size)


@pytest.mark.parametrize("size", [12, 39, 41, 53, 57, 65, 109, 125, 128])
def test_bmps_with_other_headers_are_refused(size: int):
    with pytest.raises(BadSample):
        image_headers.read_header(bmp_with(size), "some.bmp")
