"""`--data.fold all`: one ordinary run per fold by one command, which resumes where it was cut, and their scores."""

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline import api, cli
from sightline.errors import BadData
from sightline.inference import folds

# Fold 1 cannot be opened while a file `missing` lies in the folder. Each fold has its own number of images.
RECIPE = '''"""Three folds of numbers."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from sightline.config import Recipe, TrainConfig
from sightline.data.classification import ClassificationData
from sightline.errors import BadData
from sightline.parts import DataSpec, ModelConfig
from sightline.tasks.classification import Classification
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


@dataclass(frozen=True)
class Folded(ClassificationData):
    fold: int = 0
    """Which fold is evaluated."""
    folds: int = 3
    """How many there are."""

    def open(self, split, seed):
        if self.fold == 1 and Path("missing").exists():
            raise BadData("fold 1 is not here")
        path = f"synthetic:classes=6,samples={64 + 32 * self.fold},size=12"
        return ClassificationData.open(replace(self, path=path), split, seed + self.fold)


@dataclass(frozen=True)
class Regression(ModelConfig):
    def build(self, spec: DataSpec) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * spec.size[0] * spec.size[1], len(spec.classes)))


def recipe() -> Recipe:
    return Recipe(
        name="folded",
        model=Regression(),
        data=Folded(path="synthetic:", classes=6, size=12, eval_resize=12, eval_size=12),
        task=Classification(),
        optimizer=OptimizerConfig(lr=1e-4),
        schedule=ScheduleConfig(kind="constant"),
        train=TrainConfig(epochs=3, global_batch=8, precision="fp32"),
    )
'''
FLAGS = ["--run.workers=0", "--run.device=cpu", "--run.progress=off"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "folded.py").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def starts(run: Path) -> int:
    return sum('"event": "start"' in line for line in (run / "log.jsonl").read_text().splitlines())


def weights(run: Path) -> bytes:
    return sorted(run.glob("checkpoints/ckpt-*/model.safetensors"))[-1].read_bytes()


def test_all_folds_are_trained_and_an_interrupted_command_resumes(here: Path, capsys):
    command = ["train", "folded.py", *FLAGS, "--run.out", "runs/x", "--data.fold", "all", "--train.epochs", "2"]
    (here / "missing").touch()
    assert cli.main(command) == 3
    assert (here / "runs/x/fold-0/scores.json").is_file() and not (here / "runs/x/folds.json").exists()
    (here / "missing").unlink()
    capsys.readouterr()
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert [starts(here / f"runs/x/fold-{fold}") for fold in range(3)] == [1, 1, 1]
    document = json.loads((here / "runs/x/folds.json").read_text())
    found = []
    for fold, row in enumerate(document["folds"]):
        best = json.loads((here / f"runs/x/fold-{fold}/scores-best.json").read_text())
        assert best["values"]["samples"] == (64 + 32 * fold) // 8
        assert (row["fold"], row["step"], row["top1"]) == (fold, best["step"], best["values"]["top1"])
        assert row["classes"] == {each["class"]: each["top1"] for each in best["tables"]["classes"]}
        found.append(row["top1"])
    last = "next: sightline predict runs/x FILE ..., the ensemble of all folds\nreport: runs/x/report.html\n"
    assert shown == f"{folds.as_text(document)}\nfinished: results are in runs/x\n{last}"
    assert "fold-1" in (here / "runs/x/report.html").read_text()
    assert document["mean"]["top1"] == pytest.approx(sum(found) / 3)
    assert document["spread"]["top1"] == pytest.approx(statistics.stdev(found)) and len(set(found)) > 1
    # A fold of it is the run that one would have made alone.
    alone = ["train", "folded.py", *FLAGS, "--run.out=alone", "--data.fold=2", "--train.epochs=2", "--run.report=off"]
    assert cli.main(alone) == 0
    assert weights(here / "alone") == weights(here / "runs/x/fold-2")
    # The same command trains nothing more and tells the same.
    capsys.readouterr()
    assert cli.main([*command[:-4], "--train.epochs", "2", "--data.fold=all"]) == 0
    assert capsys.readouterr().out == shown and starts(here / "runs/x/fold-1") == 1
    (here / "runs/x/report.html").unlink()
    assert cli.main(["report", "runs/x"]) == 0
    assert all(f"fold-{fold}" in (here / "runs/x/report.html").read_text() for fold in range(3))
    for words in (["export", "runs/x"], ["show", "runs/x"], ["report", "runs/x", "runs"]):
        assert cli.main(words) in (2, 4)
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == errors[1] == "error: runs/x is a folder of 3 runs; give one of them, e.g. runs/x/fold-0"
    assert errors[2].startswith("error: runs is not a run folder")


def test_an_evaluation_on_another_fold_says_so(here: Path, capsys):
    """Most of what another fold holds out was trained on."""
    shown = ["--run.workers=0", "--run.device=cpu", "--run.progress=plain"]
    assert cli.main(["train", "folded.py", *FLAGS, "--run.out=run", "--train.epochs=1"]) == 0
    for flags, warns in ([], False), (["--data.fold=2"], True):
        capsys.readouterr()
        assert cli.main(["evaluate", "run", "--recipe", "folded.py", *shown, *flags]) == 0
        assert ("these are not the run's validation images" in "".join(capsys.readouterr())) == warns


def test_what_has_no_folds_or_begins_elsewhere_is_refused(here: Path, capsys):
    assert cli.main(["train", "demo_classification", "--data.fold", "all"]) == 2
    assert cli.main(["check", "demo_classification", "--data.path=synthetic:", "--data.fold", "all"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["error: --data.fold all: ClassificationData of demo_classification has no folds; leave it out"] * 2
    assert cli.main(["train", "folded.py", "--data.fold=all", "--run.resume=runs/other"]) == 2
    assert "--run.resume runs/other cannot be combined with --data.fold all" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_check_takes_all_folds(here: Path, capsys):
    shown = []
    for fold in ("--data.fold=0", "--data.fold=all"):
        assert cli.main(["check", "unet2d", "--data.path=synthetic:samples=5", "--data.task=04", fold]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "no problems" in shown[0]


def probabilities(out: Path) -> np.ndarray:
    """(images, classes) as predictions.json lists them."""
    rows = json.loads((out / "predictions.json").read_text())["files"]
    return np.array([[each["score"] for each in sorted(row["found"], key=lambda e: e["id"])] for row in rows])


def test_several_runs_predict_the_mean_of_their_probabilities(here: Path, capsys):
    train = [
        "train",
        "folded.py",
        *FLAGS,
        "--run.report=off",
        "--data.fold=all",
        "--train.epochs=1",
        "--optimizer.lr=0.01",
    ]
    assert cli.main([*train, "--run.out=x"]) == 0
    (here / "in").mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 255, (12, 12, 3), np.uint8)
        Image.fromarray(pixels).save(here / "in" / f"{number}.png")
    rest = ["in", "--top=6", "--no-draw", "--recipe=folded.py", *FLAGS[:2]]

    def predict(*runs: str) -> np.ndarray:
        assert cli.main(["predict", *runs, *rest, "--out=out", "--run.progress=off"]) == 0
        found = probabilities(here / "out")
        shutil.rmtree(here / "out")
        return found

    alone = [predict(f"x/fold-{fold}") for fold in range(3)]
    assert np.abs(alone[0] - alone[1]).max() > 0.01
    np.testing.assert_allclose(predict("x/fold-0", "x/fold-2"), (alone[0] + alone[2]) / 2, atol=1e-6)
    both = predict("x/fold-0", "in/0.png", "x/fold-2")
    np.testing.assert_allclose(both[0], (alone[0] + alone[2])[0] / 2, atol=1e-6)
    # The folder of all folds is one name, and its predictions lie in it.
    capsys.readouterr()
    assert cli.main(["predict", "x", *rest]) == 0
    said = capsys.readouterr().out
    assert "the probabilities of 3 runs are averaged: x/fold-0/checkpoints/ckpt-" in said
    assert all(said.count(f"x/fold-{fold}/checkpoints/ckpt-") == 1 for fold in range(3))
    np.testing.assert_allclose(probabilities(here / "x" / "predictions"), sum(alone) / 3, atol=1e-6)
    runs = json.loads((here / "x/predictions/predictions.json").read_text())["runs"]
    assert [Path(run["checkpoint"]).parts[1] for run in runs] == ["fold-0", "fold-1", "fold-2"]
    found = api.predict(["x/fold-0", "x/fold-1"], ["in/0.png", "in/1.png"], flags=FLAGS, recipe_file="folded.py")
    mean = np.array([[value for _, value in sorted(each.probabilities.items())] for each in found])
    names = sorted(range(6), key=lambda n: sorted(found[0].probabilities)[n])
    np.testing.assert_allclose(mean[:, names], (alone[0] + alone[1]) / 2, atol=1e-6)
    for words, code, message in (
        (["x/fold-0", "x/fold-1", "in"], 2, "the results of 2 runs (x/fold-0, x/fold-1) belong to none of them; add"),
        (["x/fold-0", "x/fold-1"], 2, "all of these are runs; add images"),
        (["x/fold-0", "x/fold-9", "in", "--out=out"], 2, "x/fold-9 does not exist"),
        (["in/0.png", "x/fold-0"], 2, "in/0.png is not a run, and the run comes first: `sightline predict x/fold-0"),
        (["gone.png", "x/fold-0"], 2, "gone.png is not a run, and the run comes first"),
    ):
        assert cli.main(["predict", *words, "--recipe=folded.py", *FLAGS]) == code
        assert message in capsys.readouterr().err
    for flags in ([], ["--labels", "in"]):
        assert cli.main(["evaluate", "x", "--recipe=folded.py", *flags]) == 2
        assert "each case was trained on by all of them but one" in capsys.readouterr().err
    assert cli.main(["evaluate", "x", "--recipe=folded.py", "--choose-postprocessing", *FLAGS]) == 2
    assert "post-processing is for masks of volumes, and folded makes none" in capsys.readouterr().err


@pytest.mark.slow  # two processes that import torch
def test_two_ranks_train_all_folds_together(here: Path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "sightline"]
    flags = [*FLAGS, "--data.fold=all", "--data.folds=2", "--train.epochs=1", "--train.max-steps=2", "--run.out=x"]
    done = subprocess.run(
        [*launcher, "train", "folded.py", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    document = json.loads((here / "x/folds.json").read_text())
    assert [row["step"] for row in document["folds"]] == [2, 2]
    assert done.stdout.count("spread  ") == 1  # one of them speaks
    assert json.loads((here / "x/fold-1/environment.json").read_text())["ranks"] == 2


# The numbers


def fold(number: int, dice: float, **classes: float | None) -> dict:
    return {"fold": number, "folder": f"fold-{number}", "epoch": 9, "step": 90, "dice": dice, "classes": classes}


def test_mean_and_spread_by_hand():
    rows = [fold(0, 0.8, left=0.7, right=0.9), fold(1, 0.9, left=0.8, right=None), fold(2, 0.7, left=0.9, right=0.5)]
    document = folds.summary("unet", "dice", rows)
    assert document["mean"] == {"dice": pytest.approx(0.8), "classes": {"left": pytest.approx(0.8), "right": None}}
    assert document["spread"] == {"dice": pytest.approx(0.1), "classes": {"left": pytest.approx(0.1), "right": None}}
    assert folds.as_text(document).splitlines() == [
        "fold        dice    left   right",
        "0         0.8000  0.7000  0.9000  epoch 9",
        "1         0.9000  0.8000       -  epoch 9",
        "2         0.7000  0.9000  0.5000  epoch 9",
        "mean      0.8000  0.8000       -",
        "spread    0.1000  0.1000       -",
    ]
    assert folds.summary("unet", "dice", rows[:1])["spread"]["dice"] is None  # one fold has none


@pytest.mark.parametrize("text", ["", "{", "[]", '{"values": {}}', '{"values": {"dice": 1}, "tables": 3}'])
def test_scores_that_cannot_be_read_are_reported(tmp_path: Path, text: str):
    (tmp_path / "scores-best.json").write_text(text)
    with pytest.raises(BadData, match=r"fold 2 is trained, but .*scores-best.json cannot be read .*to train it again"):
        folds.read_fold(tmp_path, 2, "dice")
