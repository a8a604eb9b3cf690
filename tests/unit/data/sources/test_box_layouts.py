"""Boxes in every layout: the same data give the same boxes; what can be wrong with each is named."""

import json
import os
import pickle
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.formats import coco
from sightline.data.sources import SourceOptions, open_boxes, voc, yolo
from sightline.errors import BadData, BadSample, UsageError
from sightline.files.plain_yaml import to_text

MADE = runpy.run_path(str(Path(__file__).with_name("box_layouts.py")))
LAYOUTS, DRAWN = MADE["LAYOUTS"], MADE["DRAWN"]


@pytest.fixture(scope="session")
def data(drawn_boxes: Path):
    return MADE["read"](drawn_boxes)


@pytest.fixture
def written(data, tmp_path: Path):
    """written(layout) -> its folder"""

    def write(layout: str) -> Path:
        LAYOUTS[layout](data, tmp_path / "data")
        return tmp_path / "data"

    return write


def found_in(source) -> dict[str, tuple]:
    """File name -> (sides, classes, boxes) of each image."""
    found = {}
    for index in range(len(source)):
        each = source.objects(index)
        names = [source.classes[label - 1] for label in each.labels]
        found[os.path.basename(source.name(index))] = ((each.width, each.height), names, each.boxes)
    return found


# The same data


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_boxes(data, written, layout):
    root = written(layout)
    sources = {split: open_boxes("auto", str(root), split) for split in ("train", "val")}
    if layout in DRAWN:
        assert (
            sources["train"].held_out.all() == sources["val"].held_out.all() == sources["val"].annotations.names.all()
        )
        assert len(sources["val"]) == round(0.2 * len(MADE["both"](data)))
        found = found_in(sources["train"]) | found_in(sources["val"])
        expected = [e for e in MADE["both"](data) if e.boxes or e.file in found_in(sources["val"])]
    else:
        found = found_in(sources["val"]) | found_in(sources["train"])
        assert set(found_in(sources["val"])) == {entry.file for entry in data["val"]}
        expected = [entry for entry in MADE["both"](data) if entry.boxes or entry in data["val"]]
    assert set(found) == {entry.file for entry in expected}
    for entry in expected:
        sides, names, boxes = found[entry.file]
        assert sides == (entry.width, entry.height) and names == [box[0] for box in entry.boxes]
        assert np.abs(boxes - np.asarray([box[1:] for box in entry.boxes]).reshape(-1, 4)).max(initial=0) < (
            1e-3 if layout.startswith("yolo") else 1e-9
        )
    first = data["train"][0] if sources["train"].name(0).endswith(data["train"][0].file) else None
    assert sources["train"].image(0) == (first.data if first else sources["train"].image(0))
    assert sources["train"].classes == sources["val"].classes == tuple(MADE["classes_of"](data))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_run_keeps_of_a_layout_can_be_given_as_its_path(written, tmp_path, layout):
    root = written(layout)
    sources = {split: open_boxes("auto", str(root), split) for split in ("train", "val")}
    description = tmp_path / "run.yaml"
    description.write_text(to_text(sources["train"].layout.as_values()))
    for split, source in sources.items():
        assert open_boxes("auto", str(description), split).fingerprint == source.fingerprint
        assert pickle.loads(pickle.dumps(source)).image(0) == source.image(0)


def test_json_files_of_any_name_agree_with_pycocotools(written):
    coco = pytest.importorskip("pycocotools.coco")
    root = written("coco_export")
    theirs = coco.COCO(str(root / "valid" / "_annotations.coco.json"))
    ours = open_boxes("auto", str(root), "val")
    for index in range(len(ours)):
        each = ours.objects(index)
        expected = theirs.loadAnns(theirs.getAnnIds(imgIds=[each.image_id]))
        assert each.boxes.tolist() == [annotation["bbox"] for annotation in expected]


def test_xml_files_agree_with_torchvision(written):
    from xml.etree import ElementTree

    from torchvision.datasets import VOCDetection

    root = written("voc")
    ours = open_boxes("auto", str(root), "val")
    for index in range(len(ours)):
        file = (root / "Annotations" / os.path.basename(ours.name(index))).with_suffix(".xml")
        said = VOCDetection.parse_voc_xml(ElementTree.parse(file).getroot())["annotation"]
        edges = [{key: int(text) for key, text in each["bndbox"].items()} for each in said.get("object", [])]
        expected = [[e["xmin"] - 1, e["ymin"] - 1, e["xmax"] - e["xmin"] + 1, e["ymax"] - e["ymin"] + 1] for e in edges]
        assert ours.objects(index).boxes.tolist() == expected


def test_yolo_lines_agree_with_torchvision(written):
    import torch
    from torchvision.ops import box_convert

    root = written("yolo")
    ours = open_boxes("auto", str(root), "train")
    for index in range(len(ours)):
        each = ours.objects(index)
        lines = np.loadtxt(
            (root / "labels" / "train" / os.path.basename(ours.name(index))).with_suffix(".txt"), ndmin=2
        )
        pixels = torch.from_numpy(lines[:, 1:]) * torch.tensor([each.width, each.height, each.width, each.height])
        assert np.abs(each.boxes - box_convert(pixels, "cxcywh", "xywh").numpy()).max() < 1e-3


@pytest.mark.parametrize("layout", ["yolo", "yolo_lists", "yolo_plain"])
def test_headers_and_labels_are_read_once(written, settle, monkeypatch, layout):
    from sightline.data.sources import yolo

    read = []
    sides = yolo.sides_of
    monkeypatch.setattr(yolo, "sides_of", lambda path: read.append(path.name) or sides(path))
    root = written(layout)
    (root / "classes.txt").unlink(missing_ok=True)  # also where the labels tell how many classes there are
    settle(root)
    first, second, val = (open_boxes("auto", str(root), split) for split in ("train", "train", "val"))
    assert sorted(read) == sorted(path.name for path in (root / "images").rglob("*.jpg"))
    assert first.fingerprint == second.fingerprint != val.fingerprint
    label = next(file for file in sorted((root / "labels").rglob("train*.txt")) if file.stat().st_size)
    label.write_text("0 0.5 0.5 0.25 0.25\n")
    assert open_boxes("auto", str(root), "train").fingerprint != first.fingerprint and len(read) > len(set(read))


def test_a_split_file_decides_before_the_draw(written, tmp_path):
    root = written("coco_one")
    names = sorted(os.listdir(root / "photos"))[:3]
    (tmp_path / "split.json").write_text(json.dumps({"val": names}))
    source = open_boxes("auto", str(root), "val", SourceOptions(split=str(tmp_path / "split.json")))
    assert sorted(found_in(source)) == names
    assert len(open_boxes("auto", str(root), "val", SourceOptions(val_fraction=0.5))) == 16


def test_one_json_file_may_be_the_path(data, written):
    root = written("coco_one")
    whole, file = (open_boxes("auto", str(path), "train") for path in (root, root / "annotations.json"))
    assert whole.fingerprint == file.fingerprint
    assert len(open_boxes("auto", str(written("coco") / "train.json"), "val")) == round(0.2 * len(data["train"]))


def test_images_that_are_not_read_are_counted(written):
    root = written("voc_export")
    for name in ("a.heic", "b.HEIC", "c.jp2", "notes.txt", ".hidden.gif"):
        (root / "train" / name).touch()
    assert dict(open_boxes("auto", str(root), "train").ignored) == {".heic": 2, ".jp2": 1}


def test_predictions_among_the_images_are_not_images(data, written):
    root = written("yolo_plain")
    before = open_boxes("auto", str(root), "val").fingerprint
    results = root / "images" / "pred"
    results.mkdir()
    (results / "drawn.jpg").write_bytes(data["train"][0].data)
    assert open_boxes("auto", str(root), "val").fingerprint != before
    (results / "predictions.json").write_text('{\n "format": 1}')
    assert open_boxes("auto", str(root), "val").fingerprint == before


def test_a_description_names_folders_of_any_name(data, tmp_path):
    MADE["images"](tmp_path / "here" / "fotos", data["train"])
    MADE["coco_json"](tmp_path / "boxes.json", data["train"], MADE["classes_of"](data))
    (tmp_path / "mine.yaml").write_text("kind: coco\ntrain: {images: here/fotos, labels: boxes.json}\n")
    source = open_boxes("auto", str(tmp_path / "mine.yaml"), "train")
    assert source.layout.is_drawn and source.folder == tmp_path / "here" / "fotos"
    (tmp_path / "mine.yaml").write_text("kind: coco\ntrain: here/fotos\n")
    with pytest.raises(UsageError, match="labels of train is None, expected a json file"):
        open_boxes("auto", str(tmp_path / "mine.yaml"), "train")


def test_sources_import_no_torch():
    script = (
        "import sys, sightline.data.sources as s; s.kinds();"
        "s.open_boxes('auto', 'synthetic:classes=2,samples=4', 'val'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


# Rules of the formats


def test_a_polygon_becomes_its_bounding_box_and_edges_are_put_on_the_border(written):
    root = written("yolo")
    name = sorted(os.listdir(root / "images" / "train"))[0]
    wide, tall = Image.open(root / "images" / "train" / name).size
    label = (root / "labels" / "train" / name).with_suffix(".txt")
    label.write_text("2 0.1 0.2 0.5 0.25 0.3 0.75\n\n1.0 0.900001 0.5 0.2 1.000002\n")
    found = open_boxes("auto", str(root), "train").objects(0)
    expected = [[0.1 * wide, 0.2 * tall, 0.4 * wide, 0.55 * tall], [0.8 * wide, 0, 0.2 * wide, tall]]
    assert np.abs(found.boxes - expected).max() < 1e-3 and found.labels.tolist() == [3, 2]
    assert found.boxes[1, 1] == 0 and found.boxes[1, 0] + found.boxes[1, 2] <= wide


def test_a_turned_photo_has_the_sides_that_a_person_sees(written):
    root = written("yolo")
    path = sorted((root / "images" / "train").iterdir())[0]
    image = Image.new("RGB", (40, 20))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(path, exif=exif)
    path.rename(path.with_suffix(".jpeg"))
    found = open_boxes("auto", str(root), "train").objects(0)
    assert (found.width, found.height) == (20, 40)


@pytest.mark.parametrize(("layout", "side"), [("yolo", 1), ("coco", 0)])
def test_a_photo_turned_by_half_is_turned_back_for_yolo_alone(written, layout, side):
    """Its sides do not tell: YOLO's tools turn images when they read them, COCO's do not."""
    from sightline.data.detection import DetectionData

    root = written(layout)
    data = DetectionData(path=str(root), size=32).open("val", 0)
    path = root / ("images/val" if layout == "yolo" else "images") / os.path.basename(data.name(0))
    wide, tall = Image.open(path).size
    image = Image.new("RGB", (wide, tall))
    image.paste((255, 255, 255), (0, 0, wide // 2, tall))  # the left half, as stored
    exif = image.getexif()
    exif[0x0112] = 3
    image.save(path, exif=exif)
    pixels = DetectionData(path=str(root), size=32).open("val", 0).load(0, 0)["image"]
    assert (pixels[:, :12].mean() > 200) == (side == 0) and (pixels[:, 20:].mean() > 200) == (side == 1)


def test_xml_that_counts_from_zero_is_noticed_in_either_split(data, written):
    root = written("voc_export")
    for file in root.rglob("*.xml"):
        text = file.read_text()
        for edge in ("xmin", "ymin"):
            for number in range(300, 0, -1):
                text = text.replace(f"<{edge}>{number}</{edge}>", f"<{edge}>@{number - 1}</{edge}>")
        file.write_text(text.replace("@", ""))
    assert any(box[1] == 0 or box[2] == 0 for entry in MADE["both"](data) for box in entry.boxes)
    found = found_in(open_boxes("auto", str(root), "val"))
    for entry in data["val"]:
        assert found[entry.file][2].tolist() == [list(box[1:]) for box in entry.boxes]


def test_the_area_of_an_object_without_an_outline_is_that_of_its_box(data, written):
    root = written("voc")
    read = {"val": voc.read_instances(voc.XmlFiles.at(voc.layout_at(str(root)).place("val")), pytest.fail)}
    of_sources = open_boxes("auto", str(root), "val").annotations.area
    expected = sorted(wide * tall for entry in data["val"] for _, _, _, wide, tall in entry.boxes)
    for area in (of_sources, voc.counted_alike(read)["val"].area):
        assert sorted(area.tolist()) == expected


class Name(str):
    """A text that counts with how many others it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)


def test_the_work_for_classes_grows_as_their_number():
    """30,000 classes took half a minute when each was looked for in a list."""
    count = 2000
    drawn = np.random.default_rng(0).permutation(count)
    read = {
        split: coco.Instances(
            [coco.Image(1, "a.jpg", 64, 64)],
            {label: Name(f"c{number:04d}") for label, number in enumerate(drawn.tolist(), 1)},
            np.arange(count),
            np.zeros(count, np.int64),
            np.arange(1, count + 1),
            np.full((count, 4), 5.0),
            np.zeros(count),
            np.zeros(count, bool),
        )
        for split in ("train", "val")
    }
    Name.compared = 0
    for found in voc.counted_alike(read).values():
        assert [found.categories[label] for label in found.labels.tolist()] == [f"c{n:04d}" for n in drawn.tolist()]
        assert list(found.categories.values()) == sorted(found.categories.values())
    assert Name.compared < 20 * count


def test_difficult_objects_are_crowds_and_parts_are_no_objects():
    text = b"""<?xml version="1.0"?><annotation><size><width>50</width><height>40</height></size>
      <object><name> big  dog </name><difficult>1</difficult><bndbox><xmin>1</xmin><ymin>2.5</ymin><xmax>9</xmax>
      <ymax>20</ymax></bndbox><part><name>head</name><bndbox><xmin>3</xmin><ymin>3</ymin><xmax>4</xmax><ymax>4</ymax>
      </bndbox></part></object></annotation>"""
    found = voc.read_annotation(text, "a.xml", pytest.fail)
    assert found == voc.Annotation("", 40, 50, [voc.Box("big dog", (1, 2.5, 9, 20), True)])


@pytest.mark.parametrize(
    ("text", "side"),
    [("1", 1), ("20.0", 20), ("1048576", 2**20), ("1048577", 0), ("0", 0), ("1.5", 0), ("nan", 0), ("wide", 0)],
)
def test_a_side_that_cannot_be_is_left_to_the_image(text: str, side: int):
    xml = f"<annotation><size><width>{text}</width><height>40</height></size></annotation>"
    found = voc.read_annotation(xml.encode(), "a.xml", pytest.fail)
    assert (found.height, found.width) == (40, side)


def test_images_of_xml_files_may_lie_deeper_or_be_called_otherwise(data, written):
    root = written("voc_plain")
    (root / "images" / "deep").mkdir()
    for image in sorted((root / "images").glob("train*.jpg")):
        image.rename(root / "images" / "deep" / image.name)
    first = sorted((root / "annotations").iterdir())[0]
    first.rename(first.with_name("other.xml"))  # it names its image
    found = open_boxes("auto", str(root), "train").annotations.names.all()
    found += open_boxes("auto", str(root), "val").annotations.names.all()
    with_boxes = [entry.file for entry in data["train"] if entry.boxes]
    assert {b"deep/" + name.encode() for name in with_boxes} <= set(found)


def test_labels_beside_their_images_need_a_list_of_classes(data, tmp_path):
    """As labelImg writes them; without the list they could be texts of any sort."""
    names = MADE["classes_of"](data)
    MADE["images"](tmp_path / "data", MADE["both"](data))
    MADE["yolo_labels"](tmp_path / "data", MADE["both"](data), names)
    with pytest.raises(UsageError, match="holds nothing that this recipe can read"):
        open_boxes("auto", str(tmp_path / "data"), "train")
    (tmp_path / "data" / "classes.txt").write_text("\n".join(names))
    source = open_boxes("auto", str(tmp_path / "data"), "val")
    assert source.classes == tuple(names) and len(source) == 7
    (tmp_path / "data" / "README.txt").write_text("no label")
    assert len(open_boxes("auto", str(tmp_path / "data"), "val")) == 7


def test_two_splits_may_share_a_folder_of_labels(data, tmp_path):
    for split, entries in data.items():
        MADE["images"](tmp_path / split, entries)
        MADE["yolo_labels"](tmp_path / "texts", entries, MADE["classes_of"](data))
    (tmp_path / "mine.yaml").write_text(
        "kind: yolo\ntrain: {images: train, labels: texts}\nval: {images: val, labels: texts}\n"
    )
    assert len(open_boxes("auto", str(tmp_path / "mine.yaml"), "val")) == len(data["val"])


def test_classes_without_names_are_numbers(written):
    root = written("yolo_plain")
    (root / "classes.txt").unlink()
    source = open_boxes("auto", str(root), "val")
    assert source.classes == tuple("012345678")


def test_classes_without_names_are_counted_in_both_splits_also_where_val_shows_nothing(tmp_path):
    for split, text in (("train", "3 0.5 0.5 0.2 0.2\n"), ("val", "")):
        for folder in ("images", "labels"):
            (tmp_path / folder / split).mkdir(parents=True)
        Image.new("RGB", (40, 20)).save(tmp_path / "images" / split / "one.png")
        (tmp_path / "labels" / split / "one.txt").write_text(text)
    for split, labels in (("train", [4]), ("val", [])):  # 0 is the background
        source = open_boxes("auto", str(tmp_path), split)
        assert source.classes == tuple("0123") and source.objects(0).labels.tolist() == labels


def test_paths_of_another_machine_are_looked_for_beside_the_file(data, written):
    root = written("yolo_export")
    (root / "data.yaml").write_text("path: /content\ntrain: sets/train/images\nval: valid/images\nnames: [a, b]\n")
    with pytest.raises(BadData, match=r"class \d, expected a whole number from 0 to 1 \(unknown category\)"):
        open_boxes("auto", str(root), "train")
    names = MADE["classes_of"](data)
    (root / "data.yaml").write_text(f"train: D:/mine/sets/train/images\nval: /content/x/valid/images\nnames: {names}\n")
    assert len(open_boxes("auto", str(root), "val")) == len(data["val"])


# What is wrong


def test_two_images_of_one_label_are_refused(written):
    root = written("yolo")
    image = sorted((root / "images" / "train").iterdir())[0]
    shutil.copy(image, image.with_suffix(".png"))
    with pytest.raises(BadData, match=rf"{image.stem}.png: has the label of {image.name}, .*rename one of them"):
        open_boxes("auto", str(root), "train")
    root = written("voc_export")
    image = sorted((root / "train").glob("*.jpg"))[0]
    shutil.copy(image, image.with_suffix(".png"))
    source = open_boxes("voc", str(root), "train")  # its xml names one of them
    assert image.name in found_in(source) and f"{image.stem}.png" not in found_in(source)
    xml = image.with_suffix(".xml")
    xml.write_text(xml.read_text().replace(image.name, "elsewhere.jpg"))
    with pytest.raises(BadData, match=rf"could be of {image.name} and {image.stem}.png, and names elsewhere.jpg"):
        open_boxes("voc", str(root), "train")


@pytest.mark.parametrize("layout", ["yolo", "yolo_lists"])
def test_an_image_without_a_label_has_no_objects(written, layout):
    root = written(layout)
    gone, emptied = sorted((root / "labels").glob("**/val*.txt"))[:2]
    gone.unlink()
    emptied.write_text("\n \n")
    source = open_boxes("auto", str(root), "val")
    counts = {os.path.basename(source.name(i)): len(source.objects(i).boxes) for i in range(len(source))}
    assert len(source) == 13 and counts[f"{gone.stem}.jpg"] == counts[f"{emptied.stem}.jpg"] == 0


def remove_image(root: Path, layout: str) -> str:
    folder = {"coco": "images", "yolo": "images/train", "voc": "JPEGImages"}[layout]
    image = next(file for file in sorted((root / folder).iterdir()) if file.name.startswith("train"))
    image.unlink()
    return image.stem


@pytest.mark.parametrize("layout", ["coco", "yolo", "voc"])
def test_missing_images_are_refused_or_left_to_the_bad_sample_policy(written, layout):
    root = written(layout)
    (root / "labels" / "train").mkdir(parents=True, exist_ok=True)
    stem = remove_image(root, layout)
    with pytest.raises(BadData, match=rf"lacks 1 of the \d+ images .*{stem}.*on-bad-sample skip; `sightline check`"):
        open_boxes(layout, str(root), "train")
    source = open_boxes(layout, str(root), "train", SourceOptions(skips_missing=True))
    [index] = [i for i in range(len(source)) if stem in source.name(i)]
    assert len(source.missing) == 1 and len(source.objects(index).boxes)
    with pytest.raises(BadSample, match=stem):
        source.image(index)


def test_images_that_lie_nowhere_are_said_with_what_to_do(written):
    root = written("coco")
    shutil.rmtree(root / "images")
    with pytest.raises(BadData, match=r"train.json names 20 images \(train0.*none of them in .*`kind: coco`, `train: "):
        open_boxes("auto", str(root), "train")


def test_several_json_files_of_one_split_are_refused(written):
    root = written("coco")
    shutil.copy(root / "train.json", root / "train_v2.json")
    with pytest.raises(UsageError, match="has 2 json files that could be its train split: train.json, train_v2.json"):
        open_boxes("auto", str(root), "train")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 0.5 0.5 nan 0.1", r"a.txt:2: .*expected finite numbers \(box not a number\)"),
        ("0 0.5 0.5 inf 0.1", r"a.txt:2: .*expected finite numbers"),
        ("0 0.5 0.5 0.1", r"a.txt:2: 4 values, expected class cx cy w h"),
        ("0 0.5 0.5 0.1 0.1 0.9", r"a.txt:2: 6 values, expected"),
        ("zero 0.5 0.5 0.1 0.1", r"a.txt:2: .* is not a line of numbers"),
        ("\xff\x00\x01", r"a.txt:2: 1 values, expected"),
        ("10 0.5 0.5 0.1 0.1", r"a.txt:2: class 10, expected a whole number from 0 to 8"),
        ("-1 0.5 0.5 0.1 0.1", r"a.txt:2: class -1, expected"),
        ("0.5 0.5 0.5 0.1 0.1", r"a.txt:2: class 0.5, expected"),
    ],
)
def test_lines_that_are_none_are_named_with_their_number(written, line, message):
    root = written("yolo")
    image = sorted((root / "images" / "train").iterdir())[0]
    image.rename(image.with_name("a.jpg"))
    (root / "labels" / "train" / image.name).with_suffix(".txt").unlink()
    (root / "labels" / "train" / "a.txt").write_text(f"0 0.5 0.5 0.1 0.1\n{line}\n", encoding="latin-1")
    with pytest.raises(BadData, match=message):
        open_boxes("auto", str(root), "train")


def test_a_label_number_beyond_all_classes_makes_no_names(written):
    root = written("yolo_plain")
    (root / "classes.txt").unlink()
    next((root / "labels").iterdir()).write_text("20000 0.5 0.5 0.1 0.1\n")
    with pytest.raises(BadData, match="class 20000, expected a whole number from 0 to 9999"):
        open_boxes("auto", str(root), "train")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("train: !!python/object/apply:os.system ['true']\nnames: [a]\n", UsageError, "cannot be read as YAML"),
        ("train: &a images/train\nval: *a\nnames: [a]\n", UsageError, "anchors and aliases are not read"),
        ("train: [images/train, images/val]\nnames: [a]\n", BadData, "train is .*, expected one path"),
        ("train: images/nowhere\nnames: [a]\n", BadData, "train is images/nowhere, found neither as a folder"),
        ("train: images/train\nnames: {1: a, 2: b}\n", BadData, r"names are numbered \[1, 2\], expected 0 to 1"),
        ("train: images/train\nnames: [no, yes]\n", BadData, "the name False was read as true or false; quote it"),
        ("train: images/train\nnc: 3\nnames: [a, b]\n", BadData, "nc is 3, but names has 2"),
        ("train: images/train\nnc: -1\n", BadData, "data.yaml: nc is -1, expected the number of classes, 1 to 10000"),
        ("train: images/train\nnc: 100000000000\n", BadData, "nc is 100000000000, expected the number of classes"),
        ("train: images/train\nnc: yes\n", BadData, "nc is True, expected the number of classes"),
        ("train: images/train\nnames: 7\n", BadData, "names is 7, expected a list of names"),
        ("train:\nval: images/val\nnames: [a]\n", BadData, "train is empty"),
    ],
)
def test_a_wrong_data_yaml_is_refused(written, text, error, message):
    root = written("yolo")
    (root / "data.yaml").write_text(text)
    for path in (root, root / "data.yaml"):
        with pytest.raises(error, match=message):
            open_boxes("auto", str(path), "train")


BOMB = '<!DOCTYPE a [<!ENTITY x "ha">' + "".join(
    f'<!ENTITY x{n} "&x{n - 1 if n else ""};&x{n - 1 if n else ""};">' for n in range(30)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{BOMB}]><annotation>&x29;</annotation>", "declares a document type or an entity"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "declares a document type"),
        ("<annotation>", "is not a whole XML file"),
        ("", "is not a whole XML file"),
        ("<?xml version='1.0' encoding='nonsense'?><annotation/>", "is not a whole XML file"),
        ("<html></html>", "holds <html>, expected <annotation>"),
        ("<a>" * 100_000, "is not a whole XML file"),
        ("<annotation>" + " " * 2**22, "has more than the 4194304 bytes allowed"),
        ("<annotation><object><name>a</name></object></annotation>", "object 1: 'a' has xmin '', expected a number"),
        ("<annotation><object><bndbox/></object></annotation>", "object 1: has no <name>"),
        (
            "<annotation><object><name>a</name><bndbox><xmin>nan</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax>"
            "</bndbox></object></annotation>",
            "'a' has xmin nan, expected a finite number",
        ),
    ],
)
def test_a_wrong_xml_file_is_refused(written, text, message):
    root = written("voc")
    file = sorted((root / "Annotations").iterdir())[0]
    file.write_text(text)
    with pytest.raises(BadData, match=message) as error:
        open_boxes("auto", str(root), "train")
    assert file.name in str(error.value)


def test_a_class_of_val_alone_is_refused(written):
    root = written("voc")
    name = (root / "ImageSets" / "Main" / "val.txt").read_text().split()[0]
    (root / "Annotations" / f"{name}.xml").write_text(
        "<annotation><size><width>9</width><height>9</height></size><object><name>unicorn</name><bndbox><xmin>1</xmin>"
        "<ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></object></annotation>"
    )
    with pytest.raises(BadData, match="has objects of classes that train lacks: unicorn; add training images"):
        open_boxes("auto", str(root), "val")
    root = written("coco_export")
    content = json.loads((root / "valid" / "_annotations.coco.json").read_text())
    content["categories"].append({"id": 99, "name": "unicorn"})
    (root / "valid" / "_annotations.coco.json").write_text(json.dumps(content))
    with pytest.raises(BadData, match=r"they differ: unicorn \(99\)"):
        open_boxes("coco", str(root), "val")


def test_a_list_that_names_an_image_without_an_annotation_is_refused(written):
    root = written("voc")
    with (root / "ImageSets" / "Main" / "train.txt").open("a") as file:
        file.write("nobody\n")
    with pytest.raises(BadData, match=r"names 1 of 21 images without an annotation, the first one .*nobody.xml"):
        open_boxes("auto", str(root), "train")


def test_links_in_circles_are_followed_once(written):
    root = written("yolo")
    (root / "images" / "train" / "again").symlink_to(root / "images" / "train")
    (root / "images" / "train" / "up").symlink_to(root / "images")
    (root / "labels" / "train" / "self").symlink_to("self")
    before = len(list((root / "images" / "train").glob("*.jpg")))
    source = open_boxes("auto", str(root), "val")
    assert len(source) == 13
    train = open_boxes("auto", str(root), "train", SourceOptions(skips_missing=True))
    assert sum("/again/" in train.name(i) for i in range(len(train))) == 0 and len(train) <= before
    (root / "images" / "train" / "loop.jpg").symlink_to("loop.jpg")
    (root / "labels" / "train" / "loop.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    source = open_boxes("auto", str(root), "train")
    [index] = [i for i in range(len(source)) if source.name(i).endswith("loop.jpg")]
    with pytest.raises(BadSample, match="loop.jpg: cannot be read"):
        source.image(index)


def test_a_folder_that_cannot_be_read_is_named(written, monkeypatch):
    root = written("yolo")
    scan = os.scandir

    def scandir(path):
        if str(path).endswith("labels/train"):  # as chmod 000 does, but for root too
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BadData, match=r"labels/train cannot be read: Permission denied; allow reading it"):
        open_boxes("auto", str(root), "train")


def test_boxes_outside_are_left_out_of_training_and_kept_for_evaluation(written):
    root = written("yolo")
    for split in ("train", "val"):
        label = sorted((root / "labels" / split).iterdir())[0]
        label.write_text("0 0.5 0.5 0.1 0.1\n1 0.9 0.5 0.4 0.1\n")
    assert len(open_boxes("auto", str(root), "train").objects(0).boxes) == 1
    assert len(open_boxes("auto", str(root), "val").objects(0).boxes) == 2


def test_too_few_images_to_split_are_refused(data, tmp_path):
    MADE["images"](tmp_path, data["train"][:1])
    MADE["coco_json"](tmp_path / "one.json", data["train"][:1], MADE["classes_of"](data))
    with pytest.raises(BadData, match="has 1 images; at least 2 are needed"):
        open_boxes("auto", str(tmp_path), "train")


MANY = {number: f"c{number}" for number in range(12)}  # as texts 10 comes before 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ()),
        ({"nc": 1}, ()),
        ({"nc": yolo.MAX_CLASSES}, ()),
        ({"nc": 0}, "nc is 0, expected the number of classes, 1 to 10000"),
        ({"nc": yolo.MAX_CLASSES + 1}, "nc is 10001, expected"),
        ({"nc": True}, "nc is .*, expected the number"),
        ({"nc": "2"}, "nc is .*, expected the number"),
        ({"names": ["a", 2, 1.5]}, ("a", "2", "1.5")),
        ({"names": MANY}, tuple(MANY.values())),
        ({"names": dict(reversed(MANY.items()))}, tuple(MANY.values())),
        ({"names": {**MANY, 12: "x", 14: "y"}}, "names are numbered .*, expected 0 to 13"),
        ({"names": {1: "a", 2: "b"}}, "names are numbered .*, expected 0 to 1"),
        ({"names": {"a": 0, 1: "b"}}, "names are numbered .*, expected 0 to 1"),
        ({"names": []}, "names is .*, expected a list of names"),
        ({"names": {}}, "names is .*, expected a list of names"),
        ({"names": ["a", ""]}, "names is .*, expected a list of names"),
        ({"names": ["a", None]}, "names is .*, expected a list of names"),
        ({"names": "a"}, "names is .*, expected a list of names"),
        ({"names": ["no", False]}, "the name False was read as true or false; quote it"),
        ({"names": ["a", "\ud800"]}, "holds half characters; write them out"),
        ({"names": ["a", "b"], "nc": 2}, ("a", "b")),
        ({"names": ["a", "b"], "nc": 3}, "nc is 3, but names has 2; correct one of them"),
    ],
    ids=str,
)
def test_names_of_classes(values: dict, expected: tuple | str):
    if isinstance(expected, tuple):
        assert yolo._class_names(Path("data.yaml"), values) == expected
    else:
        with pytest.raises(BadData, match=f"^data.yaml: .*{expected}"):
            yolo._class_names(Path("data.yaml"), values)
