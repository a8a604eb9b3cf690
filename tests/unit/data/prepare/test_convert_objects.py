"""`prepare convert` of boxes, masks and labels from exports into COCO, YOLO, tar, parquet and folders, and back."""

import json
import os
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline import cli
from sightline.data.prepare import convert as converting
from sightline.data.sources import SourceOptions, open_boxes, open_masks
from sightline.data.sources import open_source as open_labels
from sightline.errors import UsageError

SOURCES = Path(__file__).resolve().parents[1] / "sources"
MADE = runpy.run_path(str(SOURCES / "tool_layouts.py"))
EVERY = SourceOptions(keeps_all=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    entries = MADE["ENTRIES"]
    MADE["labelme"](tmp_path / "in" / "train", entries)
    MADE["labelme"](tmp_path / "in" / "val", entries[:2])
    return tmp_path / "in"


def convert(source: Path, out: Path, form: str, *more: str) -> int:
    words = ["prepare", "convert", "--source", str(source), "--out", str(out), "--form", form, "--jobs", "1", *more]
    return cli.main(words)


def key(name: str) -> str:
    return os.path.splitext(os.path.basename(name.rpartition(":")[2]))[0]


def boxes_of(path: Path, split: str) -> dict:
    source = open_boxes("auto", str(path), split, EVERY)
    found = {}
    for row in range(len(source)):
        each = source.objects(row)
        names = [source.classes[label - 1] for label in each.labels]
        found[key(source.name(row))] = (each.width, each.height, names, each.boxes.round(4).tolist(), source.image(row))
    return found


@pytest.mark.parametrize("form", ["coco", "yolo", "tar", "parquet"])
def test_boxes(source, tmp_path, form):
    if form == "parquet":
        pytest.importorskip("pyarrow")
    assert convert(source, tmp_path / "out", form, "--shards", *(["2"] if form in ("tar", "parquet") else ["0"])) == 0
    for split in ("train", "val"):
        assert boxes_of(tmp_path / "out", split) == boxes_of(source, split)
    assert open_boxes("auto", str(tmp_path / "out"), "train").classes == ("cat", "dog")
    assert not list((tmp_path / "out").rglob(".parts"))


@pytest.mark.parametrize("form", ["coco", "tar", "parquet"])
def test_masks(source, tmp_path, form):
    if form == "parquet":
        pytest.importorskip("pyarrow")
    assert convert(source, tmp_path / "out", form, "--of", "masks") == 0
    for split in ("train", "val"):
        ours, theirs = (open_masks("auto", str(at), split) for at in (tmp_path / "out", source))
        if form != "parquet":  # which names no values
            assert ours.classes == theirs.classes
        there = {key(theirs.name(row)): theirs.mask(row) for row in range(len(theirs))}
        assert len(ours) == len(theirs)
        for row in range(len(ours)):
            np.testing.assert_array_equal(ours.mask(row), there[key(ours.name(row))])


@pytest.mark.parametrize("form", ["folder", "tar", "parquet"])
def test_labels(source, tmp_path, form):
    if form == "parquet":
        pytest.importorskip("pyarrow")
    assert convert(source, tmp_path / "out", form, "--of", "labels") == 0
    for split in ("train", "val"):
        ours, theirs = (open_labels("auto", str(at), split) for at in (tmp_path / "out", source))
        assert ours.classes == theirs.classes == ("day", "night")
        found = [{key(each.name(at)): each.read(at) for at in range(len(each))} for each in (ours, theirs)]
        assert found[0] == found[1]


def test_names_that_are_equal_below_folders_stay_apart(tmp_path):
    entries = [
        each._replace(file=name) for each, name in zip(MADE["ENTRIES"], ("a.jpg", "00000001-a.jpg"), strict=False)
    ]
    MADE["cvat"](tmp_path / "in" / "train", entries)
    MADE["cvat"](tmp_path / "in" / "val", entries)
    images = tmp_path / "in" / "train" / "images"
    (images / "below").mkdir()
    os.link(images / "a.jpg", images / "below" / "a.jpg")
    file = tmp_path / "in" / "train" / "annotations.xml"
    file.write_text(
        file.read_text().replace("</annotations>", '<image id="9" name="below/a.jpg"></image></annotations>')
    )
    assert convert(tmp_path / "in", tmp_path / "out", "yolo") == 0
    assert len(boxes_of(tmp_path / "out", "train")) == 3


def test_crowds_stay_crowds_and_yolo_which_has_none_leaves_them_out(tmp_path, capsys):
    MADE["coco"](tmp_path / "in2")
    file = tmp_path / "in2" / "train.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["iscrowd"] = 1
    file.write_text(json.dumps(content))
    for form in ("yolo", "tar", "parquet"):
        if form == "parquet":
            pytest.importorskip("pyarrow")
        assert convert(tmp_path / "in2", tmp_path / form, form) == 0
        said = capsys.readouterr().out
        crowds = [
            source.objects(row).crowd.tolist()
            for source in (open_boxes("auto", str(tmp_path / form), split, EVERY) for split in ("train", "val"))
            for row in range(len(source))
        ]
        if form == "yolo":
            assert "crowds left out 1" in said and sum(map(len, crowds)) == len(content["annotations"]) - 1
        else:
            assert "left out" not in said and sorted(crowds) == [[], [False], [False, False], [True, False]]


def test_a_val_split_that_was_drawn_is_named_and_other_data_are_told_from_it(source, tmp_path, capsys):
    for _ in range(2):  # the second start only reads the record
        assert convert(source / "train", tmp_path / "out", "coco") == 0
        assert "convert: train 3, val (drawn from train) 1, " in capsys.readouterr().out
    assert convert(source, tmp_path / "whole", "coco") == 0
    assert "convert: train 4, val 2, " in capsys.readouterr().out
    assert convert(source, tmp_path / "out", "coco") == 2
    said = capsys.readouterr().err
    assert "out was begun with other data: its train came from other files; choose another --out" in said


def test_missing_images_are_refused_without_flags_that_convert_lacks(tmp_path, capsys):
    MADE["cvat"](tmp_path / "in", MADE["ENTRIES"])
    (tmp_path / "in" / "images" / "b.jpg").unlink()
    for form, of in (("coco", "boxes"), ("coco", "masks"), ("folder", "labels")):
        assert convert(tmp_path / "in", tmp_path / "out", form, "--of", of) == 3
        said = capsys.readouterr().err
        assert "lacks 1 of the " in said and "`kind: cvat`" in said and "on-bad-sample" not in said


def test_a_second_start_changes_nothing_and_forms_that_do_not_fit_are_refused(source, tmp_path, capsys):
    assert convert(source, tmp_path / "out", "coco") == 0
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.json")}
    assert convert(source, tmp_path / "out", "coco") == 0
    assert {file: file.stat().st_mtime_ns for file in before} == before
    content = json.loads((tmp_path / "out" / "annotations" / "instances_train.json").read_text())
    assert [len(content[name]) for name in ("images", "annotations", "categories")] == [4, 5, 2]
    capsys.readouterr()
    assert convert(source, tmp_path / "no", "yolo", "--of", "masks") == 2
    assert "--form yolo holds boxes, not masks" in capsys.readouterr().err
    assert convert(source, tmp_path / "no", "coco", "--of", "labels") == 2
    assert "choose folder, tar or parquet for labels" in capsys.readouterr().err


def test_what_is_written_of_data_that_hold_several_things(source, tmp_path):
    def what(path: Path, form: str, **other: str) -> str:
        return converting._what(converting.ConvertOptions(path, tmp_path / "out", form, **other))

    entries = MADE["ENTRIES"]
    MADE["coco"](tmp_path / "coco")
    MADE["labelme"](tmp_path / "tags" / "train", [each._replace(shapes=[]) for each in entries])
    for split, name in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")):
        MADE["photos"](tmp_path / "classes" / split / name, entries[:1])
    for folder in ("images", "masks"):
        (tmp_path / "masked" / folder).mkdir(parents=True)
    for number, each in enumerate(entries):
        MADE["photos"](tmp_path / "masked" / "images", [each._replace(file=f"{number}.png")])
        values = np.full((each.height, each.width), number % 2, np.uint8)
        Image.fromarray(values).save(tmp_path / "masked" / "masks" / f"{number}.png")
    for path, kind, expected in (
        (source, "auto", "labels boxes boxes boxes labels"),
        (source, "labelme", "labels boxes boxes boxes labels"),
        (tmp_path / "tags", "auto", "labels boxes labels labels labels"),
        (tmp_path / "classes", "auto", "labels boxes labels labels labels"),
        (tmp_path / "masked", "auto", "labels masks masks masks labels"),
        (tmp_path / "masked", "masks", "labels masks masks masks labels"),
    ):
        forms = ("folder", "coco", "yolo", "tar", "tfrecord")
        assert " ".join(what(path, form, kind=kind) for form in forms) == expected, (path, kind)
    assert what(source, "tar", of="masks") == "masks" and what(source, "yolo", of="boxes") == "boxes"
    for form in ("folder", "tfrecord"):
        with pytest.raises(UsageError, match=f"holds images with boxes, which --form {form} cannot hold; choose coco"):
            what(tmp_path / "coco", form)
        with pytest.raises(UsageError, match=f"--form {form} holds labels, not boxes; choose tar, parquet or coco"):
            what(source, form, of="boxes")


def test_shards_of_1252_images(tmp_path):
    def options(**shards: int) -> converting.ConvertOptions:
        return converting.ConvertOptions(tmp_path, tmp_path / "out", "tar", **shards)

    for count, expected in ((1, 1), (1252, 1), (1253, 2), (2504, 2), (2505, 3)):
        sources = {"train": range(count), "val": range(1)}
        assert converting._shards(options(), sources) == {"train": expected, "val": 1}
    assert converting._shards(options(shards=99_999, val_shards=7), sources) == {"train": 99_999, "val": 7}
    for name in ("shards", "val_shards"):
        for wrong in (-1, 100_000):
            with pytest.raises(UsageError, match=f"^{name}={wrong}: use 1 to 99999, or 0$"):
                options(**{name: wrong})
