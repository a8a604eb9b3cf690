"""More --train.epochs on a run that has ended or was stopped."""

import json
import os
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from tiny import tiny

TINY = ["demo_classification", *tiny(), "--run.progress=auto"]
NEVER_BETTER = ("--optimizer.lr=0", "--train.patience=1")


@pytest.fixture
def train(sightline):
    """train(out, *flags): three steps an epoch."""
    return lambda out, *flags: sightline("train", *TINY, "--run.out", out, *flags)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs; for reading only."""
    from sightline import cli

    out = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main(["train", *TINY, f"--run.out={out}", "--train.epochs=2"]) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def lines(out: Path, event: str) -> list[dict]:
    found = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == event]


def bits(out: Path) -> list[str]:
    newest = max((out / "checkpoints").glob("ckpt-????????"))
    return [sha256(file.read_bytes()).hexdigest() for file in sorted(newest.glob("*.safetensors"))]


def epochs(out: Path) -> int:
    return yaml.safe_load((out / "config.yaml").read_text())["train"]["epochs"]


def test_a_finished_run_resumes_at_its_last_step_with_the_schedule_of_the_new_length(train, run: Path, tmp_path: Path):
    said = train(run, "--train.epochs=4")
    assert said.code == 0 and "resuming from step 6" in said.out, said
    (line,) = re.findall(".*instead of.*", said.out)
    # Cosine after a warm-up of 3 steps: of 2 epochs the last step has 1/3 of the way left, of 4 the seventh 2/3.
    assert line == (
        "4 epochs instead of 2; the schedule is recomputed for them: the last rate was 0.05, the next is 0.15"
    )
    assert [line["step"] for line in lines(run, "train")][-1] == 12 and epochs(run) == 4
    assert lines(run, "resume")[-1]["changes"] == ["train.epochs: 2 -> 4"]
    rate = {line["step"]: line["lr"] for line in lines(run, "train")}
    assert train(tmp_path / "whole", "--train.epochs=4").code == 0
    assert {step: rate[step] for step in (10, 12)} == {
        line["step"]: line["lr"] for line in lines(tmp_path / "whole", "train") if line["step"] in (10, 12)
    }
    assert "is finished" in train(run, "--train.epochs=4").out


def test_a_lengthened_run_has_the_bits_of_one_that_was_as_long_from_the_start(train, tmp_path: Path):
    constant = ("--schedule.kind=constant", "--schedule.warmup-epochs=0")
    assert train(tmp_path / "long", *constant, "--train.epochs=3").code == 0
    assert train(tmp_path / "short", *constant, "--train.epochs=2").code == 0
    assert train(tmp_path / "short", *constant, "--epochs=3").code == 0
    assert bits(tmp_path / "short") == bits(tmp_path / "long")


def test_fewer_epochs_than_are_done_are_an_error(train, run: Path):
    said = train(run, "--train.epochs=1")
    assert said.code == 2 and "train.epochs=1, but 2 are done in " in said.err, said
    assert "give --train.epochs 2 or more" in said.err and epochs(run) == 2


def test_every_other_change_is_still_refused_with_the_diff(train, run: Path):
    said = train(run, "--train.epochs=4", "--optimizer.lr=0.1")
    assert said.code == 2 and "\n  optimizer.lr: 0.2 -> 0.1\n" in said.err, said
    assert said.err.count(" -> ") == 1 and epochs(run) == 2
    said = train(run, "--train.epochs=4", "--optimizer.lr=0.1", "--run.override")
    assert said.code == 0 and "4 epochs instead of 2" in said.out


def test_a_refused_change_comes_before_what_follows_from_it(sightline, tmp_path: Path):
    flags = [*(flag for flag in TINY if not flag.startswith("--data.eval")), "--train.max-steps=1"]
    assert sightline("train", *flags, "--run.out", tmp_path / "run").code == 0
    said = sightline("train", *flags, "--run.out", tmp_path / "run", "--data.size=32")
    follows = "\n  data.size: 24 -> 32\n  and what follows from that: data.eval_resize, data.eval_size\nRestore"
    assert said.code == 2 and follows in said.err, said


def test_an_interrupted_run_may_grow_and_not_shrink(train, run: Path, tmp_path: Path):
    """Three of four epochs are done, as after a stop."""
    assert train(run, "--train.epochs=4").code == 0
    newest = max((run / "checkpoints").glob("ckpt-????????"))
    shutil.rmtree(newest)
    assert json.loads((run / "checkpoints" / "ckpt-00000009" / "state.json").read_text())["progress"]["epoch"] == 3
    said = train(run, "--train.epochs=3")
    assert said.code == 2 and "\n  train.epochs: 4 -> 3\n" in said.err and "--run.override" in said.err, said
    said = train(run, "--train.epochs=5")
    assert said.code == 0 and "5 epochs instead of 4" in said.out and "resuming from step 9" in said.out, said
    assert [line["step"] for line in lines(run, "train")][-1] == 15


def test_a_run_that_patience_ended_needs_more_patience(train, tmp_path: Path):
    assert "1 evaluations brought no better" in train(tmp_path, *NEVER_BETTER, "--train.epochs=4").out
    said = train(tmp_path, *NEVER_BETTER, "--train.epochs=6")
    assert said.code == 2 and "does not continue this run: 1 evaluations brought no better" in said.err, said
    assert "--train.patience" in said.err and epochs(tmp_path) == 4
    said = train(tmp_path, "--optimizer.lr=0", "--train.patience=0", "--train.epochs=6")
    assert said.code == 0 and "6 epochs instead of 4" in said.out, said
    assert [line["epoch"] for line in lines(tmp_path, "epoch")][-1] == 6


def test_a_damaged_newest_checkpoint_is_passed_over_as_without_more_epochs(train, run: Path):
    newest = max((run / "checkpoints").glob("ckpt-????????"))
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(os.path.getsize(file.name) - 8)
    said = train(run, "--train.epochs=4")
    assert said.code == 0 and "resuming from step 3" in said.out and "4 epochs instead of 2" in said.out, said
