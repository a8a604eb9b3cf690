"""The rates of the originals as a user asks for them: `sightline inspect RECIPE --lr-at ... --json`.

Worked out beforehand from the originals' formulas over ImageNet's 1,281,167 images.
"""

import json
import subprocess
import sys

import pytest

from sightline import cli

SMALL = "--model.arch=shufflenet_v2_x0_5"  # a network that is counted in no time; no rate asks for it


@pytest.mark.parametrize(
    ("name", "batch", "flag", "ranks", "steps_per_epoch", "expected"),
    [
        (
            "resnet50_keras",
            2048,
            "--ranks",
            8,
            625,
            {0: 0, 1: 0.000256, 625: 0.16, 3124: 0.799744, 3125: 0.8, 18750: 0.8, 18751: 0.08, 37501: 0.008}
            | {50001: 0.0008},
        ),
        pytest.param(
            "resnet50_keras",
            256,
            "--run.devices",
            1,
            5004,
            {0: 0, 12510: 0.05, 25020: 0.1, 150120: 0.1, 150121: 0.01},
            marks=pytest.mark.slow,
        ),
        (
            "resnet50_lars",
            2048,
            "--run.devices",
            8,
            625,
            {1: 0.0050667, 625: 3.1666667, 1875: 9.5, 1876: 9.4991784, 5000: 7.1060379, 12500: 2.7760236}
            | {20000: 0.4443544, 24999: 0.0001001},
        ),
        pytest.param(
            "resnet50_lars",
            256,
            "--ranks",
            1,
            5004,
            {0: 0, 15012: 2.5, 15013: 2.499973, 100080: 0.7305377},
            marks=pytest.mark.slow,
        ),
        (
            "resnext101",
            1024,
            "--run.devices",
            8,
            1251,
            {0: 0, 1: 0.0001023, 10008: 1.0238977, 10009: 1.0041663, 56295: 0.5120857},
        ),
        pytest.param("resnext101", 8192, "--ranks", 64, 156, {0: 0, 14039: 0.0001322}, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else "",
)
def test_rates_of_the_originals(
    capsys, name: str, batch: int, flag: str, ranks: int, steps_per_epoch: int, expected: dict[int, float]
):
    steps = [str(step) for step in expected]
    flags = [SMALL, f"--train.global-batch={batch}", flag, str(ranks), "--json", "--lr-at", *steps]
    assert cli.main(["inspect", name, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps_per_epoch"] == steps_per_epoch
    assert found["lr_at"] == pytest.approx({str(step): rate for step, rate in expected.items()}, abs=1e-6)


def test_ranks_of_several_hosts_are_more_than_the_devices_of_one(capsys):
    flags = [SMALL, "--run.devices=1", "--ranks=16", "--train.global-batch=4096", "--json", "--lr-at", "936"]
    assert cli.main(["inspect", "resnet50_lars", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["lr_at"] == {"936": pytest.approx(9.5)}


@pytest.mark.slow  # two processes that import torch
def test_two_ranks_train_at_the_rates_that_inspect_shows(tmp_path, capsys):
    flags = [SMALL, "--data.path=synthetic:classes=4,samples=64,size=32", "--data.classes=4", "--data.size=24"]
    flags += ["--train.global-batch=8", "--train.epochs=5", "--run.devices=2", "--run.device=cpu", "--run.workers=0"]
    flags += [f"--run.out={tmp_path}", "--run.log-every-steps=1", "--run.report=off", "--train.no-eval-at-end"]
    command = [sys.executable, "-m", "sightline", "train", "resnet50_lars", *flags, "--train.eval-every-epochs=9"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=240)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    used = {str(event["step"] - 1): event["lr"] for event in events if event["event"] == "train"}
    assert cli.main(["inspect", "resnet50_lars", *flags, "--json", "--lr-at", *used]) == 0
    assert json.loads(capsys.readouterr().out)["lr_at"] == pytest.approx(used, rel=1e-6)
    assert len(used) == 40 and max(used.values()) == pytest.approx(9.5)
