"""When a run writes checkpoints, and what the log tells of its epochs."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from tiny import tiny

from sightline import api
from sightline.config import Run
from sightline.engine import checkpoint
from sightline.errors import UsageError

# Epochs of three steps.
TINY = [*tiny(), "--run.progress=auto"]
EVERY_2 = ["--run.checkpoint-every-epochs=2", "--train.eval-every-epochs=2"]


def train(folder: Path, *flags: str) -> None:
    api.train(*api.load("demo_classification", [*TINY, f"--run.out={folder}", *flags]))


def events(folder: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == kind]


def saved(folder: Path) -> list[int]:
    return [event["step"] for event in events(folder, "checkpoint")]


def test_initial_periodic_and_final_and_only_the_newest_stay(tmp_path: Path):
    train(tmp_path, "--train.epochs=7", "--run.checkpoint-initial", "--run.keep=3", *EVERY_2)
    assert saved(tmp_path) == [0, 6, 12, 18, 21]
    best = (tmp_path / "checkpoints" / "best").read_text().strip()
    kept = {path.name for path in (tmp_path / "checkpoints").glob("ckpt-*")}
    assert kept == {"ckpt-00000012", "ckpt-00000018", "ckpt-00000021", best}


def test_steps_that_end_within_an_epoch_are_saved(tmp_path: Path):
    train(tmp_path, "--train.epochs=7", "--train.max-steps=8", *EVERY_2)
    assert saved(tmp_path) == [6, 8]


def test_what_scored_best_is_saved_between_turns(tmp_path: Path):
    """Else `best` would name a checkpoint that is not the best."""
    train(tmp_path, "--train.epochs=4", "--run.checkpoint-every-epochs=99", "--run.keep=9")
    state = json.loads((checkpoint.find(tmp_path, "latest") / "state.json").read_text())["progress"]
    scores = {event["step"]: (event["top1"], -event["loss"]) for event in events(tmp_path, "evaluate")}
    assert scores[state["best_step"]] == max(scores.values())
    assert (tmp_path / "checkpoints" / "best").read_text().strip() == f"ckpt-{state['best_step']:08d}"
    records = [step for step in scores if all(scores[step] > scores[earlier] for earlier in range(3, step, 3))]
    assert saved(tmp_path) == sorted({*records, 12})


def test_a_run_stopped_between_turns_ends_with_the_bits_of_one_that_was_not(tmp_path: Path):
    """2 + 2 epochs against 4: step, rate and momentum continue."""
    flags = ["--train.epochs=4", "--schedule.kind=cosine", *EVERY_2]
    train(tmp_path / "whole", *flags)
    train(tmp_path / "parts", *flags, "--train.max-steps=5")
    train(tmp_path / "parts", *flags)
    whole, parts = (checkpoint.find(tmp_path / name, "latest") for name in ("whole", "parts"))
    assert whole.name == parts.name == "ckpt-00000012"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert events(tmp_path / "whole", "train")[-1]["lr"] == events(tmp_path / "parts", "train")[-1]["lr"]


def test_no_initial_checkpoint_where_a_run_resumes(tmp_path: Path):
    train(tmp_path, "--train.epochs=2", "--train.max-steps=3", "--run.checkpoint-initial", "--run.keep=9")
    train(tmp_path, "--train.epochs=2", "--run.checkpoint-initial", "--run.keep=9")
    assert saved(tmp_path) == [0, 3, 6]


def test_epochs_between_checkpoints_are_counted_from_one():
    with pytest.raises(UsageError, match="run.checkpoint_every_epochs=0 must be at least 1"):
        Run(checkpoint_every_epochs=0)


def test_every_epoch_tells_its_loss_its_score_its_time_and_once_its_speed(tmp_path: Path, capsys):
    train(tmp_path, "--train.epochs=2", "--run.tensorboard", "--run.log-every-steps=2", "--run.progress=plain")
    found = events(tmp_path, "epoch")
    assert [(line["epoch"], line["step"]) for line in found] == [(1, 3), (2, 6)]
    for line in found:
        assert line["seconds"] * line["images_per_s"] == pytest.approx(24, rel=0.05)
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith(("epoch 1/2  loss", "epoch 2/2  loss"))]
    for line, event in zip(lines, found, strict=True):
        assert line.startswith(f"epoch {event['epoch']}/2  loss {event['loss']:.4g}  top1 0.") and "  0:00:" in line
    assert shown.count(" img/s\n") == 3  # that of the whole run comes last
    assert "time to train 0:00:" in shown
    curves = scalars(tmp_path)
    assert curves["epoch/images_per_s"] == curves["epoch/seconds"] == [3, 6]
    assert curves["train/lr"] == curves["train/top1"] == curves["train/loss"] == [2, 3, 4, 6]


def test_tensorboard_has_points_of_training_every_so_many_steps_if_asked(tmp_path: Path):
    every = ("--run.log-every-steps=1", "--run.tensorboard-every-steps=2")
    train(tmp_path, "--train.epochs=2", "--run.tensorboard", *every)
    assert [line["step"] for line in events(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]
    curves = scalars(tmp_path)
    assert curves["train/loss"] == curves["train/lr"] == [2, 4, 6]
    assert curves["epoch/seconds"] == curves["evaluate/top1"] == [3, 6]


def scalars(folder: Path) -> dict[str, list[int]]:
    """Name of each TensorBoard curve and the steps it has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {name: [event.step for event in board.Scalars(name)] for name in board.Tags()["scalars"]}


def test_parts_of_a_loss_are_shown_wherever_the_loss_is(tmp_path: Path, capsys):
    """A recipe of one's own whose task shows two sums, as a detector does."""
    recipe = tmp_path / "own.py"
    recipe.write_text(
        '"""Two parts."""\n'
        "import dataclasses\n"
        "from sightline.parts import Loss\n"
        "from sightline.recipes import demo_classification\n"
        "from sightline.tasks.classification import Classification\n\n\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Own(Classification):\n"
        "    def loss(self, model, batch):\n"
        "        total = super().loss(model, batch).total\n"
        "        part = total.detach() * len(batch['label'])\n"
        "        return Loss(total, {'class_loss': part * 0.75, 'box_loss': part * 0.25})\n\n\n"
        "def recipe():\n"
        "    return dataclasses.replace(demo_classification.recipe(), name='own', task=Own())\n"
    )
    flags = [*TINY, f"--run.out={tmp_path / 'run'}", "--train.epochs=1", "--run.tensorboard", "--run.progress=plain"]
    api.train(*api.load(str(recipe), [*flags, "--run.log-every-steps=2"]))
    line, _ = events(tmp_path / "run", "train")
    assert line["class_loss"] == pytest.approx(0.75 * line["loss"], rel=1e-5)
    assert line["box_loss"] == pytest.approx(0.25 * line["loss"], rel=1e-5)
    assert f"class_loss {line['class_loss']:.4g}  box_loss {line['box_loss']:.4g}  lr " in capsys.readouterr().out
    assert {"train/class_loss", "train/box_loss", "train/lr"} <= scalars(tmp_path / "run").keys()


def test_only_packages_that_have_changed_are_named(tmp_path: Path, capsys):
    flags = ("--train.epochs=2", "--run.progress=plain")
    train(tmp_path, *flags, "--train.max-steps=3")
    path = checkpoint.find(tmp_path, "latest")
    tensors, state = checkpoint.read(path)
    state["environment"]["packages"] |= {"torch": "1.0", "gone": "2"}
    shutil.rmtree(path)
    checkpoint.write(path, tensors, state)
    capsys.readouterr()
    train(tmp_path, *flags)
    shown = capsys.readouterr().out
    assert f"warning: torch changed from 1.0 to {version('torch')}; results may differ in the last bits\n" in shown
    assert "warning: gone changed from 2 to absent; " in shown and shown.count("may differ") == 2 and "{" not in shown
