"""Hugging Face's layouts: metadata beside images, parquet files and save_to_disk give what the data give as COCO."""

import io
import json
import os
import pickle
import runpy
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.classification import ClassificationData
from sightline.data.detection import DetectionData
from sightline.data.masks import MaskData
from sightline.data.sources import SourceOptions, kind_of_boxes, open_boxes, open_masks, packed, parquet
from sightline.data.sources import open_source as open_labels
from sightline.errors import BadData, BadSample, UsageError

MADE = runpy.run_path(str(Path(__file__).with_name("tool_layouts.py")))
ENTRIES, box = MADE["ENTRIES"], MADE["box"]
OPTIONS = SourceOptions(split="all")
CLASSES = ["cat", "dog"]


def objects(entry, named=True) -> dict:
    boxes = [(label, MADE["sides"](corners)) for label, corners in entry.shapes]
    return {
        "bbox": [list(sides) for _, sides in boxes],
        "category": [label if named else CLASSES.index(label) for label, _ in boxes],
    }


def mask_of(entry) -> Image.Image:
    values = np.zeros((entry.height, entry.width), np.uint8)
    values[2:8, 3:9], values[10:12] = 1, 2
    return Image.fromarray(values)


def encoded(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def metadata(root: Path, form: str = "jsonl", entries=ENTRIES) -> None:
    MADE["photos"](root, entries)
    (root / "masks").mkdir()
    rows = []
    for each in entries:
        mask_of(each).save(root / "masks" / f"{each.file[0]}.png")
        row = {"file_name": each.file, "label": each.tags[0], "objects": objects(each)}
        rows.append(row | {"mask_file_name": f"masks/{each.file[0]}.png"})
    if form == "jsonl":
        (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    lines = [
        f'{row["file_name"]},{row["label"]},"{json.dumps(row["objects"]).replace(chr(34), 2 * chr(34))}"'
        for row in rows
    ]
    (root / "metadata.csv").write_text("\n".join(["file_name,label,objects", *lines, ""]))


FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["day", "night"], "_type": "ClassLabel"},
    "objects": {
        "feature": {
            "bbox": {"feature": {"dtype": "float32", "_type": "Value"}, "length": 4, "_type": "Sequence"},
            "category": {"names": CLASSES, "_type": "ClassLabel"},
        },
        "_type": "Sequence",
    },
    "mask": {"_type": "Image"},
}


def table(entries=ENTRIES, **other):
    pa = pytest.importorskip("pyarrow")
    pictures = [Image.new("RGB", (each.width, each.height), (9, 9, 9 + at)) for at, each in enumerate(entries)]
    columns = {
        "image": [{"bytes": encoded(each), "path": e.file} for each, e in zip(pictures, entries, strict=True)],
        "label": [["day", "night"].index(each.tags[0]) for each in entries],
        "objects": [objects(each, named=False) for each in entries],
        "mask": [{"bytes": encoded(mask_of(each)), "path": None} for each in entries],
    } | other
    told = {"huggingface": json.dumps({"info": {"features": FEATURES}})}
    return pa.table(columns).replace_schema_metadata(told)


def write_parquet(file: Path, made, rows: int = 3) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(made, file, row_group_size=rows)


def save_to_disk(folder: Path, made) -> None:
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(
        file, made.schema
    ) as stream:  # fmt: skip
        stream.write_table(made, max_chunksize=3)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


WRITERS = {
    "metadata.jsonl": lambda root: metadata(root / "train"),
    "metadata.csv": lambda root: metadata(root / "train", "csv"),
    "parquet": lambda root: write_parquet(root / "data" / "train-00000-of-00001.parquet", table()),
    "parquet in a folder": lambda root: write_parquet(root / "train" / "0000.parquet", table()),
    "save_to_disk": lambda root: save_to_disk(root / "train", table()),
    "one file": lambda root: write_parquet(root / "all.parquet", table()),
}


@pytest.mark.parametrize("form", WRITERS)
def test_boxes_labels_and_masks_are_those_that_were_written(tmp_path, form):
    root = tmp_path / "data"
    WRITERS[form](root)
    MADE["coco"](tmp_path / "coco")
    kind = form.partition(".")[0] if form.startswith("metadata") else "parquet"
    assert kind_of_boxes("auto", str(root)) == kind
    ours, coco = (open_boxes("auto", str(each), "val", OPTIONS) for each in (root, tmp_path / "coco"))
    assert ours.classes == coco.classes and len(ours) == len(coco) == 4
    title = {"save_to_disk": form, "metadata": "metadata"}.get(form.partition(".")[0], "parquet")
    assert ours.notes[0] == f"from Hugging Face's {title}"
    assert not ours.ignored  # the file that was read
    ours = pickle.loads(pickle.dumps(ours))
    for row in range(4):
        mine, other = ours.objects(row), coco.objects(row)
        assert (mine.width, mine.height) == (other.width, other.height)
        np.testing.assert_allclose(mine.boxes, other.boxes)
        assert mine.labels.tolist() == other.labels.tolist() and len(ours.image(row)) <= ours.room[row]
    labels = open_labels("auto", str(root), "val", OPTIONS)
    assert labels.classes == ("day", "night") and len(labels) == 4
    found = {os.path.basename(labels.name(at)): labels.read(at).label for at in range(4)}
    assert found == {each.file: ["day", "night"].index(each.tags[0]) for each in ENTRIES}
    if form == "metadata.csv":
        return
    masks = pickle.loads(pickle.dumps(open_masks("auto", str(root), "val", OPTIONS)))
    assert masks.classes == ("0", "1", "2") and "Hugging Face" in masks.notes[0]
    for row, each in enumerate(ENTRIES):
        assert masks.size(row) == (each.height, each.width)
        np.testing.assert_array_equal(masks.mask(row), np.asarray(mask_of(each)))


def test_splits_of_parquet_files(tmp_path):
    parts = {"train-00000-of-00002": ENTRIES[:2], "train-00001-of-00002": ENTRIES[2:]}
    parts |= {"validation-00000-of-00001": ENTRIES[:1], "test-00000-of-00001": ENTRIES[1:]}
    for name, entries in parts.items():
        write_parquet(tmp_path / "data" / f"{name}.parquet", table(entries))
    sizes = [len(open_labels("auto", str(tmp_path), split)) for split in ("train", "val", "test")]
    assert sizes == [4, 1, 3]
    assert open_labels("auto", str(tmp_path), "train").held_out is None
    os.remove(tmp_path / "data" / "validation-00000-of-00001.parquet")
    assert len(open_labels("auto", str(tmp_path), "val")) == 3  # the test split validates


@pytest.mark.parametrize("form", ["parquet", "metadata"])
@pytest.mark.parametrize("task", ["classification", "detection", "masks"])
def test_a_test_split_that_validates_is_named_by_train_and_check(tmp_path, form, task):
    for split, entries in (("train", ENTRIES), ("test", ENTRIES[1:])):
        if form == "parquet":
            write_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", table(entries))
        else:
            metadata(tmp_path / split, entries=entries)
    parts = {"classification": ClassificationData, "detection": DetectionData, "masks": MaskData}
    config = parts[task](path=str(tmp_path))
    facts = config.look(tmp_path / "run", ())
    assert facts.line.count("test validates") == 1 and not facts.has_test, facts.line
    report = config.check_samples(True, 0, lambda *_: None)
    assert report.facts.keys() == {"train", "val"} and "chosen" not in report.facts["train"]
    assert report.facts["val"]["chosen"] == "test validates, as the data have no val split"


def test_a_split_is_drawn_where_there_is_none(tmp_path):
    write_parquet(tmp_path / "a.parquet", table())
    train, val = (
        open_boxes("auto", str(tmp_path), split, SourceOptions(val_fraction=0.5)) for split in ("train", "val")
    )
    assert {*val.held_out.each()} == {val.name(at).encode() for at in range(len(val))}
    names = [source.name(at) for source in (train, val) for at in range(len(source))]
    assert len(names) == len({*names}) and {*names} <= {each.file for each in ENTRIES}


def test_several_labels_and_texts(tmp_path):
    several = table(label=[["a"], ["a", "b"], [], ["c"]]).replace_schema_metadata(None)
    write_parquet(tmp_path / "a.parquet", several)
    source = open_labels("auto", str(tmp_path), "val", OPTIONS)
    assert source.is_multi_label and source.classes == ("a", "b", "c")
    assert [source.read(at).label.tolist() for at in range(4)] == [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    write_parquet(tmp_path / "b" / "b.parquet", table(label=["x"] * 4, kind=["10", "9", "10", "9"]))
    options = SourceOptions(split="all", label_column="kind")
    assert open_labels("auto", str(tmp_path / "b" / "b.parquet"), "val", options).classes == ("9", "10")
    write_parquet(tmp_path / "c.parquet", table(label=["x", "y", None, "x"]).replace_schema_metadata(None))
    with pytest.raises(BadData, match="c.parquet: column label is empty in some rows"):
        open_labels("auto", str(tmp_path / "c.parquet"), "val", OPTIONS)


def test_few_row_groups_lie_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_KEPT_BYTES", 1)
    write_parquet(tmp_path / "a.parquet", table(), rows=1)
    source = open_labels("auto", str(tmp_path), "val", OPTIONS)
    for at in (3, 0, 2, 1, 0):
        assert Image.open(io.BytesIO(source.read(at).data)).size
        assert len(source.rows.reader._kept) == 1


def test_a_look_at_all_images_is_kept(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", table())
    os.utime(tmp_path / "a.parquet", (1e9, 1e9))
    first = open_boxes("auto", str(tmp_path), "train"), open_masks("auto", str(tmp_path), "train")
    monkeypatch.setattr(packed, "read_header", lambda *_: pytest.fail("images were read again"))
    again = open_boxes("auto", str(tmp_path), "train"), open_masks("auto", str(tmp_path), "train")
    assert [each.fingerprint for each in again] == [each.fingerprint for each in first]


# What is wrong


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"need pyarrow.*pip install 'sightline\[parquet\]'"):
        open_labels("auto", str(tmp_path), "train")


def test_images_that_are_not_in_the_file(tmp_path):
    pa = pytest.importorskip("pyarrow")
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    paths = pa.array([{"bytes": None, "path": f"{at}.jpg"} for at in range(4)], kind)
    write_parquet(tmp_path / "a.parquet", table(image=paths))
    source = open_labels("auto", str(tmp_path), "val", OPTIONS)
    with pytest.raises(BadSample, match="no bytes in column image, only the path 0.jpg; .*save_to_disk or push_to_hub"):
        source.read(0)


@pytest.mark.parametrize(
    ("other", "opener", "said"),
    [
        ({"image": [1, 2, 3, 4]}, open_labels, "has no column of images"),
        ({"label": [1.5] * 4}, open_labels, "no column of labels: found image, label, objects, mask.*label-column"),
        ({"objects": [1] * 4}, open_boxes, r"no column of boxes.*found the columns image, label"),
        ({"objects": [{"bbox": [[1, 2, 3]], "category": [0]}] * 4}, open_boxes, "a.jpg: bbox of a.jpg is .*expected 4"),
        ({"objects": [{"bbox": [[9, 9, -3, 4]], "category": [0]}] * 4}, open_boxes, "expected x, y, width, height"),
        ({"objects": [{"bbox": [[1, 2, 3, 4]], "category": [0, 1]}] * 4}, open_boxes, "as many bbox as category"),
        ({"mask": [1] * 4}, open_masks, "no column of masks"),
    ],
)
def test_wrong_columns_are_named(tmp_path, other, opener, said):
    pytest.importorskip("pyarrow")
    made = table(**{key: value for key, value in other.items() if key != "image"})
    if "image" in other:
        made = made.drop(["mask", "objects", "image"])
    write_parquet(tmp_path / "a.parquet", made)
    with pytest.raises(BadData, match=said):
        opener("parquet", str(tmp_path), "train", SourceOptions())


def test_large_row_groups_and_damaged_files_are_refused(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", table())
    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_MOST_GROUP", 10)
        with pytest.raises(BadData, match="row group 0 has .* MiB.*batch_size=100"):
            open_labels("auto", str(tmp_path), "train")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadData, match=r"a.parquet cannot be read: .*; fetch or write it again"):
        open_labels("auto", str(tmp_path), "train")


def test_few_bytes_that_stand_for_many_are_bounded(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    image = encoded(Image.new("RGB", (12, 10)))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    nulls = pa.table({"image": pa.nulls(50_000, kind), "label": pa.array(np.zeros(50_000, np.int64))})
    write_parquet(tmp_path / "nulls" / "a.parquet", nulls, 50_000)
    with pytest.raises(BadData, match="claims 50000 rows in .* too few for images"):
        open_labels("auto", str(tmp_path / "nulls"), "train")
    names = [{"bytes": image, "path": "p" * 2**14} for _ in range(300)]
    named = pa.table({"image": pa.array(names, kind), "label": pa.array([0, 1] * 150)})
    write_parquet(tmp_path / "names" / "a.parquet", named, 300)
    assert named.nbytes > 20 * (tmp_path / "names" / "a.parquet").stat().st_size
    taken, real = [], parquet._within

    def seen(batch, name):
        taken.append(batch.nbytes)
        return real(batch, name)

    monkeypatch.setattr(parquet, "_within", seen)
    monkeypatch.setattr(parquet, "_AT_ONCE", 2**17)
    source = open_labels("parquet", str(tmp_path / "names"), "train")
    assert source.name(0).startswith("a.parquet:")
    assert max(taken) < 2**18
    copies = [{"bytes": image + bytes(2**14), "path": f"{number}.png"} for number in range(200)]
    write_parquet(tmp_path / "same" / "a.parquet", pa.table({"image": copies, "label": [0, 1] * 100}), 200)
    monkeypatch.setattr(parquet, "_MOST_GROUP", 2**20)
    source = open_labels("parquet", str(tmp_path / "same"), "train")
    with pytest.raises(BadSample, match="takes more than the 1 MiB allowed"):
        source.read(0)


def test_a_text_of_arrow_that_begins_outside_of_its_buffer_is_refused(tmp_path):
    """The first and the last place are right, which is all that a quick look checks."""
    pa = pytest.importorskip("pyarrow")
    places = pa.py_buffer(np.array([0, 2**20, 2, 3, 4], np.int32).tobytes())
    texts = pa.StringArray.from_buffers(4, places, pa.py_buffer(b"abcd"))
    made = table().drop_columns(["label", "objects", "mask"]).append_column("label", texts)
    save_to_disk(tmp_path / "saved", made)
    with pytest.raises(BadData, match=r"cannot be read: .*[Oo]ffset"):
        open_labels("auto", str(tmp_path / "saved"), "val", OPTIONS)


def test_an_arrow_file_that_ends_between_two_batches_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    file, ends = io.BytesIO(), []
    with pa.ipc.new_file(file, table().schema) as out:
        for batch in table().to_batches(max_chunksize=2):
            out.write_batch(batch)
            ends.append(file.tell())
    assert len(ends) == 2
    for end in (*ends, len(file.getvalue()) - 1):
        (tmp_path / "a.arrow").write_bytes(file.getvalue()[:end])
        with pytest.raises(BadData, match=r"a.arrow cannot be read: .*; fetch or write it again"):
            open_labels("auto", str(tmp_path / "a.arrow"), "val", OPTIONS)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("form", ["stream", "file"])
@pytest.mark.parametrize("coded", [True, False])
def test_compressed_arrow_is_refused_before_it_is_unpacked(tmp_path, compression, form, coded):
    pa = pytest.importorskip("pyarrow")
    made = table()
    if coded:  # a message with the texts comes before the rows
        made = made.append_column("kind", pa.array(["a", "b"] * 2).dictionary_encode())
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        getattr(pa.ipc, f"new_{form}")(file, made.schema, options=options) as out,
    ):
        out.write_table(made, max_chunksize=3)
    if compression:
        with pytest.raises(BadData, match=r"a.arrow cannot be read: its buffers are compressed; .*save_to_disk"):
            open_labels("auto", str(tmp_path / "a.arrow"), "val", OPTIONS)
        return
    source = open_labels("auto", str(tmp_path / "a.arrow"), "val", OPTIONS)
    assert {source.name(at): source.read(at).label for at in range(4)} == {
        "a.jpg": 0,
        "b.jpg": 1,
        "c.jpg": 0,
        "d.jpg": 1,
    }


@pytest.mark.parametrize(
    ("listed", "said"),
    [(["p.arrow"], "p.arrow is no file beside it"), (["a.arrow", "a.arrow"], "a file is listed twice")],
)
def test_what_save_to_disk_lists_is_a_file_each(tmp_path, listed, said):
    pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / "p.arrow")
    (tmp_path / "a.arrow").touch()
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in listed]}))
    with pytest.raises(BadData, match=said):
        open_labels("parquet", str(tmp_path), "train")


def test_metadata_that_cannot_be_used_names_the_line(tmp_path):
    metadata(tmp_path / "data")
    file = tmp_path / "data" / "metadata.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"bbox": [[', '"bbox": [["x", ', 1))
    with pytest.raises(BadData, match=r"metadata.jsonl, entry at byte 0: bbox of a.jpg is"):
        open_boxes("auto", str(tmp_path / "data"), "train")
    file.write_text(text + "{")
    with pytest.raises(BadData, match=r"metadata.jsonl: the line at byte \d+ is not JSON"):
        open_boxes("auto", str(tmp_path / "data"), "train")
    options = SourceOptions(label_column="kind")
    file.write_text(text)
    with pytest.raises(BadData, match=r"no column is called kind, as --data.label-column says"):
        open_labels("auto", str(tmp_path / "data"), "train", options)
    (tmp_path / "data" / "masks" / "b.png").unlink()
    with pytest.raises(BadData, match=r"image without a mask.*lacks its mask masks/b.png"):
        open_masks("auto", str(tmp_path / "data"), "train")


# WebDataset's tars


def tar_of(file: Path, entries=ENTRIES, **other) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as made:
        for at, each in enumerate(entries):
            picture = Image.new("RGB", (each.width, each.height), (9, 9, 9 + at))
            said = {"objects": objects(each, named=False), "caption": "x"} | other
            members = {"jpg": encoded(picture), "json": json.dumps(said).encode(), "seg.png": encoded(mask_of(each))}
            for ending, data in members.items():
                info = tarfile.TarInfo(f"{each.file[0]}.{ending}")
                info.size = len(data)
                made.addfile(info, io.BytesIO(data))


def test_boxes_and_masks_of_tars(tmp_path):
    tar_of(tmp_path / "data" / "train" / "0.tar", ENTRIES[:3])
    tar_of(tmp_path / "data" / "train" / "1.tar", ENTRIES[3:])
    (tmp_path / "data" / "classes.txt").write_text("cat\ndog\nrest")
    MADE["coco"](tmp_path / "coco")
    path = str(tmp_path / "data")
    assert kind_of_boxes("auto", path) == "tar_objects"
    ours, coco = open_boxes("auto", path, "val", OPTIONS), open_boxes("auto", str(tmp_path / "coco"), "val", OPTIONS)
    assert ours.classes == ("cat", "dog", "rest") and ours.notes == ("from tar shards",)
    ours = pickle.loads(pickle.dumps(ours))
    for row, each in enumerate(ENTRIES):
        np.testing.assert_allclose(ours.objects(row).boxes, coco.objects(row).boxes)
        assert ours.objects(row).labels.tolist() == coco.objects(row).labels.tolist()
        assert Image.open(io.BytesIO(ours.image(row))).size == (each.width, each.height)
    masks = pickle.loads(pickle.dumps(open_masks("auto", path, "val", OPTIONS)))
    assert masks.classes == ("cat", "dog", "rest")
    for row, each in enumerate(ENTRIES):
        np.testing.assert_array_equal(masks.mask(row), np.asarray(mask_of(each)))


def test_other_forms_of_boxes_in_tars(tmp_path):
    boxes = [[1, 2, 3, 4], [5, 6, 7, 8]]
    annotations = [{"bbox": each, "category_id": name} for each, name in zip(boxes, "ab", strict=True)]
    for at, said in enumerate(({"boxes": boxes, "labels": ["a", "b"]}, {"annotations": annotations})):
        tar_of(tmp_path / str(at) / "train-0.tar", **({"objects": annotations} if at else {"objects": said}))
        source = open_boxes("auto", str(tmp_path / str(at)), "val", OPTIONS)
        assert source.classes == ("a", "b") and source.objects(0).boxes.tolist() == boxes


def test_tars_of_labels_alone_are_not_taken_for_boxes(tmp_path):
    with tarfile.open(tmp_path / "train-0.tar", "w") as made:
        for name, data in (("a.jpg", encoded(Image.new("RGB", (4, 4)))), ("a.json", b'{"label": 3}')):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    with pytest.raises(UsageError, match="holds images with a label"):
        open_boxes("auto", str(tmp_path), "train")
    with pytest.raises(UsageError, match=r"holds images with a label.*tar shards with KEY.jpg and KEY.seg.png"):
        open_masks("auto", str(tmp_path), "train")
    with pytest.raises(UsageError, match=r"does not exist.*tar shards with KEY.jpg and KEY.json"):
        open_boxes("auto", str(tmp_path / "none"), "train")


def test_members_of_a_tar_that_lie_apart_are_refused(tmp_path):
    tar_of(tmp_path / "train-0.tar")
    with tarfile.open(tmp_path / "train-0.tar", "a") as made:
        info = tarfile.TarInfo("z.json")
        info.size = 2
        made.addfile(info, io.BytesIO(b"{}"))
    with pytest.raises(BadData, match=r"z.json has no image beside it .*one after the other"):
        open_boxes("auto", str(tmp_path), "train")


@pytest.mark.parametrize(
    ("said", "expected"), [(b"{", "is not JSON"), (b'{"objects": [1]}', "expected a list of objects")]
)
def test_a_wrong_json_in_a_tar_names_its_sample(tmp_path, said, expected):
    tar_of(tmp_path / "train-0.tar")
    data = (tmp_path / "train-0.tar").read_bytes()
    at = data.index(b'{"objects"')
    (tmp_path / "train-0.tar").write_bytes(
        data[:at] + said.ljust(data.index(b"\0", at) - at) + data[data.index(b"\0", at) :]
    )
    with pytest.raises(BadData, match=rf"a\.jp?s?o?n?g?.*{expected}"):
        open_boxes("tar_objects", str(tmp_path), "train")
