"""Where exports and images of labelling tools lie, which split and class they are of, and what an index may say."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.sources import (
    SourceOptions,
    index_files,
    labelme,
    labelstudio,
    open_boxes,
    open_masks,
    tool_exports,
    via,
)
from sightline.data.sources import open_source as open_labels
from sightline.data.sources.tool_exports import Read
from sightline.errors import BadData, BadSample, UsageError

ALL = SourceOptions(split="all")


def photo(*files: Path, size: tuple[int, int] = (24, 20)) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(file)


def via_of(*names: str, label: str = "a", tags: object = None, box: tuple = (1, 2, 5, 4)) -> str:
    """An export of VIA: a box in each image."""
    shape = {"name": "rect", **dict(zip(("x", "y", "width", "height"), box, strict=True))}
    region = {"shape_attributes": shape, "region_attributes": {"class": label} if label else {}}
    said = {"regions": [region] if box[2] else [], "file_attributes": {} if tags is None else {"class": tags}}
    return json.dumps({name: {"filename": name, **said} for name in names})


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def names_in(root: Path, split: str = "val", options: SourceOptions = ALL) -> list[str]:
    source = open_boxes("via", str(root), split, options)
    return [source.name(row) for row in range(len(source))]


# Exports


def test_what_comes_after_an_image_that_is_named_again_is_read(tmp_path):
    """Some folders hold an export beside the project that it is of."""
    photo(*(tmp_path / name for name in ("a.png", "b.png")))
    write(tmp_path / "a.json", via_of("a.png"))
    write(tmp_path / "b.json", via_of("a.png", "b.png"))
    assert [Path(name).name for name in names_in(tmp_path)] == ["a.png", "b.png"]


def test_some_files_of_a_folder_tell_whether_it_holds_exports(tmp_path):
    for number in range(50):
        write(tmp_path / f"{number:02d}.json", "{}")
    last = write(tmp_path / "50.JSON", via_of("a.png"))
    write(tmp_path / ".a.json", via_of("a.png"))
    write(tmp_path / "00.txt", via_of("a.png"))
    assert via.TOOL.exports(tmp_path) == []
    (tmp_path / "00.json").unlink()
    assert via.TOOL.exports(tmp_path) == [last]
    folder = tmp_path / "labelme"
    one = '{"imagePath": "a.png", "shapes": []}'
    for number in range(50):
        write(folder / f"{number:02d}.json", "{}")
    write(folder / "50.json", one)
    assert labelme.TOOL.exports(folder) == []
    write(folder / "49.json", one)
    assert len(labelme.TOOL.exports(folder)) == 51 and len(labelme.TOOL.exports(folder, 1)) == 1
    assert labelme.TOOL.exports(tmp_path / "none") == []


def test_a_file_is_known_by_its_first_bytes(tmp_path, monkeypatch):
    text = via_of("a.png")
    monkeypatch.setattr(tool_exports, "_HEAD", len(text))
    assert via.TOOL.is_file_of(write(tmp_path / "a.json", text))
    assert not via.TOOL.is_file_of(write(tmp_path / "a.json", " " * len(text) + text))
    (tmp_path / "b.JSON").write_bytes(b"\xef\xbb\xbf" + text[:-3].encode())
    assert via.TOOL.is_file_of(tmp_path / "b.JSON")
    assert not via.TOOL.is_file_of(write(tmp_path / "a.txt", text))
    assert not via.TOOL.is_file_of(tmp_path / "none.json")
    assert not via.TOOL.detect(str(tmp_path / "none.json")) and via.TOOL.detect(str(tmp_path / "b.JSON"))


@pytest.mark.parametrize("folder", ["", *tool_exports.LABEL_FOLDERS, "images"])
def test_exports_lie_in_the_usual_folders(tmp_path, folder):
    photo(tmp_path / "a.png")
    file = write(tmp_path / folder / "x.json", via_of("a.png"))
    assert names_in(tmp_path) == [f"{tmp_path.name}/a.png"]
    if folder != "images":  # a file there has its images beside it
        assert names_in(file) == names_in(tmp_path)
    shutil.move(file, tmp_path / "rest.d.json")
    (tmp_path / "rest").mkdir()
    shutil.move(tmp_path / "rest.d.json", tmp_path / "rest" / "x.json")
    with pytest.raises(BadData, match=r"holds no export of VIA; docs/reference/data_tools.md shows the layouts"):
        names_in(tmp_path)


@pytest.mark.parametrize("below", ["{0}/x.json", "{0}/labels/x.json", "annotations/{0}/x.json", "images/{0}/x.json"])
def test_exports_of_splits(tmp_path, below):
    for split in ("train", "valid", "test"):
        photo(tmp_path / ("images" if below[0] != "{" else "") / split / "a.png")
        write(tmp_path / below.format(split), via_of("a.png"))
    options = SourceOptions()
    assert [names_in(tmp_path, split, options) for split in ("train", "val", "test")] == [
        ["train/a.png"], ["valid/a.png"], ["test/a.png"]
    ]  # fmt: skip


def test_files_called_like_splits(tmp_path):
    photo(*(tmp_path / f"{name}.png" for name in "abc"))
    for name, image in (("train", "a"), ("val", "b"), ("test", "c"), ("test2", "a")):
        write(tmp_path / f"{name}.json", via_of(f"{image}.png"))
    found = [names_in(tmp_path, split, SourceOptions()) for split in ("train", "val", "test")]
    assert found == [[f"{tmp_path.name}/{name}.png"] for name in "abc"]
    for name in ("val", "test", "test2"):
        (tmp_path / f"{name}.json").unlink()
    assert names_in(tmp_path) == [f"{tmp_path.name}/a.png"]  # one file is all there is
    (tmp_path / "train.json").rename(tmp_path / "val.json")
    write(tmp_path / "more.json", via_of("b.png"))
    assert names_in(tmp_path) == [f"{tmp_path.name}/{name}.png" for name in "ab"]


def test_what_is_needed_is_named_where_nothing_of_it_is_marked(tmp_path):
    photo(tmp_path / "a.png", tmp_path / "b.png")
    write(tmp_path / "x.json", via_of("a.png", "b.png", box=(1, 1, 0, 0)))
    for kind, what in ((open_boxes, "boxes"), (open_masks, "outlines"), (open_labels, "labels of whole images")):
        with pytest.raises(
            BadData, match=rf"VIA marks no {what} in its 2 images; it has nothing else either; annotate"
        ):
            kind("via", str(tmp_path), "val", ALL)
        with pytest.raises(UsageError, match="no test split"):
            kind("via", str(tmp_path), "test")
    write(tmp_path / "x.json", via_of("a.png", "b.png"))
    said = r"it has 2 objects \(for `sightline train detection` or `segmentation`\); annotate them first"
    with pytest.raises(BadData, match=rf"marks no labels of whole images in its 2 images; {said}"):
        open_labels("via", str(tmp_path), "val", ALL)
    write(tmp_path / "x.json", via_of("a.png", "b.png", box=(1, 1, 0, 0), tags="day"))
    said = r"it has 2 labels of images \(for `sightline train classification`\); annotate"
    with pytest.raises(BadData, match=rf"marks no boxes in its 2 images; {said}"):
        open_boxes("via", str(tmp_path), "val", ALL)


# Images


@pytest.mark.parametrize(
    ("said", "files", "expected"),
    [
        ("a.png", ["a.png", "x/a.png", "images/a.png", "labels/a.png"], "labels/a.png"),
        ("a.png", ["a.png", "x/a.png", "images/a.png"], "a.png"),
        ("a.png", ["x/a.png", "images/a.png"], "images/a.png"),
        ("../x/a.png", ["x/a.png", "images/a.png"], "x/a.png"),
        ("x\\a.png", ["x/a.png", "images/a.png", "y/x/a.png"], "x/a.png"),
        ("C:\\y\\x\\a.png", ["z/x/a.png", "z/y/a.png"], "z/x/a.png"),
        ("/y/x/a.png", ["z/ax/a.png", "z/y/x/a.png", "y/z/a.png"], "z/y/x/a.png"),
        ("/data/upload/0a1b2c-a.png", ["x/a.png"], "x/a.png"),
        ("0123456789ab-a.png", ["x/a.png"], "x/a.png"),
        ("0123456789ab-a.png", ["x/a.png", "y/0123456789ab-a.png"], "y/0123456789ab-a.png"),
        ("0123456789abc-a.png", ["x/a.png"], "0123456789abc-a.png"),
        ("12345-a.png", ["x/a.png"], "12345-a.png"),
        ("x/b.png", ["x/a.png"], "b.png"),
        ("x/b.png", ["x/x.png"], "b.png"),
    ],
)
def test_an_image_is_found_by_its_path_or_its_name(tmp_path, said, files, expected):
    photo(*(tmp_path / file for file in files))
    write(tmp_path / "labels" / "x.json", via_of(said))
    options = SourceOptions(split="all", skips_missing=True)
    assert names_in(tmp_path, "val", options) == [f"{tmp_path.name}/{expected}"]


def test_folders_of_images_decide_splits_for_cvat_alone(tmp_path):
    photo(tmp_path / "train" / "a.png", tmp_path / "val" / "b.png")
    write(tmp_path / "x.json", via_of("train/a.png", "val/b.png"))
    assert len(names_in(tmp_path)) == 2
    images = "".join(f'<image name="{name}"><tag label="x"/></image>' for name in ("train/a.png", "val/b.png"))
    write(tmp_path / "y.xml", f"<annotations><meta/>{images}</annotations>")
    found = [open_labels("cvat", str(tmp_path), split) for split in ("train", "val")]
    assert [[source.name(row) for row in range(len(source))] for source in found] == [["train/a.png"], ["val/b.png"]]


def test_images_of_one_name_are_named(tmp_path):
    photo(*(tmp_path / folder / "a.png" for folder in "wxyz"))
    write(tmp_path / "x.json", via_of("a.png"))
    said = r"x.json, entry at byte 10: a.png could be w/a.png or x/a.png or y/a.png; rename one of them; fix it in VIA"
    with pytest.raises(BadData, match=said):
        names_in(tmp_path)
    for name in ("..", "a\x01b"):
        write(tmp_path / "x.json", json.dumps({"k": json.loads(via_of(name))[name]}))
        with pytest.raises(BadData, match=r"image: the name .*; fix it in VIA"):
            names_in(tmp_path)


def test_sides_come_from_the_image_or_from_its_boxes(tmp_path):
    photo(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"broken")
    write(tmp_path / "x.json", via_of("a.png", "b.png", box=(1, 2, 50.5, 40)))
    source = open_boxes("via", str(tmp_path), "val", ALL)
    first, second = source.objects(0), source.objects(1)
    assert (first.width, first.height) == (24, 20) and first.boxes.tolist() == [[1, 2, 23, 18]]
    assert (second.width, second.height) == (52, 42) and second.boxes.tolist() == [[1, 2, 50.5, 40]]
    write(tmp_path / "x.json", via_of("b.png", box=(1, 2, 2**20, 5)))
    assert open_boxes("via", str(tmp_path), "val", ALL).objects(0).width == 2**20
    write(tmp_path / "x.json", via_of("a.png", box=(24, 2, 5, 5)))
    assert "1 objects outside their image or without an area" in open_boxes("via", str(tmp_path), "val", ALL).notes


def test_other_files_among_those_of_labelme_are_counted(tmp_path):
    photo(tmp_path / "a.png")
    one = {"imagePath": "a.png", "version": "5", "shapes": []}
    one["shapes"] = [{"label": "a", "shape_type": "rectangle", "points": [[1, 1], [4, 4]]}]
    write(tmp_path / "a.json", json.dumps(one))
    write(tmp_path / "b.json", "{}")
    source = open_boxes("labelme", str(tmp_path), "val", ALL)
    assert source.notes == ("annotated in LabelMe", "1 .json files of something else ignored")
    task = {"data": {"image": "a.png"}, "annotations": []}
    write(tmp_path / "two" / "x.json", json.dumps([task]))
    with pytest.raises(BadData, match=r"two has no annotated image; annotate some in Label Studio first"):
        open_boxes("labelstudio", str(tmp_path / "two"), "val", ALL)
    assert labelstudio.TOOL.detect(str(tmp_path / "two"))


# Classes


def test_classes_are_those_of_train(tmp_path):
    for split, label in (("train", "b"), ("val", "c")):
        photo(tmp_path / split / "a.png")
        write(tmp_path / split / "x.json", via_of("a.png", label=label))
    with pytest.raises(BadData, match=r"val has classes that train lacks: c; add training images of them, or remove"):
        open_boxes("via", str(tmp_path), "val")
    for labels, said in (
        (("b", ""), "b"),  # an object without a name is of the only class
        (("", "b"), None),
        (("", ""), "object"),
    ):
        for split, label in zip(("train", "val"), labels, strict=True):
            write(tmp_path / split / "x.json", via_of("a.png", label=label))
        if said is None:
            with pytest.raises(BadData, match="has classes that train lacks: b"):
                open_boxes("via", str(tmp_path), "val")
        else:
            source = open_boxes("via", str(tmp_path), "val")
            assert source.classes == (said,) and source.objects(0).labels.tolist() == [1]


def test_labels_of_images(tmp_path):
    for split in ("train", "val"):
        photo(*(tmp_path / split / f"{name}.png" for name in "abc"))

    def said(**tags: object) -> str:
        return json.dumps(
            {name: json.loads(via_of(f"{name}.png", tags=of))[f"{name}.png"] for name, of in tags.items()}
        )

    write(tmp_path / "train" / "x.json", said(a="x", b="y", c="x"))
    write(tmp_path / "val" / "x.json", said(a="y", b=None, c="x"))
    train, val = (open_labels("via", str(tmp_path), split) for split in ("train", "val"))
    assert [train.name(row) for row in range(3)] == ["a.png", "c.png", "b.png"] and not train.is_multi_label
    assert {val.name(row): val.read(row).label for row in range(2)} == {"c.png": 0, "a.png": 1}
    assert "1 images without a label left out" in val.notes and len(train.notes) == 1
    two = {"x": True, "y": True}
    write(tmp_path / "val" / "x.json", said(a="y", b=two, c="x"))
    with pytest.raises(BadData, match=r"b.png has 2 labels, each training image has one; remove the others"):
        open_labels("via", str(tmp_path), "val")
    write(tmp_path / "train" / "x.json", said(a="x", b=two, c=None))
    train, val = (open_labels("via", str(tmp_path), split) for split in ("train", "val"))
    assert train.is_multi_label and val.is_multi_label and train.classes == ("x", "y")
    assert {val.name(row): val.read(row).label.tolist() for row in range(3)} == {
        "a.png": [0, 1], "b.png": [1, 1], "c.png": [1, 0]
    }  # fmt: skip
    write(tmp_path / "val" / "x.json", said(a="z"))
    with pytest.raises(BadData, match="has classes that train lacks: z"):
        open_labels("via", str(tmp_path), "val")
    write(tmp_path / "val" / "x.json", said(a="x", b="y"))
    (tmp_path / "val" / "b.png").unlink()
    with pytest.raises(BadData, match=r"lacks 1 of the 2 images.*b.png"):
        open_labels("via", str(tmp_path), "val")
    assert len(open_labels("via", str(tmp_path), "val", SourceOptions(skips_missing=True))) == 2
    photo(tmp_path / "test" / "a.png")
    write(tmp_path / "test" / "x.json", said(a=None))
    with pytest.raises(UsageError, match=r"none of the 1 images of .*test has a label"):
        open_labels("via", str(tmp_path), "test")


def test_a_part_of_the_labelled_images_validates(tmp_path):
    photo(*(tmp_path / f"{number:02d}.png" for number in range(60)))
    tags = {f"{number:02d}.png": "xy"[number % 2] for number in range(60)}
    said = {name: json.loads(via_of(name, tags=tag))[name] for name, tag in tags.items()}
    write(tmp_path / "x.json", json.dumps(said))
    options = SourceOptions(val_fraction=0.2)
    train, val = (open_labels("via", str(tmp_path), split, options) for split in ("train", "val"))
    mine, held_out = ({source.name(row) for row in range(len(source))} for source in (train, val))
    assert mine | held_out == set(tags) and len(held_out) == 12 and not mine & held_out
    for source in (train, val):
        assert {os.fsdecode(each) for each in source.held_out.all()} == held_out
        labels = [source.read(row).label for row in range(len(source))]
        assert labels == ["xy".index(tags[source.name(row)]) for row in range(len(source))] == sorted(labels)
        assert sum(labels) == len(labels) // 2
        names = [source.name(row) for row in range(len(source))]
        assert names == sorted(names, key=lambda name: (tags[name], name))


# What an earlier run kept


def test_an_index_that_does_not_fit_is_refused(tmp_path):
    photo(tmp_path / "a.png", tmp_path / "b.png")
    write(tmp_path / "x.json", via_of("a.png", "b.png", tags="day"))
    place = via.TOOL.layout_at(str(tmp_path)).train
    read = tool_exports._read_place(via.TOOL, place)
    kept = read.arrays()
    again = Read.loaded(read.files, kept)
    assert again.starts.tolist() == read.starts.tolist() and again.tag_names.all() == [b"day"]
    one = np.zeros(1, np.int64)
    for wrong in (
        {"starts": one},
        {"stops": one},
        {"file_of": one},
        {"splits": one},
        {"tag_ends": one},
        {"tags": one},
        {"tag_ends": np.asarray([1, 0])},
        {"tag_ends": np.asarray([1, 3])},
        {"tag_ends": np.asarray([3, 2])},
        {"tags": np.asarray([0, 1])},
        {"tags": np.asarray([0, -1])},
        {"file_of": np.asarray([0, 1])},
        {"file_of": np.asarray([-1, 0])},
        {"starts": np.asarray([0, -1])},
        {"splits": np.asarray([0, 3])},
        {"splits": np.asarray([-1, 0])},
        index_files.Names.of([b"../a.png", b"b.png"]).arrays("names"),
    ):
        assert wrong.keys() <= kept.keys()
        with pytest.raises((ValueError, BadData)):
            Read.loaded(read.files, kept | wrong)
    assert Read.loaded(read.files, kept | {"splits": np.asarray([0, 2])}).splits.tolist() == [0, 2]


def test_an_export_that_is_gone_is_named(tmp_path):
    photo(tmp_path / "a.png")
    file = write(tmp_path / "x.json", via_of("a.png"))
    source = open_masks("via", str(tmp_path), "val", ALL)
    assert source.mask(0).sum() == 20
    text = file.read_text()
    for changed in (text.replace('"width": 5', '"width": 6'), text.replace('"a"', '"b"'), text[:-30]):
        file.write_text(changed)
        if "6" in changed:  # its outline alone is another one
            assert source.mask(0).sum() == 24
            continue
        with pytest.raises(BadSample, match=rf"{file} has changed since it was indexed; start again"):
            source.mask(0)
    file.unlink()
    with pytest.raises(BadSample, match=rf"{file} cannot be read: No such file"):
        source.mask(0)
    with pytest.raises(BadData, match="x.json cannot be read: No such file or directory; allow reading it or remove"):
        tool_exports._state(file)
