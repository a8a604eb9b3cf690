"""How `predict` is fed: who decodes, who loads, and that none of it changes what is found."""

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from sightline import api, cli, kernels
from sightline.errors import BadData
from sightline.files import sizes
from sightline.inference import checkpoints, predict
from sightline.parts import PredictOptions

HERE = ["--run.device=cpu", "--train.precision=fp32", "--run.report=off", "--run.workers=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of one step; images/ beside its run are of many sizes, one of them damaged."""
    home = tmp_path_factory.mktemp("predict")
    draws = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(8):
            path = home / "data" / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draws.integers(0, 255, (32, 32, 3), np.uint8)).save(path)
    (home / "images").mkdir()
    for number in range(20):
        sides = (20 + 3 * number, 60 - 2 * number, 3)
        Image.fromarray(draws.integers(0, 255, sides, np.uint8)).save(home / "images" / f"{number:02d}.jpg")
    damaged = home / "images" / "07.jpg"
    damaged.write_bytes(damaged.read_bytes()[:200])
    flags = [f"--data.path={home / 'data'}", f"--run.out={home / 'run'}", "--train.max-steps=1", *HERE]
    assert cli.main(["train", "demo_classification", "--batch-size=4", *flags]) == 0
    return home / "run"


def test_weights_that_nobody_evaluated_are_predicted_with_and_doubted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags = [f"--data.path={run.parent / 'data'}", f"--run.out={tmp_path / 'run'}", "--train.max-steps=1", *HERE]
    train = ["train", "demo_classification", "--batch-size=4", "--epochs=3", *flags]
    assert cli.main([*train, "--train.no-eval-at-end"]) == 0
    capsys.readouterr()
    for folder, warns in ((tmp_path / "run", True), (run, False)):
        api.write_predictions(folder, run.parent / "images/00.jpg", tmp_path / f"seen_{warns}", HERE, draws=False)
        said = capsys.readouterr()
        line = "ckpt-00000001 was never evaluated: it was saved at step 1, after 0 of 3 epochs"
        assert (line in said.out + said.err) is warns


@pytest.mark.parametrize("few_bytes", [0, 2**23])
def test_few_files_need_no_processes(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_bytes: int):
    """One broken file among twenty loses only itself, in the order of the names, whoever loads them."""
    monkeypatch.setattr(sizes, "FEW_BYTES", few_bytes)
    started: list[int] = []
    opened = predict.Loader

    def watched(*args, **kwargs):
        loader = opened(*args, **kwargs)
        started.append(len(loader.worker_pids))
        return loader

    monkeypatch.setattr(predict, "Loader", watched)
    flags = [*HERE[:-1], "--data.on-bad-sample=skip"]
    api.write_predictions(run, run.parent / "images", tmp_path, flags, draws=False)
    assert (started[0] == 0) == (few_bytes > 0)
    document = json.loads((tmp_path / "predictions.json").read_text())
    names = [f"{number:02d}.jpg" for number in range(20)]
    assert [row["file"] for row in document["files"]] == [name for name in names if name != "07.jpg"]
    assert [row["file"] for row in document["unreadable"]] == ["07.jpg"]
    lines = (tmp_path / "predictions.csv").read_text().splitlines()[1:]
    assert list(dict.fromkeys(Path(line.split(",")[0]).name for line in lines)) == [
        row["file"] for row in document["files"]
    ]
    for row in document["files"][::6]:
        (alone,) = api.predict(run, row["path"], flags=HERE)
        assert alone.probabilities == pytest.approx({each["class"]: each["score"] for each in row["found"]}, abs=1e-6)


@pytest.mark.parametrize("many_bytes", [0, 2**30])
def test_kernels_are_compiled_for_many_files_only(run: Path, monkeypatch: pytest.MonkeyPatch, many_bytes: int):
    monkeypatch.setattr(sizes, "MANY_BYTES", many_bytes)
    seen: list[bool] = []
    finish = predict.Trained.predict

    def watched(*given: Any) -> Any:
        seen.append(kernels.may_compile())
        return finish(*given)

    monkeypatch.setattr(predict.Trained, "predict", watched)
    api.predict(run, run.parent / "images" / "01.jpg", flags=HERE)
    assert seen == [many_bytes == 0]
    assert kernels.may_compile()


@pytest.mark.parametrize("many_bytes", [0, 2**30])
def test_evaluate_compiles_kernels_for_many_samples_only(run: Path, monkeypatch: pytest.MonkeyPatch, many_bytes: int):
    monkeypatch.setattr(checkpoints, "MANY_BYTES", many_bytes)
    seen: list[bool] = []
    evaluate = checkpoints.evaluate

    def watched(*given: Any) -> Any:
        seen.append(kernels.may_compile())
        return evaluate(*given)

    monkeypatch.setattr(checkpoints, "evaluate", watched)
    api.evaluate(run, flags=HERE)
    assert seen == [many_bytes == 0]
    assert kernels.may_compile()


def test_an_error_while_writing_ends_the_prediction(run: Path, monkeypatch: pytest.MonkeyPatch):
    trained = predict.open_trained(run, "best", "", "predict", HERE)
    files = {path.name: path for path in sorted((run.parent / "images").iterdir()) if path.name != "07.jpg"}

    def fails(*given: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(predict, "results", fails)
    with pytest.raises(OSError, match="no room"):
        predict.predict_objects(trained, files, PredictOptions())


def test_a_command_draws_no_weights_that_a_checkpoint_replaces(run: Path, monkeypatch: pytest.MonkeyPatch):
    trained = predict.open_trained(run, "best", "", "predict", HERE)
    drawn: list[str] = []

    def watched(name, function, *given, **more):
        drawn.append(name)
        return function(*given, **more)

    for name in checkpoints.DRAWN:
        function = getattr(nn.init, name)
        monkeypatch.setattr(nn.init, name, functools.partial(watched, name, function))
    before = [getattr(nn.init, name) for name in checkpoints.DRAWN]
    in_script = trained.build().state_dict()
    assert drawn
    drawn.clear()
    with monkeypatch.context() as as_command:
        as_command.setattr(checkpoints.terminal, "is_command", lambda: True)
        in_command = trained.build().state_dict()
    assert not drawn and [getattr(nn.init, name) for name in checkpoints.DRAWN] == before
    assert in_command.keys() == in_script.keys() == trained.tensors["model"].keys()
    for name, tensor in trained.tensors["model"].items():
        assert torch.equal(in_command[name], tensor) and torch.equal(in_script[name], tensor), name


def test_sizes_of_files_are_the_same_without_drawings_for_which_each_is_read_again(run: Path, tmp_path: Path):
    images = tmp_path / "images"
    images.mkdir()
    for name in ("00.jpg", "07.jpg", "12.jpg"):  # the second is damaged
        (images / name).write_bytes((run.parent / "images" / name).read_bytes())
    turned, exif = Image.open(images / "00.jpg"), Image.Exif()
    exif[0x0112] = 6
    turned.save(images / "turned.jpg", exif=exif)
    found = []
    for draws in (True, False):
        api.write_predictions(run, images, tmp_path / f"out_{draws}", [*HERE, "--data.on-bad-sample=skip"], draws=draws)
        document = json.loads((tmp_path / f"out_{draws}" / "predictions.json").read_text())
        assert [each["file"] for each in document["unreadable"]] == ["07.jpg"]
        found.append([{key: value for key, value in row.items() if key != "picture"} for row in document["files"]])
    assert found[0] == found[1]
    sizes_of = {row["file"]: (row["width"], row["height"]) for row in found[1]}
    assert sizes_of == {"00.jpg": (60, 20), "12.jpg": (36, 56), "turned.jpg": (20, 60)}


def test_inputs_that_cannot_be_read_are_named_three_at_most(run: Path, tmp_path: Path):
    for count in (1, 3, 5):
        (tmp_path / str(count)).mkdir()
        for number in range(count):
            (tmp_path / str(count) / f"{number}.jpg").write_bytes(b"none")
        (tmp_path / str(count) / "good.jpg").write_bytes((run.parent / "images" / "00.jpg").read_bytes())
        with pytest.raises(BadData) as refused:
            api.predict(run, sorted((tmp_path / str(count)).iterdir()), flags=HERE)
        text = str(refused.value)
        assert f"{count} of {count + 1} inputs cannot be read (" in text
        assert [f"{number}.jpg" in text for number in range(count)] == [number < 3 for number in range(count)]


def test_a_signal_ends_the_prediction_after_the_batch_at_hand(run: Path, tmp_path: Path, monkeypatch, capsys):
    seen, predict_batch = [], checkpoints.Trained.predict

    def predicted(self, *given):
        seen.append(given)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until the thread that answers signals has taken it
        return predict_batch(self, *given)

    monkeypatch.setattr(checkpoints.Trained, "predict", predicted)
    words = ["predict", str(run), str(run.parent / "images"), "--out", str(tmp_path), "--train.global-batch=4"]
    assert cli.main([*words, *HERE, "--data.on-bad-sample=skip"]) == 143
    document = json.loads((tmp_path / "predictions.json").read_text())
    assert len(seen) == 2 and [row["file"] for row in document["files"]] == [f"{n:02d}.jpg" for n in range(7)]
    assert [row["file"] for row in document["unreadable"]] == ["07.jpg"]
    assert f"stopped after 7 of 20 files; {tmp_path / 'predictions.json'} " in capsys.readouterr().out
