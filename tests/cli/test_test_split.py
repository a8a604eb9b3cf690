"""A test split from the first line of a training to `evaluate RUN --split test`, as a user types it."""

import json
import os
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import SIZES

from sightline import api, cli
from sightline.errors import UsageError
from sightline.report.story import read_story

REPO = Path(__file__).resolve().parents[2]
BOXES = runpy.run_path(str(REPO / "tests/unit/data/sources/box_layouts.py"))
MASKS = runpy.run_path(str(REPO / "tests/unit/data/prepare/raw_layouts.py"))
HERE = ["--run.workers=0", "--run.device=cpu", "--run.progress=plain"]
SHORT = ["--train.epochs=2", "--train.precision=fp32", "--run.report=off", *HERE]
SMALL = [*SIZES, "--train.global-batch=8"]
COUNTS = {"train": 8, "val": 3, "test": 5}  # images of each class
CLASSES = ("blue", "green", "red")
VALIDATES = "warning: the test split is what validated this run: its best checkpoint was chosen by these images\n"


def draw(root: Path, **folders: str) -> Path:
    """Class folders of images that a network of 24 pixels takes as they are."""
    rng = np.random.default_rng(0)
    for split, folder in folders.items():
        for place, name in enumerate(CLASSES):
            (root / folder / name).mkdir(parents=True)
            for number in range(COUNTS[split]):
                pixels = rng.integers(0, 160, (24, 24, 3), np.uint8)
                pixels[..., 2 - place] += 60
                Image.fromarray(pixels).save(root / folder / name / f"{number}.png")
    return root


def train(data: Path, out: Path) -> Path:
    command = ["train", "demo_classification", f"--data.path={data}", f"--run.out={out}", *SMALL, *SHORT]
    assert cli.main(command) == 0
    return out


@pytest.fixture(scope="module")
def paints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("data") / "paints", train="train", val="val", test="test")


@pytest.fixture(scope="module")
def run(paints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(paints, tmp_path_factory.mktemp("runs") / "run")


def right_of(run: Path, folder: Path) -> tuple[int, int]:
    """Count right answers over the files of a folder, and the files, with PIL and torch alone."""
    network, right = api.model(run, device="cpu"), 0
    files = sorted(folder.rglob("*.png"))
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for file in files:
        pixels = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255
        with torch.no_grad():
            answer = int(network(((pixels - mean) / std)[None]).argmax())
        right += CLASSES[answer] == file.parent.name
    return right, len(files)


def test_training_names_the_test_split_first_and_last(sightline, paints: Path, tmp_path: Path):
    flags = [f"--data.path={paints}", f"--run.out={tmp_path / 'run'}", *SMALL, *SHORT]
    said = sightline("train", "demo_classification", *flags)
    assert said.out.splitlines()[0] == (
        "data: 3 classes, 24 + 9 images; test split: 15 images, scored by `evaluate RUN --split test`"
    )
    assert (
        f"next:\n  sightline evaluate {tmp_path / 'run'}\n  sightline evaluate {tmp_path / 'run'} --split test\n"
        in (said.out)
    )
    assert f"test:\n  images: {paints / 'test'}\n" in (tmp_path / "run" / "data.yaml").read_text()


def test_without_a_test_split_nothing_speaks_of_one(sightline, paints: Path, tmp_path: Path):
    shutil.copytree(paints, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "test")
    flags = [f"--data.path={tmp_path / 'data'}", f"--run.out={tmp_path / 'run'}", *SMALL, *SHORT]
    said = sightline("train", "demo_classification", *flags)
    assert said.code == 0 and "test" not in said.out.replace(str(tmp_path), ""), said
    said = sightline("evaluate", tmp_path / "run", "--split", "test", *HERE)
    looked = "a folder test or testing beside train, with class folders in it, or `test:` in a description"
    assert said.code == 2 and said.err == (
        f"error: {tmp_path / 'data'}: the data have no test split (looked for {looked}); to score other data whole, "
        "give their folder as --data.path, without --split\n"
    )
    assert not list((tmp_path / "run").glob("scores-ckpt-*"))


def test_a_test_split_changes_nothing_of_a_training(paints: Path, run: Path, tmp_path: Path):
    shutil.copytree(paints, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "test")
    other = train(tmp_path / "data", tmp_path / "run")
    kept = [json.loads((each / "scores.json").read_text()) for each in (run, other)]
    assert kept[0]["values"] == kept[1]["values"] and kept[0]["tables"] == kept[1]["tables"]
    states = [json.loads(next(each.glob("checkpoints/ckpt-*/state.json")).read_text()) for each in (run, other)]
    assert states[0]["fingerprints"] == states[1]["fingerprints"]


def test_the_test_split_of_class_folders_is_scored_whole(sightline, run: Path, paints: Path):
    said = sightline("evaluate", run, "--split", "test", *HERE)
    right, count = right_of(run, paints / "test")
    assert said.code == 0 and "split test" in said.out and "on 15 samples" in said.out and count == 15, said
    assert "warning" not in said.out + said.err, said
    [file] = run.glob("scores-ckpt-*-test.json")
    found = json.loads(file.read_text())
    assert found["split"] == "test" and found["values"]["samples"] == 15
    assert found["values"]["top1"] == pytest.approx(right / count)
    assert api.evaluate(run, {"run.device": "cpu", "run.workers": 0}, split="test").values == found["values"]
    events = [json.loads(line)["event"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert "evaluate_test" in events
    val = sightline("evaluate", run, *HERE)
    assert "on 9 samples" in val.out and "split" not in val.out.replace(str(run), ""), val
    right, count = right_of(run, paints / "val")
    [file] = [path for path in run.glob("scores-ckpt-*.json") if "test" not in path.name]
    assert json.loads(file.read_text())["values"]["top1"] == pytest.approx(right / count)


def test_the_report_of_a_run_shows_its_test_scores(sightline, run: Path, paints: Path, tmp_path: Path):
    copy = shutil.copytree(run, tmp_path / "run")
    assert "report" not in sightline("evaluate", str(copy), "--split", "test", *HERE).out  # a run without a page
    assert not (copy / "report.html").exists()
    api.report(copy)
    (copy / "scores-ckpt-00000006-test.json").unlink()
    said = sightline("evaluate", str(copy), "--split", "test", *HERE)
    assert said.code == 0 and said.out.endswith(f"report: {copy / 'report.html'}\n")
    score = json.loads((copy / "scores-ckpt-00000006-test.json").read_text())["values"]["top1"]
    assert f"<b>top1 {score:.4f}</b><small>test split</small>" in (copy / "report.html").read_text()


def test_other_data_are_scored_on_their_own_test_split(sightline, run: Path, paints: Path, tmp_path: Path):
    draw(tmp_path / "other", train="train", test="testing")
    said = sightline("evaluate", run, "--split", "test", "--data.path", tmp_path / "other", *HERE)
    assert said.code == 0 and "on 15 samples" in said.out, said
    said = sightline("evaluate", run, "--split", "test", "--data.path", paints / "test", *HERE)
    assert said.code == 2 and "the data have no test split" in said.err and "without --split" in said.err, said
    said = sightline("evaluate", run, "--data.path", paints / "test", *HERE)
    assert said.code == 0 and "on 15 samples" in said.out, said


def test_scores_of_other_data_are_no_points_of_the_reports_curves(sightline, run: Path, paints: Path, tmp_path: Path):
    copy = shutil.copytree(run, tmp_path / "run")
    curves = read_story(copy).curves
    assert {"evaluate/top1", "evaluate/loss"} <= curves.keys()
    assert sightline("evaluate", copy, "--data.path", paints / "test", *HERE).code == 0
    logged = [json.loads(line) for line in (copy / "log.jsonl").read_text().splitlines()]
    assert logged[-1]["event"] == "evaluate" and logged[-1]["samples"] == 15
    assert read_story(copy).curves == curves


def test_a_test_split_that_validated_says_so(sightline, tmp_path: Path):
    draw(tmp_path / "data", train="train", test="test")
    flags = [f"--data.path={tmp_path / 'data'}", f"--run.out={tmp_path / 'run'}", *SMALL, *SHORT]
    said = sightline("train", "demo_classification", *flags)
    assert said.out.splitlines()[0] == "data: 3 classes, 24 + 15 images; test validates"
    assert "--split test" not in said.out
    said = sightline("evaluate", tmp_path / "run", "--split", "test", *HERE)
    assert said.code == 0 and "on 15 samples" in said.out and VALIDATES in said.out + said.err, said


def test_a_test_split_that_cannot_be_used_ends_no_training(sightline, paints: Path, tmp_path: Path):
    shutil.copytree(paints, tmp_path / "data")
    (tmp_path / "data" / "test" / "red").rename(tmp_path / "data" / "test" / "pink")
    flags = [f"--data.path={tmp_path / 'data'}", f"--run.out={tmp_path / 'run'}", *SMALL, *SHORT]
    said = sightline("train", "demo_classification", *flags)
    assert said.code == 0 and "the test split cannot be used: `sightline check` says why" in said.out, said
    said = sightline("evaluate", tmp_path / "run", "--split", "test", *HERE)
    assert said.code == 3 and "test has class folders that" in said.err and "pink" in said.err, said
    said = sightline("check", "demo_classification", "--data.path", tmp_path / "data", "--run.workers=0")
    assert said.code == 3 and "class without training: 1\n  test: pink: no training image" in said.out, said


@pytest.mark.parametrize("other", [["--all"], ["--labels", "masks"], ["--choose-postprocessing"]])
def test_the_test_split_scores_one_checkpoint(sightline, run: Path, other: list[str]):
    said = sightline("evaluate", run, "--split", "test", *other)
    assert said.code == 2 and "--split test cannot be combined with --all, --labels" in said.err, said


def test_a_split_that_does_not_exist_is_refused(sightline, run: Path):
    assert sightline("evaluate", run, "--split", "dev").code == 2
    with pytest.raises(UsageError, match="split is 'dev', expected val or test"):
        api.evaluate(run, {"run.device": "cpu"}, split="dev")


def test_given_weights_are_scored_on_the_test_split(sightline, run: Path, paints: Path, tmp_path: Path):
    weights = tmp_path / "weights.pth"
    assert sightline("export", run, "--format", "pth", "--out", weights).code == 0
    flags = ["--model.weights", weights, "--data.path", paints, "--run.out", tmp_path / "scores", *SMALL, *HERE]
    said = sightline("evaluate", "demo_classification", "--split", "test", *flags)
    right, count = right_of(run, paints / "test")
    values = json.loads((tmp_path / "scores" / "scores-test.json").read_text())["values"]
    assert said.code == 0 and values["samples"] == count and values["top1"] == pytest.approx(right / count), said


def test_check_counts_the_test_split_and_finds_leaks(sightline, paints: Path, tmp_path: Path):
    root = shutil.copytree(paints, tmp_path / "data")
    command = ["check", "demo_classification", "--data.path", root, "--run.workers=0", "--json"]
    said = sightline(*command)
    facts = json.loads(said.out)["splits"]
    assert said.code == 0 and [facts[split]["images"] for split in COUNTS] == [24, 9, 15], said
    assert facts["test"]["images per class"] == {"min": 5, "median": 5.0, "max": 5}
    shutil.copy(root / "train" / "red" / "0.png", root / "test" / "red" / "leak.png")
    (root / "test" / "blue" / "0.png").write_bytes(b"no image")
    said = sightline(*command)
    found = {(each["kind"], each["split"], each["where"]) for each in json.loads(said.out)["problems"]}
    assert said.code == 3 and found == {
        ("same image in train and test", "train", "red/0.png"),
        ("unreadable", "test", "blue/0.png"),
    }
    assert "identical to red/leak.png in test; the test score would be inflated" in said.out


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory):
    """Train, val and test of drawn images with boxes."""
    root = tmp_path_factory.mktemp("boxes")
    amounts = ["--only", "detection", "--train-pictures=12", "--val-pictures=3"]
    assert cli.main(["prepare", "shapes", "--out", str(root / "drawn"), *amounts]) == 0
    data = BOXES["read"](root / "drawn" / "detection")
    known = {box[0] for entry in data["train"][:8] for box in entry.boxes}
    kept = [[box for box in entry.boxes if box[0] in known] for entry in data["train"][8:]]
    test = [e._replace(file=f"test{e.file}", boxes=b) for e, b in zip(data["train"][8:], kept, strict=True)]
    val = [e._replace(boxes=[box for box in e.boxes if box[0] in known]) for e in data["val"]]
    return {"train": data["train"][:8], "val": val, "test": test}


def test_the_test_split_of_boxes_is_scored_whole(sightline, boxes, tmp_path: Path):
    root = tmp_path / "data"
    BOXES["LAYOUTS"]["coco"](boxes, root)  # as many splits as it is given
    BOXES["images"](root / "images", boxes["test"])
    small = ["--model.width=4", "--data.size=48", "--train.global-batch=4", "--data.classes=0", *SHORT]
    flags = [f"--data.path={root}", f"--run.out={tmp_path / 'run'}", *small]
    said = sightline("train", "demo_detection", *flags)
    count = len(boxes["test"])
    assert said.code == 0 and f"; test split: {count} images, scored by" in said.out.splitlines()[0], said
    said = sightline("evaluate", tmp_path / "run", "--split", "test", *HERE)
    assert said.code == 0 and f"on {count} samples" in said.out, said
    [file] = (tmp_path / "run").glob("scores-ckpt-*-test.json")
    found = json.loads(file.read_text())
    assert found["values"]["samples"] == count
    # The same images as the val split of other files.
    same = tmp_path / "same"
    BOXES["images"](same / "images", [*boxes["train"], *boxes["test"]])
    for split, entries in (("train", boxes["train"]), ("val", boxes["test"])):
        BOXES["coco_json"](same / f"{split}.json", entries, BOXES["classes_of"](boxes))
    assert api.evaluate(tmp_path / "run", [f"--data.path={same}", *HERE[:2]]).values == found["values"]
    names = {os.path.basename(row["name"]) for row in found["worst"]}
    assert names <= {entry.file for entry in boxes["test"]}
    command = ["check", "demo_detection", "--data.path", root, "--run.workers=0", "--json"]
    facts = json.loads(sightline(*command).out)["splits"]["test"]
    assert (facts["images"], facts["boxes"]) == (count, sum(len(entry.boxes) for entry in boxes["test"]))
    (next(root.rglob(boxes["test"][0].file))).write_bytes(boxes["train"][0].data)
    report = json.loads(sightline(*command).out)
    leaks = [each for each in report["problems"] if each["kind"] == "same image in train and test"]
    assert len(leaks) == 1 and boxes["train"][0].file in leaks[0]["where"]


def test_volumes_have_no_test_split(sightline, tmp_path: Path):
    MASKS["pictures"](tmp_path / "mine", cases=8)
    where = ["--source", tmp_path / "mine", "--out", tmp_path / "prepared"]
    assert sightline("prepare", "decathlon", *where, "--jobs", 1).code == 0
    flags = ["--data.path", tmp_path / "prepared", "--run.out", tmp_path / "run", "--model.width=4", *SHORT]
    assert sightline("train", "demo_segmentation", *flags, "--train.max-steps=1").code == 0
    said = sightline("evaluate", tmp_path / "run", "--split", "test", *HERE)
    assert said.code == 2 and "volumes have no test split, because imagesTs" in said.err, said
