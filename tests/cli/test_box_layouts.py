"""Detection data of every layout as a user gives them to check, train, evaluate, predict and prepare."""

import json
import runpy
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tiny import HERE

from sightline import cli
from sightline.data.detection import DetectionData
from sightline.data.sources import open_boxes

REPO = Path(__file__).resolve().parents[2]
MADE = runpy.run_path(str(REPO / "tests/unit/data/sources/box_layouts.py"))
SMALL = "--model.width=4 --data.size=48 --train.global-batch=4 --train.epochs=1 --train.eval-every-epochs=1".split()
ANY = "--data.classes=0"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("drawn")
    amounts = ["--only", "detection", "--train-pictures=10", "--val-pictures=4"]
    assert cli.main(["prepare", "shapes", "--out", str(out), *amounts]) == 0
    return MADE["read"](out / "detection")


@pytest.fixture
def written(data, tmp_path: Path):
    def write(layout: str) -> Path:
        MADE["LAYOUTS"][layout](data, tmp_path / layout)
        return tmp_path / layout

    return write


@pytest.fixture
def train(sightline, tmp_path: Path):
    """train(path, *flags): one epoch, into run/."""
    out = tmp_path / "run"
    return lambda path, *flags: sightline(
        "train", "demo_detection", f"--data.path={path}", f"--run.out={out}", ANY, *SMALL, *HERE, *flags
    )


def events(run: Path, name: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


@pytest.mark.parametrize("layout", ["coco_folders", "yolo_lists"])  # all others: unit/data/sources/test_box_layouts.py
def test_every_layout_is_checked(sightline, written, layout):
    said = sightline("check", "demo_detection", f"--data.path={written(layout)}", ANY, "--run.workers=0")
    assert said.code == 0 and said.out.endswith("no problems\n"), said
    assert said.out.count("  images   ") == 2


def test_room_is_made_for_the_boxes_of_the_data_unless_it_was_typed(written, tmp_path: Path):
    root = written("coco_folders")
    files = [json.loads(file.read_text()) for file in root.rglob("*.json")]
    most = max(max(Counter(box["image_id"] for box in file["annotations"]).values()) for file in files)
    data = DetectionData(path=str(root), max_boxes=1)
    seen = data.look(tmp_path, ())
    assert seen.fields == {"max_boxes": most} and seen.line.endswith(f"; up to {most} boxes in an image")
    assert not data.look(tmp_path, {"max_boxes"}).fields
    assert not DetectionData(path=str(root), max_boxes=most).look(tmp_path, ()).fields


def test_a_drawn_split_is_kept_and_used_by_evaluate_and_predict(sightline, train, written, tmp_path, monkeypatch):
    root = written("yolo_plain")
    assert train(root).code == 0
    run = tmp_path / "run"
    held_out = json.loads((run / "split.json").read_text())["val"]
    assert len(held_out) == 3 and set(held_out) < {path.name for path in (root / "images").iterdir()}
    assert (run / "data.yaml").read_text().startswith("kind: yolo\ntrain:\n")
    shutil.copy(root / "images" / held_out[0], root / "images" / "another.jpg")  # the kept split stays as it is
    monkeypatch.chdir(tmp_path)
    said = sightline("evaluate", run, *HERE)
    assert said.code == 0, said
    said = sightline("predict", run, root / "images" / held_out[0], "--out", tmp_path / "seen", *HERE)
    assert said.code == 0 and held_out[0] in (tmp_path / "seen" / "predictions.json").read_text(), said


def test_a_description_of_a_run_starts_another(sightline, train, written, tmp_path):
    assert train(written("voc")).code == 0
    said = sightline(
        *("train", "demo_detection", f"--data.path={tmp_path / 'run' / 'data.yaml'}", f"--run.out={tmp_path / 'two'}"),
        *(ANY, *SMALL, *HERE),
    )
    assert said.code == 0, said
    first, second = (json.loads((tmp_path / name / "scores.json").read_text()) for name in ("run", "two"))
    assert first["values"] == second["values"]


def test_missing_images_end_a_run_or_are_skipped_and_listed(sightline, train, written, data, tmp_path):
    root = written("coco")
    gone = [next(entry.file for entry in data[split] if entry.boxes) for split in ("train", "val")]
    for name in gone:
        (root / "images" / name).unlink()
    said = train(root)
    assert said.code == 3 and f"the first one {gone[0]} (image " in said.err
    assert "--data.on-bad-sample skip" in said.err and "`sightline check`" in said.err and ".zip" not in said.err
    said = train(root, "--data.on-bad-sample=skip", "--data.max-bad-samples=0")
    assert said.code == 3 and "1 of the 9 train images" in said.err and "raise --data.max-bad-samples" in said.err
    assert train(root, "--data.on-bad-sample=skip", "--run.out", tmp_path / "skips").code == 0
    listed = [json.loads(line) for line in (tmp_path / "skips" / "bad_samples.jsonl").read_text().splitlines()]
    assert {(each["feed"], each["name"]) for each in listed} == {
        ("train", f"images/{gone[0]}"),
        ("val", f"images/{gone[1]}"),
    }
    assert [(each["samples"], each["skipped"]) for each in events(tmp_path / "skips", "evaluate")] == [(3, 1)]
    said = sightline("check", "demo_detection", f"--data.path={root}", ANY, "--json", "--run.workers=0")
    assert {(each["kind"], each["where"]) for each in json.loads(said.out)["problems"]} == {
        ("missing file", f"images/{name}") for name in gone
    }


def check(sightline, root: Path) -> dict:
    """Data may have other classes than the recipe."""
    said = sightline("check", "demo_detection", f"--data.path={root}", "--json", "--run.workers=0")
    assert said.code == 3, said
    return json.loads(said.out)


def problems(found: dict) -> set[tuple[str, str, str]]:
    return {(each["kind"], each["split"], Path(each["where"]).name) for each in found["problems"]}


def test_all_that_is_wrong_with_labels_is_listed(sightline, written):
    root = written("yolo")
    labels = sorted((root / "labels" / "train").iterdir())
    images = [(root / "images" / "train" / label.name).with_suffix(".jpg") for label in labels]
    labels[0].write_text("99 0.5 0.5 0.1 0.1\n0 0.5 nan 0.1 0.1\n0 0.5\n")
    labels[1].write_text("0 0.9 0.5 0.4 0.1\n0 0.5 0.5 0 0.1\n")
    shutil.copy(images[2], images[2].with_suffix(".png"))
    images[3].unlink()
    images[4].write_bytes(b"<html>")
    shutil.copy(images[5], root / "images" / "val" / "twin.jpg")
    found = {problem for problem in problems(check(sightline, root)) if problem[0] != "class without training"}
    assert found == {
        ("unknown category", "train", f"{labels[0].name}:1"),
        ("box not a number", "train", f"{labels[0].name}:2"),
        ("unreadable entry", "train", f"{labels[0].name}:3"),
        ("box outside of the image", "train", images[1].name),
        ("box without an area", "train", images[1].name),
        ("two images of one label", "train", f"{images[2].stem}.png"),
        ("missing file", "train", labels[3].name),
        ("unreadable", "train", images[4].name),
        ("same image in train and val", "train", images[5].name),
    }


def test_all_that_is_wrong_with_xml_is_listed(sightline, written):
    root = written("voc_export")
    files = sorted((root / "train").glob("*.xml"))
    files[0].write_text('<!DOCTYPE a [<!ENTITY x "y">]><annotation/>')
    files[1].write_text(files[1].read_text().replace("</annotation>", "<object><name/></object></annotation>"))
    files[2].with_suffix(".jpg").unlink()
    files[3].write_text(files[3].read_text().replace("<width>", "<width>1"))
    shutil.copy(files[4].with_suffix(".jpg"), root / "train" / "alone.jpg")
    valid = sorted((root / "valid").glob("*.xml"))[0]
    valid.write_text(valid.read_text().replace("</annotation>", OBJECT + "</annotation>"))
    found = check(sightline, root)
    assert problems(found) - {
        ("class without training", "val", "cross")
    } == {  # of which the first file had the only one
        ("unreadable entry", "train", files[0].name),
        ("unreadable entry", "train", f"{files[1].name}: object {files[1].read_text().count('<object>')}"),
        ("missing file", "train", files[2].with_suffix(".jpg").name),
        ("size differs", "train", files[3].with_suffix(".jpg").name),
        ("class without training", "val", "unicorn"),
    }
    assert found["splits"]["train"]["in no split"] == 2  # alone.jpg, and that of the first xml file


OBJECT = (
    "<object><name>unicorn</name><bndbox><xmin>2</xmin><ymin>2</ymin><xmax>3</xmax><ymax>3</ymax></bndbox></object>"
)


def test_a_label_class_that_train_lacks_is_listed(sightline, written, data):
    root = written("yolo_export")
    (root / "data.yaml").write_text((root / "data.yaml").read_text().replace("nc: ", "# ").replace("']", "', 'new']"))
    with sorted((root / "valid" / "labels").iterdir())[0].open("a") as file:
        file.write(f"{len(MADE['classes_of'](data))} 0.5 0.5 0.1 0.1\n")
    assert problems(check(sightline, root)) == {("class without training", "val", "new")}


def test_images_that_cannot_be_found_are_one_problem(sightline, written):
    root = written("coco_one")
    shutil.rmtree(root / "photos")
    [problem] = check(sightline, root)["problems"]
    assert problem["kind"] == "cannot be opened" and "`kind: coco`" in problem["text"]


def test_convert_says_which_forms_hold_boxes(sightline, written, tmp_path):
    root = written("yolo")
    said = sightline("prepare", "convert", "--source", root, "--out", tmp_path / "out", "--form", "folder")
    assert said.code == 2 and "holds images with boxes" in said.err and "choose coco, yolo, tar, parquet" in said.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["coco_one", "yolo"])
def test_prepare_coco_takes_every_layout(sightline, written, tmp_path, layout):
    """As folders and as records, with the same boxes as the layout itself."""
    root = written(layout)
    objects = {}
    for form in ("folder", "tfrecord"):
        out = tmp_path / form
        flags = ("--form", form, "--shards", 2, "--val-shards", 1, "--jobs", 1)
        said = sightline("prepare", "coco", "--source", root, "--out", out, *flags)
        assert said.code == 0, said
        assert sightline("check", "demo_detection", f"--data.path={out}", ANY, "--run.workers=0").code == 0
        source = open_boxes("auto", str(out), "train")
        objects[form] = [source.objects(index) for index in range(len(source))]
    source = open_boxes("auto", str(root), "train")
    assert source.classes == open_boxes("auto", str(tmp_path / "folder"), "train").classes
    for index in range(len(source)):
        expected = source.objects(index)
        for form in objects:
            found = objects[form][index]
            assert np.array_equal(found.boxes, expected.boxes) and found.labels.tolist() == expected.labels.tolist()


def test_prepare_coco_refuses_data_with_problems(sightline, written, tmp_path):
    root = written("yolo")
    sorted((root / "labels" / "train").iterdir())[0].write_text("0 0.5 0.5\n")
    said = sightline("prepare", "coco", "--source", root, "--out", tmp_path / "out")
    assert said.code == 3 and ".txt:1: 3 values, expected" in said.err and "`sightline check`" in said.err
