"""Exports of tools for labelling: the same data in each give what COCO's json gives; what is wrong is named."""

import base64
import json
import os
import pickle
import runpy
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sightline.data import facts
from sightline.data.check.boxes import check_boxes
from sightline.data.sources import Opener, SourceOptions, kind_of_boxes, kind_of_masks, open_boxes, open_masks
from sightline.data.sources import open_source as open_labels
from sightline.errors import BadData, BadSample, UsageError
from sightline.files.archive import BadArchive

MADE = runpy.run_path(str(Path(__file__).with_name("tool_layouts.py")))
LAYOUTS, ENTRIES, Entry, box = MADE["LAYOUTS"], MADE["ENTRIES"], MADE["Entry"], MADE["box"]
TITLES = {"labelme": "LabelMe", "via": "VIA", "cvat": "CVAT", "labelstudio": "Label Studio"}
OPTIONS = SourceOptions(split="all")


def boxes_of(source) -> dict[str, tuple]:
    found = {}
    for index in range(len(source)):
        each = source.objects(index)
        names = [source.classes[label - 1] for label in each.labels]
        found[os.path.basename(source.name(index))] = (each.width, each.height, names, each.boxes.round(6).tolist())
    return found


def masks_of(source) -> dict[str, list]:
    return {os.path.basename(source.name(index)): source.mask(index).tolist() for index in range(len(source))}


@pytest.fixture
def written(tmp_path: Path):
    """written(layout, entries) -> its folder"""

    def write(layout: str, entries=ENTRIES) -> Path:
        LAYOUTS[layout](tmp_path / "data", entries)
        return tmp_path / "data"

    return write


@pytest.fixture
def expected(tmp_path: Path) -> Path:
    MADE["coco"](tmp_path / "coco")
    return tmp_path / "coco"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_masks_and_labels_are_those_of_coco(written, expected, layout):
    path, kind = str(written(layout)), layout.partition("_")[0]
    assert kind_of_boxes("auto", path) == kind_of_masks("auto", path, SourceOptions()) == kind
    ours, coco = open_boxes("auto", path, "val", OPTIONS), open_boxes("auto", str(expected), "val", OPTIONS)
    assert ours.classes == coco.classes == ("cat", "dog")
    assert ours.notes[0] == f"annotated in {TITLES[kind]}"
    if layout == "cvat":  # z_order turns the order around
        assert boxes_of(ours)["b.jpg"][2] == ["dog", "cat"]
    assert boxes_of(pickle.loads(pickle.dumps(ours))) == boxes_of(coco)
    drawn, coco = open_masks("auto", path, "val", OPTIONS), open_masks("auto", str(expected), "val", OPTIONS)
    assert drawn.classes == coco.classes == ("background", "cat", "dog")
    assert masks_of(pickle.loads(pickle.dumps(drawn))) == masks_of(coco)
    labels = open_labels("auto", path, "val", OPTIONS)
    assert labels.classes == ("day", "night")
    assert {os.path.basename(labels.name(i)): labels.read(i).label for i in range(4)} == {
        **dict.fromkeys(("a.jpg", "c.jpg"), 0),
        **dict.fromkeys(("b.jpg", "d.jpg"), 1),
    }


@pytest.mark.parametrize("layout", ["labelme", "via", "cvat", "labelstudio"])
def test_splits_lie_in_folders_and_the_first_line_names_the_tool(tmp_path, layout):
    root = tmp_path / "data"
    LAYOUTS[layout](root / "train", ENTRIES[:3])
    LAYOUTS[layout](root / "val", [ENTRIES[3]._replace(file="a.jpg")])
    opener, options = Opener(), SourceOptions()
    both = {split: opener.open(open_boxes, "auto", str(root), split, options) for split in ("train", "val")}
    said = facts.describe(both, options)
    assert said.startswith(f"data: 2 classes, 2 + 1 images; annotated in {TITLES[layout]}")
    check = check_boxes(str(root), "auto", 0, True, 0, lambda *_: None)
    assert {each["read"].partition(";")[0] for each in check.facts.values()} == {f"annotated in {TITLES[layout]}"}
    assert not any("chosen" in each for each in check.facts.values())
    drawn = check_boxes(str(root / "train"), "auto", 0, True, 0, lambda *_: None)
    assert drawn.facts["val"]["chosen"] == "from train, as the data have no val split"
    assert boxes_of(both["val"])["a.jpg"][2] == ["cat"]
    assert both["val"].layout.as_values()["kind"] == layout


def test_a_run_finds_its_data_again_by_their_description(written, tmp_path):
    first = open_boxes("auto", str(written("labelstudio")), "train")
    description = tmp_path / "data.yaml"
    description.write_text(json.dumps(first.layout.as_values()))
    again = open_boxes("auto", str(description), "train")
    assert boxes_of(again) == boxes_of(first) and again.fingerprint == first.fingerprint


@pytest.mark.parametrize("layout", ["labelme", "cvat"])
def test_what_an_earlier_run_kept_is_used_until_a_file_changes(written, layout):
    root = written(layout)
    for file in root.rglob("*"):
        os.utime(file, (1e9, 1e9))
    first = open_masks("auto", str(root), "val", OPTIONS)
    kept = list(root.glob(".sightline-index-*"))
    assert len(kept) == 1
    assert masks_of(open_masks("auto", str(root), "val", OPTIONS)) == masks_of(first)
    file = next(file for file in sorted(root.iterdir()) if file.suffix in (".json", ".xml"))
    file.write_text(file.read_text().replace("cat", "cow"))
    assert open_masks("auto", str(root), "val", OPTIONS).classes != first.classes
    with pytest.raises(BadSample, match="has changed since it was indexed"):
        first.mask(0)


def labelme_with(root: Path, *shapes: dict, **other) -> str:
    entry = Entry("a.png", 24, 20, [])
    MADE["photos"](root, [entry, entry._replace(file="b.png")])
    for name in ("a", "b"):
        content = MADE["labelme_of"](entry._replace(file=f"{name}.png"), list(shapes)) | other
        (root / f"{name}.json").write_text(json.dumps(content))
    return str(root)


def cvat_with(root: Path, shapes: str) -> str:
    MADE["photos"](root, [Entry("a.png", 24, 20, []), Entry("b.png", 24, 20, [])])
    images = "".join(f'<image id="{n}" name="{n}.png" width="24" height="20">{shapes}</image>' for n in "ab")
    (root / "annotations.xml").write_text(f"<annotations><version>1.1</version>{images}</annotations>")
    return str(root)


def labelstudio_with(root: Path, *results: dict) -> str:
    MADE["photos"](root, [Entry("a.png", 24, 20, []), Entry("b.png", 24, 20, [])])
    about = {"original_width": 24, "original_height": 20}
    tasks = [
        {"data": {"image": f"{name}.png"}, "annotations": [{"result": [about | each for each in results]}]}
        for name in "ab"
    ]
    (root / "export.json").write_text(json.dumps(tasks))
    return str(root)


def region() -> np.ndarray:
    inside = np.zeros((20, 24), bool)
    inside[3:9, 4:20] = True
    inside[5, 6:8] = False
    inside[9:15, 12:15] = True
    return inside


def test_masks_of_each_tool_give_their_pixels(tmp_path):
    inside = region()
    part = inside[3:15, 4:20]
    runs = np.diff([0, *(np.flatnonzero(np.diff(part.ravel())) + 1), part.size]).tolist()
    rle = ",".join(map(str, [0, *runs] if part.ravel()[0] else runs))
    mask = f'<mask label="cat" z_order="0" rle="{rle}" left="4" top="3" width="16" height="12"></mask>'
    brush = {"type": "brushlabels", "value": {"format": "rle", "rle": MADE["brush"](inside), "brushlabels": ["cat"]}}
    png = {"label": "cat", "shape_type": "mask", "points": [[4, 3], [19, 14]], "mask": MADE["png"](part)}
    for path in (
        labelme_with(tmp_path / "labelme", png),
        cvat_with(tmp_path / "cvat", mask),
        labelstudio_with(tmp_path / "labelstudio", brush),
    ):
        assert np.array_equal(open_masks("auto", path, "val").mask(0), inside), path
        found = open_boxes("auto", path, "val").objects(0)
        assert found.boxes.tolist() == [[4, 3, 16, 12]] and found.area.tolist() == [inside.sum()]


def test_turned_boxes_are_enclosed_and_masks_keep_their_corners(tmp_path):
    """A box of 8 x 4 about (12, 10), turned by 90 degrees, in the way of each tool."""
    corners = [[10, 6], [14, 6], [14, 14], [10, 14]]
    turned = {"label": "cat", "shape_type": "oriented_rectangle", "points": corners}
    value = {"x": 100 * 14 / 24, "y": 100 * 6 / 20, "width": 100 * 8 / 24, "height": 100 * 4 / 20, "rotation": 90}
    paths = (
        labelme_with(tmp_path / "labelme", turned),
        cvat_with(tmp_path / "cvat", '<box label="cat" xtl="8" ytl="8" xbr="16" ybr="12" rotation="90"></box>'),
        labelstudio_with(
            tmp_path / "labelstudio", {"type": "rectanglelabels", "value": {**value, "rectanglelabels": ["cat"]}}
        ),
    )
    for path in paths:
        source = open_boxes("auto", path, "val")
        assert source.objects(0).boxes.round(6).tolist() == [[10, 6, 4, 8]], path
        assert "2 rotated boxes enclosed by upright ones" in source.notes
        assert open_masks("auto", path, "val").mask(0)[6:14, 10:14].all()


def test_circles_and_ellipses_have_their_area(tmp_path):
    circle = {"label": "cat", "shape_type": "circle", "points": [[12, 10], [12, 16]]}
    ellipse = {"type": "ellipselabels", "value": {"x": 50, "y": 50, "radiusX": 25, "radiusY": 30, "rotation": 0}}
    ellipse["value"]["ellipselabels"] = ["cat"]
    for path in (
        labelme_with(tmp_path / "labelme", circle),
        cvat_with(tmp_path / "cvat", '<ellipse label="cat" cx="12" cy="10" rx="6" ry="6"></ellipse>'),
        labelstudio_with(tmp_path / "labelstudio", ellipse),
    ):
        found = open_boxes("auto", path, "val").objects(0)
        assert found.boxes.round(6).tolist() == [[6, 4, 12, 12]]
        assert abs(found.area[0] - 36 * np.pi) < 0.3
        y, x = np.mgrid[:20, :24] + 0.5
        is_inside = (x - 12) ** 2 + (y - 10) ** 2
        drawn = open_masks("auto", path, "val").mask(0) > 0
        assert drawn[is_inside < 5**2].all() and not drawn[is_inside > 7**2].any()


def test_points_and_lines_are_left_out_and_ignored_shapes_count_for_nothing(tmp_path):
    point = {"label": "cat", "shape_type": "point", "points": [[3, 3]]}
    square = {"label": "cat", "shape_type": "rectangle", "points": [[1, 1], [5, 5]]}
    unsure = {"label": "__ignore__", "points": [[8, 8], [16, 8], [16, 16], [8, 16]]}
    path = labelme_with(tmp_path / "data", point, square, unsure)
    source = open_boxes("auto", path, "train")
    assert source.classes == ("cat",) and source.most_objects == 1
    assert any("2 points, lines" in note for note in source.notes)
    mask = open_masks("auto", path, "val").mask(0)
    assert (mask[8:16, 8:16] == 255).all() and (mask[1:5, 1:5] == 1).all() and mask[18, 2] == 0


def test_boxes_are_cut_off_at_the_border(tmp_path):
    path = labelme_with(tmp_path / "data", {"label": "a", "shape_type": "rectangle", "points": [[-3, 2], [30, 8.5]]})
    assert open_boxes("auto", path, "train").objects(0).boxes.tolist() == [[0, 2, 24, 6.5]]


def test_several_labels_of_an_image_make_several_labels_of_all(tmp_path):
    entries = [each._replace(tags=("day", "rain") if each.file == "a.jpg" else each.tags) for each in ENTRIES]
    MADE["cvat"](tmp_path / "data", entries)
    source = open_labels("auto", str(tmp_path / "data"), "val", OPTIONS)
    assert source.is_multi_label and source.classes == ("day", "night", "rain")
    assert source.read(0).label.tolist() == [1, 0, 1]


def test_images_are_found_by_their_names(tmp_path):
    """Windows' paths, folders of another machine, the same name in two folders."""
    entry = Entry("a.jpg", 24, 20, [box("cat", 1, 1, 4, 4)])
    MADE["photos"](tmp_path / "data" / "images" / "one", [entry])
    MADE["photos"](tmp_path / "data" / "images" / "two", [entry, entry._replace(file="b.jpg")])
    labels = tmp_path / "data" / "annotations"
    labels.mkdir()
    for name, path in (("1", r"..\images\two\a.jpg"), ("2", "/home/me/b.jpg"), ("3", "C:/x/one/a.jpg")):
        said = MADE["labelme_of"](entry) | {"imagePath": path, "imageData": None}
        (labels / f"{name}.json").write_text(json.dumps(said))
    source = open_boxes("auto", str(tmp_path / "data"), "val", OPTIONS)
    assert list(map(source.name, range(3))) == [
        f"data/images/{each}" for each in ("one/a.jpg", "two/a.jpg", "two/b.jpg")
    ]
    (labels / "3.json").write_text(json.dumps(MADE["labelme_of"](entry)))  # which holds the image itself
    source = open_boxes("auto", str(tmp_path / "data"), "val", OPTIONS)
    assert source.name(0) == "data/annotations/3.json" and source.image(0) == b"not read" * 99
    (labels / "3.json").write_text(json.dumps(MADE["labelme_of"](entry) | {"imageData": None}))
    with pytest.raises(BadData, match=r"3.json.*a.jpg could be images/one/a.jpg or images/two/a.jpg; rename one"):
        open_boxes("auto", str(tmp_path / "data"), "val", OPTIONS)


def test_an_image_is_found_by_the_name_of_its_json_alone(tmp_path):
    path = Path(labelme_with(tmp_path, {"label": "a", "shape_type": "rectangle", "points": [[1, 2], [5, 6]]}))
    for name in ("a", "b"):
        said = json.loads((path / f"{name}.json").read_text()) | {"imagePath": f"before-{name}.tif", "imageData": None}
        (path / f"{name}.json").write_text(json.dumps(said))
    source = open_boxes("auto", str(path), "val", OPTIONS)
    assert [os.path.basename(source.name(row)) for row in range(2)] == ["a.png", "b.png"]
    (path / "below").mkdir()
    os.link(path / "a.png", path / "below" / "a.png")
    with pytest.raises(BadData, match=r"lacks 1 of the 2 images.*before-a.tif"):
        open_boxes("auto", str(path), "val", OPTIONS)


def cvat_subsets(root: Path, subsets: dict[str, str], folders: bool = False) -> str:
    """Images and xml as a CVAT project with subsets exports them: files of one name, in the folders of subsets."""
    entries = [each for each in ENTRIES if each.file[0] in subsets]
    text = MADE["cvat_xml"](entries)
    for each in entries:
        subset = subsets[each.file[0]]
        MADE["photos"](root / "images" / subset, [each._replace(file="same.jpg")])
        name = f"{subset}/same.jpg" if folders else "same.jpg"
        about = f'name="{name}"' + f' subset="{subset}"' * (not folders)
        text = text.replace(f'name="{each.file}"', about)
    (root / "annotations.xml").write_text(text)
    return str(root)


@pytest.mark.parametrize("folders", [False, True])
def test_subsets_of_cvat_are_splits(tmp_path, folders):
    by_width = {each.width: each for each in ENTRIES}
    subset_of = {"a": "Train", "b": "Validation", "c": "Test", "d": "Batch 1"}
    path = cvat_subsets(tmp_path / "data", subset_of, folders)
    for kind in (open_boxes, open_masks):
        opener, options = Opener(), SourceOptions(keeps_all=True)
        both = {split: opener.open(kind, "auto", path, split, options) for split in ("train", "val")}
        names = {split: [source.name(row) for row in range(len(source))] for split, source in both.items()}
        assert names == {
            "train": ["data/images/Batch 1/same.jpg", "data/images/Train/same.jpg"],
            "val": ["data/images/Validation/same.jpg"],
        }
        said = facts.describe(both, options)
        batch = "no subset" if folders else "the subset Batch 1"
        subsets = "Test 1, Train 1, Validation 1"
        assert (
            f"2 + 1 images; annotated in CVAT; split by subset: {subsets}; 1 images of {batch}, which are for training"
            in said
        )
        assert "no val split" not in said
        description = tmp_path / "data.yaml"
        description.write_text(json.dumps(both["val"].layout.as_values()))
        again = kind("auto", str(description), "val", options)
        assert again.fingerprint == both["val"].fingerprint
    boxes = open_boxes("auto", path, "val").objects(0)
    assert by_width[boxes.width].file == "b.jpg" and boxes.labels.tolist() == [2, 1]
    labels = {split: open_labels("auto", path, split) for split in ("train", "val", "test")}
    assert [len(labels[split]) for split in ("train", "val", "test")] == [2, 1, 1]
    assert labels["val"].classes == ("day", "night") and labels["val"].read(0).label == 1
    with pytest.raises(UsageError, match="none of the 1 images .* has a box"):
        open_boxes("auto", path, "test")


def test_subsets_of_cvat_without_a_validation_or_a_train(tmp_path):
    path = cvat_subsets(tmp_path / "one", {"a": "train", "d": "test"})
    val, test = (open_boxes("auto", path, split) for split in ("val", "test"))
    assert val.name(0) == test.name(0) == "one/images/test/same.jpg" and not val.held_out
    assert "split by subset: test 1, train 1, test validates" in val.notes
    path = cvat_subsets(tmp_path / "two", {"a": "Validation", "d": "Test"})
    source = open_boxes("auto", path, "val")
    assert source.held_out is not None and "1 images of the subset Test, which decides no split" in source.notes
    with pytest.raises(UsageError, match="no test split .*a subset Test beside Train"):
        open_boxes("auto", path, "test")
    path = cvat_subsets(tmp_path / "three", {"d": "Train", "b": "Validation"})
    with pytest.raises(BadData, match="has classes that train lacks: dog"):
        open_boxes("auto", path, "val")


def test_an_image_in_labelmes_json_is_read_where_no_file_has_it(written, tmp_path):
    root = written("labelme")
    photos = {each.file: (root / each.file).read_bytes() for each in ENTRIES}
    for each in ENTRIES:
        text = base64.b64encode(photos[each.file]).decode()
        content = MADE["labelme_of"](each) | {"imageData": text}
        if each.file == "d.jpg":
            del content["imageHeight"], content["imageWidth"]
        said = json.dumps(content)
        (root / each.file).with_suffix(".json").write_text(said.replace("/", r"\/") if each.file == "b.jpg" else said)
    other = (root / "c.jpg").read_bytes() + b"beside"  # a file wins
    (root / "c.jpg").write_bytes(other)
    before = boxes_of(open_boxes("auto", str(root), "val", OPTIONS))
    masks = masks_of(open_masks("auto", str(root), "val", OPTIONS))
    for name in "abd":
        (root / f"{name}.jpg").unlink()
    for kind in (open_boxes, open_masks):
        source = pickle.loads(pickle.dumps(kind("auto", str(root), "val", OPTIONS)))
        found = {source.name(row): source.image(row) for row in range(len(source))}
        expected = {f"data/{name}.json": photos[f"{name}.jpg"] for name in "abd"} | {"data/c.jpg": other}
        assert found == expected and "3 images read from the .json files that hold them" in source.notes
        assert [Path(source.files[row]).is_file() for row in range(4)] == [True] * 4
    named = {name.replace(".json", ".jpg"): value for name, value in boxes_of(open_boxes("auto", str(root), "val",
             OPTIONS)).items()}  # fmt: skip
    assert named == before
    drawn = masks_of(open_masks("auto", str(root), "val", OPTIONS))
    assert {name.replace(".json", ".jpg"): mask for name, mask in drawn.items()} == masks
    labels = open_labels("auto", str(root), "val", OPTIONS)
    assert {labels.read(row).data for row in range(4)} == {photos["a.jpg"], photos["b.jpg"], photos["d.jpg"], other}


def test_labelmes_json_without_an_image_or_with_a_broken_one_is_named(written):
    root = written("labelme")
    (root / "a.jpg").unlink()
    file = root / "a.json"
    content = json.loads(file.read_text())
    for nothing in (None, ""):
        file.write_text(json.dumps(content | {"imageData": nothing}))
        with pytest.raises(BadData, match=r"lacks 1 of the 4 images.*a.jpg"):
            open_boxes("auto", str(root), "val", OPTIONS)
    file.write_text(json.dumps(content | {"imageData": "no base64"}))
    source = open_boxes("auto", str(root), "val", OPTIONS)
    with pytest.raises(BadSample, match=r"a.json.*imageData.*not base64"):
        source.image(0)
    file.write_text(json.dumps(content | {"imageData": None}))
    with pytest.raises(BadSample, match=r"a.json.*without an image in it"):
        source.image(0)


# What is not read names the tool and the way out


def via_with(root: Path, region_attributes: dict, **shape) -> str:
    MADE["photos"](root, ENTRIES)
    content = {each.file: MADE["via_of"](each) for each in ENTRIES}
    content["a.jpg"]["regions"][0]["region_attributes"] = region_attributes
    content["a.jpg"]["regions"][0]["shape_attributes"] |= shape
    (root / "via.json").write_text(json.dumps(content))
    return str(root)


def test_attributes_of_via_say_the_class(tmp_path):
    for at, attributes in enumerate(({"name": "cow", "colour": "red"}, {"kind": {"cow": True, "x": False}}, {"a": "cow",
                                     "b": "cow"})):  # fmt: skip
        path = via_with(tmp_path / str(at), attributes)
        assert open_boxes("auto", path, "val", OPTIONS).classes == ("cat", "cow", "dog")
    assert "object" in open_boxes("auto", via_with(tmp_path / "none", {}), "val", OPTIONS).classes
    for split, entries in (("train", ENTRIES[3:]), ("val", ENTRIES[2:])):  # the only class there is
        MADE["via"](tmp_path / "one" / split, entries)
    file = tmp_path / "one" / "val" / "via_region_data.json"
    file.write_text(file.read_text().replace('{"name": "cat"}', "{}"))
    val, masks = (each("auto", str(tmp_path / "one"), "val") for each in (open_boxes, open_masks))
    assert val.classes == ("cat",) and val.objects(1).labels.tolist() == [1] and masks.mask(1).max() == 1
    with pytest.raises(BadData, match=r"'kind', 'colour', of which none is called class.*in VIA"):
        open_boxes("auto", via_with(tmp_path / "two", {"kind": "cow", "colour": "red"}), "val")


def test_exports_that_are_not_read_name_the_way_out(tmp_path):
    MADE["photos"](tmp_path)
    file = tmp_path / "annotations.xml"
    file.write_text('<annotations><version>1.1</version><meta/><track id="0" label="a"></track></annotations>')
    with pytest.raises(BadData, match=r"annotations.xml is a CVAT video export.*in CVAT choose .*COCO 1.0"):
        open_boxes("auto", str(tmp_path), "train")
    file.unlink()
    file = tmp_path / "project.json"
    file.write_text('{"project":{"pid":"__VIA_PROJECT_ID__","data_format_version":"3.1.1","vid_list":["1"]}}')
    with pytest.raises(BadData, match="project.json is a project of VIA 3.*in VIA 3 choose"):
        open_masks("auto", str(tmp_path), "train")
    file.write_text('[{"image":"/data/upload/1/a.jpg","id":1,"label":[],"annotator":1,"annotation_id":1}]')
    with pytest.raises(BadData, match=r"project.json is Label Studio's JSON-MIN.*choose Export, JSON"):
        open_boxes("auto", str(tmp_path), "train")


def test_data_of_another_task_are_named(written):
    path = written("labelme", [each._replace(tags=()) for each in ENTRIES])
    with pytest.raises(BadData, match=r"LabelMe marks no labels of whole images in its 4 images; it has 5 objects"):
        open_labels("auto", str(path), "train")


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (
            {"label": "", "points": [[1, 1], [2, 2], [3, 1]]},
            r"label of shapes\[0\] is '', expected the name of a class",
        ),
        (
            {"label": "a", "points": [[1, 1], [2, "x"], [3, 1]]},
            r"points of shapes\[0\] is 'x', expected a finite number",
        ),
        ({"label": "a", "points": [[1, 1], [2], [3, 1]]}, r"points of shapes\[0\] is \[2\], expected 2 numbers"),
        ({"label": "a", "points": None}, r"points of shapes\[0\] is None, expected a list"),
        ({"label": "a", "points": [[0, 0], [9, 9]], "shape_type": "mask", "mask": "x"}, "is not base64"),
        ({"label": "a", "points": [[0, 0], [9, 9]], "shape_type": "mask", "mask": "eHh4"}, "is not an image"),
    ],
)
def test_a_wrong_shape_is_named_with_its_file(tmp_path, shape, said):
    path = labelme_with(tmp_path / "data", shape)
    with pytest.raises(BadData, match=rf"a\.json, entry at byte 0: .*{said}.*; fix it in LabelMe"):
        open_boxes("labelme", path, "train")


def test_annotated_twice(written):
    root = written("via")
    (root / "z.json").write_text((root / "via_region_data.json").read_text())
    assert len(open_boxes("auto", str(root), "val", OPTIONS)) == 4  # both say the same
    text = (root / "via_region_data.json").read_text()
    (root / "z.json").write_text(text.replace('"x": 4,', '"x": 5,', 1))
    with pytest.raises(BadData, match=r"z.json.*a.jpg is annotated otherwise in via_region_data.json; give one of"):
        open_boxes("auto", str(root), "val", OPTIONS)
    (root / "z.json").write_text(text.replace('"cat"', '"cow"', 1))
    with pytest.raises(BadData, match=r"z.json.*a.jpg is annotated otherwise in via_region_data.json; give one of"):
        open_boxes("auto", str(root), "val", OPTIONS)


def test_missing_images_and_classes_that_train_lacks(tmp_path, written):
    root = written("cvat")
    (root / "images" / "b.jpg").unlink()
    with pytest.raises(BadData, match=r"lacks 1 of the 4 images.*b.jpg"):
        open_boxes("auto", str(root), "val", OPTIONS)
    source = open_boxes("auto", str(root), "val", SourceOptions(split="all", skips_missing=True))
    assert source.missing == ("b.jpg",)
    LAYOUTS["cvat"](tmp_path / "two" / "train", ENTRIES[3:])
    LAYOUTS["cvat"](tmp_path / "two" / "val", ENTRIES[:2])
    with pytest.raises(BadData, match="has classes that train lacks: dog"):
        open_boxes("auto", str(tmp_path / "two"), "val")


def test_a_zip_that_leads_out_of_its_folder_writes_nothing(tmp_path):
    (tmp_path / "in").mkdir()
    with zipfile.ZipFile(tmp_path / "in" / "task.zip", "w") as packed:
        packed.writestr("annotations.xml", MADE["cvat_xml"](ENTRIES))
        packed.writestr("../evil.jpg", b"x")
    with pytest.raises((BadArchive, UsageError)):
        open_boxes("cvat", str(tmp_path / "in" / "task.zip"), "train")
    assert [each.name for each in tmp_path.rglob("*")] == ["in", "task.zip"]


def test_entities_in_xml_are_refused(tmp_path):
    MADE["photos"](tmp_path)
    text = MADE["cvat_xml"](ENTRIES).replace("<annotations>", '<!DOCTYPE a [<!ENTITY b "c">]><annotations>')
    (tmp_path / "annotations.xml").write_text(text)
    with pytest.raises(BadData, match="declares a document type or an entity"):
        open_boxes("auto", str(tmp_path), "train")


def test_what_is_said_of_regions_and_images(tmp_path):
    """Captions of VIA, <Labels> beside <Rectangle>, choices of a region, several labels, subsets, boxes outside."""
    MADE["via"](tmp_path / "via")
    file = tmp_path / "via" / "via_region_data.json"
    about = '"file_attributes": {"caption": "a", "public_domain": "no", "image_url": "b"}'
    file.write_text(file.read_text().replace('"file_attributes": {"time": "day"}', about))
    assert len(open_boxes("auto", str(tmp_path / "via"), "val", OPTIONS)) == 4
    place = {"x": 25, "y": 50, "width": 50, "height": 25}
    region = [
        {"id": "r", "type": "rectangle", "value": place},
        {"id": "r", "type": "labels", "value": {**place, "labels": ["cat", "cow"]}},
        {"id": "r", "type": "choices", "value": {**place, "choices": ["blurred"]}},
        {"id": "s", "type": "rectanglelabels", "value": {**place, "x": 150, "rectanglelabels": ["cat"]}},
    ]
    path = labelstudio_with(tmp_path / "ls", *region)
    source = open_boxes("auto", path, "train")
    assert source.objects(0).boxes.tolist() == [[6, 10, 12, 5]] and source.classes == ("cat",)
    assert "2 regions with several labels, of which the first counts" in source.notes
    assert "2 objects outside their image or without an area" in source.notes
    with pytest.raises(BadData, match="marks no labels of whole images"):
        open_labels("auto", path, "train")
    path = cvat_with(tmp_path / "cvat", '<box label="cat" xtl="8" ytl="8" xbr="16" ybr="12"></box>')
    file = tmp_path / "cvat" / "annotations.xml"
    file.write_text(file.read_text().replace("<image ", '<image subset="Validation" '))
    assert any(
        "2 images of the subset Validation, which decides no split" in n
        for n in open_boxes("auto", path, "train").notes
    )


def test_data_of_other_tools_name_them_and_the_way_out(tmp_path):
    (tmp_path / "IM0001").write_bytes(b"\0" * 128 + b"DICM" + b"\2")
    with pytest.raises(UsageError, match="holds DICOM .*IM0001.*dcm2niix"):
        open_boxes("auto", str(tmp_path), "train")


@pytest.mark.parametrize("layout", ["labelme", "via", "labelstudio"])
def test_one_json_file_of_a_tool_is_not_taken_for_coco(written, layout):
    root = written(layout)
    file = min(root.rglob("*.json"))
    assert kind_of_boxes("auto", str(file)) == kind_of_masks("auto", str(file), OPTIONS) == layout
    said = f"{file} is a file of {TITLES[layout]}, .*give its folder, {root}"
    with pytest.raises(BadData, match=said):
        open_boxes("coco", str(file), "train")
    if layout == "labelme":  # one file for each image
        with pytest.raises(BadData, match=said):
            open_boxes("auto", str(file), "train")
    else:
        assert boxes_of(open_boxes("auto", str(file), "train")) == boxes_of(open_boxes("auto", str(root), "train"))
