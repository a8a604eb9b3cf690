"""Going on with a run where its folder, its recipe or its checkpoint is not quite what it was."""

import json
import shutil
from pathlib import Path

import pytest
from tiny import tiny

from sightline import api
from sightline.errors import BadData, UsageError
from sightline.hardware import devices
from sightline.parts import Scores

TINY = [*tiny(), "--run.log-every-steps=1", "--run.keep=50", "--run.progress=auto"]


def train(folder: Path, *flags: str) -> Scores:
    return api.train(*api.load("demo_classification", [*TINY, f"--run.out={folder}", *flags]))


def events(folder: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == kind]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("ckpt-*"))


def test_a_run_past_its_new_end_is_finished(tmp_path: Path):
    first = train(tmp_path, "--train.epochs=3")
    before = checkpoints(tmp_path)
    again = train(tmp_path, "--train.epochs=2", "--run.override")
    assert again.values == first.values and checkpoints(tmp_path) == before


def test_more_epochs_with_override_resume(tmp_path: Path):
    train(tmp_path, "--train.epochs=1", "--schedule.kind=constant")
    train(tmp_path, "--train.epochs=3", "--schedule.kind=constant", "--run.override")
    assert [event["step"] for event in events(tmp_path, "train")] == list(range(1, 10))


def test_a_start_says_what_is_trained_on_what_and_for_how_long(tmp_path: Path, capsys):
    rate = ["--optimizer.lr=0.2", "--optimizer.lr-for-batch=64", "--run.progress=plain"]
    train(tmp_path, "--train.epochs=1", *rate)
    said = capsys.readouterr().out.splitlines()
    evaluated = next(line for line in said if "training and" in line)
    assert evaluated == "demo_classification: 24 training and 3 evaluation samples"
    device = devices.select("cpu").name()
    assert f"1 epoch of 3 steps, batch 8, base rate 0.025 (0.2 per 64 samples), fp32 on {device}" in said
    assert not any("resuming" in line or "stops after" in line for line in said)
    train(tmp_path, "--train.epochs=9", "--train.patience=1", "--train.max-steps=4", "--run.override", *rate)
    said = capsys.readouterr().out.splitlines()
    assert f"at most 9 epochs of 3 steps, batch 8, base rate 0.025 (0.2 per 64 samples), fp32 on {device}" in said
    assert "stops after 1 evaluation without a better top1 (train.patience)" in said and "resuming from step 3" in said


def test_another_recipe_or_other_data_are_refused_with_what_has_changed(tmp_path: Path):
    train(tmp_path, "--train.epochs=2", "--train.max-steps=1", "--optimizer.lr=0.1")
    changed = r"was made with another recipe:\n  optimizer.lr: 0.1 -> 0.2\nRestore the old values"
    with pytest.raises(UsageError, match=changed):
        train(tmp_path, "--train.epochs=2", "--optimizer.lr=0.2")
    with pytest.raises(UsageError, match="--run.override cannot change train.global_batch of a stored run"):
        train(tmp_path, "--train.epochs=2", "--optimizer.lr=0.1", "--train.global-batch=4")
    data = "--data.path=synthetic:classes=10,samples=32,size=24"
    with pytest.raises(BadData, match="the train data are not those that .*ckpt-00000001 was trained on"):
        train(tmp_path, "--train.epochs=2", "--optimizer.lr=0.1", data)
    with pytest.raises(UsageError, match="holds checkpoints and --run.resume never was given"):
        train(tmp_path, "--train.epochs=2", "--optimizer.lr=0.1", "--run.resume=never")
    assert checkpoints(tmp_path) == ["ckpt-00000001"]


@pytest.mark.parametrize(("samples", "last"), [(16, 8), (48, 24)])  # epochs of 2 or of 6 steps instead of 3
def test_other_data_with_override_resume_from_their_step(tmp_path: Path, samples: int, last: int):
    train(tmp_path, "--train.epochs=4", "--train.max-steps=7")
    data = f"--data.path=synthetic:classes=10,samples={samples},size=24"
    train(tmp_path, "--train.epochs=4", data, "--run.override")
    assert [event["step"] for event in events(tmp_path, "train")] == list(range(1, last + 1))
    assert events(tmp_path, "epoch")[-1]["epoch"] == 4


def test_the_same_command_resumes_also_where_it_began_with_another_runs_checkpoint(tmp_path: Path):
    """`--run.resume PATH` begins there; after a stop the folder's own checkpoints are further."""
    donor, own = tmp_path / "donor", tmp_path / "own"
    train(donor, "--train.epochs=3", "--run.checkpoint-every-steps=1")
    for name in checkpoints(donor)[4:]:
        shutil.rmtree(donor / "checkpoints" / name)
    flags = ["--train.epochs=3", "--run.checkpoint-every-steps=1", f"--run.resume={donor}"]
    whole = train(own, *flags)
    assert events(own, "resume")[0]["step"] == 4
    for name in checkpoints(own):
        if name > "ckpt-00000006":
            shutil.rmtree(own / "checkpoints" / name)  # as if it had been stopped there
    assert train(own, *flags) == whole
    assert events(own, "resume")[1]["step"] == 6


@pytest.mark.parametrize("rule", ["skip", "rewind"])
def test_steps_that_are_not_finite_are_reported_and_left_out(tmp_path: Path, rule: str):
    """A rate beyond all bounds: the first step is finite, all that follow are not."""
    diverging = ["--optimizer.lr=1e30", "--schedule.kind=constant", "--schedule.warmup-epochs=0", "--train.epochs=1"]
    train(tmp_path, *diverging, f"--run.on-nan={rule}")
    assert [event["step"] for event in events(tmp_path, "bad_step")] == [1, 2]
    assert all(len(event["samples"]) == 8 for event in events(tmp_path, "bad_step"))
    told = [event["text"] for event in events(tmp_path, "warning")]
    assert len(told) == 2 and all(("skipped" if rule == "skip" else "back to step 0") in text for text in told)
    state = json.loads((tmp_path / "checkpoints" / "ckpt-00000003" / "state.json").read_text())
    assert state["progress"]["bad_steps"] == 2
    assert state["progress"]["avoid"] == ([] if rule == "skip" else [1, 2])


def test_the_best_checkpoint_is_kept_and_pointed_to(tmp_path: Path):
    train(tmp_path, "--train.epochs=5", "--run.keep=1")
    scores = [(event["top1"], -event["loss"]) for event in events(tmp_path, "evaluate")]
    best = f"ckpt-{3 * (scores.index(max(scores)) + 1):08d}"  # of equals the one with the lowest loss
    assert (tmp_path / "checkpoints" / "best").read_text().strip() == best
    assert set(checkpoints(tmp_path)) == {best, "ckpt-00000015"}
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "ckpt-00000015"
