"""`--run.compile auto` on a GPU: the switch in mid-run, what it leaves alone, and the starts after it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sightline import api, config
from sightline.data.loading.loader import BadSamples, Loader
from sightline.data.loading.order import TrainOrder
from sightline.engine.model import build_model
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.train import compiling
from sightline.train.schedules import RunLength
from sightline.train.state import TrainState
from sightline.train.step import build_step

pytestmark = pytest.mark.device

TINY = """--data.path=synthetic:classes=4,samples=640,size=40 --data.size=32 --data.eval-size=32 --data.eval-resize=36
--model.width=16 --train.global-batch=32 --train.precision=fp32 --train.epochs=4 --run.workers=2""".split()


@pytest.fixture
def cuda() -> devices.Device:
    device = devices.select()
    if device.kind != "cuda":
        pytest.skip(f"written for cuda, this is {device.kind}")
    device.activate()
    return device


def steps_of(device: devices.Device, compile_at: int) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Make four steps, compiled from one of them on."""
    recipe, run = config.load("demo_classification", [*TINY, "--run.compile=off"])
    bound = recipe.data.open("train", 0).bind(device, 32)
    order = TrainOrder(len(bound.dataset), 32, 0)
    loader = Loader(
        {"train": (bound, order)}, config.Run(workers=0), device, World(), BadSamples("fail", 0, print), lambda: None
    )
    loader.seek("train", 0, 4)
    state = TrainState(recipe, build_model(recipe, run, bound.dataset.spec, device), device, RunLength(1, 8))
    step = build_step(recipe, run, device, World(), state, bound)
    for number in range(4):
        batch = loader.next("train")
        step(batch, number, 0.01)
        if number + 1 == compile_at:
            step.compile(batch)
    loader.close()
    return step.read_totals(World()), [p.detach().cpu().clone() for p in state.model.parameters()]


def test_a_step_compiled_in_mid_run_stays_close_and_counts_on(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    totals, plain = steps_of(cuda, compile_at=0)
    compiled_totals, compiled = steps_of(cuda, compile_at=2)
    assert compiled_totals["steps"] == totals["steps"] == 4
    assert compiled_totals["loss"] == pytest.approx(totals["loss"], rel=1e-3)
    for a, b in zip(plain, compiled, strict=True):
        assert (a - b).norm() < 1e-2 * a.norm().clamp(min=1e-3)


def choice(folder: Path) -> str:
    latest = (folder / "checkpoints/latest").read_text().strip()
    return str(json.loads((folder / "checkpoints" / latest / "state.json").read_text())["choices"].get("compile"))


@pytest.mark.slow
def test_a_run_that_lasts_switches_once_and_resumes_compiled(cuda, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compiling, "COLD_S", 0.0)
    monkeypatch.setattr(compiling, "WARM_S", 0.0)
    flags = [*TINY, f"--run.out={tmp_path}"]
    api.train(*api.load("demo_classification", [*flags, "--train.max-steps=50"]))
    assert "compiling, about 0 s: " in capsys.readouterr().out
    assert choice(tmp_path) == "on"
    scores = api.train(*api.load("demo_classification", [*flags, "--train.max-steps=0", "--run.override"]))
    assert "compiling, about" not in capsys.readouterr().out
    assert scores.values["samples"] == 80


def test_a_short_run_is_not_compiled_and_says_so(cuda, tmp_path, capsys):
    api.train(*api.load("demo_classification", [*TINY, f"--run.out={tmp_path}"]))
    assert "not compiled: " in capsys.readouterr().out
    assert choice(tmp_path) == "off"


@pytest.mark.slow
def test_a_run_killed_after_its_choice_keeps_it(cuda, tmp_path):
    # `on` is what a stored choice becomes; the kill comes in the middle of an epoch after it.
    script = (
        "import sys; from sightline.train import compiling; compiling.COLD_S = compiling.WARM_S = 0.0\n"
        "if __name__ == '__main__':\n    from sightline.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    file = tmp_path / "run.py"
    file.write_text(script)
    flags = [*TINY, f"--run.out={tmp_path / 'run'}", "--run.checkpoint-every-steps=5"]
    command = [sys.executable, str(file), "train", "demo_classification", *flags]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 200
    while not (tmp_path / "run/checkpoints/ckpt-00000045").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "compiling, about" not in done.stdout
    assert choice(tmp_path / "run") == "on"
