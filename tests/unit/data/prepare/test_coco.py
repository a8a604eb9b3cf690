"""`prepare coco` from generated zips: which boxes and images are kept, what records hold, what is refused."""

import hashlib
import json
import os
import re
import runpy
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sightline import cli
from sightline.data.formats.coco import read_instances
from sightline.data.formats.records import parse_example, scan_frames
from sightline.data.prepare import coco

MADE = runpy.run_path(str(Path(__file__).with_name("coco_zips.py")))
content, make_zips, write_zip = MADE["content"], MADE["make_zips"], MADE["write_zip"]
KEYS = {
    *(f"image/{key}" for key in ("height", "width", "filename", "source_id", "key/sha256", "encoded", "format")),
    *(f"image/object/bbox/{key}" for key in ("xmin", "xmax", "ymin", "ymax")),
    *(f"image/object/{key}" for key in ("class/text", "class/label", "is_crowd", "area")),
}


def prepare(source: Path, out: Path, *more: str) -> int:
    return cli.main(["prepare", "coco", "--source", str(source), "--out", str(out), "--jobs", "1", *more])


def records(path: Path) -> list[dict]:
    data = path.read_bytes()
    return [parse_example(data[at + 12 : at + 12 + length]) for at, length in scan_frames(data, path.name)]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def expected(split: str, count: int) -> list[dict]:
    """By hand, from the rules: the original's filter, training without images that have no box left."""
    described, images = content(split, count)
    names = {each["id"]: each["name"].encode() for each in described["categories"]}
    found = []
    for image in described["images"]:
        boxes = []
        for each in described["annotations"]:
            x, y, width, height = each["bbox"]
            is_inside = x + width <= image["width"] and y + height <= image["height"]
            if each["image_id"] == image["id"] and width > 0 and height > 0 and is_inside:
                boxes.append(each)
        if not boxes and split == "train":
            continue
        data = images[image["file_name"]]
        found.append(
            {
                "image/height": [image["height"]],
                "image/width": [image["width"]],
                "image/filename": [image["file_name"].encode()],
                "image/source_id": [str(image["id"]).encode()],
                "image/key/sha256": [hashlib.sha256(data).hexdigest().encode()],
                "image/encoded": [data],
                "image/format": [b"jpeg"],
                "image/object/bbox/xmin": [float32(b["bbox"][0] / image["width"]) for b in boxes],
                "image/object/bbox/xmax": [float32((b["bbox"][0] + b["bbox"][2]) / image["width"]) for b in boxes],
                "image/object/bbox/ymin": [float32(b["bbox"][1] / image["height"]) for b in boxes],
                "image/object/bbox/ymax": [float32((b["bbox"][1] + b["bbox"][3]) / image["height"]) for b in boxes],
                "image/object/class/text": [names[b["category_id"]] for b in boxes],
                "image/object/class/label": [b["category_id"] for b in boxes],
                "image/object/is_crowd": [b["iscrowd"] for b in boxes],
                "image/object/area": [float(b["area"]) for b in boxes],
            }
        )
    return found


@pytest.fixture(scope="module")
def zips(tmp_path_factory) -> Path:
    return make_zips(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def shards(zips, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "out"
    assert prepare(zips, out, "--form", "tfrecord", "--shards", "7", "--val-shards", "3") == 0
    return out


def test_records(shards):
    for split, count, number in (("train", 40, 7), ("val", 20, 3)):
        wanted = expected(split, count)
        for shard in range(number):
            found = records(shards / f"{split}-{shard:05d}-of-{number:05d}.tfrecord")
            assert found == wanted[shard::number], "round the shards, counting those that are kept"
            assert all(record.keys() == KEYS for record in found)


def test_counts(zips, tmp_path, capsys):
    assert prepare(zips, tmp_path / "out", "--form", "tfrecord") == 0
    [line] = capsys.readouterr().out.splitlines()
    # Of ten training images one has no annotation, two have only bad ones.
    kept, dropped = len(expected("train", 40)), 0
    for split, count in (("train", 40), ("val", 20)):
        described, _ = content(split, count)
        usable = sum(len(r["image/object/area"]) for r in expected(split, count))
        dropped += len(described["annotations"]) - usable
    assert kept == 28 and dropped > 30
    assert line.startswith(f"coco: train 40, train with boxes 28, val 20, boxes left out {dropped} in ")


def test_folder(zips, tmp_path):
    assert prepare(zips, tmp_path / "out") == 0
    found = contents(tmp_path / "out")
    wanted = {}
    for split, count in (("train", 40), ("val", 20)):
        described, images = content(split, count)
        wanted |= {f"{split}2017/{name}": data for name, data in images.items()}
        wanted[f"annotations/instances_{split}2017.json"] = json.dumps(described).encode()
    assert {k: v for k, v in found.items() if k not in ("prepared.json", ".prepare.lock")} == wanted


def test_annotations_lie_where_the_original_looks_for_them(shards):
    for split, count in (("train", 40), ("val", 20)):
        stored = (shards / "raw-data" / "annotations" / f"instances_{split}2017.json").read_bytes()
        assert json.loads(stored) == content(split, count)[0]


def test_from_folders_the_same_records(zips, shards, tmp_path):
    assert prepare(zips, tmp_path / "folders") == 0
    more = ("--form", "tfrecord", "--shards", "7", "--val-shards", "3")
    assert prepare(tmp_path / "folders", tmp_path / "out", *more) == 0
    assert shard_files(tmp_path / "out") == shard_files(shards)


def shard_files(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name.endswith((".tfrecord", ".json"))} | {
        "prepared.json": b""  # names what it was made from, zips by their checksums and folders by sizes
    }


@pytest.mark.slow  # test_imagenet.py compares files of several processes by default, test_processes.py their order
def test_jobs_change_nothing(zips, tmp_path):
    more = ("--form", "tfrecord", "--shards", "7", "--val-shards", "3")
    assert prepare(zips, tmp_path / "one", *more) == 0
    assert prepare(zips, tmp_path / "two", *more, "--jobs", "2") == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_second_start_does_nothing(zips, shards, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in shards.rglob("*.tfrecord")}
    more = ("--form", "tfrecord", "--shards", "7", "--val-shards", "3")
    assert prepare(zips, shards, *more) == 0
    assert {path: path.stat().st_mtime_ns for path in shards.rglob("*.tfrecord")} == before
    assert prepare(zips, shards, "--form", "tfrecord", "--shards", "8", "--val-shards", "3") == 2
    assert "was begun with shards.train=7, now it is 8" in capsys.readouterr().err


def test_damaged_image_in_the_zip(zips, tmp_path, capsys):
    source = tmp_path / "in"
    make_zips(source)
    stored = (source / "train2017.zip").read_bytes()
    image = content("train", 40)[1]["000000001049.jpg"]
    at = stored.index(image) + len(image) // 2
    (source / "train2017.zip").write_bytes(stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :])
    few = ("--shards", "5", "--val-shards", "2")
    for form in ("folder", "tfrecord"):
        assert prepare(source, tmp_path / form, "--form", form, *few) == 3
        assert "'train2017/000000001049.jpg' is not the" in capsys.readouterr().err
    (source / "train2017.zip").write_bytes(stored)
    for form in ("folder", "tfrecord"):  # its pieces that were whole stay
        assert prepare(source, tmp_path / form, "--form", form, *few) == 0
        assert prepare(zips, tmp_path / f"clean {form}", "--form", form, *few) == 0
        assert contents(tmp_path / form) == contents(tmp_path / f"clean {form}")


def edited(folder: Path, change) -> Path:
    """Zips whose training annotations went through `change`; it may return bytes."""
    make_zips(folder)
    jsons = {}
    for split, count in (("train", 40), ("val", 20)):
        described = content(split, count)[0]
        result = change(described) if split == "train" else None
        jsons[f"annotations/instances_{split}2017.json"] = (
            result if isinstance(result, bytes) else json.dumps(described).encode()
        )
    write_zip(folder / "annotations_trainval2017.zip", jsons, zipfile.ZIP_DEFLATED)
    return folder


BAD = {
    "no json": (lambda d: b"{", "is not a whole JSON file"),
    "deep": (lambda d: b"[" * 200_000, "is not a whole JSON file"),
    "captions": (lambda d: b'{"images": []}', "has no images and no annotations and no categories"),
    "image twice": (lambda d: d["images"].append(d["images"][0]), r"image \d+ appears twice"),
    "no number": (lambda d: d["annotations"][0].update(bbox=[1, float("nan"), 2, 3]), "has bbox .*nan"),
    "image missing": (lambda d: d["images"][0].update(file_name="x.jpg"), "1 of 40 images .*x.jpg"),
    "way out": (lambda d: d["images"][0].update(file_name="../val2017/x.jpg"), "leads out of its folder"),
    "other categories": (lambda d: d["categories"][0].update(name="man"), "different categories"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_annotations(tmp_path, capsys, name):
    change, said = BAD[name]
    assert prepare(edited(tmp_path / "in", change), tmp_path / "out") == 3
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".prepare.lock"]


@pytest.mark.parametrize("box", [[-1, 1, 5, 5], [1, -0.5, 5, 5]])
def test_boxes_beyond_the_upper_left_edges_are_left_out(tmp_path, capsys, box):
    def change(described) -> None:
        described["annotations"][-1]["bbox"] = box

    source = edited(tmp_path / "in", change)
    assert prepare(source, tmp_path / "out", "--form", "tfrecord", "--shards", "1", "--val-shards", "1") == 0
    found = records(tmp_path / "out" / "train-00000-of-00001.tfrecord")
    edges = [e for r in found for key in ("xmin", "xmax", "ymin", "ymax") for e in r[f"image/object/bbox/{key}"]]
    assert all(0 <= edge <= 1 for edge in edges)


def test_the_last_images_may_show_nothing(tmp_path):
    described = content("val", 20)[0]
    last = [image["id"] for image in described["images"][-2:]]
    described["annotations"] = [each for each in described["annotations"] if each["image_id"] not in last]
    make_zips(tmp_path / "in")
    jsons = {"train": content("train", 40)[0], "val": described}
    files = {f"annotations/instances_{split}2017.json": json.dumps(each).encode() for split, each in jsons.items()}
    write_zip(tmp_path / "in" / "annotations_trainval2017.zip", files, zipfile.ZIP_DEFLATED)
    assert prepare(tmp_path / "in", tmp_path / "out", "--form", "tfrecord", "--shards", "1", "--val-shards", "1") == 0
    found = records(tmp_path / "out" / "val-00000-of-00001.tfrecord")
    labels = {int(each["image/source_id"][0]): each.get("image/object/class/label", []) for each in found}
    assert len(labels) == 20 and [len(labels[number]) for number in last] == [0, 0]


def test_area_and_crowd_may_be_left_out(tmp_path):
    def change(described) -> None:
        for each in described["annotations"]:
            del each["area"], each["iscrowd"]

    source = edited(tmp_path / "in", change)
    assert prepare(source, tmp_path / "out", "--form", "tfrecord", "--shards", "1", "--val-shards", "1") == 0
    first = records(tmp_path / "out" / "train-00000-of-00001.tfrecord")[0]
    assert first["image/object/area"] == [75.0] and first["image/object/is_crowd"] == [0]


def test_an_image_file_that_holds_no_image(tmp_path, capsys):
    source = make_zips(tmp_path / "in")
    images = content("val", 20)[1]
    images["000000005000.jpg"] = b"<html>"
    write_zip(source / "val2017.zip", {f"val2017/{name}": data for name, data in images.items()})
    assert prepare(source, tmp_path / "out", "--form", "tfrecord", "--shards", "1") == 3
    assert "val2017/000000005000.jpg" in capsys.readouterr().err


def test_hostile_zip(tmp_path, capsys):
    source = make_zips(tmp_path / "in")
    write_zip(source / "val2017.zip", {"../evil.jpg": b"x"})
    assert prepare(source, tmp_path / "out") == 3
    assert "leads out of its folder" in capsys.readouterr().err and not list(tmp_path.rglob("evil*"))


def test_counts_of_the_whole_set_are_checked(zips, tmp_path, monkeypatch, capsys):
    """As if COCO 2017 had 40 training images."""
    monkeypatch.setattr(coco, "_COCO_2017", {"train": 40, "train with boxes": 28, "val": 20})
    assert prepare(zips, tmp_path / "good") == 0
    monkeypatch.setattr(coco, "_COCO_2017", {"train": 40, "train with boxes": 29, "val": 20})
    assert prepare(zips, tmp_path / "bad") == 3
    assert "train with boxes: 28 images, COCO 2017 has 29" in capsys.readouterr().err


def test_outlines_do_not_fill_the_memory(tmp_path):
    described = content("train", 40)[0]
    for each in described["annotations"]:
        each["segmentation"] = [[0.5] * 5000]
    data = json.dumps(described).encode()
    tracemalloc.start()
    read_instances([data], "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(data), f"{len(data)} bytes of JSON took {peak}"


def test_annotations_may_stand_before_what_they_belong_to():
    described = content("train", 40)[0]
    data, turned = (json.dumps(dict(pairs)).encode() for pairs in (described.items(), reversed(described.items())))
    assert data != turned
    one, other = (vars(read_instances([each], "x")) for each in (data, turned))
    texts = [[file[start:end] for start, end in found.pop("spans")] for file, found in ((data, one), (turned, other))]
    assert texts[0] == texts[1], "outlines lie elsewhere"
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_places_that_cannot_be(zips, tmp_path, capsys):
    for out in (zips, zips / "below", zips.parent):
        assert prepare(zips, out) == 2
        assert "choose another --out" in capsys.readouterr().err
    assert prepare(tmp_path / "nothing", tmp_path / "out") == 2
    assert "--download" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert prepare(tmp_path / "empty", tmp_path / "out") == 2
    assert "neither annotations_trainval2017.zip nor a folder annotations" in capsys.readouterr().err
    assert prepare(zips, tmp_path / "out", "--shards", "0") == 2
    assert prepare(zips, tmp_path / "out", "--jobs", "-1") == 2


def test_real_images(shared_data, tmp_path):
    """The small real set, zipped here: every image and box arrives, and the records parse."""
    tiny = shared_data / "coco-tiny"
    source = tmp_path / "in"
    source.mkdir()
    for split in ("train", "val"):
        files = {f"{split}2017/{p.name}": p.read_bytes() for p in sorted((tiny / f"{split}2017").iterdir())}
        write_zip(source / f"{split}2017.zip", files)
    jsons = {f"annotations/{p.name}": p.read_bytes() for p in sorted((tiny / "annotations").iterdir())}
    write_zip(source / "annotations_trainval2017.zip", jsons, zipfile.ZIP_DEFLATED)
    assert prepare(source, tmp_path / "out", "--form", "tfrecord", "--shards", "3", "--val-shards", "2") == 0
    for split, number in (("train", 3), ("val", 2)):
        described = json.loads(jsons[f"annotations/instances_{split}2017.json"])
        parts = [records(tmp_path / "out" / f"{split}-{i:05d}-of-{number:05d}.tfrecord") for i in range(number)]
        found = {int(record["image/source_id"][0]): record for part in parts for record in part}
        assert list(found) == [i["id"] for start in range(number) for i in described["images"][start::number]]
        for image in described["images"]:
            boxes = [each for each in described["annotations"] if each["image_id"] == image["id"]]
            assert found[image["id"]]["image/object/class/label"] == [each["category_id"] for each in boxes]
            stored = (tiny / f"{split}2017" / image["file_name"]).read_bytes()
            assert found[image["id"]]["image/encoded"] == [stored]


def test_all_images_are_on_the_disk_before_the_folder_is_called_complete(zips, tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []
    monkeypatch.setattr(
        os, "sync", lambda: seen.append((len(list(out.rglob("*.jpg"))), (out / "prepared.json").exists()))
    )
    assert prepare(zips, out) == 0
    assert seen == [(60, False)] and (out / "prepared.json").exists()
