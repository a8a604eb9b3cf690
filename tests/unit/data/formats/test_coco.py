"""COCO's json, read by `train`, `check` and `prepare coco`: what one refuses, none takes."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.check.boxes import check_boxes
from sightline.data.formats.coco import FAULTS, faults, read_instances, usable
from sightline.data.prepare import coco
from sightline.data.sources import open_boxes
from sightline.errors import BadData


def silent(what: str, done: int, total: int) -> None:
    """No progress."""


def content() -> dict:
    """Two images of 20x10 with two boxes each."""
    boxes = [[1, 2, 3, 4], [0.5, 0, 19.5, 10]]
    return {
        "images": [{"id": i, "file_name": f"{i}.jpg", "height": 10, "width": 20} for i in (5, 6)],
        "annotations": [
            {"id": 10 * image + at, "image_id": image, "category_id": 1 + at, "bbox": box, "area": 12.5, "iscrowd": at}
            for image in (5, 6)
            for at, box in enumerate(boxes)
        ],
        "categories": [{"id": 1, "name": "person"}, {"id": 2, "name": "car"}],
    }


@pytest.fixture
def readers(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """readers(change): what `train`, `check` and `prepare` say of a data set whose training json went through `change`;
    '' where they take it."""

    def read(change: Callable[[dict], object], changed: tuple[str, ...] = ("train",)) -> dict[str, str]:
        data = tmp_path / "data"
        (data / "annotations").mkdir(parents=True)
        for split in ("train", "val"):
            described = content()
            (data / f"{split}2017").mkdir()
            for image in described["images"]:
                colour = (image["id"], 20, 30 if split == "train" else 90)
                Image.new("RGB", (20, 10), colour).save(data / f"{split}2017" / image["file_name"])
            if split in changed:
                change(described)
            (data / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(described))
        report = check_boxes(str(data), "auto", 0, True, 1, silent)
        said = {"check": " ".join(f"{each.kind}: {each.where}: {each.text}" for each in report.problems)}
        for name, act in {
            "train": lambda: [open_boxes("auto", str(data), split) for split in ("train", "val")],
            "prepare": lambda: coco.prepare(coco.CocoOptions(data, tmp_path / "out", jobs=1), silent),
        }.items():
            try:
                act()
                said[name] = ""
            except BadData as error:
                said[name] = str(error)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return said

    return read


def image(**values: object) -> Callable[[dict], object]:
    return lambda described: described["images"][0].update(values)


def box(**values: object) -> Callable[[dict], object]:
    return lambda described: described["annotations"][0].update(values)


def category(**values: object) -> Callable[[dict], object]:
    return lambda described: described["categories"][0].update(values)


def without(key: str, field: str) -> Callable[[dict], object]:
    return lambda described: described[key][0].pop(field)


def again(key: str, **values: object) -> Callable[[dict], object]:
    return lambda described: described[key].append(described[key][0] | values)


REFUSED: dict[str, tuple[Callable[[dict], object], str]] = {
    "image: id as text": (image(id="5"), "id is '5', expected a whole number"),
    "image: id as a fraction": (image(id=5.0), "id is 5.0"),
    "image: id is true": (image(id=True), "id is True"),
    "image: id beyond 64 bits": (image(id=2**63), "id is 9223372036854775808"),
    "image: id twice": (again("images"), "image 5 appears twice"),
    "image: no height": (without("images", "height"), "height is None"),
    "image: height 0": (image(height=0), "height is 0, expected a whole number from 1 to 1048576"),
    "image: height beyond": (image(height=2**20 + 1), "height is 1048577"),
    "image: width of 31 bits": (image(width=2**31 - 1), "width is 2147483647"),
    "image: no name": (without("images", "file_name"), "file_name is None"),
    "image: empty name": (image(file_name=""), "file_name is ''"),
    "image: the folder": (image(file_name="."), "expected the name of a file"),
    "image: way out": (image(file_name="../val2017/5.jpg"), "leads out of its folder"),
    "image: absolute": (image(file_name="/etc/passwd"), "is an absolute path"),
    "image: half a character": (image(file_name="\ud800.jpg"), "file_name is "),
    "image: a byte that is not a letter": (image(file_name="\udc80.jpg"), "file_name is "),
    "image: not there": (image(file_name="away.jpg"), "away.jpg"),
    "image: a number": (lambda d: d["images"].append(7), "7, expected an object"),
    "category: negative": (category(id=-1), "id is -1, expected a whole number from 0"),
    "category: beyond": (category(id=2**31 + 1), "id is 2147483649"),
    "category: no name": (without("categories", "name"), "name is None"),
    "category: half a character": (category(name="\udfff"), "name is "),
    "category: id twice": (again("categories", name="man"), "category 1 is 'person' already"),
    "category: not those of val": (category(name="man"), "categories"),
    "box: negative category": (box(category_id=-1), "category_id is -1, expected a whole number from 0"),
    "box: unknown category": (box(category_id=3), "annotation 50 has category 3, which is not in the list"),
    "box: unknown image": (box(image_id=7), "annotation 50 belongs to image 7, which is not in the list"),
    "box: id twice": (again("annotations"), "annotation 50 appears twice"),
    "box: id beyond 64 bits": (box(id=-(2**63) - 1), "id is -9223372036854775809"),
    "box: no sides": (without("annotations", "bbox"), "annotation 50 has bbox None"),
    "box: three sides": (box(bbox=[1, 2, 3]), "annotation 50 has bbox [1, 2, 3]"),
    "box: a text": (box(bbox=[1, 2, 3, "4"]), "annotation 50 has bbox [1, 2, 3, '4']"),
    "box: true": (box(bbox=[1, 2, 3, True]), "annotation 50 has bbox [1, 2, 3, True]"),
    "box: nan": (box(bbox=[1, 2, math.nan, 4]), "annotation 50 has bbox [1, 2, nan, 4]"),
    "box: infinite": (box(bbox=[1, 2, math.inf, 4]), "annotation 50 has bbox [1, 2, inf, 4]"),
    "box: beyond all floats": (box(bbox=[1, 2, 10**400, 4]), "annotation 50 has bbox [1, 2, 1000"),
    "box: area as text": (box(area="big"), "annotation 50 has area 'big'"),
    "box: area nan": (box(area=math.nan), "annotation 50 has area nan"),
    "box: area beyond 32 bits": (box(area=1e39), "annotation 50 has area 1e+39"),
    "box: crowd 2": (box(iscrowd=2), "iscrowd is 2, expected a whole number from 0 to 1"),
    "box: crowd true": (box(iscrowd=True), "iscrowd is True"),
    "box: a number": (lambda d: d["annotations"].append(7), "7, expected an object"),
    "no annotations": (lambda d: d.update(annotations=[]), "has no annotations"),
    "no list of annotations": (lambda d: d.pop("annotations"), "has no annotations"),
    "no images": (lambda d: d.update(images=[]), "has no images"),
    "no categories": (lambda d: d.update(categories=[]), "has no categories"),
    "an object": (lambda d: d.update(annotations={}), "annotations is not a list"),
}
TAKEN: dict[str, Callable[[dict], object]] = {
    "as it is": lambda described: None,
    "negative image id": lambda d: (image(id=-3)(d), [each.update(image_id=-3) for each in d["annotations"][:2]]),
    "negative annotation id": box(id=-(2**63)),
    "name with a dot before it": image(file_name="./5.jpg"),
    "no area": without("annotations", "area"),
    "no crowd": without("annotations", "iscrowd"),
    "whole area": box(area=12),
    "lists in another order": lambda d: [d.update({key: d.pop(key)}) for key in ("images", "categories")],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_of_them_refuses_no_other_takes(readers, name):
    change, reported = REFUSED[name]
    said = readers(change)
    assert all(said.values()), said
    if name not in ("image: not there", "category: not those of val"):  # which the json alone does not show
        assert {reader: reported in text and "instances_train2017.json" in text for reader, text in said.items()} == {
            "train": True,
            "check": True,
            "prepare": True,
        }, said


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_odd_but_right_is_taken_by_all(readers, name):
    assert readers(TAKEN[name]) == {"train": "", "check": "", "prepare": ""}


def test_check_reports_boxes_that_train_and_prepare_leave_out(readers):
    said = readers(box(bbox=[1, 2, 3, 8.5]))
    assert said["train"] == said["prepare"] == "" and "box outside of the image" in said["check"]


def test_two_categories_of_one_name_are_reported_and_trained_on(readers):
    said = readers(lambda d: d["categories"].append({"id": 3, "name": "car"}), ("train", "val"))
    assert "categories 2 and 3 are both called 'car'" in said["check"] and said["train"] == ""


def test_all_wrong_entries_reach_the_callback_and_the_others_are_kept():
    described = content()
    described["images"].append({"id": 7})
    described["annotations"][1]["image_id"] = 7
    described["annotations"][2]["bbox"] = None
    reported: list[tuple[str, str]] = []
    found = read_instances(
        [json.dumps(described).encode()], "x", lambda kind, where, text: reported.append((kind, where))
    )
    assert reported == [
        ("unreadable entry", "x: images[2]"),
        ("unreadable entry", "x: annotations[2]"),
        ("unknown image", "x: annotations[1]"),
    ]
    assert found.ids.tolist() == [50, 61] and found.rows.tolist() == [0, 1] and len(found.images) == 2


@pytest.mark.filterwarnings("error")
def test_the_rule_about_boxes_names_one_fault_each():
    boxes = {
        (1, 1, 2, 2): "",
        (0, 0, 20, 10): "",
        (1e308, 1e308, 1e308, 1e308): "outside of the image",
        (-1e308, 0, 1e308, 5): "outside of the image",
        (-0.5, 1, 2, 2): "outside of the image",
        (1, 1, 2, 9.1): "outside of the image",
        (1, 1, 0, 2): "without an area",
        (-5, 1, 2, -2): "without an area",
        (1, math.nan, 2, 2): "not a number",
        (math.inf, 1, -1, 2): "not a number",
    }
    table = np.array(list(boxes), np.float64)
    assert [FAULTS[each] for each in faults(table, 10, 20)] == list(boxes.values())
    assert usable(table, np.full(10, 10), np.full(10, 20)).tolist() == [True, True, *[False] * 8]
