"""Boxes and masks in tar shards: members, limits at their borders, what an index keeps, images that differ."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.sources import SourceOptions, index_files, open_boxes, open_masks, packed, tar_objects
from sightline.data.sources.shards import Shard
from sightline.errors import BadData, BadSample, UsageError

ALL = SourceOptions(split="all")


def tar_of(file: Path, *members: tuple[str, bytes]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as made:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return file


def png(values: object, form: str = "PNG", **how) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.asarray(values)).save(stream, form, **how)
    return stream.getvalue()


GREY = png(np.zeros((6, 8), np.uint8))
COLOUR = png(np.zeros((6, 8, 3), np.uint8))


def boxes(*names: object, width: float = 3) -> bytes:
    return json.dumps({"objects": {"bbox": [[1, 2, width, 4]] * len(names), "category": list(names)}}).encode()


def mask(*values: int) -> bytes:
    found = np.zeros((6, 8), np.uint8)
    found[0, : len(values)] = values
    return png(found)


# What is such a shard


def is_one(path: Path, *members: tuple[str, bytes]) -> bool:
    tar_of(path, *members)
    return tar_objects.detect(str(path.parent))


def test_the_first_samples_tell_what_a_shard_holds(tmp_path):
    file = tmp_path / "train-0.tar"
    label = [(f"{at}.{ending}", data) for at in range(9) for ending, data in (("jpg", b"x"), ("json", b'{"label": 3}'))]
    assert not is_one(file, *label)
    assert is_one(file, *label[:14], ("7.jpg", b"x"), ("7.json", boxes("a")))
    assert not is_one(file, *label[:16], ("8.jpg", b"x"), ("8.json", boxes("a")))
    assert not is_one(file, ("a.jpg", b"x"), ("a.json", b'{"objects": []}'))
    assert not is_one(file, ("a.jpg", b"x"), ("a.json", b"{"))
    assert not is_one(file, ("a.seg.png", b"x"))
    assert not is_one(file)
    for name in tar_objects.MASKS:
        assert is_one(file, ("a.jpg", b"x"), (f"a.{name.upper()}.PNG", b"x"))
    assert not is_one(file, ("a.jpg", b"x"), ("a.other.png", b"x"))
    os.rename(file, tmp_path / "val-0.tar")
    assert is_one(tmp_path / "val-0.tar", ("a.json", boxes("a")), ("a.jpg", b"x"))
    os.rename(tmp_path / "val-0.tar", tmp_path / "val-0.tar.gz")
    assert not tar_objects.detect(str(tmp_path))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"objects": 1, "annotations": 2}, 1),
        ({"annotations": 2, "bbox": 3}, 2),
        *[({key: [1], "labels": ["a"]}, {key: [1], "labels": ["a"]}) for key in ("bbox", "boxes", "bboxes")],
        ({"labels": ["a"]}, None),
        ([1], None),
    ],
)
def test_what_a_json_says_of_boxes(said, expected):
    assert tar_objects.objects_in(json.dumps(said).encode(), "x") == expected


def test_a_json_has_a_limit(tmp_path, monkeypatch):
    said = boxes("a")
    file = tar_of(tmp_path / "train-0.tar", ("a.jpg", COLOUR), ("a.json", said))
    monkeypatch.setattr(tar_objects, "_MOST_JSON", len(said))
    assert tar_objects.detect(str(tmp_path))
    assert len(open_boxes("tar_objects", str(tmp_path), "val", ALL).objects(0).labels) == 1
    monkeypatch.setattr(tar_objects, "_MOST_JSON", len(said) - 1)
    assert not tar_objects.detect(str(tmp_path))
    with pytest.raises(BadData, match=f"a.jpg: its json has {len(said)} bytes, {len(said) - 1} are allowed"):
        open_boxes("tar_objects", str(tmp_path), "val", ALL)
    with open(file, "rb") as opened:
        (members, _), *_ = tar_objects._groups(opened, Shard.at(tmp_path, file))
        with pytest.raises(BadData, match=f"a.json has {len(said)} bytes, more than the {len(said) - 1} allowed"):
            tar_objects._objects(opened.fileno(), members["json"], "x")


def test_members_of_a_key_may_lie_in_any_order(tmp_path):
    tar_of(tmp_path / "train-0.tar", ("x/a.json", boxes("a")), ("x/a.JPG", COLOUR), ("x/a.png", b"second"),
           ("x/a.seg.png", GREY), ("x/b.json", b"{}"), ("x/b.jpg", COLOUR), ("c.jpg", COLOUR))  # fmt: skip
    source = open_boxes("auto", str(tmp_path), "val", ALL)
    names = [source.name(row) for row in range(3)]
    assert names == ["train-0.tar:x/a.JPG", "train-0.tar:x/b.jpg", "train-0.tar:c.jpg"]
    assert [source.objects(row).labels.tolist() for row in range(3)] == [[1], [], []]
    assert {source.image(row) for row in range(3)} == {COLOUR}
    for members in ([("a.json", b"{}")], [("a.json", b"{}"), ("b.jpg", COLOUR)]):
        tar_of(tmp_path / "train-0.tar", *members)
        with pytest.raises(BadData, match=r"train-0.tar: a.json has no image beside it \(jpg.*\); pack the members"):
            open_boxes("tar_objects", str(tmp_path), "val", ALL)
    tar_of(tmp_path / "train-0.tar", ("a.txt", b""))
    with pytest.raises(BadData, match=r"holds no images \(jpg.*\) in its tar files"):
        open_boxes("tar_objects", str(tmp_path), "val", ALL)


# Boxes


def test_boxes_have_their_size_and_classes(tmp_path):
    members = [("a.jpg", COLOUR), ("a.json", boxes("b", "a", width=99)), ("b.jpg", b"broken"), ("b.json", boxes("b"))]
    tar_of(tmp_path / "train-0.tar", *members)
    source = open_boxes("auto", str(tmp_path), "val", ALL)
    assert source.classes == ("a", "b") and source.class_ids == (1, 2) and source.most_objects == 2
    assert source.room.tolist() == [3 * 6 * 8 + 4096, 3 + 4096] and source.is_upright
    found = source.objects(0)
    assert (found.height, found.width, found.labels.tolist()) == (6, 8, [2, 1])
    assert found.boxes.tolist() == [[1, 2, 7, 4]] * 2 and found.area.tolist() == [396, 396]
    assert (source.objects(1).height, source.objects(1).width) == (1, 1)
    before = source.fingerprint
    tar_of(tmp_path / "train-0.tar", *members[:1], ("a.json", boxes("b", "a", width=98)), *members[2:])
    assert open_boxes("auto", str(tmp_path), "val", ALL).fingerprint != before


def test_classes_are_those_of_train(tmp_path):
    tar_of(tmp_path / "train-0.tar", ("a.jpg", COLOUR), ("a.json", boxes("b", "c")))
    tar_of(tmp_path / "val-0.tar", ("a.jpg", COLOUR), ("a.json", boxes("c")))
    source = open_boxes("auto", str(tmp_path), "val")
    assert source.classes == ("b", "c") and source.objects(0).labels.tolist() == [2] and source.held_out is None
    tar_of(tmp_path / "val-0.tar", ("a.jpg", COLOUR), ("a.json", boxes("c", "x", "d")))
    with pytest.raises(BadData, match="has classes that train lacks: d, x; remove them"):
        open_boxes("auto", str(tmp_path), "val")
    (tmp_path / "classes.txt").write_text("c\nb")
    tar_of(tmp_path / "val-0.tar", ("a.jpg", COLOUR), ("a.json", boxes(0, 1)))
    assert open_boxes("auto", str(tmp_path), "val").objects(0).labels.tolist() == [1, 2]
    tar_of(tmp_path / "val-0.tar", ("a.jpg", COLOUR), ("a.json", boxes(2)))
    with pytest.raises(BadData, match="has classes that train lacks: 2"):
        open_boxes("auto", str(tmp_path), "val")
    os.remove(tmp_path / "train-0.tar")
    with pytest.raises(BadData, match="has no train split"):
        open_boxes("tar_objects", str(tmp_path), "train")
    with pytest.raises(UsageError, match="no test split"):
        open_boxes("tar_objects", str(tmp_path), "test")


def test_numbered_categories_have_their_names():
    names = ("a", "b")
    for objects in ({"category": [0, 1]}, [{"category": 0}, {"label": 1, "x": 1}], {"class": 1}):
        said = json.dumps(packed.named(objects, names)).replace('"x": 1', "")
        assert "0" not in said and "1" not in said
    same = {"category": [2, -1, True, "0", None], "label": 1.0, "bbox": [0]}
    assert packed.named(same, names) == same and packed.named(3, names) == 3
    assert packed.named({"category": [0]}, ()) == {"category": [0]}


def test_what_lies_in_a_shard_is_kept_until_it_changes(tmp_path, monkeypatch):
    file = tar_of(tmp_path / "train-0.tar", ("a.jpg", COLOUR), ("a.json", boxes("a")), ("a.seg.png", GREY))
    os.utime(file, (1e9, 1e9))
    first = tar_objects.Members.of(tmp_path, "train")
    assert (tmp_path / ".sightline-index-tar_objects-train").is_file()
    with monkeypatch.context() as patch:
        patch.setattr(tar_objects, "_listed", lambda *_: pytest.fail("the shard was read again"))
        again = tar_objects.Members.of(tmp_path, "train")
    assert again.columns.tolist() == first.columns.tolist() and again.names.all() == first.names.all()
    assert again.read(0, "image") == COLOUR and again.read(0, "mask") == GREY
    tar_of(file, ("b.jpg", COLOUR))
    assert tar_objects.Members.of(tmp_path, "train").names.all() == [b"train-0.tar:b.jpg"]


def test_an_index_that_leads_out_of_a_shard_is_refused(tmp_path):
    shards = [Shard(tmp_path / "0", "0", 100, 1), Shard(tmp_path / "1", "1", 50, 1)]
    row = [0, 90, 10, 0, 0, 99, 1]
    ends = np.zeros(1)
    assert tar_objects._loaded({"columns": np.asarray(row), "names_ends": ends}, shards).tolist() == [row]
    for at, value in ((0, 2), (0, -1), (0, 1), (1, 91), (2, 11), (3, 101), (4, 101), (5, 100), (6, 2), (4, -1)):
        wrong = np.asarray([value if place == at else each for place, each in enumerate(row)])
        with pytest.raises(ValueError, match=r"nowhere|outside its shard"):
            tar_objects._loaded({"columns": wrong, "names_ends": ends}, shards)
    for columns, names in ((row, np.zeros(2)), (row * 2, ends), (row[1:], ends)):
        with pytest.raises(ValueError):  # noqa: PT011  # then the shards are read again
            tar_objects._loaded({"columns": np.asarray(columns), "names_ends": names}, shards)


def test_a_shard_that_changes_while_it_is_read(tmp_path, monkeypatch):
    file = tar_of(tmp_path / "train-0.tar", ("a.jpg", COLOUR), ("b.jpg", GREY))
    members = tar_objects.Members.of(tmp_path, "train")
    monkeypatch.setattr(tar_objects, "MAX_BYTES", len(COLOUR))
    assert members.read(0, "image") == COLOUR
    with pytest.raises(BadSample, match="a.jpg: has no mask; add KEY.seg.png, or remove the sample"):
        members.read(0, "mask")
    monkeypatch.setattr(tar_objects, "MAX_BYTES", len(COLOUR) - 1)
    with pytest.raises(BadSample, match=f"{len(COLOUR)} bytes, more than the {len(COLOUR) - 1} allowed"):
        members.read(0, "image")
    monkeypatch.undo()
    at = int(members.columns[1, 1])
    os.truncate(file, at + len(GREY))
    assert members.read(1, "image") == GREY
    os.truncate(file, at + len(GREY) - 1)
    with pytest.raises(BadSample, match=f"b.jpg: member at byte {at}: the file ends in it; fetch the file again"):
        members.read(1, "image")


# Masks


def samples(*masks: bytes, image: bytes = COLOUR) -> list[tuple[str, bytes]]:
    return [each for at, data in enumerate(masks) for each in ((f"{at}.png", image), (f"{at}.seg.png", data))]


def test_masks_of_train_and_val_decide_the_classes(tmp_path):
    tar_of(tmp_path / "train-0.tar", *samples(mask(1), mask(3)))
    tar_of(tmp_path / "val-0.tar", *samples(mask(7)))
    tar_of(tmp_path / "test-0.tar", *samples(mask(3, 3)))
    for split, expected in (("train", [[1], [2]]), ("val", [[3]]), ("test", [[2, 2]])):
        source = open_masks("auto", str(tmp_path), split)
        assert source.classes == ("0", "1", "3", "7") and source.values == (0, 1, 3, 7)
        assert [source.mask(row)[0, : len(row_of)].tolist() for row, row_of in enumerate(expected)] == expected
    tar_of(tmp_path / "test-0.tar", *samples(mask(9)))
    with pytest.raises(BadData, match="masks of test have values that train lacks: 9"):
        open_masks("auto", str(tmp_path), "test")
    for names, classes in (("a\nb\nc\nd\ne\nf\ng\nh", tuple("abdh")), ("a\nb\nc\nd\ne\nf\ng", ("0", "1", "3", "7"))):
        (tmp_path / "classes.txt").write_text(names)
        assert open_masks("auto", str(tmp_path), "val").classes == classes
    (tmp_path / "train-0.tar").unlink()
    source = open_masks("tar_objects", str(tmp_path), "val")
    assert source.values == (0, 7)


def test_masks_that_cannot_be_used_are_named_or_left_out(tmp_path):
    small = png(np.zeros((5, 8), np.uint8))
    soft = png(np.zeros((6, 8), np.uint8), "JPEG")
    for wrong, said in (
        (small, "size differs: is 8x5, its image .* is 8x6"),
        (soft, "soft edges: is stored as JPEG"),
        (b"x", "unreadable: "),
    ):
        tar_of(tmp_path / "train-0.tar", *samples(mask(1), wrong, mask(2), wrong))
        with pytest.raises(BadData, match=rf"train-0.tar:1.png: {said}.*\(so are 2 of 4\)"):
            open_masks("auto", str(tmp_path), "val", ALL)
        source = open_masks("auto", str(tmp_path), "val", SourceOptions(split="all", skips_missing=True))
        assert len(source) == 4 and source.size(2) == (6, 8)
        with pytest.raises(BadSample, match=f"its mask is not usable: {said}"):
            source.size(1)
    tar_of(tmp_path / "train-0.tar", *samples(mask(1)), ("b.png", COLOUR))
    with pytest.raises(BadData, match="b.png: unreadable: has no mask"):
        open_masks("auto", str(tmp_path), "val", ALL)


def test_an_image_or_mask_that_was_replaced(tmp_path):
    rng = np.random.default_rng(0)
    image, noise = png(rng.integers(0, 256, (6, 8, 3), np.uint8)), png(rng.integers(0, 9, (6, 8), np.uint8))
    file = tar_of(tmp_path / "train-0.tar", *samples(noise, image=image))
    source = open_masks("auto", str(tmp_path), "val", ALL)
    other = png(np.ones((8, 6), np.uint8) * 5)
    data = file.read_bytes()
    for old, row in ((image, 1), (noise, 5)):
        at, length = source.packed.columns[0, row : row + 2].tolist()
        assert data[at : at + length] == old and len(other) < length
        file.write_bytes(data[:at] + other.ljust(length, b"\0") + data[at + length :])
        with pytest.raises(BadSample, match="other .*size.* than when .* indexed; start again"):
            source.image(0) if row == 1 else source.mask(0)


def test_images_have_the_pixels_of_all(tmp_path):
    deep = png(np.arange(48, dtype=np.uint16).reshape(6, 8) * 1000)
    tar_of(tmp_path / "train-0.tar", *samples(mask(1), image=deep))
    source = open_masks("auto", str(tmp_path), "val", ALL)
    assert (source.channels, source.bits) == (1, 16)
    found = source.image(0)
    assert isinstance(found, np.ndarray) and found.dtype == np.uint16 and found.ravel().tolist() == [
        1000 * at for at in range(48)
    ]  # fmt: skip
    tar_of(tmp_path / "train-0.tar", *samples(mask(1), image=GREY))
    source = open_masks("auto", str(tmp_path), "val", ALL)
    assert (source.channels, source.bits) == (1, 8) and source.image(0) == GREY
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = png(np.arange(144, dtype=np.uint8).reshape(6, 8, 3), "PNG", exif=exif)
    tar_of(tmp_path / "train-0.tar", *samples(mask(1), image=turned))  # its mask belongs to it as stored
    source = open_masks("auto", str(tmp_path), "val", ALL)
    found = source.image(0)
    assert isinstance(found, np.ndarray) and found.ravel().tolist() == list(range(144))
    upright = png(np.arange(48, dtype=np.uint8).reshape(8, 6) % 2)
    tar_of(tmp_path / "train-0.tar", *samples(upright, image=turned))
    source = open_masks("auto", str(tmp_path), "val", ALL)
    assert source.image(0) == turned and source.size(0) == (8, 6)


def test_a_part_of_train_validates(tmp_path):
    tar_of(tmp_path / "train-0.tar", *samples(*[mask(at + 1) for at in range(10)]))
    options = SourceOptions(val_fraction=0.3)
    train, val = (open_masks("auto", str(tmp_path), split, options) for split in ("train", "val"))
    assert (len(train), len(val)) == (7, 3)
    held_out = {val.name(row) for row in range(3)}
    for source in (train, val):
        assert {os.fsdecode(each) for each in source.held_out.all()} == held_out
        for row in range(len(source)):
            number = int(source.name(row).rpartition(":")[2].partition(".")[0])
            assert source.mask(row)[0, 0] == number + 1
    assert not held_out & {train.name(row) for row in range(7)}
    assert isinstance(train.faults, index_files.Names) and len(train.faults) == 7
