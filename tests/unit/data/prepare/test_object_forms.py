"""Files that `prepare convert` writes, to the letter, and how they are cut into pieces."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.sources import SourceOptions, open_boxes, open_masks, open_source
from sightline.data.writing import object_forms
from sightline.data.writing.object_forms import ObjectForm, ObjectImages
from sightline.errors import BadData, UsageError

EVERY = SourceOptions(keeps_all=True, split="all")


def png(values: object) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.asarray(values)).save(stream, "PNG")
    return stream.getvalue()


PHOTO = png(np.zeros((6, 8, 3), np.uint8))


def folders(root: Path, count: int) -> Path:
    for name in "ab":
        (root / name).mkdir(parents=True)
    (root / "a" / "0.png").write_bytes(PHOTO)
    for number in range(1, count):
        os.link(root / "a" / "0.png", root / ("b" if number == count - 1 else "a") / f"{number}.png")
    return root


def coco(root: Path) -> Path:
    """Boxes of three images: two and a crowd, none, one without an area."""
    (root / "images").mkdir(parents=True)
    for name in ("a", "b", "c"):
        (root / "images" / f"{name}.png").write_bytes(PHOTO)
    boxes = ((1, 2, [1, 2, 4, 3], 0), (1, 1, [0, 0, 8, 6], 1), (1, 1, [2, 2, 0.5, 1], 0), (3, 2, [1, 1, 0, 2], 0))
    objects = [
        {"id": number, "image_id": image, "category_id": label, "bbox": box, "iscrowd": crowd, "area": 7}
        for number, (image, label, box, crowd) in enumerate(boxes, 1)
    ]
    images = [{"id": n, "file_name": f"{name}.png", "width": 8, "height": 6} for n, name in enumerate("abc", 1)]
    categories = [{"id": n, "name": name} for n, name in enumerate(("cat", "dog"), 1)]
    said = {"images": images, "annotations": objects, "categories": categories}
    (root / "train.json").write_text(json.dumps(said))
    return root


def masked(root: Path) -> Path:
    """Masks of background, cat and dog, of whose pixels some count for nothing."""
    for split in ("images", "masks"):
        (root / split).mkdir(parents=True)
    for number, name in enumerate("ab"):
        values = np.zeros((6, 8), np.uint8)
        values[1:3, 2:5], values[5, 7], values[0, 0] = 1 + number, 255, 2 - number
        (root / "images" / f"{name}.png").write_bytes(PHOTO)
        (root / "masks" / f"{name}.png").write_bytes(png(values))
    (root / "classes.txt").write_text("background\ncat\ndog\n")
    return root


def plan(out: Path, form: ObjectForm, source, shards: int = 1) -> ObjectImages:
    out.mkdir(exist_ok=True)
    return ObjectImages(out, form, {"train": source, "val": source}, {"train": shards, "val": shards}, 1000)


@pytest.fixture
def boxes(tmp_path: Path):
    return open_boxes("coco", str(coco(tmp_path / "in")), "val", EVERY)


@pytest.fixture
def masks(tmp_path: Path):
    return open_masks("auto", str(masked(tmp_path / "masked")), "val", EVERY)


def test_pieces_of_250_images_and_shards_of_as_many_as_asked(tmp_path):
    source = open_source("folder", str(folders(tmp_path / "in", 501)), "val", EVERY)
    assert len(source) == 501
    for form, shards, expected in (
        ("coco", 1, [250, 250, 1]),
        ("yolo", 9, [250, 250, 1]),
        ("tar", 1, [501]),
        ("tar", 2, [251, 250]),
        ("tar", 250, [3] * 167),
        ("parquet", 250, [3] * 167 + [0] * 83),
    ):
        made = plan(tmp_path / "out", form, source, shards)
        assert made.pieces() == {"train": expected, "val": expected}
        assert made.room() == 1000 + 2 * 501 * 8192
        decided = made.decided()
        assert decided["form"] == form and decided["of"] == "labels"
        assert decided["shards"] == ({"train": shards, "val": shards} if form in ("tar", "parquet") else None)
        assert decided["inputs"] == {"train": source.fingerprint, "val": source.fingerprint}


def test_row_groups_of_100(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    source = open_source("folder", str(folders(tmp_path / "in", 201)), "val", EVERY)
    written = plan(tmp_path / "out", "parquet", source).write("val", 0)
    ((name, size),) = written.files
    assert name == "data/validation-00000-of-00001.parquet" and written.notes == {}
    assert (tmp_path / "out" / name).stat().st_size == size
    file = pq.ParquetFile(tmp_path / "out" / name)
    assert [file.metadata.row_group(group).num_rows for group in range(3)] == [100, 100, 1]
    table = file.read()
    assert table["label"].to_pylist() == [0] * 200 + [1]
    assert {each["bytes"] for each in table["image"].to_pylist()} == {PHOTO}
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features == {"image": {"_type": "Image"}, "label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    made = plan(tmp_path / "out", "parquet", source, 250)
    assert pq.read_table(tmp_path / "out" / made.write("train", 201).files[0][0]).num_rows == 0


def test_parquet_of_boxes_and_masks(tmp_path, boxes, masks):
    pq = pytest.importorskip("pyarrow.parquet")
    ((name, _),) = plan(tmp_path / "out", "parquet", boxes).write("train", 0).files
    assert name == "data/train-00000-of-00001.parquet"
    table = pq.read_table(tmp_path / "out" / name)
    assert table.select(["width", "height", "objects"]).to_pylist() == [
        {"width": 8, "height": 6, "objects": objects}
        for objects in (
            {"bbox": [[1, 2, 4, 3], [0, 0, 8, 6], [2, 2, 0.5, 1]], "category": [1, 0, 0], "iscrowd": [0, 1, 0]},
            {"bbox": [], "category": [], "iscrowd": []},
            {"bbox": [[1, 1, 0, 2]], "category": [1], "iscrowd": [0]},
        )
    ]
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    number, real = ({"dtype": kind, "_type": "Value"} for kind in ("int64", "float64"))
    names = {"names": ["cat", "dog"], "_type": "ClassLabel"}
    assert features == {
        "image": {"_type": "Image"},
        "objects": {
            "bbox": {"feature": {"feature": real, "_type": "List"}, "_type": "List"},
            "category": {"feature": names, "_type": "List"},
            "iscrowd": {"feature": number, "_type": "List"},
        },
        "width": number,
        "height": number,
    }
    ((name, _),) = plan(tmp_path / "out", "parquet", masks).write("train", 0).files
    table = pq.read_table(tmp_path / "out" / name)
    assert table.column_names == ["image", "mask"]
    for row, each in enumerate(table["mask"].to_pylist()):
        assert each["path"] is None
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(each["bytes"]))), masks.mask(row))
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features == {"image": {"_type": "Image"}, "mask": {"_type": "Image"}}


def test_parquet_of_several_labels(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    said = {}
    for name, tags in (("a.png", ("y",)), ("b.png", ("x", "y")), ("c.png", ("x",))):
        (tmp_path / name).write_bytes(PHOTO)
        said[name] = {"filename": name, "regions": [], "file_attributes": {"class": dict.fromkeys(tags, True)}}
    (tmp_path / "via.json").write_text(json.dumps(said))
    source = open_source("via", str(tmp_path), "val", EVERY)
    ((name, _),) = plan(tmp_path / "out", "parquet", source).write("train", 0).files
    table = pq.read_table(tmp_path / "out" / name)
    assert table["label"].to_pylist() == [[1], [0, 1], [0]]
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"feature": {"names": ["x", "y"], "_type": "ClassLabel"}, "_type": "List"}


def members(file: Path) -> list[tuple[str, bytes, tuple]]:
    with tarfile.open(file) as tar:
        return [(each.name, tar.extractfile(each).read(), (each.mtime, each.uid, each.mode)) for each in tar]


def test_tar_of_boxes_and_masks(tmp_path, boxes, masks):
    made = plan(tmp_path / "out", "tar", boxes, 2)
    assert [made.write("val", number).files[0][0] for number in range(2)] == [
        "val/val-000000.tar",
        "val/val-000001.tar",
    ]
    first = members(tmp_path / "out" / "val" / "val-000000.tar")
    assert [name for name, *_ in first] == ["a.png", "a.json", "b.png", "b.json"]
    assert first[0][1] == PHOTO and {about for *_, about in first} == {(0, 0, 0o644)}
    objects = {"bbox": [[1, 2, 4, 3], [0, 0, 8, 6], [2, 2, 0.5, 1]], "category": ["dog", "cat", "cat"]}
    assert json.loads(first[1][1]) == {"width": 8, "height": 6, "objects": objects | {"iscrowd": [0, 1, 0]}}
    assert [name for name, *_ in members(tmp_path / "out" / "val" / "val-000001.tar")] == ["c.png", "c.json"]
    assert made.finish([]) == {"train": 3, "val": 3}
    assert (tmp_path / "out" / "classes.txt").read_text() == "cat\ndog\n"
    ((name, size),) = plan(tmp_path / "out", "tar", masks).write("train", 0).files
    found = members(tmp_path / "out" / name)
    assert name == "train/train-000000.tar" and (tmp_path / "out" / name).stat().st_size == size
    assert [name for name, *_ in found] == ["a.png", "a.json", "a.seg.png", "b.png", "b.json", "b.seg.png"]
    assert found[1][1] == b"{}"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(found[2][1]))), masks.mask(0))


def test_coco_of_boxes_and_masks(tmp_path, boxes, masks):
    made = plan(tmp_path / "out", "coco", boxes)
    written = [made.write(split, 0) for split in ("train", "val")]
    assert [name for name, _ in written[1].files] == ["val/a.png", "val/b.png", "val/c.png",
                                                      "annotations/.parts/val-000000.json"]  # fmt: skip
    assert all((tmp_path / "out" / name).stat().st_size == size for each in written for name, size in each.files)
    assert made.finish(written) == {"train": 3, "val": 3, "train objects": 4, "val objects": 4}
    assert sorted(os.listdir(tmp_path / "out" / "annotations")) == ["instances_train.json", "instances_val.json"]
    content = json.loads((tmp_path / "out" / "annotations" / "instances_val.json").read_text())
    original = json.loads((tmp_path / "in" / "train.json").read_text())
    assert content == original | {
        "annotations": [
            {"id": n, **{key: value for key, value in each.items() if key != "id"}}
            for n, each in enumerate(original["annotations"], 1)
        ]
    }
    assert made.finish(written) == {"train": 3, "val": 3, "train objects": 4, "val objects": 4}  # once more
    made = plan(tmp_path / "masks", "coco", masks)
    written = [made.write(split, 0) for split in ("train", "val")]
    made.finish(written)
    content = json.loads((tmp_path / "masks" / "annotations" / "instances_train.json").read_text())
    assert content["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    first = [{key: each[key] for key in each if key != "segmentation"} for each in content["annotations"][:3]]
    assert first == [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [7, 5, 1, 1], "area": 1, "iscrowd": 1},
        {"id": 2, "image_id": 1, "category_id": 1, "bbox": [2, 1, 3, 2], "area": 6, "iscrowd": 0},
        {"id": 3, "image_id": 1, "category_id": 2, "bbox": [0, 0, 1, 1], "area": 1, "iscrowd": 0},
    ]
    assert content["annotations"][0]["segmentation"] == {"size": [6, 8], "counts": [47, 1]}
    assert content["annotations"][1]["segmentation"] == {"size": [6, 8], "counts": [13, 2, 4, 2, 4, 2, 21]}
    assert len(content["annotations"]) == 6


def test_yolo_of_boxes(tmp_path, boxes):
    made = plan(tmp_path / "out", "yolo", boxes)
    written = [made.write(split, 0) for split in ("train", "val")]
    assert [name for name, _ in written[0].files] == [
        f"{kind}/train/{name}.{end}" for name in "abc" for kind, end in (("images", "png"), ("labels", "txt"))
    ]
    text = (tmp_path / "out" / "labels" / "train" / "a.txt").read_text()
    assert text == "1 0.37500000 0.58333333 0.50000000 0.50000000\n0 0.28125000 0.41666667 0.06250000 0.16666667\n"
    assert (tmp_path / "out" / "labels" / "train" / "c.txt").read_text() == ""
    assert made.finish(written) == {"train": 3, "val": 3, "crowds left out": 2}
    said = (tmp_path / "out" / "data.yaml").read_text()
    assert said == "train: images/train\nval: images/val\nnames:\n  0: cat\n  1: dog\n"


def test_what_a_form_cannot_hold(tmp_path, boxes, masks):
    labels = open_source("folder", str(folders(tmp_path / "labels", 2)), "val", EVERY)
    for form, source, said in (
        ("yolo", masks, "--form yolo is for boxes; choose coco, tar or parquet for masks"),
        ("yolo", labels, "--form yolo is for boxes"),
        ("coco", labels, "--form coco is for boxes and masks; choose folder, tar or parquet for labels"),
    ):
        with pytest.raises(UsageError, match=said):
            plan(tmp_path / "out", form, source).check()
    for form, source in (("yolo", boxes), ("coco", boxes), ("coco", masks), ("tar", labels)):
        plan(tmp_path / "out", form, source).check()
    synthetic = plan(tmp_path / "out", "tar", open_masks("synthetic", "synthetic:size=8,samples=2,classes=2", "train"))
    with pytest.raises(BadData, match="has no encoded image; only images on disk are converted"):
        synthetic.write("train", 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("x/a.jpg", "a.jpg"), ("s.tar:x/b.png", "b.png"), ("s.tar:c", "c"), ("..a.png", "a.png"), ("x/a\tb", "00000007"),
     ("x/...", "00000007")],
)  # fmt: skip
def test_names_come_from_strangers(name, expected):
    class Named:
        def name(self, index: int) -> str:
            return name

    assert object_forms._file_of(Named(), 7) == expected  # type: ignore[arg-type]


def test_equal_names_are_numbered_and_an_ending_is_added(tmp_path, boxes):
    made = plan(tmp_path / "out", "coco", boxes)
    assert made.names("train") == ["a.png", "b.png", "c.png"]
    root = tmp_path / "two"
    for name in "ab":
        (root / name).mkdir(parents=True)
        (root / name / "x.png").write_bytes(PHOTO)
    source = open_source("folder", str(root), "val", EVERY)
    assert plan(tmp_path / "out", "tar", source).names("val") == ["00000000-x.png", "00000001-x.png"]
    assert object_forms.bytes_of(source) == 2 * len(PHOTO)
    os.rename(root / "b" / "x.png", root / "b" / "X.png")
    assert object_forms.bytes_of(source) == len(PHOTO)
    assert plan(tmp_path / "out", "tar", open_source("folder", str(root), "val", EVERY)).names("val")[1] == (
        "00000001-X.png"
    )
    made._names["train"] = ["a", "b", "c.JPG"]
    assert [made._named("train", row, PHOTO) for row in range(3)] == ["a.png", "b.png", "c.JPG"]
    for form, ending in (("JPEG", ".jpg"), ("BMP", ".bmp"), ("WEBP", ".webp"), ("TIFF", ".tif")):
        stream = io.BytesIO()
        Image.new("RGB", (4, 4)).save(stream, form)
        assert made._named("train", 0, stream.getvalue()) == f"a{ending}"
