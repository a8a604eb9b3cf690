"""`check` of images with boxes: each thing that can be wrong is found, named and nothing else; both forms."""

import json
import math
import runpy
import shutil
from pathlib import Path

import pytest
from PIL import Image

from sightline.data.check import images
from sightline.data.check.boxes import check_boxes
from sightline.data.detection import DetectionData
from sightline.data.formats.records import encode_example, frame, parse_example, scan_frames
from sightline.data.prepare.coco import CocoOptions, prepare
from sightline.data.sources import open_boxes
from sightline.errors import BadData, UsageError

MADE = runpy.run_path(str(Path(__file__).parents[1] / "prepare" / "coco_zips.py"))
jpeg = MADE["jpeg"]
CATEGORIES = [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}]


def silent(what: str, done: int, total: int) -> None:
    """No progress."""


def check(path: Path, classes: int = 0, decode: bool = True, kind: str = "auto"):
    return check_boxes(str(path), kind, classes, decode, 1, silent)


def problems(report) -> set[tuple[str, str, str]]:
    return {(each.kind, each.split, each.where) for each in report.problems}


@pytest.fixture
def data(tmp_path) -> Path:
    """Good COCO folders: 6 + 3 images, two boxes each but for one image without any, and a crowd."""
    root = tmp_path / "data"
    (root / "annotations").mkdir(parents=True)
    for split, count, base in (("train", 6, 10), ("val", 3, 50)):
        (root / f"{split}2017").mkdir()
        images, annotations = [], []
        for image_id in range(base, base + count):
            file = f"{image_id:012d}.jpg"
            (root / f"{split}2017" / file).write_bytes(jpeg(image_id, (40, 30)))
            images.append({"id": image_id, "file_name": file, "height": 30, "width": 40})
            for at in range(2 if image_id != base else 0):
                entry = {"id": 10 * image_id + at, "image_id": image_id, "category_id": 1 + 2 * at}
                annotations.append(
                    entry | {"bbox": [1, 2.5, 39, 27.5], "area": 9, "iscrowd": int(image_id == base + 1)}
                )
        write(root, split, {"images": images, "annotations": annotations, "categories": CATEGORIES})
    return root


def write(root: Path, split: str, described: dict) -> None:
    (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(described))


def change(root: Path, split: str = "train"):
    """The json of a split, to be changed within `with`."""

    class Changing:
        def __enter__(self) -> dict:
            self.described = json.loads((root / "annotations" / f"instances_{split}2017.json").read_text())
            return self.described

        def __exit__(self, *_):
            write(root, split, self.described)

    return Changing()


def as_records(data: Path, out: Path) -> Path:
    prepare(CocoOptions(data, out, form="tfrecord", shards=2, val_shards=1, jobs=1), silent)
    return out


def edit_records(path: Path, change_one) -> None:
    stored = path.read_bytes()
    payloads = [stored[at + 12 : at + 12 + length] for at, length in scan_frames(stored, path.name)]
    examples = [parse_example(payload) for payload in payloads]
    change_one(examples[0])
    path.write_bytes(b"".join(frame(encode_example(each)) for each in examples))


FACTS = {
    "images": 6,
    "unreadable": 0,
    "without boxes": 1,
    "classes": 2,
    "boxes": 10,
    "crowds": 2,
    "boxes per image": {"min": 0, "median": 2.0, "max": 2},
    "classes without any": 0,
    "width": {"min": 40, "median": 40.0, "max": 40},
    "height": {"min": 30, "median": 30.0, "max": 30},
    "duplicate files": 0,
    "boxes per class": {"person": 5, "car": 5},
}


@pytest.mark.parametrize("decode", [True, False])
def test_good_data(data, decode):
    report = check(data, classes=2, decode=decode)
    assert report.problems == [] and report.facts["train"] == FACTS
    assert report.facts["val"]["images"] == 3


def test_good_records(data, tmp_path):
    report = check(as_records(data, tmp_path / "out"), classes=2)
    assert report.problems == []
    # The image without boxes has no record.
    assert report.facts["train"] == FACTS | {
        "images": 5,
        "without boxes": 0,
        "boxes per image": {"min": 2, "median": 2.0, "max": 2},
    }
    assert report.facts["val"]["without boxes"] == 1


def test_one_s_own_names(data):
    for split in ("train", "val"):
        (data / f"{split}2017").rename(data / split)
        file = data / "annotations" / f"instances_{split}2017.json"
        file.rename(file.with_name(f"instances_{split}.json"))
    assert check(data).problems == [] and check(data).facts["train"] == FACTS


def test_drawn_shapes(tmp_path):
    from sightline.data.prepare import shapes

    shapes.prepare(shapes.ShapesOptions(tmp_path, only=("detection",), train_pictures=6, val_pictures=4), silent)
    assert check(tmp_path / "detection").problems == []


def test_real_images(shared_data):
    report = check(shared_data / "coco-tiny", classes=80)
    assert report.problems == []
    assert report.facts["train"]["boxes"] == 705 and report.facts["train"]["crowds"] == 6
    assert report.facts["val"]["boxes"] == 815 and report.facts["val"]["classes without any"] == 0


BOXES = {
    "outside right": ([1, 2, 39.5, 5], "box outside of the image"),
    "outside below": ([1, 2, 5, 28.5], "box outside of the image"),
    "outside left": ([-0.5, 2, 5, 5], "box outside of the image"),
    "no width": ([1, 2, 0, 5], "box without an area"),
    "negative": ([1, 2, 5, -5], "box without an area"),
}


@pytest.mark.parametrize("name", BOXES)
def test_boxes(data, name):
    box, kind = BOXES[name]
    with change(data) as described:
        described["annotations"][3]["bbox"] = box
    report = check(data)
    assert problems(report) == {(kind, "train", "train2017/000000000012.jpg")}
    assert "annotation 121" in report.problems[0].text


def test_lines_about_many_classes_are_short(shared_data):
    found = check(shared_data / "coco-tiny", decode=False).as_text()
    assert max(map(len, found.splitlines())) <= 110 and "toothbrush 2" in found


def test_everything_at_once(data):
    """Nothing hides anything else."""
    with change(data) as described:
        described["images"].append(described["images"][0])
        described["images"].append({"id": 70, "file_name": "away.jpg", "height": 3, "width": 4})
        described["images"].append({"id": 71, "file_name": "../val2017/000000000050.jpg", "height": 30, "width": 40})
        described["images"].append({"id": 72, "file_name": "000000000011.jpg", "height": 30, "width": 40})
        described["images"][1]["width"] = 41
        described["annotations"].append(described["annotations"][0])
        described["annotations"][1]["category_id"] = 2
        described["annotations"][2]["image_id"] = 999
        described["annotations"][4]["bbox"] = "here"
    with change(data, "val") as described:
        described["categories"].append({"id": 4, "name": "train"})
    folder = data / "train2017"
    (folder / "stranger.jpg").write_bytes(jpeg(1, (40, 30)))
    (folder / ".hidden.jpg").write_bytes(b"")
    (folder / "notes.txt").write_bytes(b"")
    (folder / "000000000013.jpg").write_bytes(b"<html>")
    half = folder / "000000000014.jpg"
    half.write_bytes(half.read_bytes()[:200])
    shutil.copy(data / "val2017" / "000000000051.jpg", folder / "000000000015.jpg")
    name = "instances_train2017.json"
    assert problems(check(data)) == {
        ("duplicate id", "train", f"{name}: images[6]"),
        ("duplicate id", "train", f"{name}: annotations[10]"),
        ("missing file", "train", "train2017/away.jpg"),
        ("unreadable entry", "train", f"{name}: images[8]"),
        ("same file twice", "train", "train2017/000000000011.jpg"),
        ("size differs", "train", "train2017/000000000011.jpg"),
        ("unknown category", "train", f"{name}: annotations[1]"),
        ("unknown image", "train", f"{name}: annotations[2]"),
        ("unreadable entry", "train", f"{name}: annotations[4]"),
        ("extra file", "train", "train2017/stranger.jpg"),
        ("unreadable", "train", "train2017/000000000013.jpg"),
        ("unreadable", "train", "train2017/000000000014.jpg"),
        ("same image in train and val", "train", "train2017/000000000015.jpg"),
        ("categories differ", "val", str(data)),
    }


@pytest.mark.parametrize("decode", [True, False])
def test_turned_images_may_be_annotated_as_stored_or_as_seen(data, decode):
    """As training takes them."""
    path = data / "train2017" / "000000000012.jpg"
    image = Image.open(path)
    exif = image.getexif()
    exif[0x0112] = 6  # a quarter turn
    image.save(path, exif=exif)
    assert not check(data, decode=decode).problems
    image.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    assert not check(data, decode=decode).problems
    image.transpose(Image.Transpose.ROTATE_90).save(path)
    [problem] = check(data, decode=decode).problems
    assert problem.kind == "size differs" and "is 30x40, its annotations are for 40x30" in problem.text


def test_headers_only(data):
    """Damage in a PNG's pixels that its header does not show: found by decoding, and only so."""
    from PIL import Image

    path = data / "train2017" / "000000000012.jpg"
    Image.effect_noise((40, 30), 50).save(path, "PNG")
    stored = bytearray(path.read_bytes())
    stored[len(stored) // 2] ^= 0xFF
    path.write_bytes(stored)
    assert problems(check(data)) == {("unreadable", "train", "train2017/000000000012.jpg")}
    assert check(data, decode=False).problems == []


@pytest.mark.parametrize("what", ["annotations/instances_train2017.json", "train2017"])
def test_half_a_split(data, what):
    path = data / what
    path.unlink() if path.is_file() else shutil.rmtree(path)
    report = check(data)
    assert problems(report) == {("cannot be opened", "train", str(path))} and list(report.facts) == ["val"]


def test_a_split_without_anything_is_named_as_coco_names_it(data):
    file = data / "annotations" / "instances_val2017.json"
    file.unlink()
    shutil.rmtree(data / "val2017")
    assert problems(check(data)) == {("cannot be opened", "val", str(file))}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"images": 3}', '{"images": [], "categories": 3}'])
def test_no_json(data, text):
    file = data / "annotations" / "instances_val2017.json"
    file.write_text(text)
    assert problems(check(data)) == {("cannot be opened", "val", str(file))}


def test_declared_classes(data, tmp_path):
    for path in (data, as_records(data, tmp_path / "out")):
        report = check(path, classes=80)
        assert [each.text for each in report.problems] == ["2 classes, the recipe declares 80"]


def test_nothing_there(tmp_path):
    with pytest.raises(UsageError, match="holds nothing that this recipe can read"):
        check(tmp_path)
    assert problems(check(tmp_path, kind="coco_tfrecord")) == {
        ("cannot be opened", "train", str(tmp_path)),
        ("cannot be opened", "val", str(tmp_path)),
    }
    assert check("synthetic:classes=3").problems == []


def test_processes_change_nothing(data, monkeypatch, tmp_path):
    records = as_records(data, tmp_path / "out")
    (data / "train2017" / "000000000013.jpg").write_bytes(b"<html>")
    monkeypatch.setattr(images, "_WORTH_PROCESSES", 0)
    for path in (data, records):
        several = check_boxes(str(path), "auto", 0, True, 2, silent)
        assert several == check(path)


def set_to(key: str, values: list):
    return lambda example: example.__setitem__(key, values)


RECORDS = {
    "outside": (set_to("image/object/bbox/xmax", [0.9, 1.01]), "box outside of the image"),
    "negative": (set_to("image/object/bbox/ymin", [-0.1, 0.1]), "box outside of the image"),
    "no height": (set_to("image/object/bbox/ymax", [0.9, 0.01]), "box without an area"),
    "nan": (set_to("image/object/bbox/ymax", [0.9, math.nan]), "box not a number"),
    "category": (set_to("image/object/class/label", [1, 2]), "unknown category"),
    "class name": (set_to("image/object/class/text", [b"person", b"bus"]), "unknown category"),
    "too few": (set_to("image/object/class/label", [1]), "unreadable"),
    "no id": (set_to("image/source_id", [b"x"]), "unreadable"),
    "two heights": (set_to("image/height", [3, 4]), "unreadable"),
    "size": (set_to("image/height", [31]), "size differs"),
    "checksum": (set_to("image/key/sha256", [b"0" * 64]), "wrong checksum"),
    "integers": (set_to("image/object/bbox/xmax", [1, 1]), "unreadable"),
    "other id": (set_to("image/source_id", [b"52"]), "duplicate id"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(data, tmp_path, name):
    out = as_records(data, tmp_path / "out")
    change_one, kind = RECORDS[name]
    split = "val" if name == "other id" else "train"
    shard = out / ("val-00000-of-00001.tfrecord" if split == "val" else "train-00001-of-00002.tfrecord")
    edit_records(shard, change_one)
    # What a run refuses because of it is reported too.
    found = {problem for problem in problems(check(out)) if problem != ("cannot be opened", split, str(out))}
    assert {(k, s) for k, s, _ in found} == {(kind, split)}
    assert all(where.startswith(f"{shard.name} at byte ") for *_, where in found)


def test_no_image_in_a_record(data, tmp_path):
    out = as_records(data, tmp_path / "out")
    edit_records(out / "val-00000-of-00001.tfrecord", set_to("image/encoded", [b"<html>"]))
    assert {kind for kind, *_ in problems(check(out))} == {"unreadable", "wrong checksum"}


def test_damaged_and_missing_shards(data, tmp_path):
    out = as_records(data, tmp_path / "out")
    first, second, val = sorted(out.glob("*.tfrecord"))
    stored = bytearray(first.read_bytes())
    stored[-10] ^= 1  # in the last record, whose checksum fails
    first.write_bytes(stored)
    second.unlink()
    val.write_bytes(val.read_bytes()[:-3])
    found = problems(check(out))
    assert {(kind, split) for kind, split, _ in found} == {
        ("unreadable", "train"),
        ("missing file", "train"),
        ("cannot be opened", "val"),
    }
    assert ("missing file", "train", "train-00001-of-00002.tfrecord") in found


def test_records_without_json(data, tmp_path):
    """Their classes are those of the boxes, of which val need not have all."""
    out = as_records(data, tmp_path / "out")
    shutil.rmtree(out / "raw-data")
    report = check(out, classes=2)
    assert report.problems == [] and report.facts["train"]["boxes per class"] == {"person": 5, "car": 5}
    edit_records(out / "train-00000-of-00002.tfrecord", set_to("image/object/class/text", [b"person", b"bus"]))
    assert {kind for kind, *_ in problems(check(out))} >= {"unknown category"}


def test_an_image_of_the_records_that_their_json_does_not_know_is_reported(data, tmp_path):
    """No entry is wrong by itself; a run refuses them together."""
    out = as_records(data, tmp_path / "out")
    file = out / "raw-data" / "annotations" / "instances_train2017.json"
    described = json.loads(file.read_text())
    gone = described["images"].pop()["id"]
    described["annotations"] = [each for each in described["annotations"] if each["image_id"] != gone]
    file.write_text(json.dumps(described))
    with pytest.raises(BadData, match=f"hold image {gone}, which .* does not know"):
        open_boxes("auto", str(out), "train")
    edit_records(out / "train-00000-of-00002.tfrecord", set_to("image/key/sha256", [b"0" * 64]))  # which a run takes
    report = check(out)
    assert [each.kind for each in report.problems] == ["wrong checksum", "cannot be opened"]
    assert f"hold image {gone}" in report.problems[1].text


def test_folders_beside_records_are_checked_as_training_reads_them(data, tmp_path):
    as_records(data, tmp_path / "out")
    for shard in (tmp_path / "out").glob("*.tfrecord"):
        shutil.copy(shard, data)
    (data / "train-00001-of-00002.tfrecord").write_bytes(b"damaged")
    assert open_boxes("auto", str(data), "train").kind == "coco" and check(data).problems == []


def test_what_the_recipe_has_no_room_for_is_reported(data: Path):
    """Training stops at an image with more boxes than data.max_boxes."""
    assert not DetectionData(path=str(data)).check_samples(True, 1, silent).problems
    train, val = DetectionData(path=str(data), max_boxes=1).check_samples(True, 1, silent).problems
    assert (train.split, val.split) == ("train", "val") and "use --data.max-boxes 2" in train.text


def test_a_split_of_nothing_but_mistakes_is_not_read_to_its_end(data: Path):
    shutil.rmtree(data / "annotations")
    for split in ("train", "val"):
        (data / "images").mkdir(exist_ok=True)
        (data / f"{split}2017").rename(data / "images" / split)
        for image in (data / "images" / split).iterdir():
            label = data / "labels" / split / f"{image.stem}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text("wrong\n" * (20_000 if split == "train" else 1))
    report = check(data)
    listed = [each for each in report.problems if each.split == "train"]
    assert len(listed) == 100_001 and listed[-1].kind == "cannot be opened"
    assert listed[-1].text.endswith(".txt:20000 is problem number 100000; the rest was not checked")
    assert len(report.problems) == 100_001 + 3
