"""A step that is not finite on a device with streams, which the host hears of late: also the last step counts."""

import json
import sys
from pathlib import Path

import pytest
import torch

from sightline import cli, recipes

pytestmark = pytest.mark.device

FAULTY = str(Path(__file__).parents[1] / "faults" / "faulty.py")
# Without a graph: in one, Python code runs only when it is captured, and with it the fault.
EAGER = ("--run.compile", "off", "--run.workers", "0", "--run.progress", "off", "--run.checkpoint-every-steps", "2")


def train(monkeypatch, out: Path, *flags: str) -> int:
    """Sixteen steps, of which the last is NaN."""
    if torch.accelerator.current_accelerator().type == "cuda":
        flags = (*flags, "--run.graph", "off")
    for name in [name for name in sys.modules if name.startswith(recipes.OWN)]:
        monkeypatch.delitem(sys.modules, name)  # imported afresh, it counts its steps from one
    monkeypatch.setenv("FAULT", "nan@train:16")
    return cli.main(["train", FAULTY, "--run.out", str(out), *EAGER, *flags])


def newest(out: Path) -> dict:
    folder = out / "checkpoints"
    return json.loads((folder / (folder / "latest").read_text().strip() / "state.json").read_text())["progress"]


@pytest.mark.parametrize("how", ["--run.save-in-background", "--run.no-save-in-background"])
def test_the_last_step_is_looked_at_too(monkeypatch, tmp_path, how):
    assert train(monkeypatch, tmp_path / "run", how) == 5
    ended = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert ended["code"] == 5 and "not finite in step 15" in ended["reason"]
    assert newest(tmp_path / "run")["step"] == 14


def test_the_last_step_is_skipped_where_that_was_asked_for(monkeypatch, tmp_path):
    assert train(monkeypatch, tmp_path / "run", "--run.on-nan", "skip") == 0
    progress = newest(tmp_path / "run")
    assert (progress["step"], progress["bad_steps"]) == (16, 1)
