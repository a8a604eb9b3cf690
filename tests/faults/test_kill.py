"""A run that is killed and started again ends with the bits of one that never stopped (B5: 1, 2, 3)."""

import os
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = runpy.run_path(str(Path(__file__).with_name("conftest.py")))
FAULTY, bits = HERE["FAULTY"], HERE["bits"]

SIGKILLED = -signal.SIGKILL
# Everything that carries state from step to step: average, accumulation, mixup, momentum.
EVERYTHING = ("--train.ema", "0.9", "--train.accumulation", "2", "--data.mixup", "0.2", "--train.epochs", "4")
# Written while training continues, so that the kill may hit a step, a write, or both.
EVERY_STEP = ("--run.checkpoint-every-steps", "1", "--run.save-in-background")


def kill_and_resume(sightline, out, flags, first, second):
    """SIGKILL in the middle of the second epoch, as soon as a checkpoint of it is there; then the same command."""
    started = sightline.start(out, *flags, *EVERY_STEP, "--run.workers", str(first))
    # Or a later one: each is soon deleted again.
    started.until(lambda: any(path.name >= "ckpt-00000011" for path in (out / "checkpoints").glob("ckpt-????????")))
    os.kill(started.pid, signal.SIGKILL)
    assert started.wait().code == SIGKILLED
    again = sightline.run(out, *flags, *EVERY_STEP, "--run.workers", str(second))
    assert again.code == 0, again
    assert 11 <= again.events("resume")[0]["step"] < 32
    return again


@pytest.mark.parametrize(
    ("precision", "first", "second"),
    [
        ("fp32", 2, 0),
        *(
            pytest.param(precision, first, second, marks=pytest.mark.slow)
            for precision in ("fp32", "bf16", "fp16")
            for first, second in ((0, 0), (0, 2), (2, 0), (2, 2))
            if (precision, first, second) != ("fp32", 2, 0)
        ),
    ],
)
def test_killed_run_ends_with_equal_bits(sightline, reference, tmp_path, precision, first, second):
    flags = (*EVERYTHING, "--train.precision", precision)
    whole = reference(*flags)
    again = kill_and_resume(sightline, tmp_path / "run", flags, first, second)
    assert again.bits == whole.bits
    assert {"model.safetensors", "optimizer.safetensors", "ema.safetensors"} <= set(again.bits)
    assert again.progress == whole.progress


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--optimizer.kind", "adamw", "--optimizer.no-nesterov", "--optimizer.lr", "0.01"),
        ("--train.last-batch", "wrap", "--train.global-batch", "10"),
        ("--train.last-batch", "pad", "--train.global-batch", "10"),
        ("--train.clip", "1"),
    ],
    ids=lambda flags: flags[1],
)
def test_killed_run_ends_with_equal_bits_whatever_the_recipe(sightline, reference, tmp_path, flags):
    flags = (*flags, "--train.epochs", "4")
    whole = reference(*flags)
    assert kill_and_resume(sightline, tmp_path / "run", flags, 0, 0).bits == whole.bits


# One recipe of each task, tiny; every step is saved, and every fourth epoch evaluated.
TINY = "--train.global-batch 8 --train.precision fp32 --train.ema 0.9 --train.eval-every-epochs 4 --train.epochs 40"
TASKS = {
    "classification": (FAULTY, "--data.path synthetic:classes=4,samples=24,size=24 --data.mixup 0.2"),
    "detection": (
        "demo_detection",
        "--data.path synthetic:classes=4,samples=24,size=60 --data.classes 4 --data.size 48 --data.max-boxes 8"
        " --data.crop tf --model.width 4",
    ),
    "segmentation": ("demo_segmentation", "--data.path VOLUMES --model.width 4 --train.accumulation 2"),
}


@pytest.fixture(scope="session")
def volumes(tmp_path_factory) -> Path:
    """Six prepared volumes, one of which validates: with two in a batch an epoch has two steps."""
    write = runpy.run_path(str(Path(__file__).parents[1] / "recipes" / "conftest.py"))["write_blobs"]
    return write(tmp_path_factory.mktemp("volumes") / "blobs", range(6))


@pytest.fixture(params=TASKS)
def task(request, volumes) -> dict[str, Any]:
    """The recipe and the flags of a task."""
    recipe, flags = TASKS[request.param]
    return {"recipe": recipe, "flags": [*TINY.split(), *flags.replace("VOLUMES", str(volumes)).split()]}


def killed_and_resumed(sightline, out, task, kills: int) -> list[int]:
    """SIGKILL a process as often, each time after it has saved a few steps more, then let it end; return the steps
    that were resumed from."""

    def saved() -> int:
        return max((line["step"] for line in sightline.log(out) if line["event"] == "checkpoint"), default=0)

    def written() -> int:
        """Of a checkpoint that the process had no time to log; at the end of an epoch its step is saved again."""
        return max((int(path.name[5:]) for path in (out / "checkpoints").glob("ckpt-????????")), default=0)

    random = np.random.default_rng(0)
    for _ in range(kills):
        wanted = max(saved(), written()) + random.integers(1, 4)
        started = sightline.start(out, *task["flags"], *EVERY_STEP, recipe=task["recipe"])
        started.until(lambda step=wanted: saved() >= step)
        os.kill(started.pid, signal.SIGKILL)
        assert started.wait().code == SIGKILLED
    again = sightline.run(out, *task["flags"], *EVERY_STEP, recipe=task["recipe"])
    assert again.code == 0, again
    assert not again.warnings
    return [line["step"] for line in again.events("resume")]


@pytest.mark.slow
def test_every_task_killed_once_ends_with_equal_bits(sightline, task, tmp_path):
    whole = sightline.run(tmp_path / "whole", *task["flags"], recipe=task["recipe"])
    assert whole.code == 0, whole
    resumed = killed_and_resumed(sightline, tmp_path / "run", task, kills=1)
    assert len(resumed) == 1 and resumed[0] > 0
    assert bits(tmp_path / "run") == whole.bits


@pytest.mark.slow
def test_twenty_kills_in_one_run_of_every_task(sightline, task, tmp_path):
    whole = sightline.run(tmp_path / "whole", *task["flags"], recipe=task["recipe"])
    assert whole.code == 0, whole
    resumed = killed_and_resumed(sightline, tmp_path / "run", task, kills=20)
    print(f"resumed from steps {resumed} of {whole.progress['step']}")
    assert len(resumed) == 20 and resumed == sorted(set(resumed)), "each attempt went further than the one before"
    assert bits(tmp_path / "run") == whole.bits


@pytest.mark.slow
def test_workers_leave_when_their_trainer_is_killed(sightline, tmp_path):
    out = tmp_path / "run"
    started = sightline.start(out, "--run.workers", "2", FAULT="stop@train:3")
    workers = started.until(
        lambda: next((line["workers"] for line in sightline.log(out) if line["event"] == "start"), None)
    )
    assert len(workers) == 2
    os.kill(started.pid, signal.SIGKILL)
    assert started.wait().code == SIGKILLED
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, f"workers {workers} stayed behind"
