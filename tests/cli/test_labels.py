"""Labels from tables, several labels per image, class weights and balanced sampling, as a user types them."""

import csv
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline import cli

NAME = "demo_classification"
SMALL = [
    "--model.width=4",
    "--data.size=24",
    "--data.eval-resize=24",
    "--data.eval-size=24",
    "--run.workers=0",
    "--run.report=off",
]
SHORT = [*SMALL, "--run.device=cpu", "--train.precision=fp32", "--train.global-batch=16", "--train.epochs=1"]
HERE = ["--run.device=cpu", "--run.workers=0"]
COLOURS = ("blue", "green", "red")


def write(path: Path, header: tuple[str, ...], rows: list[tuple]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 images with up to three squares, and labels.csv that lists their colours; for reading only."""
    root = tmp_path_factory.mktemp("squares")
    random, rows = np.random.default_rng(0), []
    (root / "images").mkdir()
    for number in range(80):
        pixels, shown = random.integers(0, 60, (24, 24, 3), np.uint8), random.random(3) < (0.3, 0.4, 0.5)
        for place, channel in enumerate(np.flatnonzero(shown)):
            pixels[4 * channel : 4 * channel + 10, 4 + 5 * place : 14 + 5 * place, 2 - channel] = 230
        Image.fromarray(pixels).save(root / "images" / f"{number:02d}.png")
        rows.append((f"{number:02d}.png", ";".join(np.array(COLOURS)[shown])))
    write(root / "labels.csv", ("file", "label"), rows)
    return root


@pytest.fixture
def copied(squares: Path, tmp_path: Path) -> Path:
    return shutil.copytree(squares, tmp_path / "squares")


@pytest.fixture(scope="module")
def trained(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on them; for reading only."""
    out = tmp_path_factory.mktemp("trained") / "run"
    flags = ["--data.augment=off", "--train.epochs=8", "--task.label-smoothing=0", "--optimizer.lr=0.1"]
    flags += ["--model.width=8", "--train.eval-every-epochs=4"]
    assert cli.main(["train", NAME, "--data", str(squares), "--out", str(out), *SHORT, *flags]) == 0
    return out


def scores_of(run: Path) -> dict:
    return json.loads((run / "scores.json").read_text())


def bits(run: Path) -> dict[str, str]:
    """Return a digest of every tensor file of the newest checkpoint."""
    newest = sorted((run / "checkpoints").glob("ckpt-????????"))[-1]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in newest.glob("*.safetensors")}


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "train"]


# Several labels per image


def test_several_labels_are_learnt_and_scored(trained: Path):
    best = json.loads((trained / "scores-best.json").read_text())
    assert list(best["values"]) == ["map", "macro_f1", "f1", "exact", "loss", "samples"] and best["values"]["map"] > 0.9
    rows = best["tables"]["classes"]
    assert [row["class"] for row in rows] == list(COLOURS)
    assert all(0 <= row[key] <= 1 for row in rows for key in ("map", "f1", "precision", "recall"))
    assert best["values"]["map"] == pytest.approx(np.mean([row["map"] for row in rows]))
    kept = json.loads((trained / "split.json").read_text())["val"]
    assert len(kept) == best["values"]["samples"] == 16


def test_the_first_line_says_what_the_table_holds(sightline, copied: Path, tmp_path: Path):
    shutil.copy(copied / "images" / "00.png", copied / "images" / "new.png")
    said = sightline("train", NAME, "--data", copied, "--out", tmp_path / "run", *SHORT, "--train.max-steps=1")
    assert said.code == 0, said
    assert said.out.splitlines()[0] == (
        "data: 3 classes, 64 + 16 images; labels from labels.csv; several labels per image; no val split, so 16 images "
        "validate (about 20%, by name); ignored: 1 .png"
    )
    assert "finished: best map " in said.out


def test_a_checkpoint_of_several_labels_is_evaluated(sightline, trained: Path, tmp_path: Path):
    best = json.loads((trained / "scores-best.json").read_text())["values"]
    said = sightline("evaluate", trained, "--run.out", tmp_path / "again", *HERE)
    assert said.code == 0 and f"map {best['map']:.4f}" in said.out and "green" in said.out, said


def test_every_class_above_the_threshold_is_predicted_and_drawn(
    sightline, trained: Path, squares: Path, tmp_path: Path
):
    with (squares / "labels.csv").open(newline="") as file:
        labels = {row["file"]: set(row["label"].split(";")) for row in csv.DictReader(file)}
    files = [squares / "images" / name for name in sorted(labels)]
    said = sightline("predict", trained, *files, "--out", tmp_path / "seen", *HERE)
    assert said.code == 0, said
    document = json.loads((tmp_path / "seen" / "predictions.json").read_text())
    found = {row["file"]: [each["class"] for each in row["found"]] for row in document["files"]}
    assert all(each["score"] >= 0.5 for row in document["files"] for each in row["found"])
    assert max(map(len, found.values())) > 1 and min(map(len, found.values())) < 2
    right = sum((name in found[file]) == (name in labels[file]) for file in labels for name in COLOURS)
    assert right / (3 * len(labels)) > 0.8
    assert min(Image.open(tmp_path / "seen" / "00.png").size) >= 24
    low = sightline("predict", trained, files[0], "--out", tmp_path / "all", "--score-threshold", "0", *HERE)
    assert low.code == 0
    with (tmp_path / "all" / "predictions.csv").open(newline="") as file:
        assert sorted(row["class"] for row in csv.DictReader(file)) == list(COLOURS)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--data.sampling=balanced", "sampling=balanced needs one label per image"),
        ("--data.background=first", "background=first is for one label per image"),
    ],
)
def test_what_needs_one_label_is_refused(sightline, squares: Path, tmp_path: Path, flag: str, message: str):
    said = sightline("train", NAME, "--data", squares, "--out", tmp_path / "run", *SHORT, flag)
    assert said.code == 2 and message in said.err, said


def test_mixed_and_weighted_several_labels_train(sightline, squares: Path, tmp_path: Path):
    flags = ["--data.class-weights=balanced", "--data.mixup=0.2", "--data.cutmix=1", "--train.accumulation=2"]
    said = sightline("train", NAME, "--data", squares, "--out", tmp_path / "run", *SHORT, *flags)
    assert said.code == 0 and 0 <= scores_of(tmp_path / "run")["values"]["map"] <= 1, said


def test_several_labels_have_no_other_form(sightline, squares: Path, tmp_path: Path):
    said = sightline(
        "prepare", "convert", "--source", squares, "--out", tmp_path / "out", "--form", "tar", "--jobs", "1"
    )
    assert said.code == 2 and "images with several labels each cannot be written as tar" in said.err, said


# One label per image


@pytest.fixture
def listed(shapes: Path, tmp_path: Path) -> Path:
    """The images of the class folders in one table with a split, in another order."""
    files = sorted((path for path in shapes.rglob("*.jpg")), key=lambda path: path.name)
    rows = [(path.relative_to(shapes), path.parent.name, path.parent.parent.name) for path in files]
    (tmp_path / "listed").mkdir()
    write(tmp_path / "listed" / "mine.csv", ("file", "class", "split"), rows)
    described = f"kind: table\ntrain: {{images: {shapes}, labels: mine.csv}}\n"
    (tmp_path / "listed" / "data.yaml").write_text(described)
    return tmp_path / "listed" / "data.yaml"


def test_a_table_trains_to_the_bits_of_the_folders_it_lists(sightline, listed: Path, shapes: Path, tmp_path: Path):
    for name, path, of in (("table", listed, "; labels from mine.csv"), ("folder", shapes, "")):
        said = sightline("train", NAME, "--data", path, "--out", tmp_path / name, *SHORT, "--train.max-steps=2")
        assert said.code == 0 and said.out.startswith(f"data: 10 classes, 80 + 40 images{of}\n"), said
    assert bits(tmp_path / "table") == bits(tmp_path / "folder")
    assert scores_of(tmp_path / "table")["tables"] == scores_of(tmp_path / "folder")["tables"]


def test_a_table_of_one_label_becomes_class_folders(sightline, shapes: Path, tmp_path: Path):
    names = sorted(path.name for path in (shapes / "train").iterdir())
    (tmp_path / "flat").mkdir()
    rows = []
    for name in names[:2]:
        for file in sorted((shapes / "train" / name).iterdir())[:4]:
            shutil.copy(file, tmp_path / "flat" / f"{name}-{file.name}")
            rows.append((f"{name}-{file.name}", name))
    write(tmp_path / "flat" / "labels.csv", ("file", "label"), rows)
    said = sightline(
        "prepare",
        "convert",
        "--source",
        tmp_path / "flat",
        "--out",
        tmp_path / "out",
        "--form",
        "folder",
        "--jobs",
        "1",
    )
    assert said.code == 0, said
    assert len(list((tmp_path / "out" / "train" / names[0]).iterdir())) == 3
    assert len(list((tmp_path / "out" / "val" / names[0]).iterdir())) == 1


def test_a_table_among_class_folders_is_read_and_checked_and_said_to_be(sightline, shapes: Path, tmp_path: Path):
    root = shutil.copytree(shapes / "train", tmp_path / "both")
    files = sorted(root.rglob("*.jpg"))
    rows = [(path.relative_to(root), ("odd", "even")[number % 2]) for number, path in enumerate(files)]
    write(root / "labels.csv", ("filepath", "label"), rows)
    said = sightline("show", NAME, "--data.path", root, "--out", tmp_path / "sheet.png", *SMALL)
    begin = "data: 2 classes, 64 + 16 images; labels from labels.csv, not from the class folders beside it; "
    assert said.code == 0 and said.out.startswith(begin), said
    said = sightline("check", NAME, "--data.path", root, "--run.workers=0", "--json")
    assert said.code == 0 and json.loads(said.out)["splits"]["train"]["classes"] == 2, said
    write(root / "labels.csv", ("photo", "label"), [(f"gone-{number}", *row[1:]) for number, row in enumerate(rows)])
    refused = sightline("train", NAME, "--data.path", root, "--out", tmp_path / "run", *SHORT)
    assert refused.code == 3 and "labels.csv line 1: no column of files: found 'photo', 'label'" in refused.err
    said = sightline("check", NAME, "--data.path", root, "--run.workers=0", "--json")
    [problem] = json.loads(said.out)["problems"]
    assert said.code == 3 and f"error: {problem['text']}\n" == refused.err


# Files that do not exist


def test_a_table_whose_files_are_elsewhere_names_the_folders_that_were_searched(
    sightline, copied: Path, tmp_path: Path
):
    (copied / "images").rename(tmp_path / "photos")
    refused = sightline("train", NAME, "--data", copied, "--out", tmp_path / "run", *SHORT)
    folders = [copied, copied / "images", copied / "labels", copied / "labels_images"]
    assert refused.code == 3 and f"e.g. 00.png; searched: {', '.join(map(str, folders))}. " in refused.err, refused
    said = sightline("check", NAME, "--data.path", copied, "--run.workers=0", "--json")
    [problem] = json.loads(said.out)["problems"]
    assert said.code == 3 and f"error: {problem['text']}\n" == refused.err


def test_a_class_without_any_file_that_exists_need_not_be_removed(sightline, copied: Path):
    rows = [(f"{number:02d}.png", "red" if number % 2 else "green") for number in range(80)]
    write(copied / "labels.csv", ("file", "label"), rows)
    gone = [copied / "images" / name for name, label in rows if label == "red"]
    for path in gone:
        path.unlink()
    said = sightline("check", NAME, "--data.path", copied, "--run.workers=0", "--json")
    found = {(each["where"], each["text"]) for each in json.loads(said.out)["problems"]}
    assert said.code == 3 and found == {(path.name, f"{path} does not exist") for path in gone}


def test_missing_images_are_refused_skipped_or_listed(sightline, copied: Path, tmp_path: Path):
    kept = {"07.png", "41.png"}
    for name in kept:
        (copied / "images" / name).unlink()
    words = ["train", NAME, "--data", copied, "--out", tmp_path / "run", *SHORT]
    said = sightline(*words)
    assert said.code == 3 and f"do not exist, e.g. {copied / 'images'}/" in said.err, said
    assert "sightline check" in said.err and "--data.on-bad-sample skip" in said.err
    said = sightline(*words, "--data.on-bad-sample=skip", "--train.last-batch=pad")
    assert said.code == 0, said
    lines = (tmp_path / "run" / "bad_samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["name"] for line in lines} == kept
    said = sightline("check", NAME, "--data.path", copied, "--run.workers=0", "--json")
    assert said.code == 3, said
    found = json.loads(said.out)["problems"]
    assert {each["where"] for each in found if each["kind"] == "unreadable"} == kept


def test_check_reads_tables(sightline, copied: Path):
    said = sightline("check", NAME, "--data.path", copied, "--run.workers=0")
    assert said.code == 0 and "no problems" in said.out, said
    rows = list(csv.reader((copied / "labels.csv").open(newline="")))[1:]
    wide = [(file, *(int(name in text.split(";")) for name in COLOURS), 0) for file, text in rows]
    wide = [(*row, "val" if number % 4 == 0 else "train") for number, row in enumerate(wide)]
    write(copied / "labels.csv", ("file", *COLOURS, "pink", "split"), wide)
    (copied / "images" / "03.png").write_bytes(b"no image")
    said = sightline("check", NAME, "--data.path", copied, "--run.workers=0", "--json")
    assert said.code == 3, said
    found = {(each["kind"], each["where"]) for each in json.loads(said.out)["problems"]}
    assert found == {("unreadable", "03.png"), ("class without training", "pink")}


def test_check_names_the_line_of_a_table_that_cannot_be_opened(sightline, copied: Path):
    with (copied / "labels.csv").open("a") as file:
        file.write("00.png,red;pink\n")
    said = sightline("check", NAME, "--data.path", copied, "--run.workers=0")
    assert said.code == 3 and "line 82: 00.png is in" in said.out + said.err, said


# Classes of different sizes


@pytest.fixture
def uneven(shapes: Path, tmp_path: Path) -> Path:
    """Class folders of 8, 8 and 2 training images."""
    names = sorted(path.name for path in (shapes / "train").iterdir())[:3]
    for split in ("train", "val"):
        for name in names:
            shutil.copytree(shapes / split / name, tmp_path / "uneven" / split / name)
    for file in sorted((tmp_path / "uneven" / "train" / names[2]).iterdir())[2:]:
        file.unlink()
    return tmp_path / "uneven"


BALANCED = ["--data.sampling=balanced", "--train.global-batch=6", "--train.epochs=2", "--run.log-every-steps=1"]


def test_a_balanced_run_resumes_to_the_bit(sightline, uneven: Path, tmp_path: Path):
    flags = [*SHORT, *BALANCED, "--run.checkpoint-every-steps=1", "--run.keep=99", "--data.class-weights=balanced"]
    words = ["train", NAME, "--data", uneven, *flags]
    assert sightline(*words, "--out", tmp_path / "whole").code == 0
    assert len(losses(tmp_path / "whole")) == 2 * (18 // 6)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for later in range(3, 7):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"ckpt-{later:08d}")
    (tmp_path / "resumed" / "log.jsonl").unlink()
    said = sightline(*words, "--out", tmp_path / "resumed")
    assert said.code == 0 and "resuming from step 2" in said.out, said
    assert bits(tmp_path / "resumed") == bits(tmp_path / "whole")
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")[2:]


def test_balanced_sampling_with_repeats_is_refused(sightline, uneven: Path, tmp_path: Path):
    said = sightline("train", NAME, "--data", uneven, "--out", tmp_path / "run", *SHORT, *BALANCED, "--train.repeats=3")
    assert said.code == 2 and "train.repeats=3 cannot be combined with data.sampling=balanced" in said.err, said
