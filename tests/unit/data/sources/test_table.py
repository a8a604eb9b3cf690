"""Tables of labels: where they may lie, what their columns may be called, and every way in which one cannot be used."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from sightline.data.sources import SourceOptions, open_source, table
from sightline.data.sources.layouts import Place, Splits, chosen_for_val, kept_of
from sightline.errors import BadData, UsageError

FILES = [f"{number}.jpg" for number in range(10)]
KINDS = ["cat" if number % 2 else "ant" for number in range(10)]
ROWS = list(zip(FILES, KINDS, strict=True))


def write(path: Path, rows: list[tuple], header: tuple = ("file", "label"), encoding: str = "utf-8", **format) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file, **format).writerows([header, *rows])
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with ten files, numbered."""
    root = tmp_path / "data"
    root.mkdir()
    for number, name in enumerate(FILES):
        (root / name).write_bytes(bytes([number]) * (number + 1))
    return root


def both(path: object, options: SourceOptions | None = None) -> dict[str, table.TableSource]:
    return {split: open_source("auto", str(path), split, options or SourceOptions()) for split in ("train", "val")}


def listed(source: table.TableSource) -> list[tuple[str, object]]:
    """Return names and labels, classes by name."""
    samples = [(source.name(index), source.read(index)) for index in range(len(source))]
    for number, (name, sample) in enumerate(samples):
        assert sample.data == bytes([int(Path(name).stem)]) * (int(Path(name).stem) + 1), number
    if source.is_multi_label:
        return [(name, tuple(source.classes[i] for i in np.flatnonzero(sample.label))) for name, sample in samples]
    return [(name, source.classes[sample.label]) for name, sample in samples]


# Where tables lie


def test_a_table_without_a_split_lets_a_share_of_each_class_validate(data: Path):
    write(data / "labels.csv", ROWS)
    found = both(data)
    rows = sorted(ROWS, key=lambda row: row[::-1])
    chosen = chosen_for_val([name.encode() for name, _ in rows], [int(kind == "cat") for _, kind in rows], 0.2)
    assert listed(found["val"]) == [row for row, out in zip(rows, chosen, strict=True) if out]
    assert listed(found["train"]) == [row for row, out in zip(rows, chosen, strict=True) if not out]
    assert found["train"].labels.tolist() == [0] * 4 + [1] * 4
    for source in found.values():
        assert source.classes == ("ant", "cat") and not source.is_multi_label
        assert source.layout == Splits("table", Place(data, data / "labels.csv"), None)
        assert source.held_out.all() == [name.encode() for name, _ in listed(found["val"])]


def test_a_split_file_chooses_who_validates(data: Path, tmp_path: Path):
    write(data / "labels.csv", ROWS)
    kept = tmp_path / "split.json"
    kept.write_text(json.dumps({"val": ["3.jpg", "4.jpg"]}))
    found = both(data, SourceOptions(split=str(kept)))
    assert listed(found["val"]) == [("4.jpg", "ant"), ("3.jpg", "cat")] and len(found["train"]) == 8


def test_all_samples_may_be_evaluated_but_then_none_is_trained_on(data: Path):
    write(data / "labels.csv", ROWS)
    assert len(open_source("auto", str(data), "val", SourceOptions(split="all"))) == len(ROWS)
    with pytest.raises(UsageError, match="--data.split all leaves no samples to train on"):
        open_source("auto", str(data), "train", SourceOptions(split="all"))


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("more", [[], ["elsewhere.jpg"]])
def test_a_split_file_that_leaves_nothing_to_train_on_is_refused(
    data: Path, tmp_path: Path, split: str, more: list[str]
):
    write(data / "labels.csv", ROWS)
    names, kept = [name for name, _ in ROWS], tmp_path / "split.json"
    kept.write_text(json.dumps({"val": [*names, *more]}))
    with pytest.raises(BadData, match=f"split.json lists all of the {len(ROWS)} samples for validation; give"):
        open_source("auto", str(data), split, SourceOptions(split=str(kept)))
    kept.write_text(json.dumps({"val": [*names[1:], *more]}))
    assert listed(both(data, SourceOptions(split=str(kept)))["train"]) == [ROWS[0]]


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_a_table_for_each_split(data: Path, name: str):
    write(data / "train.csv", ROWS[:7])
    write(data / f"{name}.csv", [("8.jpg", "ant"), ("7.jpg", "cat")])
    found = both(data)
    assert listed(found["val"]) == [("8.jpg", "ant"), ("7.jpg", "cat")] and len(found["train"]) == 7
    train, val = (Place(data, data / f"{each}.csv") for each in ("train", name))
    assert found["val"].layout == Splits("table", train, val, test=val if name == "test" else None)
    assert found["val"].held_out is None and dict(found["train"].ignored) == {".jpg": 1} and not found["val"].ignored


def test_test_csv_without_labels_does_not_validate(data: Path):
    write(data / "train.csv", ROWS[:8])
    write(data / "test.csv", [("8.jpg",), ("9.jpg",)], header=("file",))
    assert {split: len(source) for split, source in both(data).items()} == {"train": 6, "val": 2}


def test_the_path_may_be_the_table_itself(data: Path):
    for name, delimiter in (("mine.csv", ","), ("MINE.TSV", "\t")):
        path = write(data / name, ROWS, delimiter=delimiter)
        assert len(both(path)["train"]) == 8


@pytest.mark.parametrize("folder", ["images", "labels", "labels_images"])
def test_images_may_lie_in_a_folder_beside_the_table(data: Path, folder: str):
    (data / folder).mkdir()
    for name in FILES:
        (data / name).rename(data / folder / name)
    write(data / "labels.csv", ROWS)
    found = both(data)
    assert len(listed(found["train"])) == 8 and found["train"].layout.train.images == data / folder


def test_a_description_names_tables_and_images_anywhere(data: Path, tmp_path: Path):
    write(tmp_path / "lists" / "a.csv", ROWS[:6])
    write(tmp_path / "lists" / "b.csv", [("6.jpg", "ant")])
    described = tmp_path / "data.yaml"
    described.write_text(
        "kind: table\ntrain: {images: data, labels: lists/a.csv}\nval: {images: data, labels: lists/b.csv}\n"
    )
    found = both(described)
    assert len(listed(found["train"])) == 6 and listed(found["val"]) == [("6.jpg", "ant")]


def test_what_a_run_keeps_of_a_table_with_a_split_opens_the_same_samples(data: Path, tmp_path: Path):
    rows = [(name, kind, "train" if number < 7 else "val") for number, (name, kind) in enumerate(ROWS)]
    write(data / "labels.csv", rows, ("file", "label", "split"))
    first = both(data)
    (tmp_path / "data.yaml").write_text(kept_of(first["train"])["data.yaml"])
    again = both(tmp_path / "data.yaml")
    assert all(listed(again[split]) == listed(first[split]) for split in first)
    assert all(again[split].fingerprint == first[split].fingerprint for split in first)


def test_a_description_may_name_classes_that_the_table_numbers(data: Path, tmp_path: Path):
    write(data / "labels.csv", [(name, number % 3) for number, name in enumerate(FILES)])
    described = tmp_path / "data.yaml"
    described.write_text("kind: table\ntrain: {images: data, labels: data/labels.csv}\nclasses: [zebu, yak, ox]\n")
    assert both(described)["train"].classes == ("zebu", "yak", "ox")
    assert ("0.jpg", "zebu") in listed(both(described)["train"]) + listed(both(described)["val"])


def test_folders_of_classes_beside_a_table_are_not_classes(data: Path):
    for folder in ("one", "two"):
        (data / folder).mkdir()
        for name in FILES[:5] if folder == "one" else FILES[5:]:
            (data / name).rename(data / folder / name)
    write(data / "labels.csv", [(f"{'one' if n < 5 else 'two'}/{name}", KINDS[n]) for n, name in enumerate(FILES)])
    assert both(data)["train"].classes == ("ant", "cat")


def test_class_folders_below_train_win_over_a_table(data: Path):
    (data / "train" / "dog").mkdir(parents=True)
    write(data / "train.csv", ROWS)
    assert not table.detect(str(data))


# Columns and cells


@pytest.mark.parametrize(
    "header", [("filename", "class"), ("Image", " Target "), ("image_id", "category"), ("path", "labels")]
)
def test_columns_have_the_names_that_people_use(data: Path, header: tuple):
    write(data / "labels.csv", ROWS, header)
    assert both(data)["train"].classes == ("ant", "cat")


@pytest.mark.parametrize(
    ("encoding", "delimiter", "end"), [("utf-8-sig", ",", "\r\n"), ("utf-8", ";", "\r"), ("utf-8-sig", "\t", "\n")]
)
def test_spreadsheets_write_a_mark_and_other_delimiters(data: Path, encoding: str, delimiter: str, end: str):
    rows = [(name, f"né, {kind}") for name, kind in ROWS]
    write(data / "labels.csv", rows, encoding=encoding, delimiter=delimiter, lineterminator=end)
    assert both(data)["train"].classes == ("né, ant", "né, cat")


def test_other_columns_blank_lines_and_numbers(data: Path):
    lines = [
        "",
        "width,name,label,note",
        *(f"64,{name},{number + 8},x," for number, name in enumerate(FILES)),
        "",
        ",,,",
    ]
    (data / "labels.csv").write_text("\n".join(lines))
    with pytest.raises(BadData, match="no class has two"):
        both(data)
    lines[2:12] = [f"64,{name},{number % 3 + 8},x" for number, name in enumerate(FILES)]
    (data / "labels.csv").write_text("\n".join(lines))
    assert both(data)["train"].classes == ("8", "9", "10")


def test_endings_may_be_left_out(data: Path):
    (data / "3.txt").write_text("about it")
    write(data / "labels.csv", [(Path(name).stem, kind) for name, kind in ROWS])
    found = both(data)
    assert {name for source in found.values() for name, _ in listed(source)} == set(FILES)
    (data / "3.png").write_bytes(b"")
    with pytest.raises(BadData, match=r"labels.csv line 5: 3 may be 3.jpg or 3.png; write its ending"):
        both(data)


def test_paths_from_windows_and_absolute_ones_are_found(data: Path, tmp_path: Path):
    (tmp_path / "far").mkdir()
    (data / "9.jpg").rename(tmp_path / "far" / "9.jpg")
    (data / "sub").mkdir()
    (data / "8.jpg").rename(data / "sub" / "8.jpg")
    files = [*FILES[:8], "sub\\8.jpg", str(tmp_path / "far" / "9.jpg")]
    write(data / "labels.csv", list(zip(files, KINDS, strict=True)))
    names = {name for source in both(data).values() for name, _ in listed(source)}
    assert {"sub/8.jpg", str(tmp_path / "far" / "9.jpg")} <= names and not both(data)["train"].missing


@pytest.mark.parametrize("separator", [";", "|", " ; "])
def test_several_labels_in_a_cell(data: Path, separator: str):
    rows = [(name, separator.join([kind, "pet"] if number > 2 else [kind])) for number, (name, kind) in enumerate(ROWS)]
    rows[0] = (FILES[0], "")
    write(data / "labels.csv", rows)
    found = both(data)
    assert found["train"].classes == ("ant", "cat", "pet") and found["train"].is_multi_label
    labels = dict(listed(found["train"]) + listed(found["val"]))
    assert labels["0.jpg"] == () and labels["1.jpg"] == ("cat",) and labels["4.jpg"] == ("ant", "pet")
    assert found["train"].name(0) < found["train"].name(1) and len(found["val"]) == 2
    counts = np.bincount(found["train"].labels, minlength=3)
    assert counts.tolist() == [
        sum(name in each for _, each in listed(found["train"])) for name in ("ant", "cat", "pet")
    ]


def test_a_column_of_0_and_1_for_each_class(data: Path):
    rows = [
        (n, name, n % 2, "1.0" if n > 4 else "0.0", "True", "train" if n < 8 else "val") for n, name in enumerate(FILES)
    ]
    write(data / "labels.csv", rows, ("", "file", "odd", "Large", "any", "split"))
    found = both(data)
    assert found["train"].classes == ("odd", "Large", "any") and found["train"].is_multi_label
    assert dict(listed(found["val"])) == {"8.jpg": ("Large", "any"), "9.jpg": ("odd", "Large", "any")}


# What cannot be used

BAD = {
    "a,b\none,cat\n": r"labels.csv line 1: no column of files: found 'a', 'b'; call one file, filename",
    "file\n1.jpg\n": r"labels.csv line 1: no column of labels: found 'file'; call one label, labels",
    "file,cat,cat\n1.jpg,0,1\n": r"labels.csv line 1: two columns have one name",
    "": r"labels.csv is empty; expected a CSV file with a header",
    "file,label\n\n": r"labels.csv has a header and no rows",
    "file,label\n1.jpg,cat\n2.jpg\n": r"labels.csv line 3: 1 cells, the header has 2",
    "file,label\n1.jpg,cat,dog\n": r"labels.csv line 2: 3 cells, the header has 2",
    "file,label\n1.jpg,cat\n,cat\n": r"labels.csv line 3: names no file",
    "file,label\n1.jpg,cat\n2.jpg,\n": r"labels.csv line 3: has no label; add one",
    "file,label\n1.jpg,cat\n2.jpg,cat\n./1.jpg,dog\n": r"line 4: 1.jpg is in .*labels.csv line 2 too; keep one line",
    "file,cat,age\n1.jpg,0,1\n2.jpg,1,17\n": r"labels.csv line 3: age is '17', expected 0 or 1",
    "file,cat\n1.jpg,\n": r"labels.csv line 2: cat is '', expected 0 or 1",
    "file,label,split\n1.jpg,cat,trian\n": r"labels.csv line 2: split is 'trian', expected train, val or test",
    "file,label,split\n1.jpg,cat,train\n2.jpg,dog,val\n": r"line 3: no training image has class 'dog'",
    "file,label\n1.jpg,c\0t\n": r"labels.csv line 2: has a NUL byte, so it is not UTF-8 text",
    "file,label\n1.jpg,cat\n2.jpg,m\udce4use\n": r"labels.csv line 3: is not UTF-8 \(byte 0xe4\); save it as CSV UTF-8",
    'file,label\n1.jpg,"cat\n': r"labels.csv line 2: is not CSV: unexpected end of data",
    f"file,label\n1.jpg,{'x' * 200_000}\n": r"labels.csv line 2: is not CSV: field larger than field limit",
}


@pytest.mark.parametrize("text", BAD, ids=[text[:30] for text in BAD])
def test_a_table_that_cannot_be_used_names_the_line(data: Path, text: str):
    (data / "labels.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadData, match=BAD[text]):
        both(data)


def test_bad_lines_and_missing_files_come_in_one_answer(data: Path):
    (data / "0.jpg").touch()  # empty, but there
    (data / "labels.csv").write_text("file,label\n1.jpg,cat\n2.jpg,\nno.jpg,dog\n1.jpg,dog\n0.jpg,dog\n")
    with pytest.raises(BadData) as error:
        both(data)
    for text in (r"line 3: has no label", r"line 5: 1.jpg is in", "images that do not exist (1): no.jpg"):
        assert text in str(error.value)
    (data / "labels.csv").write_text("file,label\n1.jpg,cat\n2.jpg,\nno.jpg,dog\n")
    with pytest.raises(BadData, match=r"line 3: has no label; .*; images that do not exist \(1\): no.jpg"):
        both(data)


def test_tables_for_each_split_share_no_file_and_have_no_column_split(data: Path):
    write(data / "train.csv", ROWS[:7])
    write(data / "val.csv", [("2.jpg", "ant")])
    with pytest.raises(BadData, match=r"val.csv line 2: 2.jpg is in .*train.csv line 4 too"):
        both(data)
    write(data / "val.csv", [("8.jpg", "ant", "val")], ("file", "label", "split"))
    with pytest.raises(BadData, match=r"val.csv line 2: has a split, and there is a table for each split"):
        both(data)


def test_a_table_of_validation_images_alone_has_nothing_to_train_on(data: Path):
    write(data / "val.csv", ROWS)
    assert len(open_source("auto", str(data), "val")) == 10
    with pytest.raises(BadData, match="val split without a train split"):
        open_source("auto", str(data), "train")


def test_an_unreadable_table_is_bad_data(data: Path, tmp_path: Path):
    (tmp_path / "data.yaml").write_text("kind: table\ntrain: {images: data, labels: data}\n")
    with pytest.raises(BadData, match="cannot be read: Is a directory"):
        both(tmp_path / "data.yaml")


def test_a_file_that_is_far_too_large_for_a_table_is_not_read(data: Path):
    with (data / "labels.csv").open("wb") as file:
        file.truncate(2**30 + 1)  # takes no room on the disk
    with pytest.raises(BadData, match=r"labels.csv has more than 1024 MiB; expected a CSV file"):
        both(data)


def test_files_that_do_not_exist_are_listed_and_the_fingerprint_sees_all_else(data: Path):
    write(data / "labels.csv", ROWS)
    whole = both(data)["train"]
    (data / whole.name(0)).rename(data / "gone")
    broken = both(data)["train"]
    assert broken.missing == (str(whole.files[0]),) and len(broken) == len(whole)
    assert broken.fingerprint != whole.fingerprint
    rows = [(name, "cat" if name == whole.name(1) else kind) for name, kind in ROWS]
    (data / "gone").rename(data / whole.name(0))
    write(data / "labels.csv", rows)
    assert both(data)["train"].fingerprint != whole.fingerprint


@pytest.mark.parametrize("folder", ["archive", "archive/photos"])
def test_images_may_lie_one_or_two_folders_deeper_than_the_table(data: Path, folder: str):
    """Of up to eight folders, as archives are unpacked; the table names the files alone."""
    for name in ("archive", *"bcdefgh"):
        (data / name).mkdir()
    (data / folder).mkdir(exist_ok=True)
    for name in FILES:
        (data / name).rename(data / folder / name)
    write(data / "labels.csv", ROWS)
    assert len(listed(both(data)["train"])) == 8
    (data / "ninth").mkdir()  # too many to look into
    with pytest.raises(BadData):
        both(data)


def test_a_link_to_nowhere_that_is_no_table_of_ours_is_left_alone(data: Path, tmp_path: Path):
    """git-annex leaves such links in the place of files that were not fetched."""
    (data / "participants.csv").symlink_to(tmp_path / "not-fetched.csv")
    write(data / "train.csv", ROWS)
    assert table.detect(str(data))
    (data / "val.csv").symlink_to(tmp_path / "not-fetched.csv")
    with pytest.raises(UsageError, match=r"val\.csv is a link that leads nowhere"):
        table.detect(str(data))
