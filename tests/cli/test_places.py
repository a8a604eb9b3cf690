"""A run remembers where its data are: `train` with a relative path, then every command from another directory."""

import json
import shutil
from pathlib import Path

import pytest
from tiny import HERE, SMALL

from sightline import config
from sightline.engine import checkpoint
from sightline.recipe import store

NAME = "demo_classification"


@pytest.fixture
def work(sightline, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with `data` and a finished run, both typed as relative paths; we are in another one."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "data").symlink_to(shapes)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    said = sightline("train", NAME, *SMALL, *HERE, "--data.path=data", "--run.out=out/run", "--train.max-steps=2")
    assert said.code == 0 and "\nresults are in out/run; " in said.out, said
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def test_every_command_works_from_any_directory(sightline, work: Path):
    run = work / "out" / "run"
    stored = config.load(NAME, config=run / "config.yaml")
    assert (stored[0].data.path, stored[1].out) == (str(work / "data"), str(run))
    state = json.loads((run / "checkpoints" / "ckpt-00000002" / "state.json").read_text())
    assert state["recipe"]["data"]["path"] == str(work / "data")
    assert sightline("evaluate", "../work/out/run", *HERE).code == 0
    assert sightline("predict", "../work/out/run", work / "data" / "val" / "star", *HERE).code == 0
    assert (run / "predictions" / "predictions.csv").is_file()
    resumed = sightline("train", "--config", "../work/out/run/config.yaml", "--train.max-steps=3")
    assert resumed.code == 0 and "resuming from step 2" in resumed.out, resumed
    assert f"\n  sightline evaluate {run}\n  sightline predict {run} {work / 'data'}/val/" in resumed.out
    assert (run / "checkpoints" / "ckpt-00000003").is_dir() and list(Path().iterdir()) == []


def test_data_that_have_moved_are_named_again(sightline, work: Path):
    (work / "data").rename(work / "moved")
    lost = sightline("evaluate", work / "out" / "run", *HERE)
    assert lost.code == 2 and f"were in {work / 'data'}, which does not exist; add --data.path DIR" in lost.err
    assert sightline("evaluate", work / "out" / "run", "--data.path=../work/moved", *HERE).code == 0
    flags = [*SMALL, *HERE, "--data.path=../work/moved", "--run.out=../work/out/run", "--train.max-steps=3"]
    assert "resuming from step 2" in sightline("train", NAME, *flags).out


def test_a_run_of_an_earlier_version_with_a_relative_path_works_where_it_was_made(sightline, work: Path, monkeypatch):
    path = work / "out" / "run" / "checkpoints" / "ckpt-00000002"
    tensors, state = checkpoint.read(path)
    state["recipe"]["data"]["path"] = "data"
    shutil.rmtree(path)
    checkpoint.write(path, tensors, state)
    assert sightline("evaluate", work / "out" / "run", *HERE).code == 2
    monkeypatch.chdir(work)
    assert sightline("evaluate", "out/run", *HERE).code == 0
    flags = [*SMALL, *HERE, "--data.path=data", "--run.out=out/run", "--train.max-steps=3"]
    assert "resuming from step 2" in sightline("train", NAME, *flags).out


def test_only_what_is_on_disk_becomes_absolute(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    for typed, stored in (("here", str(tmp_path / "here")), ("synthetic:samples=8", "synthetic:samples=8"), ("", "")):
        recipe, run = store.at_absolute_paths(*config.load(NAME, [f"--data.path={typed}", "--run.benchmark-log=log"]))
        assert (recipe.data.path, run.resume) == (stored, "auto")
        assert (run.out, run.benchmark_log) == (str(tmp_path / "runs" / NAME), str(tmp_path / "log"))
