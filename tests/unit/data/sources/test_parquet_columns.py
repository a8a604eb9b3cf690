"""Parquet files one rule at a time: where files lie, what columns mean, names of rows, limits at their borders."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from sightline.data.sources import SourceOptions, parquet
from sightline.errors import BadData, BadSample, UsageError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ALL = SourceOptions(split="all")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(file: Path, columns: dict, rows: int = 2, features: dict | None = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    made = pa.table(columns)
    if features is not None:
        told = json.dumps({"info": {"features": features}})
        made = made.replace_schema_metadata({"huggingface": told})
    pq.write_table(made, file, row_group_size=rows)
    return file


def images(*paths: str | None, data: bytes = b"x" * 50) -> pa.Array:
    return pa.array([{"bytes": data + bytes([at]), "path": path} for at, path in enumerate(paths)], IMAGE)


def labelled(file: Path, *paths: str | None, rows: int = 2, **columns) -> Path:
    return write(file, {"image": images(*paths), "label": [0, 1] * (len(paths) // 2), **columns}, rows)


# Where files lie


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train-0.parquet", "b/val-0.parquet"], {"train": ["train-0"]}),
        (["a.PARQUET", "b.parquet", ".c.parquet", "d.txt", "e.parquet/x"], {"train": ["a", "b"]}),
        (["data/test-1.parquet", "data/train-1.parquet"],
         {"train": ["data/train-1"], "test": ["data/test-1"], "val": ["data/test-1"]}),
        (["data/test-1.parquet", "data/validation.parquet", "data/a.parquet"],
         {"train": ["data/a"], "val": ["data/validation"], "test": ["data/test-1"]}),
        (["data/test-1.parquet"], {"test": ["data/test-1"]}),
        (["default/train.parquet", "other/val.parquet"], {"train": ["default/train"]}),
        (["train/0.parquet", "valid/data/0.parquet", "valid/1.parquet", "rest/1.parquet", "test/default/1.parquet"],
         {"train": ["train/0"], "val": ["valid/1", "valid/data/0"]}),
        (["table.parquet", "Images/a.jpg"], {}),
        (["table.parquet", "Images/a.jpg", "data/train.parquet"], {"train": ["data/train"]}),
        (["table.parquet", "photos/a.jpg"], {"train": ["table"]}),
        (["a.txt"], {}),
    ],
)  # fmt: skip
def test_where_the_files_of_a_split_lie(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = parquet._files(str(tmp_path))
    said = {
        split: [os.path.splitext(file.relative_to(tmp_path))[0] for file in files] for split, files in found.items()
    }
    assert said == expected
    assert parquet.detect(str(tmp_path)) == bool(expected)


def test_one_file_is_given_by_its_ending(tmp_path):
    for name, is_one in (("a.parquet", True), ("a.ARROW", True), ("a.csv", False)):
        (tmp_path / name).touch()
        assert parquet.detect(str(tmp_path / name)) == is_one
    assert not parquet.detect(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"_data_files": []}, "no files, or one elsewhere"),
        ({"_data_files": [{"filename": "../a.arrow"}]}, "no files, or one elsewhere"),
        ({"_data_files": [{"filename": ".a.arrow"}]}, "no files, or one elsewhere"),
        ({"_data_files": [{"filename": 3}]}, "no files, or one elsewhere"),
        ({"_data_files": [{"filename": "a.arrow"}, {"filename": "b.arrow"}]}, "b.arrow is no file beside it"),
        ({"_data_files": 3}, "not iterable"),
        ({}, "_data_files"),
        ([], "indices"),
    ],
)
def test_a_damaged_state_is_named(tmp_path, state, said):
    (tmp_path / "a.arrow").touch()
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert not parquet.detect(str(tmp_path))
    with pytest.raises(BadData, match=rf"state.json cannot be read: .*{said}.*; save the data with save_to_disk again"):
        parquet._files(str(tmp_path))


def test_splits_of_save_to_disk(tmp_path):
    for split in ("train", "test", "rest"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.arrow").touch()
        (tmp_path / split / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    found = parquet._files(str(tmp_path))
    assert {split: files[0].parent.name for split, files in found.items()} == {
        "train": "train", "test": "test", "val": "test",
    }  # fmt: skip
    assert parquet._files(str(tmp_path / "rest")) == {"train": [tmp_path / "rest" / "a.arrow"]}


def test_a_split_that_is_not_there(tmp_path):
    labelled(tmp_path / "data" / "train.parquet", "a", "b")
    with pytest.raises(UsageError, match="no test split"):
        parquet.open_source(str(tmp_path), "test")
    os.rename(tmp_path / "data" / "train.parquet", tmp_path / "data" / "test.parquet")
    for split in ("train", "val"):
        with pytest.raises(BadData, match=f"has no {split} split; found: test"):
            parquet.open_source(str(tmp_path), split)


# What columns mean

BOTH = pa.struct([("path", pa.string()), ("bytes", pa.large_binary())])
NAMES = {"names": ["a", "b"], "_type": "ClassLabel"}


def columns(kinds: dict, features: dict | None = None) -> parquet.Columns:
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if features is not None else None
    return parquet.Columns.of(pa.schema(kinds.items(), metadata=metadata), "there")


@pytest.mark.parametrize(
    ("kinds", "features", "image", "mask"),
    [
        ({"a": pa.binary()}, None, "a", ""),
        ({"a": pa.binary(), "png": pa.large_binary(), "jpg": BOTH}, None, "jpg", ""),
        ({"a": pa.binary(), "b": pa.binary_view()}, None, "a", "b"),
        ({"a": pa.binary(), "b": pa.binary(), "c": pa.binary()}, None, "a", ""),
        ({"a": pa.binary(), "label": pa.binary(), "gt": pa.binary(), "mask": pa.binary()}, None, "a", "mask"),
        ({"b": IMAGE, "a": IMAGE}, {"a": {"_type": "Image"}}, "a", "b"),
        ({"image": IMAGE, "a": IMAGE}, {"a": {"_type": "Image"}, "image": {"_type": "Value"}}, "a", "image"),
        ({"image": IMAGE, "a": IMAGE}, {"a": 3}, "image", "a"),
    ],
)
def test_the_columns_of_images_and_masks(kinds, features, image, mask):
    found = columns(kinds, features)
    assert (found.all, found.image, found.mask) == (tuple(kinds), image, mask)


def test_columns_without_an_image():
    other = pa.struct([("bytes", pa.string())])
    for kinds, features in (
        ({"image": pa.string(), "x": other}, None),
        ({"a": IMAGE, "image": pa.string()}, {"image": {"_type": "Image"}}),
    ):
        with pytest.raises(BadData, match=rf"there has no column of images \(bytes\): {', '.join(kinds)}; .*csv"):
            columns(kinds, features)


def test_paths_beside_bytes():
    assert columns({"a": BOTH}).has_paths
    assert not columns({"a": pa.binary()}).has_paths
    assert not columns({"a": pa.struct([("bytes", pa.binary()), ("path", pa.int64())])}).has_paths


@pytest.mark.parametrize(
    ("kinds", "features", "labels"),
    [
        ({"label": pa.int64()}, None, ["label"]),
        ({"class": pa.string(), "labels": pa.list_(pa.int8()), "x": pa.int64()}, None, ["labels", "class"]),
        ({"label": pa.float64(), "target": pa.large_string()}, None, ["target"]),
        ({"label": pa.large_list(pa.string())}, None, ["label"]),
        ({"label": pa.list_(pa.list_(pa.int64()))}, None, []),
        ({"x": pa.int64(), "y": pa.int64()}, {"y": NAMES}, ["y"]),
        ({"x": pa.int64(), "y": pa.int64()}, {"y": NAMES, "x": NAMES}, []),
        ({"x": pa.int64(), "label": pa.int64()}, {"x": NAMES}, ["label"]),
        ({"x": pa.int64()}, None, []),
    ],
)
def test_the_columns_of_labels(kinds, features, labels):
    assert list(columns({"image": IMAGE, **kinds}, features).labels) == labels


def test_the_column_of_objects_is_nested():
    nested = pa.struct([("bbox", pa.list_(pa.float32()))])
    assert columns({"image": IMAGE, "annotations": nested, "object": nested}).objects == "annotations"
    assert columns({"image": IMAGE, "objects": pa.int64(), "object": pa.list_(nested)}).objects == "object"
    assert columns({"image": IMAGE, "objects": pa.string()}).objects == ""


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (b'{"info": {"features": {"a": 1}}}', {"a": 1}),
        (b'{"info": {"features": [1]}}', {}),
        (b'{"info": 3}', {}),
        (b"[]", {}),
        (b"{", {}),
        (b"[" * 100_000, {}),
        (None, {}),
    ],
)
def test_what_datasets_says(told, expected):
    assert parquet._features({b"huggingface": told} if told else {}) == expected


def within(feature: object, depth: int) -> object:
    return within({"feature": feature}, depth - 1) if depth else feature


def test_names_of_classes_lie_a_few_levels_down():
    for feature in (NAMES, within(NAMES, 1), within(NAMES, 7)):
        assert parquet._names_of(feature) == ("a", "b")
    for feature in (within(NAMES, 8), {"names": []}, {"names": ["a", ""]}, {"names": ["a", "a"]}, {"names": [1]}, 3):
        assert parquet._names_of(feature) == ()
    assert parquet._names_of({"names": ["x" * 1001, "y" * 1000]}) == ("x" * 1000, "y" * 1000)
    objects = {"bbox": 3, "category": NAMES}
    for feature in (objects, within(objects, 3), {"categories": within(NAMES, 2)}):
        assert parquet._category_names(feature) == ("a", "b")
    assert parquet._category_names(within(objects, 4)) == parquet._category_names([objects]) == ()


# Rows


def names_of(path: Path) -> list[str]:
    rows = parquet._rows(str(path), {"train": [path] if path.is_file() else sorted(path.iterdir())}, "train")
    assert rows is not None
    return [os.fsdecode(each) for each in rows.names.all()]


def test_names_of_rows(tmp_path):
    numbers = ["a.parquet:0", "a.parquet:1", "a.parquet:2", "a.parquet:3"]
    for number, (paths, expected) in enumerate([
        (["x/a.png", "c:\\y\\b.png", "c", "d" * 300], ["a.png", "b.png", "c", "d" * 255]),
        (["a", "a", "b", "c"], numbers),
        (["a", "x/a", "b", "c"], numbers),
        (["a", None, "b", "c"], numbers),
        (["a", "", "b", "c"], numbers),
        (["", "a", "b", "c"], numbers),
        (["a", "b/", "d", "c"], numbers),
        (["a", "b", "p/" * 2047 + "dd", "c"], ["a", "b", "dd", "c"]),
        (["a", "b", "p/" * 2047 + "ddd", "c"], numbers),
    ]):  # fmt: skip
        assert names_of(labelled(tmp_path / str(number) / "a.parquet", *paths)) == expected
    for name, rows in (("b", 2), ("a", 1)):
        write(tmp_path / "two" / f"{name}.parquet", {"image": [b"x" * 40] * 3, "label": [0, 1, 0]}, rows)
    assert names_of(tmp_path / "two") == [f"{name}.parquet:{row}" for name in "ab" for row in range(3)]
    source = parquet.open_source(str(tmp_path / "two"), "val", ALL)
    assert [source.name(at) for at in range(3)] == ["a.parquet:0", "a.parquet:2", "b.parquet:0"]


def test_files_of_a_split_have_the_same_columns_and_some_rows(tmp_path):
    file = labelled(tmp_path / "a.parquet", "a", "b", "c", "d")
    labelled(tmp_path / "b.parquet", "e", "f", extra=[1, 2])
    with pytest.raises(BadData, match=rf"b.parquet has other columns than {file}; write them alike"):
        parquet.open_source(str(tmp_path), "val", ALL)
    labelled(tmp_path / "b.parquet")
    assert len(parquet.open_source(str(tmp_path), "val", ALL)) == 4
    labelled(tmp_path / "a.parquet")
    with pytest.raises(BadData, match=r"a.parquet, .*b.parquet have no rows; write them again"):
        parquet.open_source(str(tmp_path), "val", ALL)


def test_the_least_bytes_of_a_row(tmp_path, monkeypatch):
    file = labelled(tmp_path / "a.parquet", "a", "b", "c", "d")
    size = file.stat().st_size
    monkeypatch.setattr(parquet, "_LEAST_ROW", size / 4)
    assert len(parquet.open_source(str(file), "val", ALL)) == 4
    monkeypatch.setattr(parquet, "_LEAST_ROW", size / 4 + 0.25)
    with pytest.raises(BadData, match=f"a.parquet claims 4 rows in {size} bytes, too few for images; write it again"):
        parquet.open_source(str(file), "val", ALL)


def test_the_most_bytes_of_a_row_group(tmp_path, monkeypatch):
    file = labelled(tmp_path / "a.parquet", "a", "b", "c", "d")
    about = pq.ParquetFile(file).metadata
    largest = max(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
    source = parquet.open_source(str(file), "val", ALL)
    monkeypatch.setattr(parquet, "_MOST_GROUP", largest)
    assert len(parquet.open_source(str(file), "val", ALL)) == 4
    monkeypatch.setattr(parquet, "_MOST_GROUP", largest - 1)
    with pytest.raises(BadData, match=r"row group 0 has 0 MiB, at most 0 are allowed; write it with smaller ones"):
        parquet.open_source(str(file), "val", ALL)
    unpacked = source.rows.reader.column(0, 0, "image", 2).nbytes
    source.rows.reader.close()
    monkeypatch.setattr(parquet, "_MOST_GROUP", unpacked - 1)
    with pytest.raises(BadSample, match="row group 0 takes more than the 0 MiB allowed, unpacked"):
        source.read(0)
    monkeypatch.setattr(parquet, "_MOST_GROUP", unpacked)
    assert source.read(0).data == b"x" * 50 + bytes([0])


def test_an_image_has_a_limit(tmp_path, monkeypatch):
    source = parquet.open_source(str(labelled(tmp_path / "a.parquet", "a", "b")), "val", ALL)
    monkeypatch.setattr(parquet, "MAX_BYTES", 51)
    assert len(source.read(1).data) == 51
    monkeypatch.setattr(parquet, "MAX_BYTES", 50)
    with pytest.raises(BadSample, match="b: 51 bytes, more than the 50 allowed"):
        source.read(1)


def test_images_without_bytes(tmp_path):
    for column, said in (
        (pa.array([None, b"x" * 50]), r"a.parquet:0: no bytes in column image; write"),
        (pa.array([None, {"bytes": b"x" * 50, "path": "b"}], IMAGE), "no bytes in column image; write"),
        (pa.array([{"bytes": None, "path": "/b"}] * 2, IMAGE), "no bytes in column image, only the path /b; write"),
    ):
        file = write(tmp_path / "a.parquet", {"image": column, "label": [0, 1]})
        with pytest.raises(BadSample, match=said):
            parquet.open_source(str(file), "val", ALL).read(0)


def test_the_groups_read_last_are_kept(tmp_path, monkeypatch):
    file = labelled(tmp_path / "a.parquet", *"abcdef")
    reader = parquet.open_source(str(file), "val", ALL).rows.reader
    sizes = [reader.column(0, group, "image", 2).nbytes for group in range(3)]
    assert [key[1] for key in reader._kept] == [0, 1, 2] and reader._bytes == sum(sizes)
    reader.close()
    assert not reader._kept and not reader._files and reader._bytes == 0
    monkeypatch.setattr(parquet, "_KEPT_BYTES", sizes[0] + sizes[1])
    for group, kept in ((0, [0]), (1, [0, 1]), (0, [1, 0]), (2, [0, 2]), (0, [2, 0]), (1, [0, 1])):
        assert reader.column(0, group, "image", 2)[0].as_py()["path"] == "abcdef"[2 * group]
        assert [key[1] for key in reader._kept] == kept
        assert reader._bytes == sum(sizes[group] for group in kept)
    with pytest.raises(BadData, match=r"a.parquet has 2 rows in group 2, expected 3; fetch it again"):
        reader.column(0, 2, "image", 3)
    monkeypatch.setattr(parquet.os, "getpid", lambda: -1)  # as in a fork
    reader.column(0, 1, "image", 2)
    assert [key[1] for key in reader._kept] == [1] and reader._bytes == sizes[1]


def test_rows_are_read_some_at_a_time(tmp_path, monkeypatch):
    kinds = {"image": images(*"abcdefgh"), "image2": ["x" * 200] * 8, "label": [0, 1] * 4}
    file = pq.ParquetFile(write(tmp_path / "a.parquet", kinds, 8))

    def sizes(name: str) -> list[int]:
        return [len(each) for each in parquet._batches(file, [0], name)]

    about = file.metadata.row_group(0)
    both = about.column(0).total_uncompressed_size + about.column(1).total_uncompressed_size
    assert sizes("image") == [8]
    monkeypatch.setattr(parquet, "_SCANNED", 3)
    assert sizes("image") == [3, 3, 2]
    for at_once, expected in ((2 * both, [2] * 4), (2 * both - 1, [1] * 8), (1, [1] * 8), (3 * both, [3, 3, 2])):
        monkeypatch.setattr(parquet, "_AT_ONCE", at_once)
        assert sizes("image") == expected
    assert [len(each) for each in parquet._batches(file, [], "image")] == []


def test_as_many_rows_at_once_as_64_mib_of_equal_ones(tmp_path):
    column = pa.array(np.arange(20_000) % 8)
    file = pq.ParquetFile(write(tmp_path / "a.parquet", {"a": column, "b": pa.nulls(20_000, pa.int8())}, 20_000))
    size = file.metadata.row_group(0).column(0).total_uncompressed_size
    assert 2**26 // 16_384 < size < 2**26 // 7000  # both limits count here
    at_once = 67_108_864 // size
    assert next(len(each) for each in parquet._batches(file, [0], "a")) == at_once < 16_384
    assert next(len(each) for each in parquet._batches(file, [0], "b")) == 16_384


def test_offsets_that_lead_out_of_their_buffers_are_refused(tmp_path):
    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, schema) as stream:
        stream.write_batch(pa.record_batch([pa.array([b"x" * 40] * 2), pa.array([0, 1])], schema=schema))
    data = (tmp_path / "a.arrow").read_bytes()
    before, after = (np.asarray(ends, np.int32).tobytes() for ends in ([0, 40, 80], [0, 40, 2**30]))
    assert data.count(before) == 1
    (tmp_path / "a.arrow").write_bytes(data.replace(before, after))
    source = parquet.open_source(str(tmp_path / "a.arrow"), "val", ALL)
    for row in range(2):
        with pytest.raises(BadSample, match=r"a.arrow:\d: .*a.arrow cannot be read: .*; fetch or write it again"):
            source.read(row)


# Labels


def labels_of(tmp_path: Path, column, features: dict | None = None, name: str = "label", **options):
    count = len(column)
    file = write(tmp_path / "a.parquet", {"image": images(*map(str, range(count))), name: column}, 2, features)
    source = parquet.open_source(str(file), "val", SourceOptions(split="all", **options))
    return source.classes, {source.name(at): source.read(at).label for at in range(count)}


@pytest.mark.parametrize(
    ("column", "features", "classes", "labels"),
    [
        ([10, 9, 10], None, ("9", "10"), [1, 0, 1]),
        (["b", "10", "9"], None, ("10", "9", "b"), [2, 0, 1]),
        (["1" * 17, "2"], None, ("2", "1" * 17), [1, 0]),
        (["1" * 18, "2"], None, ("1" * 18, "2"), [0, 1]),
        ([1, 0, 1], NAMES, ("a", "b"), [1, 0, 1]),
        (["b", "a"], NAMES, ("a", "b"), [1, 0]),
        ([0, 0], NAMES, ("a", "b"), [0, 0]),
    ],
)
def test_labels_of_rows(tmp_path, column, features, classes, labels):
    found, read = labels_of(tmp_path, column, features and {"label": features})
    assert found == classes and [read[str(at)] for at in range(len(column))] == labels


def test_several_labels_of_rows(tmp_path):
    classes, read = labels_of(tmp_path, pa.array([["b"], None, ["a", "b"]]))
    assert classes == ("a", "b")
    assert {name: label.tolist() for name, label in read.items()} == {"0": [0, 1], "1": [0, 0], "2": [1, 1]}
    classes, read = labels_of(tmp_path, pa.array([["b"], ["a"]], pa.large_list(pa.string())))
    assert classes == ("a", "b") and read == {"0": 1, "1": 0}  # of one each


def test_wrong_labels(tmp_path):
    for empty in ([1, None], [["a", None], ["b"]]):
        with pytest.raises(BadData, match="a.parquet: column label is empty in some rows; leave these out"):
            labels_of(tmp_path, pa.array(empty))
    with pytest.raises(BadData, match="no column is called kind; found image, label"):
        labels_of(tmp_path, [1, 2], label_column="kind")
    with pytest.raises(BadData, match="no column of labels: found image, kind; name it with --data.label-column"):
        labels_of(tmp_path, [1, 2], name="kind")
    with pytest.raises(BadData, match="column label has labels that train lacks: 2"):
        labels_of(tmp_path, [1, 2], {"label": NAMES})
    train = labelled(tmp_path / "two" / "train.parquet", "a", "b")
    write(train.with_name("val.parquet"), {"image": images("c"), "label": [7]})
    with pytest.raises(BadData, match="column label has labels that train lacks: 7"):
        parquet.open_source(str(tmp_path / "two"), "val")
    write(train.with_name("val.parquet"), {"image": images("c", "d"), "label": [[0], [0, 1]]})
    with pytest.raises(BadData, match="d has 2 labels, each training image has one"):
        parquet.open_source(str(tmp_path / "two"), "val")


def test_a_part_of_train_validates(tmp_path):
    file = labelled(tmp_path / "a.parquet", *map(str, range(60)))
    options = SourceOptions(val_fraction=0.3)
    train, val = (parquet.open_source(str(file), split, options) for split in ("train", "val"))
    mine, held_out = ({source.name(at) for at in range(len(source))} for source in (train, val))
    assert len(mine) == 42 and len(held_out) == 18 and mine | held_out == set(map(str, range(60)))
    for source in (train, val):
        assert source.held_out is not None and {os.fsdecode(each) for each in source.held_out.all()} == held_out
        labels = [source.read(at).label for at in range(len(source))]
        assert labels == sorted(labels) and all(int(source.name(at)) % 2 == each for at, each in enumerate(labels))
        rows = [int(source.name(at)) for at in range(len(source))]
        assert rows == sorted(rows, key=lambda row: (row % 2, row))
        assert np.bincount(labels).tolist() == [len(source) // 2] * 2
