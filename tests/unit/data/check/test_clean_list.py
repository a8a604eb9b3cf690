"""Which samples a clean list keeps: every reason to leave one out, in which order, and how its table reads."""

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

from sightline.data.check.clean_list import CleanList
from sightline.data.check.images import SeenSample
from sightline.errors import BadData, UsageError


@dataclass
class Split:
    """What a list asks of a source: names of files and classes."""

    root: str
    names: list[str]
    classes: tuple[str, ...] = ("ant", "bee", "cat")
    is_multi_label: bool = False

    def name(self, index: int) -> str:
        return self.names[index]


def listed(tmp_path: Path, multi: bool = False, **splits: list[tuple]) -> tuple[str, list[dict[str, str]]]:
    """Write the list of splits of (file, labels, bytes, fault); return its line and its rows."""
    root = str(tmp_path / "data")
    sources = {name: Split(root, [row[0] for row in rows], is_multi_label=multi) for name, rows in splits.items()}
    seen = {
        split: [SeenSample(labels, 1, 1, digest.encode(), bad) for _, labels, digest, bad in rows]
        for split, rows in splits.items()
    }
    said = CleanList(sources, seen).write(tmp_path / "clean.csv")
    with (tmp_path / "clean.csv").open(newline="", encoding="utf-8") as file:
        return said.removeprefix(f"wrote {tmp_path / 'clean.csv'}: "), list(csv.DictReader(file))


def test_every_reason_to_leave_one_out_is_counted(tmp_path: Path):
    said, rows = listed(
        tmp_path,
        train=[
            ("good", (0,), "1", ""),
            ("also", (1,), "2", ""),
            ("bad", (0,), "3", "is cut off"),
            ("none", (), "4", ""),
            ("beyond", (3,), "5", ""),
            ("below", (-1,), "6", ""),
            ("\udc80", (0,), "7", ""),
            (" space", (0,), "8", ""),
            ("twice", (0,), "1", ""),
            ("in val", (0,), "9", ""),
            ("two classes", (0,), "10", ""),
            ("two classes too", (1,), "10", ""),
        ],
        val=[("v", (0,), "9", ""), ("new", (2,), "11", ""), ("in test", (1,), "12", "")],
        test=[("t", (1,), "12", ""), ("u", (1,), "13", "")],
    )
    # Of equal images that of test stays, else that of val; a class that is not trained on cannot be scored.
    assert [(row["file"], row["label"], row["split"]) for row in rows] == [
        (f"data/{name}", label, split)
        for name, label, split in (
            ("good", "ant", "train"), ("also", "bee", "train"), ("v", "ant", "val"), ("t", "bee", "test"),
            ("u", "bee", "test"),
        )
    ]  # fmt: skip
    total, _, reasons = said.partition("; left out: ")
    assert total == "5 of 17 images"
    assert sorted(reasons.split(", ")) == [
        "1 identical to each other",
        "1 identical to one in test",
        "1 identical to one in val",
        "1 of a class without training images",
        "1 unreadable",
        "2 identical with different labels",
        "2 with a name that is not text",
        "3 without a class",
    ]


def test_nothing_left_out_is_said_shortly(tmp_path: Path):
    assert listed(tmp_path, train=[("a", (0,), "1", "")])[0] == "1 of 1 images"


@pytest.mark.parametrize(
    ("labels", "cells"),
    [
        ([(0,), (1,)], ["ant;", "bee;"]),  # else it would be read as a table of one label each
        ([(0, 1), (1,)], ["ant;bee", "bee"]),
        ([(), (1,)], ["", "bee"]),
    ],
)
def test_labels_of_a_table_with_several(tmp_path: Path, labels: list, cells: list[str]):
    rows = [(f"{number}", each, str(number), "") for number, each in enumerate(labels)]
    assert [row["label"] for row in listed(tmp_path, multi=True, train=rows)[1]] == cells


def test_without_a_training_image_nothing_is_written(tmp_path: Path):
    with pytest.raises(BadData, match="clean.csv was not written: no training image is left"):
        listed(tmp_path, train=[("a", (0,), "1", "is cut off")], val=[("b", (0,), "2", "")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("clean.txt", "ends in .csv"), ("labels.csv", "is read by it"), ("Val.csv", "is read by it"),
     ("there.csv", "exists; delete it"), ("no/clean.csv", "there is no folder")],
)  # fmt: skip
def test_places_for_a_list(tmp_path: Path, name: str, said: str):
    (tmp_path / "there.csv").touch()
    with pytest.raises(UsageError, match=said):
        CleanList({}, {}).write(tmp_path / name)
