"""`evaluate RECIPE --model.weights FILE`: the scores of weights without a run."""

import json
import shutil
from pathlib import Path

import pytest

DATA = """--data.size=16 --data.eval-resize=16 --data.eval-size=16 --train.precision=fp32 --run.device=cpu
    --run.workers=0 --run.report=off""".split()
SMALL = ["--model.width=4", *DATA]
IMAGES = "synthetic:classes=10,samples=80,size=16"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sightline import cli

    folder = tmp_path_factory.mktemp("run")
    flags = [f"--data.path={IMAGES}", "--train.epochs=1", "--train.global-batch=16", "--run.progress=off"]
    assert cli.main(["train", "demo_classification", *SMALL, *flags, f"--run.out={folder}"]) == 0
    return folder


@pytest.fixture
def weights(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    [found] = run.glob("checkpoints/ckpt-*/model.safetensors")
    return shutil.copy(found, "given.safetensors")


def test_it_has_the_scores_of_the_run_and_writes_nothing(sightline, run: Path, weights: str, tmp_path: Path):
    said = sightline("evaluate", "demo_classification", "--model.weights", weights, "--data.path", IMAGES, *SMALL)
    values = json.loads((run / "scores.json").read_text())["values"]
    assert said.code == 0 and f"top1 {values['top1']:.4f}" in said.out and f"loss {values['loss']:.4f}" in said.out
    assert "loaded all 122 tensors of given.safetensors" in said.out and "class0009 " in said.out
    assert [path.name for path in tmp_path.iterdir()] == ["given.safetensors"]


def test_a_folder_for_results_gets_them(sightline, run: Path, weights: str):
    flags = ["--weights", weights, "--data", IMAGES, "--run.out", "scores"]  # short flags as in train
    assert sightline("evaluate", "demo_classification", *flags, *SMALL).code == 0
    ours, theirs = (json.loads(Path(folder, "scores.json").read_text()) for folder in ("scores", run))
    assert ours["values"] == theirs["values"] and ours["tables"] == theirs["tables"] and ours["weights"] == weights


def test_weights_for_other_classes_are_refused(sightline, weights: str):
    path = ["--data.path", "synthetic:classes=4,samples=80,size=16"]
    said = sightline("evaluate", "demo_classification", "--model.weights", weights, *path, *SMALL)
    assert said.code == 3 and "loaded 120 tensors of given.safetensors; the head" in said.err
    assert "without values: fc.weight, fc.bias. Give data with the classes of the weights" in said.err


def test_weights_of_a_trunk_alone_are_refused(sightline, weights: str):
    flags = ["--model.depth=18", "--model.width=4", "--data.size=48", "--data.max-boxes=8", *DATA[3:]]
    path = ["--data.path", "synthetic:classes=10,samples=8,size=60"]
    flags += ["--model.weights", weights, *path]
    said = sightline("evaluate", "finetune_detection", *flags)
    assert said.code == 3 and "trunk: loaded" in said.err and "extras.0.conv1.weight" in said.err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["demo_classification"], 2, "scores given weights: add --model.weights FILE; to score a run, name its folder"),
        (["demo_classification", "--model.weights", "none.pth"], 4, "none.pth does not exist"),
        (["demo_clasification", "--model.weights", "x.pth"], 2, "did you mean 'demo_classification'?"),
        (
            ["demo_classification", "--model.weights", "x.pth", "--all"],
            2,
            "demo_classification is a recipe; leave them",
        ),
        (["demo_classification", "--model.weights", "x.pth", "--data.path", "none"], 2, "'none' does not exist"),
        (["runs/none"], 4, "runs/none does not exist"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(sightline, words: list[str], code: int, told: str):
    data = [] if "--data.path" in words or "/" in words[0] else ["--data.path", IMAGES, *SMALL]
    said = sightline("evaluate", *words, *data)
    assert (said.code, told in said.err) == (code, True), said


def test_a_folder_named_like_a_recipe_is_the_run(sightline, run: Path, weights: str):
    shutil.copytree(run, "demo_classification")
    said = sightline("evaluate", "demo_classification", "--run.device=cpu", "--run.workers=0")
    assert said.code == 0 and "evaluated checkpoint ckpt-00000005" in said.out


def test_data_without_a_val_split_are_scored_in_part_which_is_said_or_whole(sightline, shapes: Path, tmp_path: Path):
    few = tmp_path / "few"
    for name in ("circle", "square", "star"):
        shutil.copytree(shapes / "train" / name, few / name)
    flags = ["--train.epochs=1", "--train.global-batch=8", "--run.progress=off", f"--run.out={tmp_path / 'run'}"]
    assert sightline("train", "demo_classification", "--data.path", few, *SMALL, *flags).code == 0
    [weights] = tmp_path.glob("run/checkpoints/ckpt-*/model.safetensors")
    command = ["evaluate", "demo_classification", "--model.weights", weights, "--data.path", few, *SMALL]
    said = sightline(*command)
    line = "no val split: 6 samples, drawn by name, are scored; --data.split all scores all\n"
    assert said.code == 0 and line in said.out and "on 6 samples" in said.out, said
    said = sightline(*command, "--data.split", "all")
    assert said.code == 0 and "no val split" not in said.out and "on 24 samples" in said.out, said
