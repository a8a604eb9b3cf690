"""Tables as they come: columns found by what is in them or named by the user, folders, repeated lines, memory."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sightline.data.formats.label_table import labels_in
from sightline.data.sources import SourceOptions, open_source
from sightline.data.sources.table import TableSource
from sightline.errors import BadData, UsageError

GENRES = ("Action", "Comedy", "Drama", "N/A")


def write(path: Path, header: tuple, rows: list[tuple], delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


def draw(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(name.encode())


def both(path: object, **options: str) -> dict[str, TableSource]:
    return {split: open_source("auto", str(path), split, SourceOptions(**options)) for split in ("train", "val")}


def said(found: dict[str, TableSource]) -> str:
    return "; ".join(found["train"].notes)


def labels(found: dict[str, TableSource]) -> dict[str, tuple[str, ...]]:
    """Return the classes of every image by name."""
    every = {}
    for source in found.values():
        for index in range(len(source)):
            label = source.read(index).label
            places = np.flatnonzero(label) if source.is_multi_label else [label]
            every[source.name(index)] = tuple(source.classes[place] for place in places)
    return every


@pytest.fixture
def posters(tmp_path: Path) -> Path:
    """A list in a cell, a column for each class, 12 repeated rows, a folder Images, names without endings."""
    rows = []
    for number in range(60):
        shown = [genre for place, genre in enumerate(GENRES) if number >> place & 1] or ["Drama"]
        rows.append((f"tt{92000 + number:07d}", str(shown), *(int(genre in shown) for genre in GENRES)))
    draw(tmp_path / "Images", [f"{row[0]}.jpg" for row in rows])
    write(tmp_path / "train.csv", ("Id", "Genre", *GENRES), [*rows, *rows[5:17]])
    return tmp_path


def test_a_table_of_posters_is_read_as_it_comes(posters: Path):
    found = both(posters)
    assert found["train"].classes == GENRES and found["train"].is_multi_label
    every = labels(found)
    assert len(every) == 60 and every["Images/tt0092006.jpg"] == ("Comedy", "Drama")
    assert said(found) == (
        "file names from column Id, labels from column Genre (4 columns of 0 and 1 agree with it); 12 repeated lines "
        "left out"
    )
    one_hot = both(posters, label_column="Action, Comedy, D*, N/A")
    assert labels(one_hot) == every and said(one_hot).startswith("file names from column Id, labels from 4 columns;")
    assert labels(both(posters, label_column="Genre", file_column="Id")) == every


def test_what_a_run_keeps_of_a_table_whose_images_lie_below_it_opens_them(posters: Path, tmp_path: Path):
    from sightline.data.sources.layouts import kept_of

    (tmp_path / "kept.yaml").write_text(kept_of(both(posters)["train"])["data.yaml"])
    assert labels(both(tmp_path / "kept.yaml")) == labels(both(posters))


def test_columns_of_0_and_1_that_contradict_the_text_are_refused_with_the_flag(posters: Path):
    rows = list(csv.reader((posters / "train.csv").open(newline="")))
    rows[3][2], rows[9][3] = "1" if rows[3][2] == "0" else "0", "1" if rows[9][3] == "0" else "0"
    write(posters / "train.csv", tuple(rows[0]), rows[1:])
    with pytest.raises(BadData, match=r"labels may be in Genre, or in 4 columns .* disagree in 2 lines, e.g. 4, 10; "):
        both(posters)
    with pytest.raises(BadData, match="--data.label-column Genre, or --data.label-column 'Action,Comedy,Drama,N/A'"):
        both(posters)


@pytest.mark.parametrize(
    ("header", "delimiter", "ending"),
    [(("image_id", "label"), ",", ""), (("path", "class"), ";", ".png"), (("img_no", "species"), "\t", ".png")],
)
def test_tables_as_kaggle_has_them(tmp_path: Path, header: tuple, delimiter: str, ending: str):
    names = [f"img_{number:04d}" for number in range(20)]
    rows = [(name + ending, ("cat", "dog")[number % 2]) for number, name in enumerate(names)]
    draw(tmp_path / "pictures", [f"{name}.png" for name in names])
    write(tmp_path / "train.csv", header, rows, delimiter)
    found = both(tmp_path)
    assert labels(found) == {f"pictures/{name}.png": (("cat", "dog")[i % 2],) for i, name in enumerate(names)}
    guessed = "file names from column img_no, labels from column species"
    assert said(found) == (guessed if header[0] == "img_no" else "")


def test_a_column_that_names_splits_is_one(tmp_path: Path):
    rows = [(f"{number}.png", ("a", "b")[number % 2], "train" if number < 15 else "valid") for number in range(20)]
    draw(tmp_path, [row[0] for row in rows])
    for header in (("filename", "label", "split"), ("filename", "breed", "subset")):
        write(tmp_path / "labels.csv", header, rows)
        found = both(tmp_path)
        assert [len(source) for source in found.values()] == [15, 5] and found["val"].held_out is None
    assert said(found) == "file names from column filename, labels from column breed, splits from column subset"


def test_images_in_several_folders_below_a_table(tmp_path: Path):
    for part in (1, 2):
        draw(tmp_path / "data" / f"part_{part}", [f"{number}.jpg" for number in range(30) if number % 2 == part - 1])
    rows = [(number, "age"[number % 3]) for number in range(30)]
    write(tmp_path / "labels.csv", ("image_id", "label"), rows)
    found = both(tmp_path)
    assert labels(found)["data/part_2/5.jpg"] == ("e",) and len(labels(found)) == 30
    draw(tmp_path / "more", ["7.jpg", "8.jpg"])
    with pytest.raises(BadData) as error:
        both(tmp_path)
    assert (
        "2 lines cannot be used:\n  line 9: 7 may be data/part_2/7.jpg or more/7.jpg; write its folder\n  line 10"
        in (str(error.value))
    )


def test_paths_may_begin_in_a_folder_below_a_table(tmp_path: Path):
    for number in range(12):
        draw(tmp_path / "train_photos" / f"{number:02d}", ["1.jpg", "2.jpg"])
    rows = [(f"{number:02d}/{place + 1}.jpg", "ab"[place]) for number in range(12) for place in (0, 1)]
    write(tmp_path / "labels.csv", ("path", "label"), rows)
    assert labels(both(tmp_path))["train_photos/07/2.jpg"] == ("b",) and not both(tmp_path)["train"].missing


def test_a_table_of_another_name_is_named(tmp_path: Path):
    draw(tmp_path / "photos", ["1.jpg"])
    write(tmp_path / "meta.csv", ("file", "label"), [("1.jpg", "a")])
    with pytest.raises(UsageError, match=r"; if meta.csv lists images with labels, use --data.path .*/meta.csv$"):
        both(tmp_path)


def test_many_folders_below_a_table_are_not_searched(tmp_path: Path):
    for number in range(9):
        draw(tmp_path / f"class{number}", ["1.jpg", "2.jpg"])
    write(tmp_path / "labels.csv", ("file", "label"), [("1.jpg", "a"), ("2.jpg", "b")])
    root = re.escape(str(tmp_path))
    said = f"no image that {root}/labels.csv lists exists, e.g. 1.jpg; searched: "
    with pytest.raises(
        BadData, match=f"{said}{root}, {root}/images, {root}/labels, {root}/labels_images\\. Correct the"
    ):
        both(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "data.yaml").write_text("kind: table\ntrain: {images: photos, labels: labels.csv}\n")
    with pytest.raises(BadData, match=f"{said}{root}/photos\\. Correct the"):
        both(tmp_path / "data.yaml")


def test_a_column_whose_name_misleads_gives_way_to_one_that_names_files(tmp_path: Path):
    draw(tmp_path, [f"{number}.jpg" for number in range(10)])
    rows = [(f"Ann {number}", f"{number}.jpg", "xy"[number % 2]) for number in range(10)]
    write(tmp_path / "labels.csv", ("name", "photo", "label"), rows)
    assert said(both(tmp_path)) == "file names from column photo"


AMBIGUOUS = {
    ("photo", "mask", "label"): r"files may be in photo or mask; say which: --data.file-column photo$",
    ("file", "mask", "breed", "colour"): r"labels may be in breed or colour; say which: --data.label-column breed$",
    ("photo", "mask", "breed", "colour"): r"files may be in photo or mask; .*; labels may be in breed or colour; ",
    ("file", "mask", "breed", "bit"): r"labels may be in breed, or in 1 column of 0 and 1; say which: .*n 'bit'$",
    ("file", "title"): r"no column of labels: found 'file', 'title'; call one label, .*--data.label-column$",
}


@pytest.mark.parametrize("header", AMBIGUOUS, ids=map(" ".join, AMBIGUOUS))
def test_what_may_be_read_in_two_ways_is_refused_in_one_answer(tmp_path: Path, header: tuple):
    draw(tmp_path, [f"{number}{kind}.png" for number in range(12) for kind in ("", "_mask")])
    cells = {"breed": "abc", "colour": ("red", "blue"), "bit": "01", "label": "xy"}
    files = {"mask": "{}_mask.png", "title": "No. {}"}
    rows = [
        tuple(
            cells[name][number % len(cells[name])] if name in cells else files.get(name, "{}.png").format(number)
            for name in header
        )
        for number in range(12)
    ]
    write(tmp_path / "labels.csv", header, rows)
    with pytest.raises(BadData, match=AMBIGUOUS[header]):
        both(tmp_path)
    if "mask" in header:
        wanted = {"file_column": header[0], "label_column": header[2]}
        assert len(labels(both(tmp_path, **wanted))) == 12


def test_columns_that_do_not_exist_are_named_together(posters: Path):
    with pytest.raises(BadData) as error:
        both(posters, file_column="photo", label_column="Genre,genres_*")
    assert "line 1: no column is called photo, as --data.file-column says: found 'Id', 'Genre'," in str(error.value)
    assert "no column is called genres_*, as --data.label-column says: found 'Id', 'Genre'," in str(error.value)


def test_all_lines_that_cannot_be_used_are_in_one_answer(tmp_path: Path):
    draw(tmp_path, ["1.jpg", "2.jpg", "2.png", "3.jpg"])
    lines = ["file,label,split", "1.jpg,a,train", "2,a,train", ",a,train", "3.jpg,c,val", "3.jpg", "1.jpg,b,train"]
    lines += ["3.jpg,a,tset", "1.jpg,,train", *["4.jpg,,train"] * 20]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    with pytest.raises(BadData) as error:
        both(tmp_path)
    first, *others = str(error.value).splitlines()
    assert first == f"{tmp_path}/labels.csv: 8 lines cannot be used:"
    there = f"{tmp_path}/labels.csv line 2"
    assert [each.strip() for each in others] == [
        "line 3: 2 may be 2.jpg or 2.png; write its ending",
        "line 4: names no file; remove the line",
        "line 5: no training image has class 'c'; add some, or remove the line",
        "line 6: 1 cells, the header has 3; quote cells that hold a delimiter",
        f"line 7: 1.jpg is in {there} too; keep one line, its labels separated by ;",
        "line 8: split is 'tset', expected train, val or test; correct it or remove the column",
        f"line 9: 1.jpg is in {there} too; keep one line, its labels separated by ;",
        "line 10: has no label; add one, or remove the line",
        "images that do not exist (1): 4.jpg",
    ]


def test_many_bad_lines_are_counted(tmp_path: Path):
    (tmp_path / "labels.csv").write_text("file,label\n" + "a.jpg\n" * 50 + "b.jpg,x\n")
    with pytest.raises(BadData, match=r"50 lines cannot be used:\n(.*\n){20}  and 30 more$"):
        both(tmp_path)


def test_repeated_lines_differ_from_contradictions(tmp_path: Path):
    draw(tmp_path, [f"{number}.jpg" for number in range(8)])
    rows = [(f"{number}.jpg", "a;b" if number % 2 else "a") for number in range(8)]
    write(tmp_path / "labels.csv", ("file", "label"), [*rows, ("./1.jpg", "b;a"), ("2.jpg", "a")])
    assert said(both(tmp_path)) == "2 repeated lines left out" and len(labels(both(tmp_path))) == 8
    write(tmp_path / "labels.csv", ("file", "label"), [*rows, ("1.jpg", "b")])
    with pytest.raises(BadData, match=r"line 10: 1.jpg is in .*labels.csv line 3 too; keep one line$"):
        both(tmp_path)


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("cat", (("cat",), False)),
        ("['Comedy', 'Drama']", (("Comedy", "Drama"), True)),
        ('["it\'s", "b"]', (("it's", "b"), True)),
        (r"['it\'s']", (("it's",), False)),
        ("['a' 'b']", (("a", "b"), True)),
        ("[1, 2.5]", (("1", "2.5"), True)),
        ("[]", ((), True)),
        ("['a', 'a',]", (("a",), False)),
        ("a;b|a", (("a", "b"), True)),
        ("['a;b']", (("a;b",), False)),
        ("[unknown]", (("[unknown]",), False)),
        ("[__import__('os')]", (("[__import__('os')]",), False)),
        ("['a', ['b']]", (("['a', ['b']]",), False)),
        ("", ((), False)),
    ],
)
def test_lists_in_cells_are_parsed_and_nothing_else(cell: str, found: tuple):
    assert labels_in(cell) == found


def test_a_list_of_one_label_in_every_cell_is_one_label(tmp_path: Path):
    draw(tmp_path, [f"{number}.jpg" for number in range(8)])
    write(tmp_path / "labels.csv", ("file", "label"), [(f"{i}.jpg", f"['{'ab'[i % 2]}']") for i in range(8)])
    assert not both(tmp_path)["train"].is_multi_label and both(tmp_path)["train"].classes == ("a", "b")


def test_a_million_columns_are_refused(tmp_path: Path):
    draw(tmp_path, ["a.jpg"])
    (tmp_path / "labels.csv").write_text("file" + ",x" * 1_000_000 + "\na.jpg\n")
    with pytest.raises(BadData, match="labels.csv line 1: 1000001 cells, at most 65536 are read"):
        both(tmp_path)
    (tmp_path / "labels.csv").write_text("file" + "," * 5_000_000 + "\na.jpg\n")
    with pytest.raises(BadData, match="a line of more than 4194304 characters"):
        both(tmp_path)


PEAK = """
import re, sys
from sightline.data.sources import Opener, SourceOptions, open_source, table
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def rows(path):
    opener = Opener()
    found = [opener.open(open_source, "table", path, split, SourceOptions()) for split in ("train", "val")]
    return sum(map(len, found))

rows(sys.argv[1])
before = peak()
print(rows(sys.argv[2]), peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_a_row_takes_few_bytes_of_memory(tmp_path: Path):
    """100,000 paths lead to 1,000 files: each folder is a link to its own."""
    draw(tmp_path, [f"{number:04d}.jpg" for number in range(1000)])
    for number in range(100):
        (tmp_path / f"part{number:03d}").symlink_to(".")
    rows = [(f"part{i // 1000:03d}/{i % 1000:04d}.jpg", f"class{i % 997 // 10}") for i in range(100_000)]
    write(tmp_path / "labels.csv", ("file", "label"), rows)
    write(tmp_path / "few.csv", ("file", "label"), [*rows[:9], *rows[998:1009]])
    command = [sys.executable, "-c", PEAK, str(tmp_path / "few.csv"), str(tmp_path / "labels.csv")]
    # Of a million rows glibc hands freed pieces back; of fewer only if it is told so.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    count, taken = map(int, ended.stdout.split())
    assert count == len(rows) and taken < 150 * count, f"{taken / count:.0f} bytes a row"


def test_of_very_many_columns_all_that_hold_bits_are_classes(tmp_path: Path):
    """From the hundredth column on only bits are looked for; one with a word in its last row is no class."""
    names = [f"c{number:03d}" for number in range(120)]
    shown = [[names[i % 60], names[i % 60 + 60]] for i in range(240)]
    rows = [(f"{i}.jpg", str(some), *(int(name in some) for name in names)) for i, some in enumerate(shown)]
    draw(tmp_path, [row[0] for row in rows])
    write(tmp_path / "train.csv", ("Id", "Genre", *names), rows)
    found = both(tmp_path)
    assert said(found).startswith("file names from column Id, labels from column Genre (120 columns of 0 and 1 agree")
    assert found["train"].classes == tuple(names) and labels(found)["3.jpg"] == ("c003", "c063")
    rows[-1] = (*rows[-1][:117], "unsure", *rows[-1][118:])  # c115
    write(tmp_path / "train.csv", ("Id", "Genre", *names), rows)
    with pytest.raises(
        BadData, match="in Genre, or in 119 columns of 0 and 1, which disagree in 4 lines, e.g. 57, 117"
    ):
        both(tmp_path)


@pytest.mark.parametrize("at", range(6))
def test_a_line_that_comes_three_times_is_compared_with_its_first(tmp_path: Path, at: int):
    rows = [(f"{i}.jpg", "ab"[i % 2]) for i in range(6)]
    draw(tmp_path, [row[0] for row in rows])
    write(tmp_path / "labels.csv", ("file", "label"), [*rows, rows[at], rows[at]])
    assert "2 repeated lines left out" in said(both(tmp_path)) and len(labels(both(tmp_path))) == 6
    write(tmp_path / "labels.csv", ("file", "label"), [*rows, rows[at], (rows[at][0], "c"), (rows[0][0], "d")])
    with pytest.raises(
        BadData, match=f"line 9: {at}.jpg is in .*labels.csv line {at + 2} too; keep one line"
    ) as raised:
        both(tmp_path)
    assert "line 10: 0.jpg is in" in str(raised.value) and "labels.csv line 2 too" in str(raised.value)
