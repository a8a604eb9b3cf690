"""Ten commands as a user's shell starts them: processes of their own, with nothing imported, patched or forked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

TINY = """--model.width=4 --data.size=24 --data.eval-resize=24 --data.eval-size=24 --train.global-batch=16
    --train.epochs=1 --train.precision=fp32 --run.device=cpu --run.workers=1""".split()
SHAPES = ["--only=classification", "--train-per-class=8", "--val-per-class=4"]
# In this order: each finds what those before it wrote.
COMMANDS = {
    "list": (["list"], 0, "demo_classification"),
    "help": (["train", "demo_classification", "--help"], 0, "--data.path"),
    "a flag that is unknown": (["train", "demo_classification", "--data.pth=x"], 2, "--data.path"),
    "prepare": (["prepare", "shapes", "--out=drawn", *SHAPES], 0, "classification/val"),
    "check": (["check", "demo_classification", "--data=drawn/classification"], 0, "no problems"),
    "train": (["train", "demo_classification", "--data=drawn/classification", "--out=run", *TINY], 0, "epoch 1"),
    "evaluate": (["evaluate", "run", "--run.device=cpu", "--run.workers=0"], 0, "top1"),
    "predict": (["predict", "run", "drawn/classification/val/star", "--out=found"], 0, "files predicted"),
    "report": (["report", "run"], 0, "wrote run/report.html"),
    "runs": (["runs", "."], 0, "demo_classification"),
}
WRITTEN = {
    "prepare": "drawn/classification/train/star",
    "train": "run/checkpoints",
    "predict": "found/predictions.json",
    "report": "run/report.html",
}


def type_all(folder: Path) -> None:
    program = Path(sys.executable).with_name("sightline")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = {}
    for name, (words, _, _) in COMMANDS.items():
        done = subprocess.run(
            [program, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        ended[name] = [done.returncode, done.stdout, done.stderr]
    (folder / "ended.json").write_text(json.dumps(ended))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm.once(tmp_path_factory, "real-processes", type_all)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_started_by_a_shell(name: str, folder: Path):
    _, expected, told = COMMANDS[name]
    code, out, err = json.loads((folder / "ended.json").read_text())[name]
    assert code == expected, out + err
    assert told in (err if expected else out) and "Traceback" not in err, out + err
    assert name not in WRITTEN or (folder / WRITTEN[name]).exists()
