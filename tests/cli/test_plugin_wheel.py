"""The plugin of docs/howto/plugin.md: its wheel is built and unpacked, and trains with all of its parts."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sightline import plugins

REPO = Path(__file__).resolve().parents[2]
HOWTO = REPO / "docs" / "howto"
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
SMALL = ["--model.width=4", "--data.size=24", "--data.eval-resize=24", "--data.eval-size=24", "--batch-size=16"]
SMALL += ["--device=cpu", "--run.log-every-steps=1", "--run.report=off", "--task.positive-weight=4"]


def block(page: str, language: str) -> str:
    """Return the first block of a language on a page."""
    text = (HOWTO / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of the plugin and unpack it into a folder of its own."""
    root = tmp_path_factory.mktemp("plugin")
    project = root / "project"
    (project / "lab").mkdir(parents=True)
    (project / "pyproject.toml").write_text(block("plugin", "toml"), encoding="utf-8")
    files = {"__init__": '"""Parts for Sightline."""\n', "losses": block("plugin", "python")}
    files |= {"own_task": block("task", "python"), "listing": block("source", "python")}
    for name, text in files.items():
        (project / "lab" / f"{name}.py").write_text(text, encoding="utf-8")
    built = subprocess.run([sys.executable, "-c", BUILD, root / "dist"], cwd=project, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (root / "dist").glob("sightline_lab-1.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / "site")
    return root / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The plugin on the path of this process; undo() of the result removes it."""
    with monkeypatch.context() as patch:
        patch.setattr(plugins, "_loaded", {})
        patch.syspath_prepend(str(site))
        yield patch
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]


def good(said) -> str:
    assert said.code == 0, said
    return said.out


def test_a_run_with_every_part_of_a_plugin_trains_evaluates_and_resumes(
    sightline, installed: pytest.MonkeyPatch, shapes: Path, tmp_path: Path
):
    data, out = tmp_path / "lists", tmp_path / "run"
    data.mkdir()
    for split in ("train", "val"):
        lines = "".join(f"{path.parent.name} {path}\n" for path in (shapes / split).glob("*/*"))
        (data / f"{split}.txt").write_text(lines, encoding="utf-8")
    train = ["train", "own_task", "--data", data, *SMALL, "--out", out, "--run.track", "csv", "tensorboard"]
    # Loader workers are processes of their own, which read with the plugin's source.
    assert "own_task: 80 training and 40 evaluation samples" in good(sightline(*train, "--workers=1", "--epochs=1"))
    good(sightline(*train, "--workers=0", "--epochs=2"))
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "start"] == [0, 5], "resumed"
    rows = good(sightline("losses", out)).splitlines()
    assert rows == [f"{event['step']},{event['loss']}" for event in events if event["event"] == "train"]
    assert len(rows) == 10 and list((out / "tensorboard").iterdir())
    told = (out / "config.yaml").read_text()
    assert "recipe: own_task" in told and "positive_weight: 4.0" in told

    before = [event["top1"] for event in events if event["event"] == "evaluate"][-1]
    good(sightline("evaluate", out, "--checkpoint=latest", "--run.workers=0"))
    assert json.loads((out / "scores-ckpt-00000010.json").read_text())["values"]["top1"] == before
    good(sightline("inspect", out))

    installed.undo()
    gone = sightline("evaluate", out)
    assert gone.code == 2 and "made with your own recipe 'own_task'; add --recipe" in gone.err
    gone = sightline("losses", out)
    assert gone.code == 2 and "unknown command 'losses'" in gone.err


@pytest.mark.usefixtures("installed")
def test_the_kind_of_source_may_be_named(sightline, tmp_path: Path):
    said = sightline("train", "demo_classification", "--data", tmp_path, "--data.source=listing")
    assert said.code == 3 and "train.txt cannot be read" in said.err
    said = sightline("train", "demo_classification", "--data", tmp_path, "--data.source=listings")
    assert said.code == 2 and "listing (sightline-lab 1.0)" in said.err


def test_a_source_that_is_gone_is_named(sightline, installed: pytest.MonkeyPatch, shapes: Path, tmp_path: Path):
    """Chosen by `auto`, so that the recipe does not name it."""
    data, out = tmp_path / "lists", tmp_path / "run"
    data.mkdir()
    for split in ("train", "val"):
        lines = "".join(f"{path.parent.name} {path}\n" for path in (shapes / split).glob("*/*"))
        (data / f"{split}.txt").write_text(lines, encoding="utf-8")
    small = [each for each in SMALL if "weight" not in each]
    good(sightline("train", "demo_classification", "--data", data, *small, "--out", out, "--epochs=1", "--workers=0"))
    installed.undo()
    again = ["train", "demo_classification", "--data", data, *small, "--out", out, "--epochs=2", "--workers=0"]
    for command in (["evaluate", out], ["check", out], ["show", out], ["inspect", out], again):
        gone = sightline(*command)
        assert gone.code == 2, command
        assert "was trained with a source of sightline-lab 1.0, which is not installed here" in gone.err, command
    (out / "environment.json").write_text("[]", encoding="utf-8")
    unknown = sightline("show", out)
    assert unknown.code == 2 and unknown.err.startswith("error: --data.path '")


@pytest.mark.slow  # a process that imports torch; the commands above are those of this process
def test_a_new_process_and_its_workers_find_the_plugin(site: Path, shapes: Path, tmp_path: Path):
    for split in ("train", "val"):
        lines = "".join(f"{path.parent.name} {path}\n" for path in (shapes / split).glob("*/*"))
        (tmp_path / f"{split}.txt").write_text(lines, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [REPO, site])), "PYTHONSAFEPATH": "1"}
    words = ["train", "own_task", "--data", tmp_path, *SMALL, "--epochs=1", "--workers=2", "--run.devices=2"]
    line = [sys.executable, "-m", "sightline", *map(str, words), "--run.track=csv"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "runs" / "own_task" / "losses.csv").read_text().splitlines()) == 5
