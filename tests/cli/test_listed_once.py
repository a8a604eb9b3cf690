"""A start lists its data once: the first look at them, both splits and the run share what was read."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from sightline import api
from sightline.data.sources import folder, table

SMALL = """--model.width=4 --data.size=24 --data.eval-resize=24 --data.eval-size=24 --run.workers=0 --run.device=cpu
--train.global-batch=8 --train.max-steps=1""".split()


@pytest.fixture
def reads(monkeypatch) -> Counter:
    """Count the folders that are walked and the tables that are read."""
    seen: Counter[str] = Counter()
    walk, read = folder.Walk.list, table.read_table

    def walked(self, *arguments):
        seen[self.root.name] += 1
        return walk(self, *arguments)

    def read_counted(head, *arguments):
        seen[head.path.name] += 1
        return read(head, *arguments)

    monkeypatch.setattr(folder.Walk, "list", walked)
    monkeypatch.setattr(table, "read_table", read_counted)
    return seen


@pytest.fixture
def photos(shapes: Path, tmp_path: Path) -> Path:
    """Two classes of six images without a split, and a table of them in another folder."""
    root = tmp_path / "photos"
    rows = ["file,label"]
    for name in sorted(os.listdir(shapes / "train"))[:2]:
        (root / name).mkdir(parents=True)
        for file in sorted((shapes / "train" / name).iterdir())[:6]:
            shutil.copy(file, root / name)
            rows.append(f"../photos/{name}/{file.name},{name}")
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / "labels.csv").write_text("\n".join(rows))
    return root


def test_class_folders_are_walked_once(sightline, reads: Counter, shapes: Path, tmp_path: Path):
    said = sightline("train", "demo_classification", "--data", shapes, "--out", tmp_path / "run", *SMALL)
    assert said.code == 0, said
    assert reads == {"train": 1, "val": 1}


def test_one_folder_and_one_table_for_both_splits_are_read_once_from_any_directory(
    sightline, reads: Counter, photos: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for number, data in enumerate(("photos", "listed")):
        reads.clear()
        said = sightline("train", "demo_classification", "--data", data, "--out", f"run-{number}", *SMALL)
        assert said.code == 0 and "10 + 2 images" in said.out, said
        assert reads == {{"photos": "photos", "listed": "labels.csv"}[data]: 1}
    kept = [json.loads((tmp_path / f"run-{number}" / "split.json").read_text())["val"] for number in (0, 1)]
    assert len(kept[0]) == len(kept[1]) == 2


def test_the_next_start_sees_files_that_were_added(sightline, reads: Counter, photos: Path, tmp_path: Path):
    command = ["train", "demo_classification", "--data", photos, *SMALL]
    assert "10 + 2 images" in sightline(*command, "--out", tmp_path / "first").out
    file = next(photos.rglob("*.jpg"))
    for number in range(5):
        shutil.copy(file, file.with_name(f"new-{number}.jpg"))
    said = sightline(*command, "--out", tmp_path / "second")
    assert said.code == 0 and "demo_classification: 14 training and 3 evaluation samples" in said.out, said
    file.unlink()
    api.train("demo_classification", data=photos, out=tmp_path / "third", flags=SMALL, report=False)
    assert reads["photos"] == 3, "one walk for each start"


def test_an_error_names_the_data_as_they_were_typed(sightline, photos: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "listed" / "labels.csv").write_text("file,label\n../photos/none,a\n,b\n")
    said = sightline("train", "demo_classification", "--data", "listed", "--out", "run", *SMALL)
    assert said.code == 3 and "error: listed/labels.csv line 3" in said.err, said
