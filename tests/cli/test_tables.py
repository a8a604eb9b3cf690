"""Tables as they come, as a user meets them: a list of posters, columns that are named, all problems in one answer."""

import csv
from pathlib import Path

import pytest
from PIL import Image

NAME = "demo_classification"
SMALL = [
    *("--model.width=4", "--data.size=24", "--data.eval-resize=24", "--data.eval-size=24", "--train.epochs=1"),
    *("--train.precision=fp32", "--run.device=cpu", "--run.workers=0", "--run.report=off"),
]
GENRES = ("Action", "Comedy", "Drama")


@pytest.fixture
def posters(tmp_path: Path) -> Path:
    """A list in a cell, a column for each class, 12 repeated rows, a folder Images, names without endings."""
    (tmp_path / "posters" / "Images").mkdir(parents=True)
    rows = []
    for number in range(40):
        shown = [genre for place, genre in enumerate(GENRES) if number >> place & 1] or ["Drama"]
        rows.append((f"tt{92000 + number:07d}", str(shown), *(int(genre in shown) for genre in GENRES)))
        Image.effect_noise((24, 32), 20 + number).convert("RGB").save(
            tmp_path / "posters" / "Images" / f"{rows[-1][0]}.jpg"
        )
    with (tmp_path / "posters" / "train.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("Id", "Genre", *GENRES), *rows, *rows[5:17]])
    return tmp_path / "posters"


def test_a_table_of_posters_trains_and_is_evaluated_as_it_comes(sightline, posters: Path, tmp_path: Path):
    said = sightline("train", NAME, "--data", posters, "--out", tmp_path / "run", *SMALL)
    assert said.code == 0 and said.out.splitlines()[0].startswith(
        "data: 3 classes, 32 + 8 images; labels from train.csv; file names from column Id, labels from column Genre (3 "
        "columns of 0 and 1 agree with it); 12 repeated lines left out; several labels per image; no val split"
    ), said
    again = sightline("evaluate", tmp_path / "run", "--run.workers=0", "--run.device=cpu")
    assert again.code == 0 and "on 8 samples" in again.out, again
    checked = sightline("check", NAME, "--data", posters, "--run.workers=0")
    assert checked.code == 0 and "12 repeated lines left out" in " ".join(checked.out.split()), checked


@pytest.mark.shows("data.file_column")
@pytest.mark.shows("data.label_column")
def test_columns_are_named_by_flags(sightline, posters: Path, tmp_path: Path):
    with (posters / "train.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    for row in rows[1:29]:  # with those that the last 12 repeat
        row[2] = "1"
    for row in rows[41:]:
        row[2] = "1"
    with (posters / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["photo", *rows[0]], *([row[0] + ".jpg", *row] for row in rows[1:])])
    words = ["check", NAME, "--data", posters, "--run.workers=0"]
    refused = sightline(*words)
    assert refused.code == 3 and "labels may be in Genre, or in 3 columns of 0 and 1, which disagree in" in refused.out
    named = sightline(*words, "--data.label-column", "Action,Comedy,Drama", "--data.file-column", "photo")
    assert named.code == 0 and "file names from column photo, labels from 3 columns" in named.out, named
    other = sightline(*words, "--data.label-column", "Genre")
    assert other.code == 0 and "file names from column Id, labels from column Genre" in other.out, other
    wrong = sightline(*words, "--data.label-column", "Gender", "--data.file-column", "poster")
    assert wrong.code == 3 and "no column is called poster" in wrong.out and "no column is called Gender" in wrong.out
