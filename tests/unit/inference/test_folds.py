"""Folds that scored nothing that is a number, and the words of `predict` that name runs; the ordinary ones are in
tests/cli/test_folds.py."""

import json
from pathlib import Path

import pytest

from sightline.errors import UsageError
from sightline.inference import folds


def test_a_fold_without_a_best_score_tells_its_last(tmp_path: Path):
    for fold, (name, score) in enumerate([("scores-best.json", 0.5), ("scores.json", None)]):
        folder = tmp_path / f"fold-{fold}"
        folder.mkdir()
        told = {"epoch": 3, "step": 9, "values": {"dice": score}, "tables": {}}
        (folder / name).write_text(json.dumps(told))
    rows = [folds.read_fold(tmp_path / f"fold-{fold}", fold, "dice") for fold in range(2)]
    assert [row["dice"] for row in rows] == [0.5, None]
    assert folds.summary("r", "dice", rows)["mean"]["dice"] is None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs as `train` leaves them, and what a stranger's folder may hold."""
    for name in (
        "run/checkpoints/ckpt-00000003/manifest.json",
        "ckpt/manifest.json",
        "ckpt/state.json",
        "all/folds.json",
        "begun/config.yaml",
        "begun/log.jsonl",
        "begun/checkpoints/.keep",
        "photos/checkpoints/board.jpg",
        "pages/manifest.json",
        "net.onnx",
        "net.pt2",
        "a.jpg",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "runs", "inputs"),
    [
        ("run a.jpg", "run", "a.jpg"),
        ("run run a.jpg", "run run", "a.jpg"),
        ("run a.jpg ckpt all begun", "run ckpt all begun", "a.jpg"),
        ("net.pt2 a.jpg", "net.pt2", "a.jpg"),
        ("net.pt2 net.pt2 a.jpg", "net.pt2", "net.pt2 a.jpg"),
        ("run a.jpg net.onnx net.pt2", "run", "a.jpg net.onnx net.pt2"),
        ("run net.pt2", "run", "net.pt2"),
        ("run photos pages", "run", "photos pages"),
        ("gone net.onnx a.jpg", "gone", "net.onnx a.jpg"),
    ],
)
def test_later_words_are_runs_only_if_they_are_run_folders(here: Path, words: str, runs: str, inputs: str):
    assert folds.split_runs(words.split()) == (runs.split(), inputs.split())


@pytest.mark.parametrize(
    ("words", "meant"), [("a.jpg run photos", "run a.jpg photos"), ("a.jpg net.onnx", "net.onnx a.jpg")]
)
def test_an_image_before_the_run_is_told_the_right_order(here: Path, words: str, meant: str):
    with pytest.raises(UsageError, match=f"the run comes first: `sightline predict {meant}`"):
        folds.split_runs(words.split())
