"""Input that few people have: tables that contradict themselves, outlines that no tool writes, records of strangers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from sightline.data.augment.fields import MaskFields
from sightline.data.decode import decode_channels, read_header
from sightline.data.formats import class_table
from sightline.data.formats.records import HEADER_BYTES, scan_frames
from sightline.data.inputs import as_channels, decode_given
from sightline.data.sources import coco_tfrecord, open_boxes, outlines, tfrecord, yolo
from sightline.errors import BadData, BadSample, UsageError

# Tables of classes


def table(folder: Path, name: str, text: str) -> class_table.ClassTable | None:
    (folder / name).write_text(text, "utf-8")
    return class_table.read_table(folder / name)


@pytest.mark.parametrize(
    ("name", "text", "reported"),
    [
        ("classes.csv", "name,r,g,b\nroad,1,2,3\ncar,1,2,3\n", "gives #010203 to 'road' and to 'car'"),
        ("classes.csv", "name,id\nroad,7\ncar,7\n", "gives the number 7 to 'road' and to 'car'; each needs its own"),
        ("classes.txt", "road\ncar\nroad\n", "calls the number 0 and the number 2 'road'; scores are by name"),
        ("classes.csv", "name,r,g,b\nroad,1,2,3\nroad,3,2,1\n", "calls #010203 and #030201 'road'; scores are by name"),
        ("classes.csv", f'name,id\nroad,"{"7" * 140_000}"\n', "is not a CSV file: field larger than field limit"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(tmp_path: Path, name: str, text: str, reported: str):
    with pytest.raises(BadData, match=reported):
        table(tmp_path, name, text)


def test_tables_are_read_as_they_are_written(tmp_path: Path):
    found = table(tmp_path, "classes.csv", "Name, ID\nroad, 7\n,3\n\ncar, 0\n")
    assert found is not None and found.names == {7: "road", 3: "1", 0: "car"}
    found = table(tmp_path, "classes.csv", "name,R,G,B,id\nroad,1,2,3,9\ncar,255,0,16,8\n")
    assert found is not None and found.names == {0x010203: "road", 0xFF0010: "car"}
    assert table(tmp_path, "classes.csv", "file,label\na.png,x\n") is None
    assert table(tmp_path, "classes.csv", "\n") is None


# Images of other channels and depths than most


@pytest.mark.parametrize(
    ("mode", "form", "channels", "bits"),
    [
        ("RGB", "JPEG", 3, 8),
        ("L", "JPEG", 1, 8),
        ("L", "JPEG", 3, 8),
        ("RGB", "PNG", 3, 8),
        ("RGBA", "PNG", 4, 8),
        ("RGBA", "PNG", 3, 8),
        ("LA", "PNG", 1, 8),
        ("P", "PNG", 3, 8),
        ("1", "PNG", 1, 8),
        ("L", "PNG", 1, 16),
        ("RGB", "BMP", 3, 16),
        ("RGB", "JPEG", 3, 16),
        ("I;16", "PNG", 1, 16),
    ],
)
def test_channels_and_bits_are_those_of_pillow(mode: str, form: str, channels: int, bits: int):
    rng = np.random.default_rng(3)
    drawn = Image.fromarray(rng.integers(0, 256, (6, 5, 4), np.uint8), "RGBA")
    deep = rng.integers(0, 65536, (6, 5), np.uint16)
    image = Image.fromarray(deep) if mode == "I;16" else drawn.convert("RGB").convert(mode)
    stored = io.BytesIO()
    image.save(stored, form)
    found = decode_channels(stored.getvalue(), "x", read_header(stored.getvalue(), "x"), channels, bits)
    with Image.open(io.BytesIO(stored.getvalue())) as opened:
        wanted = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
        expected = deep if mode == "I;16" else np.asarray(opened.convert(wanted))
    assert found.dtype == (np.uint16 if bits == 16 else np.uint8)
    assert found.tolist() == expected.reshape(6, 5, channels).tolist()


def test_an_image_of_two_colours_is_the_same_from_a_file_in_training_in_prediction_and_in_memory():
    image = Image.fromarray(np.array([[0, 255, 255], [255, 0, 0]], np.uint8)).convert("1")
    stored = io.BytesIO()
    image.save(stored, "PNG")
    data = stored.getvalue()
    expected = [[[0], [255], [255]], [[255], [0], [0]]]
    assert decode_channels(data, "x", read_header(data, "x"), 1, 8).tolist() == expected
    assert decode_given(data, "x", 1, 8).tolist() == expected
    assert as_channels(image, "x", 1, 8).tolist() == expected


# Outlines


def letters(counts: list[int]) -> str:
    """Run lengths as COCO compresses them, by pycocotools."""
    height = sum(counts)
    flat = np.concatenate([np.full(count, i % 2, np.uint8) for i, count in enumerate(counts)])
    return coco_mask.encode(np.asfortranarray(flat.reshape(height, 1)))["counts"].decode()


@pytest.mark.parametrize("counts", [[3, 2, 1], [0, 5], [40, 70, 3, 900, 2, 1, 1, 1], [1, 33_000, 5, 2, 33_000, 1], [7]])
def test_compressed_run_lengths_are_those_of_pycocotools(counts: list[int]):
    height = sum(counts)
    expected = np.concatenate([np.full(count, i % 2, np.uint8) for i, count in enumerate(counts)])
    for given in (letters(counts), counts):
        found = outlines.drawn(height, 1, [({"size": [height, 1], "counts": given}, 1)])
        assert found.ravel().tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("outline", "reported"),
    [
        ({"size": [2, 2], "counts": [3, 2]}, "run lengths of 5 pixels in an image of 4"),
        ({"size": [2, 2], "counts": [5]}, "expected whole numbers from 0 to 4"),
        ({"size": [2, 2], "counts": [1.0, 2]}, "expected whole numbers from 0 to 4"),
        ({"size": [2, 2], "counts": [-1, 2]}, "expected whole numbers from 0 to 4"),
        ({"size": [2, 2], "counts": [True, 2]}, "expected whole numbers from 0 to 4"),
        ({"size": [2, 3], "counts": [1, 2]}, "an outline of size \\[2, 3\\], expected \\[2, 2\\]"),
        ({"size": [2, 2], "counts": "1o"}, "run lengths that are cut off"),
        ({"size": [2, 2], "counts": "1/"}, "with '/' at place 1"),
        ({"size": [2, 2], "counts": "1p"}, "with 'p' at place 1"),
        ({"size": [2, 2], "counts": "oooooooo"}, "with 'o' at place 7"),
        ([], "expected polygons or run lengths"),
        ("square", "expected polygons or run lengths"),
        ([[1, 2, 3]], "expected x and y of each corner by turns"),
        ([[0, 0, 1, 1, 2, float("nan")]], "expected x and y of each corner by turns"),
        ([[0, 0, 1, 1, 2, 10**400]], "expected x and y of each corner by turns"),
        ([[0, 0, 1, 1, 2, True]], "expected x and y of each corner by turns"),
    ],
)
def test_outlines_that_no_tool_writes_are_refused(outline: Any, reported: str):
    with pytest.raises(outlines.WrongOutline, match=reported):
        outlines.drawn(2, 2, [(outline, 1)])


def test_a_polygon_that_would_take_minutes_to_follow_is_refused():
    corners = [0.0, 0.0, 4000.0, 4000.0] * 600  # 1,200 edges of 4,000 pixels
    with pytest.raises(outlines.WrongOutline, match="a polygon of 1200 corners whose edges are 4800000 pixels long"):
        outlines.drawn(4000, 4000, [([corners], 1)])
    assert outlines.drawn(40, 40, [([corners], 1)]).max() <= 1  # moved to the sides of a small image


def test_the_last_of_several_objects_is_seen_and_what_is_no_polygon_is_not():
    square = [0, 0, 4, 0, 4, 4, 0, 4]
    found = outlines.drawn(6, 6, [([square], 1), ([[2, 2, 6, 2, 6, 6, 2, 6]], 2), ([[0, 0, 5, 5]], 3)])
    expected = np.zeros((6, 6), np.uint8)
    expected[:4, :4], expected[2:, 2:] = 1, 2
    assert found.tolist() == expected.tolist()
    assert outlines.drawn(6, 6, [(square, 1)]).sum() == 16  # one polygon needs no list around it


# YOLO


def test_a_label_file_of_absurd_length_is_reported_and_not_read():
    told: list[tuple[str, str, str]] = []

    def wrong(*words: str) -> None:
        told.append(words)  # type: ignore[arg-type]

    line = b"0 0.5 0.5 0.1 0.1\n"
    most = yolo.MAX_LABEL_BYTES
    assert yolo.read_lines(line + b" " * (most - len(line)), "a.txt", 1, wrong)[0].category == 0 and not told
    assert yolo.read_lines(line + b" " * (most - len(line) + 1), "a.txt", 1, wrong) == []
    assert told == [("unreadable entry", "a.txt", f"has more than the {most} bytes allowed for one label file")]


# Records


def test_a_wrong_record_is_blamed_on_whoever_wrote_it_wherever_it_stands(tmp_path: Path, write_records):
    def example(label: Any, name: str) -> dict[str, Any]:
        return {"image/class/label": label, "image/encoded": b"image", "image/filename": name.encode()}

    for place in range(3):
        examples = [example(-5 if i == place else i + 1, f"{i}.JPEG") for i in range(3)]
        path = write_records(tmp_path / str(place) / "train" / "train-00000-of-00001", examples)
        start = list(scan_frames(path.read_bytes(), ""))[place][0]
        with pytest.raises(BadData, match=f"record at byte {start}: expected one integer from 0"):
            tfrecord.open_source(str(tmp_path / str(place)), "train")


def test_records_of_boxes_that_lie_twice_or_nowhere_are_named(drawn_boxes: Path, as_records, tmp_path: Path):
    out = as_records(drawn_boxes, tmp_path / "records")
    first, second = (out / f"train-0000{number}-of-00004.tfrecord" for number in range(2))
    whole = first.read_bytes()
    second.write_bytes(whole)
    with pytest.raises(BadData, match="train-00001-of-00004.tfrecord: record at byte 0: image .* another record too"):
        open_boxes("auto", str(out), "train")
    for shard in out.glob("train-*"):
        shard.write_bytes(b"")
    with pytest.raises(BadData, match="4 files and no record; make them again"):
        open_boxes("auto", str(out), "train")
    first.rename(out / "train-00007-of-00004.tfrecord")
    with pytest.raises(BadData, match="train-00007-of-00004.tfrecord is not one of the 4 files .* move it away"):
        open_boxes("auto", str(out), "train")
    for shard in out.glob("train-*"):
        shard.unlink()
    with pytest.raises(BadData, match="has no train split; expected PATH/train-00000-of-00032.tfrecord"):
        coco_tfrecord.open_boxes(str(out), "train")


def test_records_of_boxes_that_change_under_a_run_are_bad_samples(drawn_boxes: Path, as_records, tmp_path: Path):
    out = as_records(drawn_boxes, tmp_path / "records")
    path = out / "val-00000-of-00003.tfrecord"
    whole = path.read_bytes()
    starts = [start for start, _ in scan_frames(whole, "")]
    for change, reported in (
        (whole[: starts[1] + HEADER_BYTES + 40], "record at byte"),
        (whole.replace(b"image/encoded", b"image/emptied"), "record at byte"),
        (b"", "record at byte"),
    ):
        source = open_boxes("auto", str(out), "val")
        where = [i for i in range(len(source)) if source.places["shard"][i] == 0 and source.places["offset"][i]]
        path.write_bytes(change)
        with pytest.raises(BadSample, match=reported):
            source.image(where[0])
        path.write_bytes(whole)
    source = open_boxes("auto", str(out), "val")
    path.unlink()
    with pytest.raises(BadSample, match="cannot be read: No such file"):
        source.image(where[0])


# Fields


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"scale": (2.0, 0.5)}, "data.scale=\\(2.0, 0.5\\) must be two numbers, the smaller one first"),
        ({"mean": (0.5,), "std": (0.5, 0.5)}, "data.mean has 1 numbers and data.std 2"),
    ],
)
def test_fields_of_masks_that_contradict_each_other_are_refused(fields: dict[str, Any], reported: str):
    with pytest.raises(UsageError, match=reported):
        MaskFields(**fields).check()
    MaskFields(scale=(0.5, 0.5), mean=(0.5,), std=(1.0,)).check()
