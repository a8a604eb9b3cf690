"""Files written piece by piece: what is noted, what a second start writes, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sightline.data.writing import pieces
from sightline.data.writing.pieces import Journal, Written
from sightline.errors import SightlineError, UsageError
from sightline.files.whole import write_text
from sightline.hardware.limits import usable_cores

RECORD = "prepared.json"


@dataclass
class Lines:
    """A plan of two parts; a piece is a text file with one line for each of its samples."""

    out: Path
    samples: dict[str, list[int]] = field(default_factory=lambda: {"train": [3, 2], "val": [1]})
    options: dict[str, Any] = field(default_factory=lambda: {"seed": 3, "forms": {"a": 1}})
    fails_at: str = ""

    def decided(self) -> dict[str, Any]:
        return self.options

    def check(self) -> None:
        if self.options.get("seed") == 13:
            raise UsageError("13 brings bad luck")

    def pieces(self) -> dict[str, list[int]]:
        return self.samples

    def room(self) -> int:
        return 100

    def write(self, part: str, number: int) -> Written:
        name = f"{part}-{number}.txt"
        if name == self.fails_at:
            raise KeyboardInterrupt
        count = self.samples[part][number]
        write_text(self.out, name, f"{part} {number}\n" * count)
        return Written([(name, (self.out / name).stat().st_size)], {"lines": count})

    def finish(self, written: list[Written]) -> dict[str, int]:
        order = [name for each in written for name, _ in each.files]
        write_text(self.out, "order.txt", " ".join(order))
        return {"lines": sum(each.notes["lines"] for each in written)}


def write(plan: Lines) -> tuple[dict[str, int], list[tuple[str, int, int]]]:
    told: list[tuple[str, int, int]] = []
    with pieces.alone_in(plan.out):
        counts = pieces.write_pieces(plan, 1, lambda *words: told.append(words))
    return counts, told


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix == ".txt"}


WHOLE = {
    "train-0.txt": "train 0\n" * 3,
    "train-1.txt": "train 1\n" * 2,
    "val-0.txt": "val 0\n",
    "order.txt": "train-0.txt train-1.txt val-0.txt",
}


def test_a_plan_is_written_and_recorded(tmp_path: Path):
    out = tmp_path / "below" / "out"
    counts, told = write(Lines(out))
    assert counts == {"lines": 6} and texts(out) == WHOLE
    assert told == [
        ("writing train", 0, 5),
        ("writing train", 3, 5),
        ("writing train", 5, 5),
        ("writing val", 0, 1),
        ("writing val", 1, 1),
    ]
    recorded = json.loads((out / RECORD).read_text())
    assert recorded == {"version": pieces.VERSION, "seed": 3, "forms": {"a": 1}, "counts": {"lines": 6}}
    assert not (out / pieces.NOTES).exists()


def test_a_second_start_writes_nothing(tmp_path: Path):
    out = tmp_path / "out"
    write(Lines(out))
    (out / "val-0.txt").write_text("mine")
    assert write(Lines(out)) == ({"lines": 6}, []) and (out / "val-0.txt").read_text() == "mine"


def test_what_a_killed_start_left_is_kept_and_the_rest_is_written(tmp_path: Path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        write(Lines(out, fails_at="val-0.txt"))
    assert not (out / RECORD).exists() and json.loads((out / pieces.NOTES / "train-00001").read_text()) == {
        "files": [["train-1.txt", 16]],
        "lines": 2,
    }
    (out / "train-0.txt").write_text("train 0\n" * 2 + "TRAIN 0\n")  # of the same size: nobody looks into it
    (out / "train-1.txt").write_text("half")
    (out / ".val-0.txt.part-77").write_text("of a process that is gone")
    counts, told = write(Lines(out))
    assert counts == {"lines": 6}
    assert texts(out) == WHOLE | {"train-0.txt": "train 0\n" * 2 + "TRAIN 0\n"}
    assert told[:2] == [("writing train", 3, 5), ("writing train", 5, 5)]
    assert not (out / ".val-0.txt.part-77").exists()


@pytest.mark.parametrize("note", ["", "{", "[]", '{"files": 3}', '{"files": [["train-0.txt", "24"]]}', '{"lines": 3}'])
def test_a_note_that_is_none_counts_for_nothing(tmp_path: Path, note: str):
    out = tmp_path / str(abs(hash(note)))
    with pytest.raises(KeyboardInterrupt):
        write(Lines(out, fails_at="train-1.txt"))
    (out / pieces.NOTES / "train-00000").write_text(note)
    assert write(Lines(out))[1][0] == ("writing train", 0, 5)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"seed": 4, "forms": {"a": 1}}, "was begun with seed=3, now it is 4; choose another --out, or delete"),
        ({"seed": 3, "forms": {"a": 2}}, "was begun with forms.a=1, now it is 2"),
        ({"seed": 3, "forms": {"a": 1, "b": 5}}, "was begun with forms.b=nothing, now it is 5"),
        ({"seed": 3, "forms": {}}, "was begun with forms.a=1, now it is nothing"),
        ({"seed": 3, "forms": 1}, "was begun with forms={'a': 1}, now it is 1"),
    ],
)
def test_a_plan_that_has_changed_is_refused(tmp_path: Path, options: dict[str, Any], reported: str):
    out = tmp_path / str(abs(hash(reported)))
    with pytest.raises(KeyboardInterrupt):
        write(Lines(out, fails_at="val-0.txt"))
    with pytest.raises(UsageError, match=reported):
        write(Lines(out, options=options))
    assert write(Lines(out))[0] == {"lines": 6}


def test_what_may_change_begins_anew(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    journal = Journal(out)
    assert journal.begin({"seed": 3, "classes": 2}) is False
    journal.note("train-00000", Written([], {"lines": 3}))
    assert journal.begin({"seed": 3, "classes": 2}, ("classes",)) is True
    assert journal.done("train-00000") == Written([], {"lines": 3})
    assert journal.begin({"seed": 3, "classes": 4}, ("classes",)) is True
    assert journal.done("train-00000") is None
    with pytest.raises(UsageError, match="was begun with classes=4, now it is 5"):
        journal.begin({"seed": 3, "classes": 5})
    with pytest.raises(UsageError, match="was begun with seed=3, now it is 2"):
        journal.begin({"seed": 2, "classes": 4}, ("classes",))
    other = Journal(out, "options.json")
    assert other.begin({"seed": 9}) is False


def test_a_folder_of_others_is_left_alone(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "holiday.jpg").touch()
    for _ in range(2):
        with pytest.raises(UsageError, match="holds holiday.jpg, not written by this command; choose another --out"):
            write(Lines(tmp_path / "out"))
    with pytest.raises(UsageError, match="holds holiday.jpg"):
        pieces.refuse_unwritable(tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [".prepare.lock", "holiday.jpg"]
    with pytest.raises(UsageError, match="13 brings bad luck"):
        write(Lines(tmp_path / "other", options={"seed": 13}))
    assert os.listdir(tmp_path / "other") == [".prepare.lock"]


def test_a_folder_that_cannot_be_made_is_named():
    for function in (pieces.refuse_unwritable, lambda path: pieces.alone_in(path).__enter__()):
        with pytest.raises(SightlineError, match="/proc/sightline/out"):
            function(Path("/proc/sightline/out"))


def test_a_trial_leaves_nothing_behind(tmp_path: Path):
    pieces.refuse_unwritable(tmp_path / "some" / "where")
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    for function in (pieces.refuse_unwritable, lambda path: pieces.alone_in(path).__enter__()):
        with pytest.raises(UsageError, match="file"):
            function(tmp_path / "file")
    write(Lines(tmp_path / "out"))
    pieces.refuse_unwritable(tmp_path / "out")


def test_the_number_of_processes():
    assert pieces.jobs_or_cores(3) == 3 and pieces.jobs_or_cores(0) == min(usable_cores(), 16)
    with pytest.raises(UsageError, match="--jobs -1: use 1 or more"):
        pieces.jobs_or_cores(-1)
