"""`sightline check --write`: a list without duplicates, leaks and damaged images, which a run trains on as it is."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

NAME = "demo_classification"
HERE = ["--run.device=cpu", "--run.workers=0"]
SMALL = [
    *("--model.width=4", "--data.size=24", "--data.eval-resize=24", "--data.eval-size=24", "--train.epochs=1"),
    *("--train.precision=fp32", "--run.report=off", *HERE),
]


@pytest.fixture
def dirty(tmp_path: Path) -> Path:
    """Class folders of three splits with copies, one leak, one image of two classes and a damaged JPEG."""
    root, random = tmp_path / "dirty", np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 6), ("test", 4)):
        for kind in ("ant", "bee"):
            (root / split / kind).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 255, (24, 24, 3), np.uint8)
                Image.fromarray(pixels).save(root / split / kind / f"{number:02d}.jpg")
    copies = {
        "train/ant/copy.jpg": "train/ant/00.jpg",
        "train/bee/leak.jpg": "val/bee/01.jpg",
        "val/ant/late.jpg": "test/ant/02.jpg",
        "train/bee/other.jpg": "train/ant/03.jpg",
    }
    for new, old in copies.items():
        shutil.copy(root / old, root / new)
    damaged = root / "train" / "bee" / "05.jpg"
    damaged.write_bytes(damaged.read_bytes()[:500])
    return root


LEFT_OUT = {
    *("train/ant/copy.jpg", "train/bee/leak.jpg", "val/ant/late.jpg", "train/bee/05.jpg"),
    *("train/bee/other.jpg", "train/ant/03.jpg"),
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_clean_list_of_folders_is_checked_trained_on_and_scored(sightline, dirty: Path, tmp_path: Path):
    clean = tmp_path / "clean.csv"
    said = sightline("check", NAME, "--data", dirty, "--write", clean, *HERE)
    assert said.code == 0, said
    assert said.out.splitlines()[-2:] == [
        "problems: 2",
        f"wrote {clean}: 42 of 48 images; left out: 1 unreadable, 1 identical to one in test, 2 identical with "
        "different labels, 1 identical to each other, 1 identical to one in val",
    ]
    files = {str(path.relative_to(dirty)) for path in dirty.rglob("*.jpg")}
    rows = rows_of(clean)
    assert {row["file"] for row in rows} == {f"dirty/{name}" for name in files - LEFT_OUT}
    assert all(row["file"].split("/")[1:3] == [row["split"], row["label"]] for row in rows)
    again = sightline("check", NAME, "--data", clean, *HERE)
    assert again.code == 0 and again.out.endswith("no problems\n"), again
    trained = sightline("train", NAME, "--data", clean, "--out", tmp_path / "run", *SMALL)
    assert trained.code == 0 and "data: 2 classes, 22 + 12 images; labels from clean.csv" in trained.out, trained
    assert "training images too" not in trained.out + trained.err
    scored = sightline("evaluate", tmp_path / "run", "--split", "test", *HERE)
    assert scored.code == 0 and "on 8 samples" in scored.out, scored


def test_a_run_says_that_its_data_leak(sightline, dirty: Path, tmp_path: Path):
    words = ["train", NAME, "--data", dirty, "--data.on-bad-sample=skip", *SMALL]
    said = sightline(*words, "--out", tmp_path / "run")
    pair = f"{dirty}/val/bee/01.jpg and {dirty}/train/bee/leak.jpg"
    line = f"1 of 13 validation images that were compared are training images too, e.g. {pair}; the score will be too "
    assert said.code == 0 and (said.out + said.err).count(f"warning: {line}high. `sightline check` lists") == 1, said
    events = [json.loads(text) for text in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert any(event["event"] == "warning" and event["text"].startswith(line) for event in events)
    said = sightline(*words, "--out", tmp_path / "other", "--data.fingerprint=names")
    assert said.code == 0 and "training images too" not in said.out + said.err


def test_a_list_elsewhere_has_absolute_paths_and_a_drawn_split_is_kept(sightline, dirty: Path, tmp_path: Path):
    (tmp_path / "lists").mkdir()
    clean = tmp_path / "lists" / "clean.csv"
    said = sightline("check", NAME, "--data", dirty / "train", "--write", clean, "--json", *HERE)
    assert said.code == 0 and json.loads(said.out)["problems"][0]["kind"] == "unreadable", said
    assert said.err.startswith(f"wrote {clean}: 23 of 27 images; left out: "), said
    rows = rows_of(clean)
    assert all(Path(row["file"]).is_absolute() for row in rows) and {row["split"] for row in rows} == {"train", "val"}
    again = sightline("check", NAME, "--data", clean, "--json", *HERE)
    counts = {split: facts["images"] for split, facts in json.loads(again.out)["splits"].items()}
    assert again.code == 0 and counts == {split: sum(row["split"] == split for row in rows) for split in counts}, again


def test_a_list_of_a_table_with_several_labels_reads_the_same(sightline, dirty: Path, tmp_path: Path):
    names = sorted((dirty / "test").rglob("*.jpg"))
    cells = ["red;blue", "red", "", "blue", "['a;b', '[c]', 'say \"x\"']", "red", "blue", "red"]
    quoted = [cell.replace(chr(34), chr(34) * 2) for cell in cells]
    lines = [f'{path.relative_to(dirty)},"{cell}"' for path, cell in zip(names, quoted, strict=True)]
    (dirty / "some.csv").write_text("\n".join(["file,label", *lines, *lines[:1], "gone.jpg,red"]))
    words = ["--data.on-bad-sample=skip", "--data.val-fraction=0.3", *HERE]
    said = sightline("check", NAME, "--data", dirty / "some.csv", "--write", dirty / "clean.csv", *words)
    assert "1 repeated lines left out" in " ".join(said.out.split()) and "left out: 1 unreadable" in said.out, said
    from sightline.data.sources import SourceOptions, open_source

    def labels(path: Path) -> dict[str, set[str]]:
        found = {}
        for split in ("train", "val"):
            source = open_source("table", str(path), split, SourceOptions(val_fraction=0.3))
            for index in range(len(source)):
                if str(source.files[index]) not in source.missing:
                    found[source.name(index)] = {source.classes[i] for i in np.flatnonzero(source.read(index).label)}
        return found

    before, after = labels(dirty / "some.csv"), labels(dirty / "clean.csv")
    assert len(before) == 8 and after.items() <= before.items() and len(after) >= 7, (before, after)


def test_what_cannot_be_listed_is_refused_before_the_check(sightline, dirty: Path, tmp_path: Path):
    words = ["check", NAME, "--data", dirty, *HERE, "--write"]
    (tmp_path / "there.csv").write_text("mine")
    for name, why in (
        ("there.csv", "exists; delete it, or use another name"),
        ("clean.txt", "expected a name that ends in .csv"),
        ("labels.csv", "a folder with labels.csv is read by it; use another name, e.g. clean.csv"),
        ("none/clean.csv", f"there is no folder {tmp_path / 'none'}; make it first"),
    ):
        said = sightline(*words, tmp_path / name)
        assert said.code == 2 and why in said.err and not said.out, said
    assert (tmp_path / "there.csv").read_text() == "mine"
    drawn = "synthetic:classes=3,samples=40,size=32"
    said = sightline("check", NAME, "--data", drawn, *HERE, "--write", tmp_path / "x.csv")
    assert said.code == 2 and "is read as synthetic; write class folders first" in said.err, said
    said = sightline("check", "demo_detection", "--data", drawn, *HERE, "--write", tmp_path / "x.csv")
    assert said.code == 2 and "--write lists images with labels" in said.err and not (tmp_path / "x.csv").exists(), said


def test_problems_that_a_list_does_not_solve_are_left(sightline, dirty: Path, tmp_path: Path):
    (dirty / "train" / "cow").mkdir()
    for number in range(3):
        shutil.copy(dirty / "test" / "bee" / "03.jpg", dirty / "train" / "cow" / f"{number}.jpg")
        with (dirty / "train" / "cow" / f"{number}.jpg").open("ab") as file:
            file.write(bytes([number]))
    (dirty / "val" / "dog").mkdir()
    shutil.copy(dirty / "val" / "bee" / "05.jpg", dirty / "val" / "dog")
    with (dirty / "val" / "dog" / "05.jpg").open("ab") as file:
        file.write(b"x")
    said = sightline("check", NAME, "--data", dirty, "--write", tmp_path / "clean.csv", *HERE)
    assert said.code == 3 and "error: 1 problem that the list does not solve; fix" in said.err, said
    assert "1 of a class without training images" in said.out
    assert {row["label"] for row in rows_of(tmp_path / "clean.csv")} == {"ant", "bee", "cow"}
