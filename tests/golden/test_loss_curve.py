"""The first 200 steps of a small run, kept per kind of device: a change of numbers must be meant.

SIGHTLINE_REGENERATE=1 pytest -m "slow or not slow" tests/golden/test_loss_curve.py   writes the file of this machine's
device anew. By default the CPU makes the first 75, an epoch and a half.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from sightline import api, config
from sightline.hardware import devices

FLAGS = """--data.path synthetic:classes=8,samples=1600,size=32 --data.classes 8 --data.size 32 --data.eval-size 32
--data.eval-resize 32 --data.crop-scale 1 1 --data.crop-ratio 1 1 --data.mixup 0.2
--model.width 8 --train.global-batch 32 --train.epochs 4 --train.precision fp32
--optimizer.lr 0.05 --run.log-every-steps 1 --run.progress off --run.workers 0 --run.threads 1 --run.compile off
--run.report off --train.eval-every-epochs 4""".split()
STEPS = 200
# Nothing is resized above: resizing rounds differently on other processors, by whole grey levels.


def curve(out: Path, *flags: str) -> list[float]:
    recipe, run = config.load("demo_classification", [*FLAGS, "--run.out", str(out), *flags])
    api.train(recipe, run)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "train"]


def compare(losses: list[float], kind: str, steps: int = STEPS) -> None:
    path = Path(__file__).parent / f"loss_curve_{kind}.json"
    if os.environ.get("SIGHTLINE_REGENERATE") and steps == STEPS:
        path.write_text(json.dumps({"torch": torch.__version__, "losses": [round(v, 6) for v in losses]}) + "\n")
    if not path.is_file():
        pytest.skip(f"no curve is kept for {kind} yet; SIGHTLINE_REGENERATE=1 writes it")
    golden = json.loads(path.read_text())["losses"]
    assert len(golden) == STEPS and len(losses) == steps
    # Other processors round differently, and training magnifies that: the start must agree, the rest on average.
    # CUDA picks its kernels by timing them, in TF32 or not, which shows within a few steps.
    start = 10 if kind == "cpu" else 3
    assert losses[:start] == pytest.approx(golden[:start], rel=2e-3)
    for first in range(0, steps, 25):
        mean, expected = (sum(part[first : first + 25]) / 25 for part in (losses, golden))
        assert mean == pytest.approx(expected, rel=0.05), f"steps {first} to {first + 24}"


@pytest.mark.parametrize("steps", [75, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_loss_curve_on_the_cpu(tmp_path, steps: int):
    stop = ("--train.max-steps", str(steps), "--train.no-eval-at-end")
    compare(curve(tmp_path / "run", "--run.device", "cpu", *stop), "cpu", steps)


@pytest.mark.device
def test_loss_curve_on_the_device(tmp_path):
    compare(curve(tmp_path / "run"), devices.select().kind)
