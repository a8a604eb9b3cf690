"""Stopped or killed around the end that a condition sets, a run ends as it would have without."""

import json
import os
import signal

import pytest

SIGKILLED = -signal.SIGKILL
EVERY_STEP = ("--run.checkpoint-every-steps", "1")
# Four epochs of eight steps.
EPOCHS = ("--train.epochs", "4", "--train.ema", "0.9")
STOPS = {
    "target": ("--train.target-score", "0.01"),
    "max_steps": ("--train.max-steps", "13"),
    "short epochs": ("--train.steps-per-epoch", "5"),
    "late evaluation": ("--train.eval-from-epoch", "3", "--train.eval-every-epochs", "4"),
    "head": ("--train.trainable", "head", "--train.epochs", "2"),
    "fp32": ("--train.fp32-ops", "BatchNorm2d", "fc", "--train.precision", "bf16", "--train.epochs", "2"),
    "warm-up": ("--run.warmup-steps", "2"),
}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=name, marks=[] if name == "target" else [pytest.mark.slow])
        for name, flags in STOPS.items()
    ],
)
def test_killed_it_ends_where_the_whole_run_ends(sightline, reference, tmp_path, flags):
    flags = (*EPOCHS, *flags)
    whole = reference(*flags)
    out = tmp_path / "run"
    started = sightline.start(out, *flags, *EVERY_STEP, FAULT="stop@train:5")
    started.until_stopped()
    os.kill(started.pid, signal.SIGKILL)
    assert started.wait().code == SIGKILLED
    again = sightline.run(out, *flags, *EVERY_STEP)
    assert again.code == 0 and again.events("resume")
    assert again.bits == whole.bits and again.progress == whole.progress
    assert [e["step"] for e in again.events("evaluate")] == [e["step"] for e in whole.events("evaluate")]
    third = sightline.run(out, *flags, *EVERY_STEP, progress="plain")
    assert third.code == 0 and "is finished" in third.stdout
    assert third.bits == whole.bits and len(third.events("start")) == len(again.events("start"))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(STOPS["target"], id="target"),
        pytest.param(STOPS["max_steps"], id="max_steps", marks=pytest.mark.slow),
    ],
)
def test_told_to_stop_in_the_evaluation_that_decides(sightline, reference, tmp_path, flags):
    """The step is saved without scores; the next start makes the evaluation and not one step."""
    flags = (*EPOCHS, *flags, "--data.path", "synthetic:classes=4,samples=128,size=24")  # two batches to evaluate
    whole = reference(*flags)
    assert len(whole.events("evaluate")) == 1
    stopped = sightline.run(tmp_path / "run", *flags, FAULT="term@eval:1")
    assert stopped.code == 128 + signal.SIGTERM
    last = whole.progress["step"]
    assert stopped.progress["step"] == last and stopped.progress["scored_step"] != last
    trained = len(stopped.events("train"))
    again = sightline.run(tmp_path / "run", *flags)
    assert again.code == 0 and len(again.events("train")) == trained
    assert again.bits == whole.bits and again.progress == whole.progress


def test_diverged_is_code_5_again_and_again(sightline, tmp_path):
    out = tmp_path / "run"
    for _ in range(2):
        ended = sightline.run(out, "--train.diverged-score", "0.999")
        assert ended.code == ended.exit_code_in_folder == 5
        assert "diverged: top1 0." in ended.stderr and "--train.diverged-score 0" in ended.stderr
        assert len(ended.events("start")) == 1 and ended.checkpoints == ["ckpt-00000008"]
    assert sightline.run(out).code == 0


def test_the_time_to_train_survives_a_kill(sightline, tmp_path):
    out = tmp_path / "run"
    killed = sightline.run(out, *EVERY_STEP, FAULT="kill@train:6")
    assert killed.code == SIGKILLED
    saved = json.loads((out / "checkpoints" / "ckpt-00000005" / "state.json").read_text())["stopwatch"]
    again = sightline.run(out, *EVERY_STEP)
    (whole,) = again.events("time_to_train")
    assert whole["running_s"] > saved["running_s"] > 0
    begun, ended = again.events("start")[0]["time"], again.events("evaluate_end")[-1]["time"]
    assert whole["wall_s"] > again.events("resume")[0]["time"] - again.events("train")[0]["time"]
    assert whole["wall_s"] <= ended - begun + 0.01
    assert json.loads((out / "exit.json").read_text())["time_to_train"]["wall_s"] == pytest.approx(
        whole["wall_s"], abs=0.001
    )


def test_the_benchmark_log_continues_after_a_kill(sightline, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    flags = (*EVERY_STEP, "--run.log-every-steps", "1", "--run.benchmark-log", str(log))
    assert sightline.run(out, *flags, FAULT="kill@train:6").code == SIGKILLED
    assert json.loads((log / "benchmark_run.log").read_text())["status"] == "running"
    again = sightline.run(out, *flags)
    assert again.code == 0
    lines = [json.loads(line) for line in (log / "metric.log").read_text().splitlines()]
    steps = [line["global_step"] for line in lines if line["name"] == "train/loss"]
    assert steps == list(range(1, 17))
    assert json.loads((log / "benchmark_run.log").read_text())["status"] == "success"
