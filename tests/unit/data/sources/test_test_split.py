"""The test split of every source of images: found under its names, counted whole, and never part of train or val."""

import csv
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.sources import SourceOptions, open_boxes, open_source
from sightline.data.sources.layouts import NoTestSplit
from sightline.errors import BadData
from sightline.files.plain_yaml import to_text

coco_features = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["coco_features"]
MADE = runpy.run_path(str(Path(__file__).with_name("box_layouts.py")))
FILES = {"train": 4, "val": 2, "test": 3}  # images of each class
KINDS = ("ant", "bee")


def image(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade % 256, 0, 0)).save(path)


def class_folders(root: Path, **folders: str) -> None:
    """root/FOLDER/CLASS/N.png for each split."""
    for split, folder in folders.items():
        for kind in KINDS:
            for number in range(FILES[split]):
                image(root / folder / kind / f"{number}.png", len(split) + number)


def table(file: Path, rows: list[tuple[str, ...]], header: tuple[str, ...] = ("file", "label")) -> None:
    for row in rows:
        image(file.parent / "images" / row[0])
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([header, *rows])


def rows_of(split: str) -> list[tuple[str, ...]]:
    return [(f"{split}{number}{kind}.png", kind) for kind in KINDS for number in range(FILES[split])]


def folder(root: Path, has_test: bool) -> None:
    class_folders(root, train="train", val="val", **({"test": "test"} if has_test else {}))


def folder_testing(root: Path, has_test: bool) -> None:
    class_folders(root, train="Train", val="Valid", **({"test": "Testing"} if has_test else {}))


def folder_named(root: Path, has_test: bool) -> None:
    class_folders(root, train="img_train", val="img_val", **({"test": "img_test"} if has_test else {}))


def folder_without_val(root: Path, has_test: bool) -> None:
    """`testing` never validated, unlike `test`."""
    class_folders(root, train="train", **({"test": "testing"} if has_test else {}))


def tables(root: Path, has_test: bool) -> None:
    for split in ("train", "val", *(["test"] if has_test else [])):
        table(root / f"{split}.csv", rows_of(split))


def table_column(root: Path, has_test: bool) -> None:
    splits = ("train", "val", *(["test"] if has_test else []))
    table(root / "labels.csv", [(*row, s) for s in splits for row in rows_of(s)], ("file", "label", "split"))


LABELLED = {each.__name__: each for each in (folder, folder_testing, folder_named, folder_without_val)}
LABELLED |= {each.__name__: each for each in (tables, table_column)}


@pytest.mark.parametrize("kind", LABELLED)
def test_labelled_images_have_their_test_split_and_the_same_train_and_val(kind: str, tmp_path: Path):
    for has_test in (False, True):
        (tmp_path / str(has_test)).mkdir()
        LABELLED[kind](tmp_path / str(has_test), has_test)
    without, with_test = str(tmp_path / "False"), str(tmp_path / "True")
    for split in ("train", "val"):
        before, now = (open_source("auto", path, split) for path in (without, with_test))
        assert now.fingerprint == before.fingerprint and now.classes == before.classes == KINDS
    with pytest.raises(NoTestSplit, match=r"no test split \(looked for (a folder test|test\.csv)"):
        open_source("auto", without, "test")
    test = open_source("auto", with_test, "test")
    assert len(test) == sum(
        "test" in str(path.relative_to(with_test)).lower() for path in Path(with_test).rglob("*.png")
    )
    assert test.per_class().tolist() == [FILES["test"]] * len(KINDS) and test.held_out is None
    assert not open_source("auto", with_test, "train").ignored


@pytest.mark.parametrize("kind", LABELLED)
def test_what_a_run_keeps_names_the_test_split_too(kind: str, tmp_path: Path):
    LABELLED[kind](tmp_path, True)
    description = tmp_path / "run.yaml"
    description.write_text(to_text(open_source("auto", str(tmp_path), "train").layout.as_values()))
    for split in ("train", "val", "test"):
        assert open_source("auto", str(description), split).fingerprint == (
            open_source("auto", str(tmp_path), split).fingerprint
        )


def test_a_description_names_a_test_folder_anywhere(tmp_path: Path):
    class_folders(tmp_path, train="a24", val="a25", test="a26")
    path = tmp_path / "pets.yaml"
    path.write_text("kind: folder\ntrain: a24\nval: a25\ntest: a26\n")
    assert {split: len(open_source("auto", str(path), split)) for split in FILES} == {"train": 8, "val": 4, "test": 6}
    path.write_text("kind: folder\ntrain: a24\ntest: a26\n")  # here a part of train validates
    assert [len(open_source("auto", str(path), split)) for split in ("train", "val", "test")] == [6, 2, 6]
    assert open_source("auto", str(path), "val").held_out is not None


@pytest.mark.parametrize("kind", ["folder", "table", "column"])
def test_where_test_validates_it_is_the_same_split(kind: str, tmp_path: Path):
    if kind == "folder":
        class_folders(tmp_path, train="train", test="test")
    elif kind == "table":
        for split in ("train", "test"):
            table(tmp_path / f"{split}.csv", rows_of(split))
    else:
        rows = [(*row, split) for split in ("train", "test") for row in rows_of(split)]
        table(tmp_path / "labels.csv", rows, ("file", "label", "split"))
    val, test = (open_source("auto", str(tmp_path), split) for split in ("val", "test"))
    assert val.fingerprint == test.fingerprint and len(val) == 6 and val.held_out is None


def test_a_test_folder_without_classes_is_no_split(tmp_path: Path):
    class_folders(tmp_path, train="train", val="val")
    image(tmp_path / "test" / "1.png")
    with pytest.raises(NoTestSplit, match="test has no class folders, so its images have no labels"):
        open_source("auto", str(tmp_path), "test")
    assert open_source("auto", str(tmp_path), "train").classes == KINDS


def test_a_test_folder_never_becomes_a_class(tmp_path: Path):
    class_folders(tmp_path, train=".")
    image(tmp_path / "test" / "1.png")
    for split in ("train", "val", "test"):
        with pytest.raises(BadData, match="some are called like splits, not like classes"):
            open_source("auto", str(tmp_path), split)


def test_a_test_table_without_labels_is_no_split(tmp_path: Path):
    for split in ("train", "val"):
        table(tmp_path / f"{split}.csv", rows_of(split))
    table(tmp_path / "test.csv", [row[:1] for row in rows_of("test")], ("file",))
    with pytest.raises(NoTestSplit, match=r"test\.csv has not the columns of .*train\.csv"):
        open_source("auto", str(tmp_path), "test")


def test_classes_of_test_alone_are_refused_and_train_opens(tmp_path: Path):
    class_folders(tmp_path, train="train", val="val", test="test")
    image(tmp_path / "test" / "cow" / "1.png")
    assert len(open_source("auto", str(tmp_path), "train")) == 8
    with pytest.raises(BadData, match="test has class folders that .*train lacks: cow"):
        open_source("auto", str(tmp_path), "test")


def test_files_of_train_and_test_are_one_problem_of_the_data_not_of_the_table(tmp_path: Path):
    """`check` reports leaks; a training does not look at the test table."""
    for split in ("train", "val"):
        table(tmp_path / f"{split}.csv", rows_of(split))
    table(tmp_path / "test.csv", [*rows_of("test"), rows_of("train")[0]])
    assert [len(open_source("auto", str(tmp_path), split)) for split in ("train", "val", "test")] == [8, 4, 7]


def test_tar_shards(tmp_path: Path, write_tar):
    def members(count: int):
        return [
            (f"{i}.{ending}", data) for i in range(count) for ending, data in (("jpg", b"i"), ("cls", b"%d" % (i % 2)))
        ]

    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", members(FILES[split]))
    before = [open_source("auto", str(tmp_path), split).fingerprint for split in ("train", "val")]
    with pytest.raises(NoTestSplit, match=r"looked for test/\*\.tar"):
        open_source("auto", str(tmp_path), "test")
    write_tar(tmp_path / "test" / "0.tar", members(3))
    assert len(open_source("auto", str(tmp_path), "test")) == 3
    assert [open_source("auto", str(tmp_path), split).fingerprint for split in ("train", "val")] == before
    for name, is_test in (
        ("a-test-000.tar", True),
        ("test.tar", True),
        ("train-test.tar", True),
        ("latest.tar", False),
    ):
        root = tmp_path / name.removesuffix(".tar")
        write_tar(root / "train-0.tar", members(4))
        write_tar(root / name, members(3))
        if is_test:
            assert len(open_source("auto", str(root), "test")) == 3
        else:
            with pytest.raises(NoTestSplit):
                open_source("auto", str(root), "test")


@pytest.mark.parametrize("name", ["test/test-00000-of-00001", "img_test-00000-of-00001"])
def test_tfrecords(tmp_path: Path, write_records, name: str):
    def records(count: int):
        return [{"image/class/label": 1 + i % 2, "image/encoded": b"%d" % i} for i in range(count)]

    for split in ("train", "validation"):
        write_records(tmp_path / split / f"{split}-00000-of-00001", records(4))
    before = [open_source("auto", str(tmp_path), split).fingerprint for split in ("train", "val")]
    with pytest.raises(NoTestSplit, match="looked for test/test-00000-of-00008"):
        open_source("auto", str(tmp_path), "test")
    write_records(tmp_path / name, records(3))
    assert len(open_source("auto", str(tmp_path), "test")) == 3
    assert [open_source("auto", str(tmp_path), split).fingerprint for split in ("train", "val")] == before


def test_records_with_boxes(drawn_boxes: Path, tmp_path: Path, write_records):
    for split, as_split in (("train", "train"), ("val", "val")):
        write_records(tmp_path / f"{as_split}-00000-of-00001.tfrecord", coco_features(drawn_boxes, split))
    before = [open_boxes("auto", str(tmp_path), split).fingerprint for split in ("train", "val")]
    with pytest.raises(NoTestSplit, match="looked for test-00000-of-00008.tfrecord"):
        open_boxes("auto", str(tmp_path), "test")
    some = [row for row in coco_features(drawn_boxes, "val") if row["image/object/class/label"]][:3]
    write_records(tmp_path / "test-00000-of-00001.tfrecord", some)
    assert len(open_boxes("auto", str(tmp_path), "test")) == 3
    assert [open_boxes("auto", str(tmp_path), split).fingerprint for split in ("train", "val")] == before


def test_drawn_data_have_none():
    for opens in (open_source, open_boxes):
        with pytest.raises(NoTestSplit, match="data that are drawn have no test split"):
            opens("auto", "synthetic:classes=2,samples=16,size=32", "test")


# Boxes


@pytest.fixture(scope="module")
def data(drawn_boxes: Path):
    """Train, val and a test split of three images."""
    found = MADE["read"](drawn_boxes)
    entries = [entry for entry in found["train"] if entry.boxes][:3]
    return found, [entry._replace(file=f"test-{number}.jpg") for number, entry in enumerate(entries)]


def add_to(layout: str, root: Path, test: list, classes: list[str]) -> None:
    """Write the test split in the form of a layout."""
    if layout in ("coco", "coco_folders", "coco_export", "coco_published"):
        images, file = {
            "coco": ("images", "test.json"),
            "coco_folders": ("images/test", "annotations/instances_test.json"),
            "coco_export": ("test", "test/_annotations.coco.json"),
            "coco_published": ("test2017", "annotations/instances_test2017.json"),
        }[layout]
        MADE["images"](root / images, test)
        MADE["coco_json"](root / file, test, classes)
    elif layout.startswith("yolo"):
        images, labels = {
            "yolo": ("images/test", "labels/test"),
            "yolo_plain": ("images/test", "labels/test"),
            "yolo_export": ("test/images", "test/labels"),
            "yolo_lists": ("images", "labels"),
        }[layout]
        MADE["images"](root / images, test)
        MADE["yolo_labels"](root / labels, test, classes)
        if layout == "yolo_lists":
            (root / "test.txt").write_text("".join(f"./images/{entry.file}\n" for entry in test))
        entry = {"yolo": "images/test", "yolo_lists": "test.txt"}.get(layout)
        if entry:
            (root / "data.yaml").write_text(f"test: {entry}\n" + (root / "data.yaml").read_text())
    elif layout == "voc":
        MADE["images"](root / "JPEGImages", test)
        MADE["voc_xml"](root / "Annotations", test)
        names = "".join(f"{Path(entry.file).stem}\n" for entry in test)
        (root / "ImageSets" / "Main" / "test.txt").write_text(names)
    else:
        MADE["images"](root / "test", test)
        MADE["voc_xml"](root / "test", test)


def write(layout: str, data, root: Path) -> None:
    classes = MADE["classes_of"](data)
    if layout == "coco_published":
        for split, entries in data.items():
            MADE["images"](root / f"{split}2017", entries)
            MADE["coco_json"](root / "annotations" / f"instances_{split}2017.json", entries, classes)
    elif layout == "yolo_plain":
        for split, entries in data.items():
            MADE["images"](root / "images" / split, entries)
            MADE["yolo_labels"](root / "labels" / split, entries, classes)
        (root / "classes.txt").write_text("\n".join(classes))
    else:
        MADE["LAYOUTS"][layout](data, root)


BOXES = ("coco", "coco_folders", "coco_export", "coco_published", "yolo", "yolo_export", "yolo_lists", "yolo_plain")
BOXES += ("voc", "voc_export")


@pytest.mark.parametrize("layout", BOXES)
def test_images_with_boxes_have_their_test_split_and_the_same_train_and_val(layout: str, data, tmp_path: Path):
    found, test = data
    write(layout, found, tmp_path)
    before = {split: open_boxes("auto", str(tmp_path), split).fingerprint for split in ("train", "val")}
    with pytest.raises(NoTestSplit, match="the data have no test split"):
        open_boxes("auto", str(tmp_path), "test")
    add_to(layout, tmp_path, test, MADE["classes_of"](found))
    opened = open_boxes("auto", str(tmp_path), "test")
    assert len(opened) == len(test) == 3 and opened.held_out is None
    assert {Path(opened.name(index)).name for index in range(3)} == {entry.file for entry in test}
    assert sum(len(opened.objects(index).labels) for index in range(3)) == sum(len(entry.boxes) for entry in test)
    train = open_boxes("auto", str(tmp_path), "train")
    assert {"train": train.fingerprint, "val": open_boxes("auto", str(tmp_path), "val").fingerprint} == before
    assert train.classes == opened.classes and train.layout.own_test is not None
    description = tmp_path / "run.yaml"
    description.write_text(to_text(train.layout.as_values()))
    for split, source in (("train", train), ("test", opened)):
        assert open_boxes("auto", str(description), split).fingerprint == source.fingerprint
    boxes = {opened.name(i).rpartition("/")[2]: opened.objects(i).boxes[:, 2:].tolist() for i in range(3)}
    for entry in test:
        assert np.allclose(boxes[entry.file], [box[3:] for box in entry.boxes], atol=0.01)


@pytest.mark.parametrize("layout", ["coco", "coco_export", "yolo", "voc", "voc_export"])
def test_where_test_validates_boxes_are_the_same_split(layout: str, data, tmp_path: Path):
    found, test = data
    write(layout, found, tmp_path)
    add_to(layout, tmp_path, test, MADE["classes_of"](found))
    for old in ("val.json", "valid", "ImageSets/Main/val.txt"):
        path = tmp_path / old
        if path.exists():
            path.rename(tmp_path.parent / f"{tmp_path.name}-{path.name}")
    if layout == "yolo":
        text = (tmp_path / "data.yaml").read_text().replace("val: images/val\n", "")
        (tmp_path / "data.yaml").write_text(text)
    val, opened = (open_boxes("auto", str(tmp_path), split) for split in ("val", "test"))
    assert val.fingerprint == opened.fingerprint and len(val) == 3


def test_unlabelled_test_images_are_no_split(data, tmp_path: Path):
    found, test = data
    bare = [entry._replace(boxes=[]) for entry in test]
    for layout in ("coco", "yolo_lists", "voc"):
        root = tmp_path / layout
        write(layout, found, root)
        add_to(layout, root, bare, MADE["classes_of"](found))
        if layout == "voc":
            for entry in bare:
                (root / "Annotations" / entry.file).with_suffix(".xml").unlink()
        assert len(open_boxes("auto", str(root), "train"))
        with pytest.raises(NoTestSplit, match="has a box|has an annotation|has no annotations"):
            open_boxes("auto", str(root), "test")
    # What COCO publishes of its test images.
    root = tmp_path / "info"
    write("coco_published", found, root)
    (root / "annotations" / "image_info_test2017.json").write_text(json.dumps({"images": [], "categories": []}))
    with pytest.raises(NoTestSplit, match="looked for a json file with test in its name"):
        open_boxes("auto", str(root), "test")


def test_missing_test_images_end_no_training(data, tmp_path: Path):
    found, test = data
    write("coco", found, tmp_path)
    add_to("coco", tmp_path, test, MADE["classes_of"](found))
    (tmp_path / "images" / test[0].file).unlink()
    assert len(open_boxes("auto", str(tmp_path), "train")) and len(open_boxes("auto", str(tmp_path), "val"))
    with pytest.raises(BadData, match="lacks 1 of the 3 images of .*test.json"):
        open_boxes("auto", str(tmp_path), "test")
    assert len(open_boxes("auto", str(tmp_path), "test", SourceOptions(skips_missing=True))) == 3
