"""cuDNN tries its kernels in long runs alone, and a run keeps what it was started with."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tiny import tiny

from sightline import api
from sightline.hardware import devices
from sightline.train import trials
from sightline.train.step import Step


@pytest.mark.parametrize(
    ("steps", "stored", "resumed", "is_longer", "choice"),
    [
        (9_999, "", False, True, "off"),
        (10_000, "", False, True, "on"),
        (20_000, "off", True, False, "off"),  # the same run, whatever the rule says now
        (20_000, "off", True, True, "on"),  # given more epochs
        (9_999, "off", True, True, "off"),
        (10, "on", True, True, "on"),
        (10, "", True, False, "on"),  # of a version that always tried
    ],
)
def test_the_number_of_steps_decides_once(steps: int, stored: str, resumed: bool, is_longer: bool, choice: str):
    assert trials.choose(steps, stored, resumed, is_longer) == choice


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch):
    """Let this CPU count as a device with kernels to try. Return a training that gives what torch was set to in each of
    its steps, and the choice in its last checkpoint."""
    monkeypatch.setitem(devices.KINDS, "cpu", dataclasses.replace(devices.KINDS["cpu"], tries_kernels=True))
    monkeypatch.setattr(trials, "MANY_STEPS", 6)
    seen: list[bool] = []
    real = Step.__call__

    def call(step, *args):
        seen.append(torch.backends.cudnn.benchmark)
        real(step, *args)

    monkeypatch.setattr(Step, "__call__", call)

    def train(folder: Path, *flags: str) -> tuple[set[bool], str]:
        seen.clear()
        api.train(*api.load("demo_classification", [*tiny(), f"--run.out={folder}", *flags]))
        latest = max(folder.glob("checkpoints/ckpt-*/state.json"))
        return set(seen), json.loads(latest.read_text())["choices"].get(trials.TRIALS, "")

    return train


def test_a_short_run_takes_cudnns_own_rules_and_keeps_them(tried, tmp_path: Path):
    """Three steps an epoch, and 6 count as many."""
    assert tried(tmp_path / "short", "--train.epochs=1") == ({False}, "off")
    assert tried(tmp_path / "long", "--train.epochs=2") == ({True}, "on")
    assert tried(tmp_path / "stopped", "--train.epochs=2", "--train.max-steps=5") == ({False}, "off")
    assert tried(tmp_path / "stopped", "--train.epochs=2") == ({False}, "off")  # its first step was made without
    assert tried(tmp_path / "short", "--train.epochs=3") == ({True}, "on")
    assert tried(tmp_path / "equal", "--train.epochs=2", "--train.deterministic") == ({False}, "")


def test_a_run_whose_checkpoint_says_nothing_tries_as_runs_did(tried, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setitem(devices.KINDS, "cpu", dataclasses.replace(devices.KINDS["cpu"], tries_kernels=False))
        assert tried(tmp_path, "--train.epochs=1", "--train.max-steps=1")[1] == ""
    assert tried(tmp_path, "--train.epochs=1") == ({True}, "on")
