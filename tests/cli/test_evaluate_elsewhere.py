"""`evaluate RUN --data.path OTHER`: a val split where OTHER has one, all samples where it has none."""

import csv
import json
import os
import runpy
import shutil
from pathlib import Path

import pytest
from PIL import Image, ImageOps
from tiny import SIZES

from sightline import api, cli
from sightline.overview import last_screen

REPO = Path(__file__).resolve().parents[2]
BOXES = runpy.run_path(str(REPO / "tests/unit/data/sources/box_layouts.py"))
MASKS = runpy.run_path(str(REPO / "tests/unit/data/prepare/raw_layouts.py"))
HERE = ["--run.workers=0", "--run.device=cpu", "--run.progress=plain"]
SHORT = ["--train.epochs=1", "--train.precision=fp32", "--run.report=off", *HERE]
SMALL = [*SIZES, "--train.global-batch=8"]
COUNTS = {"train": range(6), "val": range(6, 9), "test": range(9, 14)}  # images of each class
CLASSES = 4
WARNING = "warning: these are not the run's validation images; if it was trained on them, the score is too high\n"


@pytest.fixture(scope="module")
def birds(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders below train, val and test; each split counts its files from 0, so that names repeat."""
    root = tmp_path_factory.mktemp("data") / "birds"
    for name in sorted(os.listdir(shapes / "train"))[:CLASSES]:
        files = [*sorted((shapes / "train" / name).iterdir()), *sorted((shapes / "val" / name).iterdir())] * 2
        for split, chosen in COUNTS.items():
            (root / split / name).mkdir(parents=True)
            for number, at in enumerate(chosen):
                shutil.copy(files[at], root / split / name / f"{number}{files[at].suffix}")
    return root


def trained(data: Path, out: Path, *flags: str) -> Path:
    command = ["train", "demo_classification", f"--data.path={data}", f"--run.out={out}", *SMALL, *SHORT, *flags]
    assert cli.main(command) == 0
    return out


@pytest.fixture(scope="module")
def run(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose data have a val split."""
    return trained(birds, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def drawn(birds: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that drew its val split from train: 1 of 6 images of each class."""
    return trained(birds / "train", tmp_path_factory.mktemp("runs") / "drawn")


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.*") if not path.name.startswith("."))


# Class folders


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_plain_folder_is_scored_whole_by_a_run_with_a_val_split(sightline, run, birds: Path, split: str):
    files = files_in(birds / split)
    said = sightline("evaluate", run, "--data.path", birds / split, *HERE)
    assert said.code == 0 and f"on {len(files)} samples" in said.out, said
    assert (WARNING in said.out) == (split != "val"), said  # birds/val are the run's own validation images
    right = sum(
        found.label == file.parent.name
        for file, found in zip(files, api.predict(run, files, flags={"run.device": "cpu"}), strict=True)
    )
    values = json.loads(next(run.glob("scores-ckpt-*.json")).read_text())["values"]
    assert values["samples"] == len(files) and values["top1"] == pytest.approx(right / len(files))


def test_a_dataset_with_splits_is_scored_on_its_val_split(sightline, run, birds: Path, tmp_path: Path):
    other = tmp_path / "other"
    for number, file in enumerate(files_in(birds / "train")):
        split = "validation" if number % 6 > 3 else "train"
        (other / split / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, other / split / file.parent.name)
    said = sightline("evaluate", run, "--data.path", other, *HERE)
    assert f"on {len(files_in(other / 'validation'))} samples" in said.out and WARNING in said.out, said
    for again in ([], ["--data.path", birds]):
        said = sightline("evaluate", run, *again, *HERE)
        assert f"on {len(files_in(birds / 'val'))} samples" in said.out and WARNING not in said.out, said


def test_samples_skipped_elsewhere_are_listed_as_of_other_data(sightline, run, birds: Path, tmp_path: Path):
    shutil.copytree(birds / "test", tmp_path / "other")
    bad = files_in(tmp_path / "other")[0]
    bad.write_bytes(b"no image")
    said = sightline("evaluate", run, "--data.path", tmp_path / "other", "--data.on-bad-sample=skip", *HERE)
    assert said.code == 0, said
    (row,) = map(json.loads, (run / "bad_samples.jsonl").read_text().splitlines())
    assert row["data"] == str(tmp_path / "other") and row["name"] == f"{bad.parent.name}/{bad.name}"
    assert "skipped:" not in last_screen.as_text(run, "ckpt-00000001")
    (run / "bad_samples.jsonl").unlink()


def test_a_test_set_that_lacks_a_class_is_scored_with_a_description(sightline, run, birds: Path, tmp_path: Path):
    shutil.copytree(birds / "test", tmp_path / "test")
    shutil.rmtree(next((tmp_path / "test").iterdir()))
    said = sightline("evaluate", run, "--data.path", tmp_path / "test", *HERE)
    assert said.code == 3 and f"has {CLASSES - 1} classes, the recipe declares {CLASSES}" in said.err, said
    assert "see docs/reference/data.md, Scores on other data" in said.err, said
    (tmp_path / "test.yaml").write_text(f"kind: folder\ntrain: {birds / 'train'}\nval: test\n")
    said = sightline("evaluate", run, "--data.path", tmp_path / "test.yaml", *HERE)
    assert said.code == 0 and f"on {len(files_in(tmp_path / 'test'))} samples" in said.out, said


@pytest.mark.parametrize("typed", ["--data.val-fraction=0.4", "--data.val-fraction=0.2"])
def test_a_typed_fraction_is_drawn(sightline, run, birds: Path, typed: str):
    said = sightline("evaluate", run, "--data.path", birds / "test", typed, *HERE)
    expected = CLASSES * round(len(COUNTS["test"]) * float(typed.partition("=")[2]))
    assert f"on {expected} samples" in said.out, said


def test_a_run_with_a_drawn_split_keeps_it_for_its_own_data_in_any_place(sightline, drawn, birds: Path, tmp_path: Path):
    shutil.copytree(birds / "train", tmp_path / "moved")
    first = files_in(tmp_path / "moved")[0]
    shutil.copy(first, first.with_name(f"new{first.suffix}"))
    (tmp_path / "link").symlink_to(birds / "train")
    for path in (tmp_path / "moved", tmp_path / "link", birds / "train"):
        said = sightline("evaluate", drawn, "--data.path", path, *HERE)
        assert f"on {CLASSES} samples" in said.out and WARNING not in said.out, said


def test_other_images_of_the_same_names_are_not_taken_for_the_drawn_split(sightline, drawn, birds: Path):
    kept = json.loads((drawn / "split.json").read_text())["val"]
    files = files_in(birds / "test")
    assert {str(file.relative_to(birds / "test")) for file in files} & set(kept)
    said = sightline("evaluate", drawn, "--data.path", birds / "test", *HERE)
    assert f"on {len(files)} samples" in said.out and WARNING in said.out, said


def test_other_images_of_the_same_names_and_sizes_are_scored_whole(sightline, birds: Path, tmp_path: Path):
    files = files_in(birds / "train")
    for file in files:
        for place, turned in (("train", False), ("other", True)):  # .bmp: as many bytes for any pixels
            target = tmp_path / place / file.parent.name / f"{file.stem}.bmp"
            target.parent.mkdir(parents=True, exist_ok=True)
            image = Image.open(file).convert("RGB").resize((24, 24))
            (ImageOps.flip(image) if turned else image).save(target)
    run = trained(tmp_path / "train", tmp_path / "run")
    shutil.copytree(tmp_path / "train", tmp_path / "moved")
    for place, expected in (("moved", CLASSES), ("other", len(files))):
        said = sightline("evaluate", run, "--data.path", tmp_path / place, *HERE)
        assert f"on {expected} samples" in said.out and (WARNING in said.out) == (place == "other"), said


def test_a_typed_split_wins_over_the_one_that_a_run_keeps(sightline, drawn, birds: Path, tmp_path: Path):
    names = [str(file.relative_to(birds / "train")) for file in files_in(birds / "train")]
    (tmp_path / "mine.json").write_text(json.dumps({"val": names[:5]}))
    for typed, expected in (
        ([f"--data.split={tmp_path / 'mine.json'}"], 5),
        (["--data.val-fraction=0.5"], CLASSES * 3),
        (["--data.split=all"], len(names)),
    ):
        said = sightline("evaluate", drawn, *typed, *HERE)
        assert f"on {expected} samples" in said.out and WARNING in said.out, said


def test_the_scores_name_their_data(sightline, run, birds: Path, tmp_path: Path):
    said = sightline("evaluate", run, "--data.path", birds / "test", "--run.out", tmp_path, *HERE)
    assert said.code == 0, said
    [file] = tmp_path.glob("scores-*.json")
    [event] = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines() if '"evaluate"' in line]
    assert json.loads(file.read_text())["data"] == event["data"] == str(birds / "test")


def test_all_of_data_with_a_val_split_is_refused(sightline, run, birds: Path):
    said = sightline("evaluate", run, "--data.split=all", *HERE)
    assert said.code == 2 and f"has a val split; give one part, e.g. --data.path {birds}/train" in said.err, said


def test_all_images_cannot_validate_in_a_training(sightline, birds: Path, tmp_path: Path):
    flags = ["--data.path", birds / "train", "--run.out", tmp_path / "run", *SMALL, *SHORT]
    said = sightline("train", "demo_classification", "--data.split=all", *flags)
    assert said.code == 2 and "--data.split all leaves no samples to train on" in said.err, said


def test_python_and_a_table_of_all_checkpoints_score_the_same(sightline, run, birds: Path, tmp_path: Path):
    count = len(files_in(birds / "test"))
    scores = api.evaluate(run, {"data.path": birds / "test", "run.device": "cpu", "run.out": tmp_path / "scores"})
    assert scores.values["samples"] == count
    flags = ["--data.path", birds / "test", "--run.out", tmp_path / "all", *HERE]
    assert sightline("evaluate", run, "--all", *flags).code == 0
    rows = json.loads((tmp_path / "all" / "evaluation.json").read_text())["checkpoints"]
    assert {row["step"]: row["values"] for row in rows}[3] == scores.values


# Other kinds of data


def test_a_table_is_scored_whole(sightline, birds: Path, tmp_path: Path):
    for split in COUNTS:
        shutil.copytree(birds / split, tmp_path / "images" / split)
        rows = [(file.relative_to(birds), file.parent.name) for file in files_in(birds / split)]
        with (tmp_path / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("file", "label"), *rows])
    run = trained(tmp_path, tmp_path.parent / f"{tmp_path.name}-run")
    for split, warns in (("val", False), ("test", True)):
        said = sightline("evaluate", run, "--data.path", tmp_path / f"{split}.csv", *HERE)
        assert f"on {CLASSES * len(COUNTS[split])} samples" in said.out and (WARNING in said.out) == warns, said


@pytest.mark.parametrize("layout", ["coco_export", "yolo"])
def test_images_with_boxes_are_scored_whole(sightline, tmp_path: Path, layout: str):
    amounts = ["--only", "detection", "--train-pictures=12", "--val-pictures=3"]
    assert sightline("prepare", "shapes", "--out", tmp_path / "drawn", *amounts).code == 0
    data = BOXES["read"](tmp_path / "drawn" / "detection")
    root = tmp_path / layout
    BOXES["LAYOUTS"][layout](data, root)
    small = ["--model.width=4", "--data.size=48", "--train.global-batch=4", "--data.classes=0", *SHORT]
    flags = [f"--data.path={root}", f"--run.out={tmp_path / 'run'}", *small]
    assert sightline("train", "demo_detection", *flags).code == 0
    other = root / "train"
    if layout == "yolo":  # its classes have names in data.yaml alone
        other = tmp_path / "test.yaml"
        names = BOXES["classes_of"](data)
        other.write_text(json.dumps({"train": str(root / "images" / "train"), "names": names}))
    said = sightline("evaluate", tmp_path / "run", "--data.path", other, *HERE)
    assert said.code == 0 and f"on {len(data['train'])} samples" in said.out and WARNING in said.out, said


def test_prepared_volumes_are_scored_whole(sightline, tmp_path: Path):
    for name in ("mine", "other"):
        MASKS["pictures"](tmp_path / name, cases=8)
    for part in ("images", "masks"):
        for file in sorted((tmp_path / "other" / part).iterdir()):
            file.rename(file.with_name(f"other-{file.name}"))
    for name in ("mine", "other"):
        where = ["--source", tmp_path / name, "--out", tmp_path / f"{name}-prepared"]
        assert sightline("prepare", "decathlon", *where, "--jobs", 1).code == 0
    flags = ["--data.path", tmp_path / "mine-prepared", "--run.out", tmp_path / "run", "--model.width=4", *SHORT]
    assert sightline("train", "demo_segmentation", *flags, "--data.folds=4").code == 0
    shutil.copytree(tmp_path / "mine-prepared", tmp_path / "moved")
    for typed, expected in (
        ([], 2),
        (["--data.path", tmp_path / "moved"], 2),
        (["--data.path", tmp_path / "other-prepared"], 8),
        (["--data.path", tmp_path / "other-prepared", "--data.fold=1"], 2),
        (["--data.folds=1"], 8),
    ):
        said = sightline("evaluate", tmp_path / "run", *typed, *HERE)
        assert said.code == 0 and f"on {expected} samples" in said.out, said
    labels = ["--labels", tmp_path / "other", "--data.path", tmp_path / "other-prepared"]
    said = sightline("evaluate", tmp_path / "run", *labels, *HERE)
    assert said.code == 0 and "scored cases: 8" in said.out, said
    flags += ["--data.folds=1", "--run.out", tmp_path / "none"]
    said = sightline("train", "demo_segmentation", *flags)
    assert said.code == 2 and "--data.folds 1 leaves no volumes to train on" in said.err, said
