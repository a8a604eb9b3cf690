"""COCO as json with files and as records: what is kept, how it is numbered, what is refused."""

import json
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import sightline.data.sources.annotations as annotations_file
from sightline.data.sources import coco, coco_tfrecord, folder, open_boxes, open_source, tfrecord
from sightline.errors import BadData, BadSample, UsageError
from sightline.files import json_lists

# The ids that COCO's list of 80 categories leaves out of 1..90.
DROPPED = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
FULL = [{"id": number, "name": f"thing{number}"} for number in range(1, 91) if number not in DROPPED]


def annotation(number: int, image: int, box: list[float], **more) -> dict:
    return {"id": number, "image_id": image, "category_id": 1, "bbox": box, "area": 5.5, "iscrowd": 0, **more}


@pytest.fixture
def written(tmp_path: Path):
    """written(content changes): a data set of 20x10 images with ids 30, 7, 11, 5; 11 and 5 have no usable box."""

    def write(split: str = "train", year: str = "2017", **changes) -> Path:
        root = tmp_path / "data"
        content = {
            "info": {"year": 2017, "deep": [[1, [2]]]},
            "images": [
                {"id": number, "file_name": f"{number:012d}.jpg", "height": 10, "width": 20}
                for number in (30, 7, 11, 5)
            ],
            "annotations": [
                annotation(1, 7, [0, 0, 20, 10], iscrowd=1),
                annotation(2, 30, [1.5, 2.25, 3, 4], category_id=90, area=7.125),
                annotation(3, 7, [4, 4, 0, 3]),  # no width
                annotation(4, 11, [4, 4, 3, -1]),  # no height
                annotation(5, 7, [18, 2, 2.5, 3]),  # beyond the right edge
                annotation(6, 11, [3, 8, 3, 2.001]),  # beyond the lower edge
                annotation(7, 7, [2, 3, 4, 5]),
                annotation(8, 7, [-0.5, 3, 4, 5]),  # beyond the left edge
            ],
            "categories": FULL[::-1],
            "licenses": [],
        } | changes
        (root / "annotations").mkdir(parents=True, exist_ok=True)
        (root / "annotations" / f"instances_{split}{year}.json").write_text(json.dumps(content, indent=2))
        images = root / f"{split}{year}"
        images.mkdir(exist_ok=True)
        for image in content["images"]:
            if isinstance(image, dict) and isinstance(image.get("file_name"), str) and "/" not in image["file_name"]:
                Image.new("RGB", (20, 10), (9, 8, 7)).save(images / image["file_name"], "JPEG")
        return root

    return write


# What is kept


def test_training_leaves_out_boxes_by_rule_and_images_without_one(written):
    source = open_boxes("auto", str(written()), "train")
    assert [source.objects(i).image_id for i in range(len(source))] == [7, 30]
    first, second = source.objects(0), source.objects(1)
    assert first.boxes.tolist() == [[0, 0, 20, 10], [2, 3, 4, 5]] and first.crowd.tolist() == [True, False]
    assert second.boxes.tolist() == [[1.5, 2.25, 3, 4]] and second.area.tolist() == [7.125]
    assert (first.height, first.width) == (10, 20) and source.most_objects == 2
    assert source.name(0) == "train2017/000000000007.jpg" and source.image(0)[:2] == b"\xff\xd8"


def test_evaluation_keeps_everything_as_annotated(written):
    source = open_boxes("auto", str(written("val")), "val")
    assert [source.objects(i).image_id for i in range(len(source))] == [5, 7, 11, 30]
    assert [len(source.objects(i).boxes) for i in range(4)] == [0, 5, 2, 1] and source.most_objects == 5
    assert source.objects(1).boxes[1].tolist() == [4, 4, 0, 3] and source.objects(1).area.tolist() == [5.5] * 5


def test_ninety_ids_become_eighty_labels_and_back(written):
    """Every id that is there, one object each; the ten that are not have no label."""
    annotations = [annotation(c["id"], 30, [1, 1, 2, 2], category_id=c["id"]) for c in FULL]
    source = open_boxes("auto", str(written(annotations=annotations)), "train")
    assert len(source.classes) == len(source.class_ids) == 80 and not DROPPED & set(source.class_ids)
    labels = source.objects(0).labels
    assert labels.tolist() == list(range(1, 81))
    assert [source.class_ids[label - 1] for label in labels] == [c["id"] for c in FULL]
    assert source.classes[source.class_ids.index(90)] == "thing90"
    # As the original's table counts: ids up to 11 stay, 13 is the twelfth, 90 the eightieth.
    assert [source.class_ids.index(i) + 1 for i in (1, 11, 13, 25, 27, 90)] == [1, 11, 12, 24, 25, 80]


def test_names_without_a_year_and_folders_below(written):
    written("val", year="")
    root = written(
        year="",
        images=[{"id": 30, "file_name": "a/b.jpg", "height": 10, "width": 20}],
        annotations=[annotation(1, 30, [1, 1, 2, 2])],
    )
    (root / "train" / "a").mkdir()
    (root / "train" / "a" / "b.jpg").write_bytes(b"image")
    source = open_boxes("auto", str(root), "train")
    assert source.name(0) == "train/a/b.jpg" and source.image(0) == b"image"


def test_area_and_crowd_may_be_missing(written):
    bare = {"id": 1, "image_id": 30, "category_id": 1, "bbox": [1, 1, 2, 3]}
    found = open_boxes("auto", str(written(annotations=[bare])), "train").objects(0)
    assert found.area.tolist() == [6] and found.crowd.tolist() == [False]


def test_real_annotations_are_what_json_says(shared_data: Path):
    """Every number of every object, for both splits, against a plain json.load."""
    root = shared_data / "coco-tiny"
    for split in ("train", "val"):
        content = json.loads((root / "annotations" / f"instances_{split}2017.json").read_text())
        source = open_boxes("auto", str(root), split)
        assert len(source) == 80 and len(source.classes) == 80
        assert list(source.class_ids) == sorted(c["id"] for c in content["categories"])
        for index in range(len(source)):
            found = source.objects(index)
            image = next(i for i in content["images"] if i["id"] == found.image_id)
            expected = [a for a in content["annotations"] if a["image_id"] == found.image_id]
            assert (found.height, found.width) == (image["height"], image["width"])
            assert found.boxes.tolist() == [a["bbox"] for a in expected]
            assert found.area.tolist() == [a["area"] for a in expected]
            assert found.crowd.tolist() == [bool(a["iscrowd"]) for a in expected]
            assert [source.class_ids[label - 1] for label in found.labels] == [a["category_id"] for a in expected]


def test_reading_in_small_pieces_gives_the_same(shared_data: Path, monkeypatch):
    file = shared_data / "coco-tiny" / "annotations" / "instances_val2017.json"
    whole = annotations_file._read_json(file)
    monkeypatch.setattr(annotations_file, "BLOCK", 997)
    monkeypatch.setattr(json_lists, "BLOCK", 997)
    assert annotations_file._read_json(file).content() == whole.content()


# Cases that must be distinguished


def test_a_source_of_boxes_is_not_one_of_labels_and_the_other_way_round(written, shapes: Path, drawn_boxes: Path):
    root = written()
    assert coco.detect(str(root)) and not folder.detect(str(root)) and not coco.detect(str(shapes))
    with pytest.raises(UsageError, match="holds images with boxes"):
        open_source("auto", str(drawn_boxes), "train")
    with pytest.raises(UsageError, match="holds images with a label"):
        open_boxes("auto", str(shapes), "train")
    with pytest.raises(UsageError, match="known: auto, coco, coco_tfrecord, .*synthetic, .*voc, yolo"):
        open_boxes("folder", str(root), "train")


def test_records_of_boxes_are_none_of_labels(drawn_boxes: Path, as_records, tmp_path: Path):
    out = as_records(drawn_boxes, tmp_path / "records")
    assert coco_tfrecord.detect(str(out)) and not tfrecord.detect(str(out)) and not coco.detect(str(out))
    assert type(open_boxes("auto", str(out), "val")) is coco_tfrecord.CocoTFRecordSource


def test_the_fingerprint_follows_annotations_and_images(written, settle):
    root = written()
    before = open_boxes("auto", str(root), "train").fingerprint
    assert open_boxes("auto", str(root), "train").fingerprint == before
    (root / "train2017" / "000000000007.jpg").write_bytes(b"longer or shorter")
    resized = open_boxes("auto", str(root), "train").fingerprint
    written(annotations=[annotation(1, 7, [0, 0, 20, 9.5]), annotation(2, 30, [1, 1, 2, 2])])
    moved = open_boxes("auto", str(root), "train").fingerprint
    assert len({before, resized, moved}) == 3
    shutil.copytree(root, root.with_name("copy"))
    assert open_boxes("auto", str(root.with_name("copy")), "train").fingerprint == moved


def test_annotations_are_read_once_and_again_when_they_change(written, settle, monkeypatch):
    read = []
    reading = annotations_file._read_json
    monkeypatch.setattr(annotations_file, "_read_json", lambda file: read.append(file.name) or reading(file))
    root = written()
    settle(root)
    first, second = (open_boxes("auto", str(root), "train") for _ in range(2))
    assert read == ["instances_train2017.json"] and first.fingerprint == second.fingerprint
    for index in range(len(first)):
        for one, other in zip(vars(first.objects(index)).values(), vars(second.objects(index)).values(), strict=True):
            assert np.array_equal(one, other)
    written(annotations=[annotation(1, 7, [0, 0, 1, 1])])
    settle(root)
    assert len(open_boxes("auto", str(root), "train")) == 1 and len(read) == 2
    kept = root / ".sightline-index-coco-instances_train2017"
    kept.write_bytes(kept.read_bytes()[:-3])
    assert len(open_boxes("auto", str(root), "train")) == 1 and len(read) == 3


def test_sources_travel_to_workers(written, drawn_boxes: Path, as_records, tmp_path: Path):
    for source in (
        open_boxes("auto", str(written()), "train"),
        open_boxes("auto", str(as_records(drawn_boxes, tmp_path / "records")), "train"),
        open_boxes("auto", "synthetic:classes=3,samples=9,size=40", "train"),
    ):
        twin = pickle.loads(pickle.dumps(source))
        assert (
            np.array_equal(twin.image(1), source.image(1))
            if source.room.sum() == 0
            else (twin.image(1) == source.image(1))
        )
        assert np.array_equal(twin.objects(1).boxes, source.objects(1).boxes)


def test_synthetic_boxes_are_where_they_are_said_to_be():
    source = open_boxes("auto", "synthetic:classes=3,samples=16,size=40", "train")
    assert (len(source), len(open_boxes("auto", "synthetic:classes=3,samples=16,size=40", "val"))) == (16, 2)
    for index in range(16):
        pixels, found = source.image(index), source.objects(index)
        x, y, wide, tall = found.boxes[-1].astype(int)  # the last one lies on top
        assert pixels[y : y + tall, x : x + wide].reshape(-1, 3).std(0).max() == 0
        assert found.labels.min() >= 1 and found.labels.max() <= 3 and len(found.boxes) <= source.most_objects


# What is refused


def test_annotations_without_a_box_to_train_on_are_refused(written):
    with pytest.raises(BadData, match="instances_train2017.json: none of its 4 images has a box"):
        open_boxes("auto", str(written(annotations=[annotation(4, 7, [1, 1, 0, 2])])), "train")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b'"bbox"', b"bbox", 1),
        lambda data: data.replace(b'"images"', b'"images\xff"', 1),
        lambda data: data.replace(b"],", b"] ", 1),
        lambda data: b"[1, 2]",
        lambda data: b"",
        lambda data: b"{}",
        lambda data: b'{"images": ' + b"[" * 200_000,
        lambda data: b'{"images": [' + b"9" * 10_000 + b"]}",
        lambda data: b"<html>not found</html>",
    ],
)
def test_what_is_not_json_is_refused(written, damage):
    root = written()
    file = root / "annotations" / "instances_train2017.json"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BadData, match="instances_train2017.json"):
        open_boxes("auto", str(root), "train")


def test_an_entry_without_end_is_refused(written, monkeypatch):
    monkeypatch.setattr(json_lists, "MAX_ENTRY", 2000)
    monkeypatch.setattr(json_lists, "BLOCK", 100)
    monkeypatch.setattr(annotations_file, "BLOCK", 100)
    root = written(annotations=[annotation(1, 7, [1, 1, 2, 2], segmentation=[[1.5] * 5000])])
    with pytest.raises(BadData, match="is not a whole JSON file"):
        open_boxes("auto", str(root), "train")


@pytest.mark.parametrize(
    "body", [b"[[],", b'{"a":{', b"[1.5,", b'"', b" "], ids=["lists", "objects", "floats", "text", "space"]
)
def test_an_entry_without_end_takes_no_more_memory_than_the_longest(written, monkeypatch, body: bytes):
    monkeypatch.setattr(json_lists, "MAX_ENTRY", 2**17)
    monkeypatch.setattr(json_lists, "BLOCK", 2**14)
    monkeypatch.setattr(annotations_file, "BLOCK", 2**14)
    root = written()
    repeated = body[1:] if body[:1] == b"[" else body if body == b" " else b"aaaa"
    file = root / "annotations" / "instances_train2017.json"
    file.write_bytes(b'{"images": [' + body + repeated * (4_000_000 // len(repeated)))
    tracemalloc.start()
    with pytest.raises(BadData, match="instances_train2017.json is not a whole JSON file"):
        open_boxes("auto", str(root), "train")
    assert tracemalloc.get_traced_memory()[1] < 10e6  # 4 MB of lists took 85
    tracemalloc.stop()


def test_what_follows_the_end_of_the_object_is_refused(written):
    root = written()
    file = root / "annotations" / "instances_train2017.json"
    whole = file.read_bytes()
    file.write_bytes(whole + b" \n" * 9)
    assert len(open_boxes("auto", str(root), "train")) == 2
    file.write_bytes(whole + b" {}")
    with pytest.raises(BadData, match="more behind its end"):
        open_boxes("auto", str(root), "train")


def test_missing_files_are_named(written):
    root = written()
    os.unlink(root / "train2017" / "000000000030.jpg")
    with pytest.raises(BadData, match=r"lacks 1 of the 2 images .* 000000000030.jpg \(image 30\); unpack train2017"):
        open_boxes("auto", str(root), "train")
    with pytest.raises(BadData, match="has no val split of COCO; expected PATH/annotations/instances_val2017"):
        open_boxes("auto", str(root), "val")


def test_an_image_that_goes_away_later_is_a_bad_sample(written):
    source = open_boxes("auto", str(written()), "train")
    os.unlink(source.folder / "000000000007.jpg")
    with pytest.raises(BadSample, match="train2017/000000000007.jpg: cannot be read"):
        source.image(0)


def test_both_splits_need_the_same_categories(written):
    written("val", categories=FULL[:-1], annotations=[annotation(1, 7, [1, 1, 2, 2])])
    with pytest.raises(BadData, match=r"79 categories.* 80.*thing90 \(90\)"):
        open_boxes("auto", str(written()), "val")


# Records


def test_records_without_json_say_the_same_within_32_bits(drawn_boxes: Path, as_records, tmp_path: Path):
    out = as_records(drawn_boxes, tmp_path / "records")
    for split in ("train", "val"):
        plain, packed = (open_boxes("auto", str(root), split) for root in (drawn_boxes, out))
        assert packed.classes == plain.classes and packed.class_ids == plain.class_ids
        assert len(packed) == len(plain)
        for index in range(len(plain)):
            one, other = plain.objects(index), packed.objects(index)
            assert one.image_id == other.image_id and packed.image(index) == plain.image(index)
            assert np.array_equal(one.labels, other.labels) and np.array_equal(one.crowd, other.crowd)
            np.testing.assert_allclose(other.boxes, one.boxes, rtol=0, atol=1e-4)  # pixels


def test_with_the_json_records_say_the_same_to_the_last_digit(shared_data: Path, as_records, tmp_path: Path):
    root = shared_data / "coco-tiny"
    out = as_records(root, tmp_path / "records")
    shutil.copytree(root / "annotations", out / "raw-data" / "annotations", copy_function=shutil.copyfile)
    for split in ("train", "val"):
        plain, packed = (open_boxes("auto", str(each), split) for each in (root, out))
        for index in range(80):
            for one, other in zip(
                vars(plain.objects(index)).values(), vars(packed.objects(index)).values(), strict=True
            ):
                assert np.array_equal(one, other)
            assert packed.image(index) == plain.image(index)


def test_records_must_call_their_categories_alike(drawn_boxes: Path, as_records, tmp_path: Path):
    change = {"image/object/class/text": lambda row: [b"thing"] * len(row)}
    out = as_records(drawn_boxes, tmp_path / "records", change)
    with pytest.raises(BadData, match="is called 'thing' and|is called '.*' and 'thing'"):
        open_boxes("auto", str(out), "train")
    out = as_records(drawn_boxes, tmp_path / "others")
    content = json.loads((drawn_boxes / "annotations" / "instances_val2017.json").read_text())
    content["categories"][1]["name"] = "something else"
    (out / "annotations").mkdir()
    (out / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    with pytest.raises(BadData, match="instances_val2017.json 'something else'; both splits need the same"):
        open_boxes("auto", str(out), "train")


def test_records_are_indexed_once(drawn_boxes: Path, as_records, tmp_path: Path, settle, monkeypatch):
    out = as_records(drawn_boxes, tmp_path / "records")
    settle(out)
    first = open_boxes("auto", str(out), "train")
    monkeypatch.setattr(coco_tfrecord, "_Scan", None)
    second = open_boxes("auto", str(out), "train")
    assert second.fingerprint == first.fingerprint and second.image(3) == first.image(3)


def test_a_touching_box_stays_inside_in_32_bits():
    """Shares as records store them, of boxes that end on the edge: none may be pushed out of the image."""
    random = np.random.default_rng(0)
    low = random.uniform(0, 0.99, 5000).astype(np.float32).astype(np.float64)
    for length in (640, 427, 333):
        start, extent = coco_tfrecord._inside(low * length, np.full(5000, 1.0) * length, length)
        assert np.all(start + extent <= length) and np.all(extent > 0)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"image/source_id": b"seven"}, "expected an image id as text"),
        ({"image/source_id": 7}, "expected an image id as text"),
        ({"image/height": []}, "has no size in image/height and image/width"),
        ({"image/object/bbox/xmin": [0.5] * 99}, "other numbers of edges"),
        ({"image/object/bbox/xmin": lambda row: [float("nan")] * len(row)}, "a box or a label that is not a number"),
        ({"image/object/class/label": lambda row: [-1] * len(row)}, "a box or a label that is not a number"),
        ({"image/object/class/text": lambda row: [b"a", b"b"] * len(row)}, "other numbers of edges or names"),
    ],
)
def test_records_that_contradict_themselves_are_refused(drawn_boxes, as_records, tmp_path, change, reported):
    out = as_records(drawn_boxes, tmp_path / "records", change)
    with pytest.raises(BadData, match=reported) as raised:
        open_boxes("auto", str(out), "train")
    assert "train-00000-of-00004.tfrecord: record at byte 0" in str(raised.value)


def test_missing_shards_and_images_are_named(drawn_boxes: Path, as_records, tmp_path: Path):
    out = as_records(drawn_boxes, tmp_path / "records")
    shutil.copytree(drawn_boxes / "annotations", out / "annotations")
    shutil.move(out / "train-00002-of-00004.tfrecord", tmp_path / "away")
    with pytest.raises(BadData, match="train-00002-of-00004.tfrecord is missing; 3 of 4"):
        open_boxes("auto", str(out), "train")
    (out / "val-00001-of-00003.tfrecord").write_bytes(b"")
    with pytest.raises(BadData, match="lack 4 of the 13 images .*every image is evaluated"):
        open_boxes("auto", str(out), "val")


def test_a_damaged_record_is_a_bad_sample(drawn_boxes: Path, as_records, tmp_path: Path):
    out = as_records(drawn_boxes, tmp_path / "records")
    source = open_boxes("auto", str(out), "train")
    shard = source.shards[source.places["shard"][0]].path
    data = bytearray(shard.read_bytes())
    data[int(source.places["offset"][0]) + 400] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BadSample, match="fail their checksum"):
        source.image(0)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_json_file_may_be_the_test_split_and_of_two_neither(written, number: int):
    root = written()
    written("val")
    for split in ("train", "val"):  # the names of COCO itself have no test split
        (root / "annotations" / f"instances_{split}2017.json").rename(root / "annotations" / f"{split}.json")
    files = [root / "annotations" / f"test{name}.json" for name in ("", "_b")[:number]]
    for file in files:
        shutil.copy(root / "annotations" / "val.json", file)
    found = coco.Files.at(str(root))
    assert found.test == (files[0] if number == 1 else None)
    assert ("has 2 json files that could be its test split" in found.no_test) is (number == 2)
