"""--run.track: which trackers a run opens, and what each of them is told."""

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tiny import tiny

from sightline import api, cli
from sightline.errors import UsageError
from sightline.recipe.recipe import Run
from sightline.runs import trackers
from sightline.runs.loggers import RunStart
from sightline.runs.trackers.aside import Aside
from sightline.runs.trackers.secrets import plain, without_secrets
from sightline.runs.trackers.tensorboard import TensorBoard

NAME = "demo_classification"
TINY = [*tiny(), "--train.epochs=2", "--run.log-every-steps=1", "--run.report=auto"]


def test_a_tracker_of_no_name_is_refused_before_the_folder_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for asked in (["tensorbord"], ["tensorboard", "tensorbord"]):
        assert cli.main(["train", NAME, *TINY, f"--run.out={tmp_path / 'run'}", "--run.track", *asked]) == 2
        assert "unknown --run.track 'tensorbord'; did you mean tensorboard?; known: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_both_spellings_of_tensorboard_open_one():
    for run in (Run(tensorboard=True), Run(track=("tensorboard",)), Run(tensorboard=True, track=("tensorboard",) * 2)):
        (made,) = trackers.opened(run)
        assert isinstance(made, TensorBoard)
    assert trackers.opened(Run()) == []


class Heard(api.Logger):
    def start(self, run: api.RunStart) -> None:
        self.run = run


def test_a_start_knows_where_its_values_come_from(tmp_path: Path):
    heard = Heard()
    api.train(*api.load(NAME, [*TINY, "--run.report=off", f"--run.out={tmp_path}"]), loggers=[heard])
    assert heard.run.origins["train.epochs"] == "flag: --train.epochs"
    assert "train.seed" not in heard.run.origins and heard.run.fields["train.seed"] == 0
    assert set(heard.run.origins) <= set(heard.run.fields)


# Trackers in a process of their own. A package called trackio takes the place of the real one, which has 100 MB.

STAND_IN = '''
"""What trackio has of what our tracker calls: every call becomes a line of a file. FAILS says which call raises."""
import json, os, time

class Run:
    def __init__(self, **told):
        self.write("init", told)
    def log(self, metrics, step=None):
        shown = {name: value if isinstance(value, float) else type(value).__name__ for name, value in metrics.items()}
        self.write("log", {"step": step, **shown})
    def finish(self):
        self.write("finish", {})
    def write(self, call, told):
        if call in os.environ.get("FAILS", ""):
            raise RuntimeError("nobody takes " + os.environ["A_TOKEN"] + " at http://me:sesame@host/")
        if call in os.environ.get("HANGS", ""):
            time.sleep(3600)
        with open(os.environ["TOLD"], "a") as file:
            file.write(json.dumps([call, told], default=str) + "\\n")

def init(**told):
    print("trackio says this on the terminal")
    if "STAYS" in os.environ and not (child := os.fork()):
        time.sleep(60)
        os._exit(0)
    if "STAYS" in os.environ:
        open(os.environ["STAYS"], "w").write(str(child))
        for descriptor in range(3, 30):  # among them is the pipe to the training
            try:
                os.write(descriptor, b"{not for you\\n")
            except OSError:
                pass
    return Run(**told)

class Markdown:
    def __init__(self, text): pass
class Image:
    def __init__(self, value, caption): assert value.size[0] > 8 and caption
class Html:
    def __init__(self, path, inject): assert open(path).read().startswith("<!")
'''


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """told() -> what the stand-in was called with so far."""
    (tmp_path / "site" / "trackio").mkdir(parents=True)
    (tmp_path / "site" / "trackio" / "__init__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    monkeypatch.setenv("A_TOKEN", "token-of-somebody")
    monkeypatch.delitem(sys.modules, "trackio", raising=False)

    def read() -> list:
        lines = (tmp_path / "told.jsonl").read_text().splitlines() if (tmp_path / "told.jsonl").exists() else []
        return [json.loads(line) for line in lines]

    return read


def train(out: Path, *flags: str) -> list[dict]:
    """Train with the tracker; return the events of the run."""
    api.train(*api.load(NAME, [*TINY, f"--run.out={out}", "--run.track", "trackio", *flags]))
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_tracker_is_told_everything_and_a_resumed_run_is_the_same(tmp_path: Path, told, capfd):
    out = tmp_path / "run"
    train(out)
    events = train(out, "--train.epochs=3")
    calls = told()
    (_, first), (_, second) = [call for call in calls if call[0] == "init"]
    assert first["name"] == second["name"] == json.loads((out / "trackers" / "trackio.json").read_text())["run"]
    assert first["name"].startswith("run-") and first["project"] == "sightline"
    assert (first["config"]["train.epochs"], second["config"]["train.epochs"]) == (2, 3)
    assert first["config"]["origin.train.epochs"] == "flag: --train.epochs"
    logged = [values for call, values in calls if call == "log"]
    losses = [(values["step"], values["train/loss"]) for values in logged if "train/loss" in values]
    assert losses == [(event["step"], event["loss"]) for event in events if event["event"] == "train"]
    evaluated = [values for values in logged if "evaluate/top1" in values]
    assert [(values["step"], values["epoch"]) for values in evaluated] == [(3, 1), (6, 2), (9, 3)]
    scores = json.loads((out / "scores.json").read_text())
    rows = {row["class"]: row["top1"] for row in scores["tables"]["classes"] if row["top1"] is not None}
    assert len(rows) >= 3
    assert {name: evaluated[-1][f"evaluate/classes/{name}/top1"] for name in rows} == rows
    assert all(any("classes/" in name for name in values) for values in evaluated)
    assert {"worst/01": "Image", "report": "Html", "checkpoint": "Markdown"}.items() <= {
        name: value for values in logged for name, value in values.items()
    }.items()
    assert [call for call, _ in calls].count("finish") == 2 and calls[-1][0] == "finish"
    assert "on the terminal" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("call", ["init", "log"])
def test_what_a_tracker_cannot_send_is_one_warning_without_secrets(
    tmp_path: Path, told, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
):
    monkeypatch.setenv("FAILS", call)
    events = train(tmp_path / "run", "--run.report=off", "--run.progress=plain")
    assert [event["reason"] for event in events if event["event"] == "exit"] == ["finished"]
    said = "".join(capsys.readouterr())
    assert said.count("trackio: RuntimeError: nobody takes *** at http://***@host/") == 1
    everything = "".join(path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert "token-of-somebody" not in said + everything and "sesame" not in said + everything


def test_a_tracker_that_does_not_return_costs_no_step_and_ends_with_the_run(
    tmp_path: Path, told, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HANGS", "log")
    monkeypatch.setattr(trackers, "LEAVES_S", 2.0)
    events = train(tmp_path / "run", "--run.report=off", "--run.progress=plain")
    assert [event["step"] for event in events if event["event"] == "train"] == list(range(1, 7))
    assert "warning: trackio takes too long and may lack the end of the run" in "".join(capsys.readouterr())
    assert [call for call, _ in told()] == ["init"]


def test_a_process_that_a_tracker_leaves_behind_is_not_waited_for(tmp_path: Path, told, monkeypatch):
    monkeypatch.setenv("STAYS", str(tmp_path / "pid"))
    logger = Aside("trackio")
    logger.start(RunStart(tmp_path, {}, (), 0, 0))
    logger.close(0, "finished")
    logger.end(tmp_path / "report.html")
    problem = logger.wait(time.monotonic() + 50)
    left = int((tmp_path / "pid").read_text())
    os.kill(left, signal.SIGKILL)  # raises where it has ended
    assert problem == "" and told()[-1][0] == "finish"


def test_a_package_that_is_missing_or_broken(tmp_path: Path, told, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("mlflow", "wandb", "trackio"):
        with pytest.raises(
            UsageError, match=rf"--run.track {name} needs the package .*`pip install sightline\[{name}\]`"
        ):
            trackers.opened(Run(track=(name,)))
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site" / "trackio" / "__init__.py").write_text("import no_such_module")
    train(tmp_path / "run", "--run.report=off", "--run.progress=plain")
    assert "warning: trackio: ModuleNotFoundError: No module named 'no_such_module'" in "".join(capsys.readouterr())


def test_secrets_are_hidden_and_other_texts_are_not(monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "WANDB_API_KEY": "k" * 40,
        "MLFLOW_TRACKING_TOKEN": "t0ken-here",
        "KEYBOARD": "qwertyqwerty",
    }.items():
        monkeypatch.setenv(name, value)
    cases = {
        f"key {'k' * 40} and t0ken-here": "key *** and ***",
        "http://me:word@host:5000/a?b=1": "http://***@host:5000/a?b=1",
        "https://host/?write_token=abc&x=2": "https://host/?write_token=***&x=2",
        "s3://bucket/data@2x/pets, mail me@host": "s3://bucket/data@2x/pets, mail me@host",
        "qwertyqwerty": "qwertyqwerty",
    }
    assert {text: without_secrets(text) for text in cases} == cases
    assert [plain(value) for value in (1, 2.5, None, True, ("a", "http://u:p@h"))] == [
        1, 2.5, None, True, "('a', 'http://***@h')",
    ]  # fmt: skip
