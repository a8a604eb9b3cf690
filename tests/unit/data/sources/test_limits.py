"""Limits of readers of boxes and tables, at their exact borders."""

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.sources import (
    SourceOptions,
    box_images,
    coco,
    cvat,
    folder,
    layouts,
    of_plugins,
    open_boxes,
    table_columns,
    voc,
    yolo,
)
from sightline.errors import BadData, UsageError


def test_folders_that_were_seen_do_not_end_a_list(tmp_path):
    deepest = tmp_path
    for level in range(12):  # in which order folders are looked into is the system's choice
        (deepest / "a").mkdir()
        (deepest / "again").symlink_to(tmp_path)
        (deepest / f"{level}.txt").touch()
        deepest /= "a"
    assert len(box_images.list_files(tmp_path, (".txt",)).files) == 12


def test_cells_and_labels_of_a_column_that_may_be_labels():
    for cell, is_short in (("x" * 1000, True), ("x" * 1001, False)):
        content = table_columns._Content()
        content.add(cell)
        assert content.is_short is is_short
    content = table_columns._Content()
    content.labels = set(map(str, range(10_000)))
    content.add("x")
    assert content.is_short and len(content.labels) == 10_001
    content.add("y")
    assert not content.is_short


def test_names_in_xml_have_1000_letters():
    def read(text: str) -> voc.Annotation:
        return voc.read_annotation(text.encode(), "a.xml", lambda *said: pytest.fail(f"{said}"))

    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox>"
    for letters in (999, 1000, 1001):
        name = "a&amp;" * 20 + "x" * (letters - 40)
        found = read(f"<annotation><object><name>{name}</name>{box}</object></annotation>")
        assert len(found.boxes[0].name) == min(letters, 1000)


def test_several_zips_of_cvat_are_refused(tmp_path):
    (tmp_path / "data").mkdir()
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    xml = '<annotations><version>1.1</version><image name="a.png" width="8" height="6"/></annotations>'
    for name in ("a.zip", "b.zip"):
        with zipfile.ZipFile(tmp_path / "data" / name, "w") as packed:
            packed.writestr("annotations.xml", xml)
            packed.write(tmp_path / "a.png", "images/a.png")
    assert cvat.detect(str(tmp_path / "data"))
    with pytest.raises(
        BadData, match="data holds 2 zips of CVAT beside other exports; give one of them as --data.path"
    ):
        open_boxes("cvat", str(tmp_path / "data"), "train")
    (tmp_path / "data" / "b.zip").rename(tmp_path / "b.zip")
    assert (
        cvat.TOOL.layout_at(str(tmp_path / "data")).train == cvat.TOOL.layout_at(str(tmp_path / "data" / "a.zip")).train
    )
    (tmp_path / "data" / "annotations.xml").write_text(xml)
    with pytest.raises(BadData, match="data holds 1 zips of CVAT beside other exports"):
        open_boxes("cvat", str(tmp_path / "data"), "train")


def test_a_damaged_zip_of_cvat_is_known_by_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(cvat, "_DIRECTORY", 100)
    file = tmp_path / "a.zip"
    for data, is_cvat in (
        (b"annotations.xml" + b"x" * 85, True),
        (b"x" * 9 + b"annotations.xml" + b"x" * 85, True),
        (b"annotations.xml" + b"x" * 86, False),
        (b"", False),
    ):
        file.write_bytes(data)
        assert cvat._is_zip_of_cvat(file) is is_cvat and cvat.detect(str(file)) is is_cvat
    assert not cvat._is_zip_of_cvat(tmp_path / "none.zip")


def test_a_description_says_why_its_test_split_is_none(tmp_path: Path):
    for split in ("train", "val", "test"):
        for kind in ("images", "labels"):
            (tmp_path / kind / split).mkdir(parents=True)
        Image.new("RGB", (8, 6)).save(tmp_path / "images" / split / "a.png")
        (tmp_path / "labels" / split / "a.txt").write_text("0 0.5 0.5 0.25 0.5\n")
    layout = yolo.layout_at(str(tmp_path))
    assert layout.test and not layout.no_test
    kept = tmp_path / "run" / "data.yaml"
    kept.parent.mkdir()

    kept.write_text(json.dumps(layout.as_values()))
    assert yolo.layout_at(str(kept)).test and not yolo.layout_at(str(kept)).no_test
    shutil.rmtree(tmp_path / "labels" / "test")
    kept.write_text(json.dumps(layout.as_values() | {"test": str(tmp_path / "images" / "test")}))
    found = yolo.layout_at(str(kept))
    assert found.test is None and found.no_test.startswith(f"{tmp_path / 'images' / 'test'} has no labels; expected")


def test_what_a_list_of_images_elsewhere_gave_is_kept(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.new("RGB", (8, 6)).save(tmp_path / "images" / f"{name}.png")
        (tmp_path / "images" / f"{name}.txt").write_text("0 0.5 0.5 0.25 0.5\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("../images/a.png\n../images/b.png\n")
    (tmp_path / "data" / "data.yaml").write_text("train: train.txt\nnames: [x]\n")
    for file in [tmp_path / "data" / "train.txt", *(tmp_path / "images").iterdir()]:
        os.utime(file, (1e9, 1e9))
    first = open_boxes("yolo", str(tmp_path / "data"), "val", SourceOptions(split="all"))
    assert [each.name for each in tmp_path.rglob(".sightline-index-*")] == [".sightline-index-yolo-train"]
    monkeypatch.setattr(yolo, "sides_of", lambda _: pytest.fail("images were read again"))
    again = open_boxes("yolo", str(tmp_path / "data"), "val", SourceOptions(split="all"))
    assert [again.name(row) for row in range(2)] == [first.name(row) for row in range(2)]
    assert again.fingerprint == first.fingerprint


def test_a_zip_of_cvat_is_unpacked_once_where_there_is_room(tmp_path, monkeypatch):
    file = tmp_path / "data" / "a.zip"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("annotations.xml", "<annotations><meta/></annotations>")
    extracted, extract = [], cvat.extract

    def extracting(source: Path, place: Path) -> None:
        extracted.append(place)
        if place.parent in full:
            raise OSError(28, "No space left on device")
        extract(source, place)

    monkeypatch.setattr(cvat, "extract", extracting)
    monkeypatch.setattr(cvat, "user_cache", lambda: tmp_path / "cache")
    full = [file.parent, tmp_path / "cache"]
    with pytest.raises(BadData, match=r"a.zip cannot be unpacked: No space left on device; unpack it by hand"):
        cvat._unpacked(file)
    assert [place.parent for place in extracted] == full
    full.pop()
    for _ in range(2):
        assert cvat._unpacked(file).parent == tmp_path / "cache" and len(extracted) == 4
    shutil.rmtree(tmp_path / "cache")
    full.clear()
    for _ in range(2):
        found = cvat._unpacked(file)
        assert found.parent == file.parent and (found / "annotations.xml").is_file() and len(extracted) == 5
    os.utime(file, (1e9, 1e9))  # another file of the same name
    assert cvat._unpacked(file) not in (found, None) and len(extracted) == 6
    monkeypatch.setattr(cvat, "user_cache", lambda: None)
    full.append(file.parent)
    os.utime(file, (2e9, 2e9))
    with pytest.raises(BadData, match="No space left"):
        cvat._unpacked(file)


@pytest.mark.parametrize(
    ("box", "said"),
    [
        ([9, 9, 1, 0], ""),
        ([-10, 0, 30, 20], ""),
        ([0, -10.5, 5, 5], "lies by far"),
        ([-10.5, 0, 5, 5], "lies by far"),
        ([10, 5, 10.5, 2], "lies by far"),
        ([5, 10, 2, 10.5], "lies by far"),
        ([0, 0, 5, -0.1], "no side is negative"),
        ([0, 0, -0.1, 5], "no side is negative"),
        ([0, 0, 5, float("nan")], "four finite numbers"),
        ([float("inf"), 0, 5, 5], "four finite numbers"),
        ([5, 5, 6, 6], ""),
        ([5, 5, 5, 6.5], "look like corners"),
        ([5, 5, 6.5, 5], "look like corners"),
        ([1, 1, 11, 11], "look like corners"),
        ([1, 1, 11.5, 11], ""),
        ([-1, 5, 3, 6.5], ""),
        ([7, 7, 6, 7], ""),
    ],
)
def test_boxes_of_a_plugin_that_cannot_be(box, said):
    """In an image of 10 x 10, of which a careless box reaches a tenth beyond and no box as far again."""
    faults = of_plugins._faults(np.asarray([[0, 0, 1, 5], box], np.float64), np.asarray([[10, 10]] * 2))
    found = [text for text, rows in faults.items() if rows.tolist() == [False, True]]
    assert len(found) == sum(rows.any() for rows in faults.values())
    assert (said in found[0]) if said else not found


def test_boxes_of_a_plugin_that_are_shares():
    for boxes, sides, are_shares in (
        ([[0.5, 0.5, 1, 1], [0, 0, 0.5, 0.2]], 3, True),
        ([[0.5, 0.5, 1, 1], [0, 0, 0.5, 1.1]], 3, False),
        ([[0.5, 0.5, 1, 1], [0, 0, 0.5, 0.2]], 2, False),
    ):
        faults = of_plugins._faults(np.asarray(boxes), np.full((2, 2), sides))
        found = [text for text, rows in faults.items() if rows.all()]
        assert [text for text, rows in faults.items() if rows.any()] == found
        assert bool(found) == are_shares and all("shares" in text for text in found)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["a/x/1.png", "a/y/1.png", "b/y/1.png", "b/x/1.png"], ["x", "y"]),
        (["a/x/1.png", "a/y/1.png"], ["x", "y"]),
        (["a/x/1.png", "a/y/1.png", "b/x/1.png", "b/z/1.png"], []),
        (["a/x/1.png", "a/y/1.png", "b/x/1.png"], []),
        (["a/x/1.png", "b/x/1.png"], []),
        (["a/x/1.png", "a/y/1.png", "b/x/1.png", "b/y/1.png", "b/1.png"], []),
        (["a/1.png", "b/1.png"], []),
    ],
)
def test_folders_that_every_class_has_may_be_the_classes(tmp_path, files, expected):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6)).save(tmp_path / file)
    assert folder.inner_classes(tmp_path, folder.class_folders(tmp_path)) == expected


def test_a_split_file_of_other_data_trains_nothing(tmp_path):
    file = tmp_path / "split.json"
    names = [b"a", b"b", b"c"]
    options = SourceOptions(split=str(file))
    file.write_text('{"val": ["b", "x"]}')
    for split in ("train", "val"):
        assert layouts.validating(names, [0] * 3, options, split).tolist() == [False, True, False]
    file.write_text('{"val": ["x"]}')
    assert layouts.validating(names, [0] * 3, options, "val").all()
    with pytest.raises(BadData, match=r"split.json lists none of the 3 samples: its run belongs to other data; give"):
        layouts.validating(names, [0] * 3, options, "train")
    assert layouts.validating(names, [0] * 3, SourceOptions(split="all"), "val").all()
    with pytest.raises(UsageError, match="--data.split all leaves no samples to train on; it is for `evaluate` only"):
        layouts.validating(names, [0] * 3, SourceOptions(split="all"), "train")
    with pytest.raises(BadData, match="none of the 3 samples can validate: no class has two; add samples, or a val"):
        layouts.validating(names, [0, 1, 2], SourceOptions(), "train")


def test_json_files_with_lists_of_coco(tmp_path, monkeypatch):
    (tmp_path / "a.json").mkdir()
    said = b'{"images": [], "annotations": [], "categories": []}'
    for name, data, has_lists in (
        ("b.json", said, True),
        ("c.json", b"\xef\xbb\xbf \n" + said, True),
        ("d.json", b"[" + said, False),
        ("e.json", b"{}", False),
    ):
        (tmp_path / name).write_bytes(data)
        assert coco._has_lists(tmp_path / name) == has_lists
    assert not coco._has_lists(tmp_path / "a.json") and not coco._has_lists(tmp_path / "none.json")
    monkeypatch.setattr(coco, "regular", lambda *_: os.open(tmp_path / "none", os.O_RDONLY))
    assert not coco._has_lists(tmp_path / "b.json") and coco._has_annotations(tmp_path / "b.json")


def test_drawn_boxes_and_masks_have_the_classes_and_numbers_of_their_path():
    for samples, of_val in ((80, 10), (7, 1)):
        path = f"synthetic:classes=3,samples={samples},size=16"
        train, val = (open_boxes("synthetic", path, split) for split in ("train", "val"))
        assert (len(train), len(val)) == (samples, of_val)
        assert train.classes == ("class0000", "class0001", "class0002") and train.class_ids == (1, 2, 3)
        for row in range(of_val):
            found = val.objects(row)
            assert (found.height, found.width) == (16, 16) and set(found.labels.tolist()) <= {1, 2, 3}
