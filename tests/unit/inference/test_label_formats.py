"""What `predict --format` writes comes back, read by the source of that format."""

import base64
import io
import json
import os
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from sightline.data.sources import SourceOptions, labelstudio, open_boxes, open_masks, open_source
from sightline.errors import UsageError
from sightline.inference.label_formats import FORMATS, brush, refuse_format, refuse_names, write_labels
from sightline.parts import DataSpec
from sightline.tasks.config import ClassificationConfig, DetectionConfig, MaskConfig, SegmentationConfig

ALL = SourceOptions(split="all")
SPEC = DataSpec(("cat", "dog"), 3, (32, 32), (), (), (1, 2))
MASKS = DataSpec(("background", "cat", "dog"), 3, (32, 32), (), (), (0, 5, 9))
BOXES = {"a b.png": [("dog", 0.75, (1.5, 2.0, 10.0, 8.25)), ("cat", 0.5, (0.0, 0.0, 40.0, 30.0))], "c.png": []}
SIZES = {"a b.png": (40, 30), "c.png": (24, 32)}


def images(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        Image.new("RGB", size).save(folder / name)


def rows(folder: Path, found) -> list[dict]:
    return [
        {"file": name, "path": str(folder / name), "width": width, "height": height, **found(name)}
        for name, (width, height) in SIZES.items()
    ]


def accepted(folder: Path) -> None:
    """As Label Studio exports predictions that somebody accepted."""
    tasks = json.loads((folder / "labelstudio.json").read_text())
    for task in tasks:
        task["annotations"] = task.pop("predictions")
    (folder / "labelstudio.json").write_text(json.dumps(tasks))


def written(form: str, found, spec: DataSpec, root: Path) -> str:
    """The path of what was written, as a source reads it: beside its images."""
    images(root / "images")
    out = root / "yolo" if form == "yolo" else root
    out.mkdir(exist_ok=True)
    write_labels(form, {"files": rows(root / "images", found)}, root, spec)
    if form == "labelstudio":
        accepted(root)
    return str(root / "labelme" if form == "labelme" else root)


def boxes_in(name: str) -> dict:
    return {"found": [{"class": label, "id": 1, "score": s, "box": list(box)} for label, s, box in BOXES[name]]}


@pytest.mark.parametrize("form", FORMATS)
def test_boxes_come_back(tmp_path, form):
    path = written(form, boxes_in, SPEC, tmp_path)
    if form == "labelme":  # its images lie elsewhere
        images(tmp_path / "labelme")
    source = open_boxes(form, path, "val", ALL)
    assert set(source.classes) == {"cat", "dog"}
    for row in range(len(source)):
        found = source.objects(row)
        expected = BOXES[os.path.basename(source.name(row))]
        assert [source.classes[label - 1] for label in found.labels] == [label for label, *_ in expected]
        np.testing.assert_allclose(found.boxes, np.reshape([box for *_, box in expected], (-1, 4)), atol=1e-4)
        assert (found.width, found.height) == SIZES[os.path.basename(source.name(row))]


def mask_of(name: str) -> np.ndarray:
    width, height = SIZES[name]
    mask = np.zeros((height, width), np.uint8)
    mask[3:20, 5:11], mask[8:12, 7:24] = 1, 2
    mask[0, -1] = 1
    return mask


@pytest.mark.parametrize("form", ["coco", "labelme", "labelstudio", "cvat"])
def test_masks_come_back(tmp_path, form):
    for name in SIZES:
        Image.fromarray(np.asarray(MASKS.class_ids, np.uint8)[mask_of(name)]).save(tmp_path / f"{name}_mask.png")
    path = written(form, lambda name: {"found": [], "mask": f"{name}_mask.png"}, MASKS, tmp_path)
    if form == "labelme":
        images(tmp_path / "labelme")
    source = open_masks(form, path, "val", ALL)
    assert source.classes == ("background", "cat", "dog")
    for row in range(len(source)):
        np.testing.assert_array_equal(source.mask(row), mask_of(os.path.basename(source.name(row))))


def test_masks_of_colours_come_back(tmp_path):
    spec = DataSpec(MASKS.classes, 3, (32, 32), (), (), (0x000000, 0xFF8001, 0x0000FE), coloured=True)
    colours = np.asarray([[0, 0, 0], [255, 128, 1], [0, 0, 254]], np.uint8)
    for name in SIZES:
        Image.fromarray(colours[mask_of(name)]).save(tmp_path / f"{name}_mask.png")
    path = written("cvat", lambda name: {"found": [], "mask": f"{name}_mask.png"}, spec, tmp_path)
    source = open_masks("cvat", path, "val", ALL)
    for row in range(len(source)):
        np.testing.assert_array_equal(source.mask(row), mask_of(os.path.basename(source.name(row))))


@pytest.mark.parametrize("form", ["labelme", "labelstudio", "cvat"])
def test_classes_come_back(tmp_path, form):
    best = {"a b.png": "dog", "c.png": "cat"}

    def found(name: str) -> dict:
        other = "cat" if best[name] == "dog" else "dog"
        return {"found": [{"class": best[name], "id": 1, "score": 0.9}, {"class": other, "id": 0, "score": 0.1}]}

    path = written(form, found, SPEC, tmp_path)
    if form == "labelme":
        images(tmp_path / "labelme")
    source = open_source(form, path, "val", ALL)
    assert {os.path.basename(source.name(at)): source.classes[source.read(at).label] for at in range(2)} == best


def test_all_classes_of_masks_are_written_but_a_background(tmp_path):
    spec = DataSpec(("road", "car", "sky"), 3, (32, 32), (), (), (0, 1, 2))
    for name in SIZES:
        Image.fromarray(mask_of(name)).save(tmp_path / f"{name}_mask.png")
    path = written("coco", lambda name: {"found": [], "mask": f"{name}_mask.png"}, spec, tmp_path)
    assert open_masks("coco", path, "val", ALL).classes == ("background", "road", "car", "sky")


@pytest.mark.parametrize("several", [True, False])
def test_several_labels_are_those_that_were_found(tmp_path, several):
    spec = DataSpec(("cat", "dog"), 3, (32, 32), (), (), multi_label=several)
    found = {"found": [{"class": "dog", "id": 1, "score": 0.3}, {"class": "cat", "id": 0, "score": 0.2}]}
    path = written("cvat", lambda name: found, spec, tmp_path)
    text = (Path(path) / "annotations.xml").read_text()
    assert text.count("<tag") == (4 if several else 2)


def test_names_that_a_format_cannot_hold(tmp_path):
    with pytest.raises(UsageError, match="a.jpg and a.png would both become one file"):
        refuse_names("yolo", ["a.jpg", "b.jpg", "a.png"], ("x",))
    with pytest.raises(UsageError, match="classes.txt and classes.jpg would both become one file"):
        refuse_names("yolo", ["a.jpg", "classes.jpg"], ("x",))
    refuse_names("labelme", ["a.jpg", "classes.jpg"], ("x",))
    with pytest.raises(UsageError, match="does not fit on a line"):
        refuse_names("yolo", ["a.jpg"], ("x", "y\nz"))
    refuse_names("coco", ["a.jpg", "a.png"], ("y\nz",))
    name = "a\x1b\udcff&.png"
    row = {"file": name, "path": f"/data/{name}", "width": 9, "height": 9}
    row["found"] = [{"class": "c\x01<", "id": 1, "score": 0.5, "box": [1, 1, 3, 3]}]
    for form in ("cvat", "labelstudio", "coco", "labelme"):
        write_labels(form, {"files": [row]}, tmp_path, DataSpec(("c\x01<",), 3, (8, 8), (), ()))
    ElementTree.parse(tmp_path / "annotations.xml")
    assert "%FF" in (tmp_path / "labelstudio.json").read_text()


# What each file says, to the letter


@pytest.fixture
def two(tmp_path: Path) -> list[dict]:
    """An image with a box, and one with a mask of its two halves and a class."""
    values = np.repeat([[0, 5, 5, 9]], 3, 0).astype(np.uint8)
    Image.fromarray(values).save(tmp_path / "m.png")
    box = {"class": "dog", "id": 1, "score": 0.123456, "box": [1.5, 2, 10, 8.25]}
    return [
        {"file": "x/a b.jpg", "path": "/data/é/x/a b.jpg", "width": 40, "height": 30,
         "found": [box, box | {"score": 1}]},
        {"file": "m.png", "path": str(tmp_path / "m.png"), "width": 4, "height": 3, "found": [
            {"class": "cat", "id": 0, "score": 0.5}, {"class": "dog", "id": 1, "score": 0.25}, {"class": "odd"}
        ], "mask": "m.png"},
    ]  # fmt: skip


def test_coco_to_the_letter(two, tmp_path):
    assert write_labels("coco", {"files": two}, tmp_path, MASKS) == "coco.json"
    content = json.loads((tmp_path / "coco.json").read_text())
    assert content["images"] == [
        {"id": 1, "file_name": "x/a b.jpg", "width": 40, "height": 30},
        {"id": 2, "file_name": "m.png", "width": 4, "height": 3},
    ]
    assert content["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    about = {"image_id": 1, "category_id": 2, "bbox": [1.5, 2, 10, 8.25], "area": 82.5, "iscrowd": 0}
    halves = {"image_id": 2, "iscrowd": 0}
    cat, dog = ({"segmentation": {"size": [3, 4], "counts": counts}} for counts in ([3, 6, 3], [9, 3]))
    assert content["annotations"] == [
        about | {"id": 1, "score": 0.123456},
        about | {"id": 2, "score": 1},
        halves | cat | {"id": 3, "category_id": 1, "bbox": [1, 0, 2, 3], "area": 6},
        halves | dog | {"id": 4, "category_id": 2, "bbox": [3, 0, 1, 3], "area": 3},
    ]


def test_yolo_to_the_letter(two, tmp_path):
    assert write_labels("yolo", {"files": two[:1]}, tmp_path, SPEC) == "labels/*.txt with classes.txt"
    assert (tmp_path / "labels" / "classes.txt").read_text() == "cat\ndog\n"
    assert (tmp_path / "labels" / "x" / "a b.txt").read_text() == "1 0.162500 0.204167 0.250000 0.275000\n" * 2


def test_labelme_to_the_letter(two, tmp_path):
    assert write_labels("labelme", {"files": two}, tmp_path, MASKS) == "labelme/*.json"
    first, second = (json.loads((tmp_path / "labelme" / name).read_text()) for name in ("x/a b.json", "m.json"))
    box = {
        "label": "dog",
        "points": [[1.5, 2], [11.5, 10.25]],
        "shape_type": "rectangle",
        "group_id": None,
        "flags": {},
    }
    assert first == {
        "version": "5.5.0", "flags": {}, "imageData": None, "imageHeight": 30, "imageWidth": 40,
        "shapes": [box | {"description": "score 0.1235"}, box | {"description": "score 1.0000"}],
        "imagePath": os.path.relpath("/data/é/x/a b.jpg", tmp_path / "labelme" / "x"),
    }  # fmt: skip
    masks = [each.pop("mask") for each in second["shapes"]]
    sides = [np.asarray(Image.open(io.BytesIO(base64.b64decode(each)))) for each in masks]
    assert [(each.shape, each.dtype, each.min()) for each in sides] == [((3, 2), np.uint8, 1), ((3, 1), np.uint8, 1)]
    about = {"shape_type": "mask", "group_id": None, "description": "", "flags": {}}
    assert second["shapes"] == [
        about | {"label": "cat", "points": [[1, 0], [2, 2]]}, about | {"label": "dog", "points": [[3, 0], [3, 2]]}
    ]  # fmt: skip
    assert second["flags"] == {} and second["imagePath"] == "../m.png"
    del two[1]["mask"]
    write_labels("labelme", {"files": two}, tmp_path, MASKS)
    assert json.loads((tmp_path / "labelme" / "m.json").read_text())["flags"] == {
        "background": False, "cat": True, "dog": False
    }  # fmt: skip


def test_label_studio_to_the_letter(two, tmp_path):
    assert write_labels("labelstudio", {"files": two}, tmp_path, MASKS) == "labelstudio.json"
    first, second = json.loads((tmp_path / "labelstudio.json").read_text())
    assert first["data"] == {"image": "/data/local-files/?d=data/%C3%A9/x/a%20b.jpg"}
    about = {"from_name": "label", "to_name": "image", "image_rotation": 0}
    box = about | {"type": "rectanglelabels", "original_width": 40, "original_height": 30, "score": 0.123456}
    box["value"] = {
        "x": 3.75,
        "y": 100 * 2 / 30,
        "width": 25,
        "height": 27.5,
        "rotation": 0,
        "rectanglelabels": ["dog"],
    }
    (predicted,) = first["predictions"]
    assert predicted == {
        "model_version": "sightline",
        "score": (0.123456 + 1) / 2,
        "result": [box | {"id": "box0"}, box | {"id": "box1", "score": 1}],
    }
    (predicted,) = second["predictions"]
    brushes = [each["value"].pop("rle") for each in predicted["result"][:2]]
    for found, inside in zip(brushes, ([0, 1, 1, 0], [0, 0, 0, 1]), strict=True):
        assert labelstudio.decoded(bytes(found), 48).tolist() == (np.repeat(inside * 3, 4) * 255).tolist()
    masks = about | {"type": "brushlabels", "original_width": 4, "original_height": 3}
    choice = {"type": "choices", "from_name": "label", "to_name": "image", "value": {"choices": ["cat"]}}
    assert predicted["score"] == 0.5 and predicted["result"] == [
        masks | {"id": "mask0", "value": {"format": "rle", "brushlabels": ["cat"]}},
        masks | {"id": "mask1", "value": {"format": "rle", "brushlabels": ["dog"]}},
        choice | {"id": "choice"},
    ]
    write_labels("labelstudio", {"files": [two[0] | {"found": []}]}, tmp_path, MASKS)
    (task,) = json.loads((tmp_path / "labelstudio.json").read_text())
    assert task["predictions"] == [{"model_version": "sightline", "score": 0, "result": []}]


def test_a_brush_of_long_runs_is_cut():
    for inside in (np.ones(2**14, bool), np.ones(2**14 + 1, bool), np.arange(2**15 + 5) > 9):
        found = labelstudio.decoded(bytes(brush(inside)), 4 * len(inside))
        assert np.array_equal(found, np.repeat(inside, 4) * 255)
    assert len(brush(np.ones(2**14, bool))) == 10 and len(brush(np.ones(2**14 + 1, bool))) == 14


def test_cvat_to_the_letter(two, tmp_path):
    assert write_labels("cvat", {"files": two}, tmp_path, MASKS) == "annotations.xml"
    edges = 'xtl="1.50" ytl="2.00" xbr="11.50" ybr="10.25"'
    box = f'    <box label="dog" source="auto" occluded="0" {edges} z_order="0"></box>'
    mask = (
        '    <mask label="{}" source="auto" occluded="0" rle="{}" left="{}" top="0" width="{}" height="3" z_order="0">'
    )
    assert (tmp_path / "annotations.xml").read_text().splitlines() == [
        '<?xml version="1.0" encoding="utf-8"?>',
        "<annotations>",
        "  <version>1.1</version>",
        '  <image id="0" name="x/a b.jpg" width="40" height="30">',
        box,
        box,
        "  </image>",
        '  <image id="1" name="m.png" width="4" height="3">',
        mask.format("cat", "0, 6", 1, 2) + "</mask>",
        mask.format("dog", "0, 3", 3, 1) + "</mask>",
        '    <tag label="cat" source="auto"></tag>',
        "  </image>",
        "</annotations>",
    ]


def test_formats_that_cannot_hold_a_task_are_refused():
    refuse_format("yolo", DetectionConfig())
    refuse_format("coco", MaskConfig())
    for form, task, said in (
        ("voc", DetectionConfig(), "choose one of coco, yolo"),
        ("coco", ClassificationConfig(), "no classes of whole images; choose labelstudio"),
        ("yolo", MaskConfig(), "polygons, not masks; choose coco"),
        ("coco", SegmentationConfig(), "for images with classes, boxes or masks"),
    ):
        with pytest.raises(UsageError, match=said):
            refuse_format(form, task)
