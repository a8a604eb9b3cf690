"""When a run evaluates, when it ends, and what the same command does afterwards."""

import json
import math
import re
import shutil
import threading
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from sightline import api, config
from sightline.config import Recipe, Run, TrainConfig
from sightline.engine import checkpoint
from sightline.engine.progress import TrainProgress
from sightline.errors import Diverged, UsageError
from sightline.metrics.topk import TopK
from sightline.parts import Batch, DataSpec, Loss, ModelConfig, Scores
from sightline.runs.folder import BEST_SCORES
from sightline.runs.screen import Screen
from sightline.tasks.classification import Classification
from sightline.train import stop_time
from sightline.train.schedules import ScheduleConfig

# Four epochs of three steps.
TINY = """--data.path=synthetic:classes=10,samples=24,size=24 --data.size=24 --data.eval-resize=24
--data.eval-size=24 --train.epochs=4 --train.global-batch=8 --train.precision=fp32 --run.workers=0 --run.device=cpu
--run.log-every-steps=1 --run.keep=50 --run.report=off""".split()


RESNET = "--model.width=4"  # for scores that neither stay nor become perfect


@dataclass(frozen=True)
class Thin(ModelConfig):
    """A few layers: when a run ends does not depend on its network, whose twenty convolutions would take half of it."""

    def build(self, spec: DataSpec) -> nn.Module:
        layers = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(128, len(spec.classes)))


@cache  # to build the parser takes as long as to train
def loaded(*flags: str) -> tuple[Recipe, Run]:
    recipe, run = api.load("demo_classification", [*TINY, *flags])
    return recipe if RESNET in flags else replace(recipe, model=Thin()), run


def train(folder: Path, *flags: str) -> Scores:
    recipe, run = loaded(*flags)
    return api.train(recipe, replace(run, out=str(folder)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """finished(*flags): the folder and the scores of a run that is made once; for reading only."""
    folder = tmp_path_factory.mktemp("finished")

    @cache
    def run(*flags: str) -> tuple[Path, Scores]:
        out = folder / str(len(list(folder.iterdir())))
        return out, train(out, *flags)

    return run


def test_a_run_that_is_not_evaluated_at_its_end_ends_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    never = ("--train.no-eval-at-end", "--train.eval-every-epochs=9", "--run.progress=plain")
    for name, more, steps in (("epochs", (), 12), ("steps", ("--train.max-steps=7",), 7)):
        scores = train(tmp_path / name, *never, *more)
        assert scores.values == {} and seen(tmp_path / name, "evaluate", "step") == []
        assert checkpoint.find(tmp_path / name, "best").name == f"ckpt-{steps:08d}", "the last is saved"
        line = r"are done; nothing was evaluated; total training time 0:00:\d\d at (\S+) img/s"
        shown = re.search(line, capsys.readouterr().out)[1]
        [end], epochs = events(tmp_path / name, "exit"), events(tmp_path / name, "epoch")
        images = [8 * (this["step"] - before) for this, before in zip(epochs, range(0, steps, 3), strict=True)]
        seconds = sum(count / epoch["images_per_s"] for count, epoch in zip(images, epochs, strict=True))
        assert end["images_per_s"] == pytest.approx(steps * 8 / seconds, rel=1e-3)
        assert float(shown.replace(",", "")) == pytest.approx(end["images_per_s"], rel=0.05)
        assert seconds - 0.001 <= end["running_s"] <= end["wall_s"] + 0.001
        train(tmp_path / name, *never, *more)
        assert "is finished" in capsys.readouterr().out
        assert "images_per_s" not in events(tmp_path / name, "exit")[-1], "nothing was trained"
    train(tmp_path / "some", "--train.no-eval-at-end", "--train.eval-every-epochs=3")
    assert seen(tmp_path / "some", "evaluate", "step") == [9], "after epoch 3 of 4, and not at the end"


def test_an_evaluation_of_some_batches_counts_only_those(tmp_path: Path):
    more = ("--data.path=synthetic:classes=10,samples=96,size=24", "--train.max-steps=1")  # 12 of them to evaluate
    scores = train(tmp_path / "run", "--train.eval-max-steps=1", *more)
    whole = train(tmp_path / "whole", *more)
    assert (scores.values["samples"], whole.values["samples"]) == (8, 12)


def events(folder: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == kind]


def seen(folder: Path, kind: str, key: str) -> list:
    return [event[key] for event in events(folder, kind)]


def bits(folder: Path) -> dict[str, bytes]:
    latest = checkpoint.find(folder, "latest")
    return {path.name: path.read_bytes() for path in sorted(latest.glob("*.safetensors"))}


def progress(folder: Path) -> dict:
    return json.loads((checkpoint.find(folder, "latest") / "state.json").read_text())["progress"]


# Evaluations


@pytest.mark.parametrize(
    ("first", "every", "epochs", "evaluated"),
    [
        (3, 4, 12, [3, 7, 11, 12]),  # MLPerf: offset 3, every 4; and the last epoch
        (2, 4, 10, [2, 6, 10]),  # the last one is not evaluated twice
        (0, 4, 9, [4, 8, 9]),
        (0, 1, 3, [1, 2, 3]),
        (5, 1, 7, [5, 6, 7]),
        (9, 1, 4, [4]),
    ],
)
def test_evaluations_start_late_and_come_at_intervals(first: int, every: int, epochs: int, evaluated: list[int]):
    cfg = TrainConfig(epochs=epochs, global_batch=8, eval_from_epoch=first, eval_every_epochs=every)
    assert [epoch for epoch in range(1, epochs + 1) if cfg.evaluates_after(epoch)] == evaluated


def test_a_run_evaluates_when_it_should(tmp_path: Path):
    train(tmp_path, "--train.eval-from-epoch=1", "--train.eval-every-epochs=2")
    assert seen(tmp_path, "evaluate", "epoch") == [1, 3, 4]


def test_evaluations_begin_and_end_and_the_last_one_gives_the_time_to_train(tmp_path: Path, capsys):
    train(tmp_path, "--train.epochs=2", "--run.progress=plain")
    begins, ends = events(tmp_path, "evaluate_begin"), events(tmp_path, "evaluate_end")
    assert [e["step"] for e in begins] == [e["step"] for e in ends] == [3, 6]
    for begin, end in zip(begins, ends, strict=True):
        assert begin["time"] <= end["time"]
    (whole,) = events(tmp_path, "time_to_train")
    assert 0 < ends[0]["running_s"] < ends[1]["running_s"] == whole["running_s"] and whole["step"] == 6
    # The first step comes after the `start` event.
    assert whole["wall_s"] <= ends[1]["time"] - events(tmp_path, "start")[0]["time"] + 0.01
    for file in ("scores.json", "exit.json"):
        told = json.loads((tmp_path / file).read_text())["time_to_train"]
        assert told == pytest.approx({key: whole[key] for key in ("wall_s", "running_s")}, abs=0.001)
    assert "2 epochs are done; time to train 0:00:" in capsys.readouterr().out


def test_the_time_to_train_counts_over_starts(tmp_path: Path):
    train(tmp_path, "--train.max-steps=6")
    (first,) = events(tmp_path, "time_to_train")
    path = checkpoint.find(tmp_path, "latest")
    tensors, state = checkpoint.read(path)
    state["stopwatch"]["first_step_at"] -= 1000  # as if the pause had been long
    checkpoint.write(tmp_path / "other" / "checkpoints" / path.name, tensors, state)
    train(tmp_path / "other")
    (second,) = events(tmp_path / "other", "time_to_train")
    assert second["wall_s"] > 1000 > second["running_s"] > first["running_s"]


# The target


def test_the_target_ends_a_run_and_the_same_command_does_not_resume(tmp_path: Path, capsys):
    flags = ["--train.target-score=0.01", "--data.path=synthetic:classes=2,samples=24,size=24", "--data.classes=2"]
    scores = train(tmp_path, *flags)
    score = scores.values["top1"]
    assert score >= 0.01 and seen(tmp_path, "evaluate", "step") == [3]
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == 0
    assert f"top1 {score:.4f} has reached the target 0.01 at step 3" in capsys.readouterr().out
    before = bits(tmp_path)
    assert train(tmp_path, *flags).values == scores.values
    assert "is finished, top1" in capsys.readouterr().out
    assert bits(tmp_path) == before and len(events(tmp_path, "start")) == 1
    # A target that is not reached yet needs no --run.override: it changes no step.
    whole = train(tmp_path / "whole", *flags[1:])
    again = train(tmp_path, "--train.target-score=0", *flags[1:])
    assert again == whole and bits(tmp_path) == bits(tmp_path / "whole")


def test_a_target_that_is_not_reached_changes_nothing(tmp_path: Path, finished):
    # Ten classes after twelve steps: nobody is perfect.
    plain, scores = finished(RESNET)
    assert train(tmp_path, RESNET, "--train.target-score=1") == scores
    assert bits(tmp_path) == bits(plain)


# Divergence


def test_a_score_that_is_too_low_ends_the_run_with_code_5(tmp_path: Path, finished):
    flags = ["--train.diverged-score=0.99"]
    for start in range(2):  # a restart finds out at once
        with pytest.raises(Diverged, match=r"top1 0\.\d{4} at step 3 is not above train.diverged_score=0.99") as error:
            train(tmp_path, *flags)
        assert error.value.exit_code == 5
        assert json.loads((tmp_path / "exit.json").read_text())["code"] == 5
        assert len(events(tmp_path, "start")) == 1, start
    assert progress(tmp_path)["scored_step"] == 3
    plain, scores = finished()
    assert train(tmp_path) == scores and bits(tmp_path) == bits(plain)


def test_a_score_that_is_not_a_number_has_diverged_too(tmp_path: Path):
    train(tmp_path / "run", "--train.epochs=1")
    path = checkpoint.find(tmp_path / "run", "latest")
    tensors, state = checkpoint.read(path)
    state["progress"]["scores"]["top1"] = math.nan
    checkpoint.write(tmp_path / "other" / "checkpoints" / path.name, tensors, state)
    with pytest.raises(Diverged):
        train(tmp_path / "other", "--train.epochs=1", "--train.diverged-score=0.001")


# Patience

CONSTANT = ["--schedule.kind=constant", "--schedule.warmup-epochs=0"]


@pytest.mark.parametrize(
    ("history", "waited"),
    [
        ([], 0),
        ([0.5], 0),
        ([0.5, 0.5], 1),  # equal is not better
        ([0.5, 0.4, 0.6], 0),
        ([0.5, 0.4, 0.45, 0.5], 3),
        ([0.2, math.nan, math.nan], 2),
        ([math.nan, 0.1], 0),
        ([0.0, -0.1], 1),
    ],
    ids=str,
)
def test_evaluations_are_counted_from_the_best_one(history: list[float], waited: int):
    assert TrainProgress(history=history).evaluations_since_best() == waited


@pytest.mark.slow  # test_fields.py has patience and min_epochs in runs of four epochs
def test_patience_ends_a_run_after_its_least_epochs_and_a_larger_one_resumes(tmp_path: Path, capsys):
    """A rate of nothing: no score is better than the first."""
    still = [*CONSTANT, "--optimizer.lr=1e-30", "--optimizer.weight-decay=0", "--train.epochs=8"]
    flags = [*still, RESNET, "--data.path=synthetic:classes=10,samples=800,size=24", "--train.steps-per-epoch=1"]
    whole = train(tmp_path / "whole", *flags)
    history = progress(tmp_path / "whole")["history"]
    run = tmp_path / "run"

    def ends(*more: str) -> int:
        """The epoch in which it ends, with the bits of a run of so many epochs."""
        train(run, *flags, *more)
        return progress(run)["epoch"]

    def expected(patience: int, least: int) -> int:
        for epoch in range(1, 9):
            rises = [n for n in range(epoch) if all(history[n] > before for before in history[:n])]
            if epoch - 1 - rises[-1] >= patience and epoch >= least:
                return epoch
        return 8

    first = expected(1, 0)
    assert first < 4, history
    assert ends("--train.patience=1") == first
    best = f"{max(history[:first]):.4f} at step {history.index(max(history[:first])) + 1}"
    assert f"1 evaluations brought no better top1 than {best} (train.patience=1); time to" in capsys.readouterr().out
    short = train(tmp_path / "short", *flags, f"--train.epochs={first}")
    before = bits(run)
    assert before == bits(tmp_path / "short")
    assert train(run, *flags, "--train.patience=1").values == short.values  # the same command does nothing more
    assert "is finished, 1 evaluations brought no better top1" in capsys.readouterr().out
    assert bits(run) == before and len(events(run, "start")) == 1
    # What changes no step needs no --run.override.
    for patience, least in ((1, first + 2), (2, 0), (3, 0)):
        wanted = max(expected(patience, least), progress(run)["epoch"])
        assert ends(f"--train.patience={patience}", f"--train.min-epochs={least}") == wanted
    assert train(run, *flags) == whole and bits(run) == bits(tmp_path / "whole")


def test_a_run_that_patience_ends_between_evaluations_is_evaluated_once_more(tmp_path: Path):
    """Also where the epoch that ends it is the first one after a resume."""
    still = [*CONSTANT, "--optimizer.lr=1e-30", "--optimizer.weight-decay=0", "--train.steps-per-epoch=1"]
    flags = [*still, "--train.epochs=8", "--train.eval-every-epochs=2", "--train.patience=1", "--train.min-epochs=5"]
    whole = train(tmp_path / "whole", *flags)
    assert seen(tmp_path / "whole", "evaluate", "epoch") == [2, 4, 5]
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(checkpoint.find(tmp_path / "resumed", "latest"))
    (tmp_path / "resumed" / "log.jsonl").unlink()
    assert train(tmp_path / "resumed", *flags) == whole
    assert seen(tmp_path / "resumed", "resume", "step") == [4]
    assert seen(tmp_path / "resumed", "evaluate", "epoch") == [5]
    assert bits(tmp_path / "resumed") == bits(tmp_path / "whole")


def test_only_planned_evaluations_count(tmp_path: Path):
    """Two hard stops bring evaluations of their own; patience must not count them."""
    flags = [*CONSTANT, "--train.patience=1", "--train.epochs=2", "--train.eval-every-epochs=2"]
    for stop in (1, 2, 4):
        train(tmp_path, *flags, f"--train.max-steps={stop}")
        assert progress(tmp_path)["step"] == stop and progress(tmp_path)["history"] == []


# Scores that are no numbers


def test_nan_is_never_best_and_any_number_beats_it():
    noted = TrainProgress()
    told = []
    for noted.step, score in enumerate([math.nan, -1.0, math.nan, -2.0, 0.5, math.nan], start=1):
        told.append(noted.note({"dice": score}, "dice", planned=True))
    assert told == [False, True, False, False, True, False]
    assert (noted.best_score, noted.best_step) == (0.5, 5) and noted.evaluations_since_best() == 1
    # As a checkpoint of a run that had taken NaN for the best says it.
    resumed = TrainProgress(step=9, best_score=math.nan, best_step=3)
    assert resumed.note({"dice": 0.0}, "dice", planned=True) and (resumed.best_score, resumed.best_step) == (0.0, 9)


class Scripted(TopK):
    """Scores as a test wants them, one for each evaluation."""

    to_come: ClassVar[list[float]] = []

    def result(self) -> Scores:
        found = super().result()
        return replace(found, values={**found.values, "top1": Scripted.to_come.pop(0)})


@dataclass(frozen=True)
class ScriptedTask(Classification):
    def metric(self, spec: DataSpec, device: torch.device) -> Scripted:
        return Scripted(spec.classes, self.label_smoothing, device)


def train_scripted(folder: Path, scores: list[float], *flags: str) -> None:
    recipe, run = loaded(*flags)
    Scripted.to_come = scores
    api.train(replace(recipe, task=ScriptedTask(**vars(recipe.task))), replace(run, out=str(folder)))
    assert not Scripted.to_come


@pytest.mark.parametrize("stop", [0, 3, 7])
def test_the_best_checkpoint_moves_on_from_a_score_that_is_not_a_number(tmp_path: Path, stop: int):
    """In one go, and on from where only NaN was known, or a number after it."""
    scores = [math.nan, 0.25, math.nan, 0.125]
    if stop:
        done = stop // 3
        hard = [0.0] if stop % 3 else []  # a stop within an epoch brings an evaluation of its own
        train_scripted(tmp_path, scores[:done] + hard, f"--train.max-steps={stop}")
        assert (progress(tmp_path)["best_step"]) == (6 if stop == 7 else -1)
        scores = scores[done:]
    train_scripted(tmp_path, scores)
    assert (progress(tmp_path)["best_score"], progress(tmp_path)["best_step"]) == (0.25, 6)
    assert checkpoint.find(tmp_path, "best").name == "ckpt-00000006"
    assert json.loads((tmp_path / BEST_SCORES).read_text())["step"] == 6


def test_a_run_without_any_number_ends_by_its_patience(tmp_path: Path, capsys):
    train_scripted(tmp_path, [math.nan] * 2, "--train.patience=2")
    assert progress(tmp_path)["best_step"] == -1 and not (tmp_path / BEST_SCORES).exists()
    assert checkpoint.find(tmp_path, "best").name == "ckpt-00000006"  # the newest, where none is best
    train_scripted(tmp_path, [], "--train.patience=2")  # finished: nothing is evaluated again
    assert "2 evaluations brought no top1 that is a number" in capsys.readouterr().out


# A plateau of the loss


def test_a_plateau_of_the_loss_drops_the_rate_and_resumes_to_the_same_bits(tmp_path: Path):
    """A rate at which the loss soon rises; torch's scheduler over the same losses gives the same rates."""
    plateau = [RESNET, "--schedule.kind=plateau", "--schedule.plateau-on=val_loss", "--schedule.patience=0"]
    flags = [*plateau, "--schedule.warmup-epochs=0", "--schedule.factor=0.3", "--optimizer.lr=0.05", "--train.epochs=6"]
    whole = train(tmp_path / "whole", *flags)
    losses = seen(tmp_path / "whole", "evaluate", "loss")
    assert progress(tmp_path / "whole")["val_losses"] == losses
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", factor=0.3, patience=0)
    rates = []
    for loss in losses:
        rates += [optimizer.param_groups[0]["lr"]] * 3
        reference.step(loss)
    assert seen(tmp_path / "whole", "train", "lr") == rates and len(set(rates)) > 1
    run = tmp_path / "run"
    train(run, *flags, "--train.max-steps=11")
    assert train(run, *flags) == whole and bits(run) == bits(tmp_path / "whole")
    assert progress(run)["val_losses"] == losses


def test_a_checkpoint_without_losses_still_loads(tmp_path: Path, finished):
    whole, scores = finished()
    path = checkpoint.find(finished("--train.max-steps=5")[0], "latest")
    tensors, state = checkpoint.read(path)
    del state["progress"]["val_losses"]
    checkpoint.write(tmp_path / "checkpoints" / path.name, tensors, state)
    resumed = train(tmp_path)  # of equal scores the first stays best, as losses are missing
    assert (resumed.values, resumed.best_score) == (scores.values, scores.best_score)
    assert progress(tmp_path)["val_losses"] == progress(whole)["val_losses"][1:]


def test_of_equal_scores_the_one_with_the_lower_loss_is_best():
    noted, seen = TrainProgress(), []
    rows = [(0.5, 3, True), (0.75, 2, True), (0.75, 4, True), (0.75, 1, True), (0.75, 0.5, False), (0.75, 1, True)]
    for noted.step, (top1, loss, planned) in enumerate(rows, start=1):
        is_best = noted.note({"top1": top1, "loss": loss}, "top1", planned)
        seen.append((is_best, noted.best_step, noted.standing(patience=9)))
    assert seen == [
        (True, 1, "best so far"),
        (True, 2, "best so far"),
        (False, 2, "no better for 1 of 9"),
        (True, 4, "equal to the best, lower loss, no better for 2 of 9"),
        (False, 4, "no better for 2 of 9"),  # a stop that was not planned does not decide
        (False, 4, "no better for 3 of 9"),
    ]
    assert noted.evaluations_since_best() == 3, "patience waits for a better score"
    noted.step, noted.val_losses = 7, []  # as a checkpoint of before there were losses
    assert not noted.note({"top1": 0.75, "loss": 0}, "top1", True) and noted.best_step == 4


def test_the_loss_has_two_names_and_a_task_without_one_is_refused():
    schedule = ScheduleConfig("plateau", plateau_on="val_loss")
    noted = TrainProgress()
    assert noted.watched(schedule) == []  # nothing is known before the first evaluation
    noted.note({"dice": 0.5, "val_loss": 0.25}, "dice", planned=True)
    noted.note({"dice": 0.5, "val_loss": 0.125}, "dice", planned=False)
    noted.note({"top1": 0.5, "loss": 0.5}, "top1", planned=True)
    assert noted.watched(schedule) == [0.25, 0.5] and noted.watched(ScheduleConfig("plateau")) == [0.5, 0.5]
    noted.note({"mAP": 0.5, "AP50": 0.7}, "mAP", planned=True)
    with pytest.raises(UsageError, match="plateau_on=val_loss needs .* val_loss or loss; this task's gives mAP, AP50"):
        noted.watched(schedule)


# Short epochs and hard stops


def test_short_epochs_move_the_schedule_too(tmp_path: Path):
    flags = ["--train.steps-per-epoch=2", "--schedule.warmup-epochs=1", "--schedule.kind=cosine", "--optimizer.lr=0.4"]
    train(tmp_path, *flags)
    assert seen(tmp_path, "start", "steps") == [8] and seen(tmp_path, "evaluate", "step") == [2, 4, 6, 8]
    expected = [0.2, 0.4, *(0.2 * (1 + math.cos(math.pi * k / 6)) for k in range(6))]
    assert seen(tmp_path, "train", "lr") == pytest.approx(expected)


def test_a_cap_beyond_the_epoch_changes_nothing(tmp_path: Path, finished):
    plain, scores = finished()
    assert train(tmp_path, "--train.steps-per-epoch=99") == scores
    assert bits(tmp_path) == bits(plain)


def test_short_epochs_cannot_be_changed_on_the_way(tmp_path: Path):
    train(tmp_path, "--train.epochs=1")
    with pytest.raises(UsageError, match="train.steps_per_epoch: 0 -> 2"):
        train(tmp_path, "--train.epochs=1", "--train.steps-per-epoch=2", "--run.override")


@pytest.mark.parametrize("stop", [2, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (3, 4, 6))])
def test_a_hard_stop_is_evaluated_saved_and_resumes_to_the_same_bits(tmp_path: Path, finished, stop: int):
    """Within an epoch, at its end, and at the end of one without an evaluation; plateau looks at every score."""
    flags = ["--train.eval-every-epochs=2", "--schedule.kind=plateau", "--schedule.patience=0", "--train.ema=0.5"]
    whole, scores = finished(*flags)
    run = tmp_path
    first = train(run, *flags, f"--train.max-steps={stop}")
    assert seen(run, "train", "step") == list(range(1, stop + 1)) and seen(run, "evaluate", "step") == [stop]
    assert checkpoint.find(run, "latest").name == f"ckpt-{stop:08d}"
    before = bits(run)
    assert train(run, *flags, f"--train.max-steps={stop}").values == first.values and bits(run) == before
    assert train(run, *flags, f"--train.max-steps={stop - 1}").values == first.values and bits(run) == before
    assert train(run, *flags, "--train.max-steps=11").values["samples"] == 3
    assert train(run, *flags) == scores and bits(run) == bits(whole)
    assert progress(run)["history"] == progress(whole)["history"]
    # The schedule is that of all epochs from the start.
    assert seen(run, "train", "lr") == seen(whole, "train", "lr")


def test_a_hard_stop_beyond_the_end_is_none(tmp_path: Path, finished):
    assert train(tmp_path, "--train.max-steps=500") == finished()[1]
    assert seen(tmp_path, "start", "steps") == [12] and len(events(tmp_path, "evaluate")) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train.target-score=75.9"], r"train.target_score=75.9 must be in \[0, 1\]; a share, not per cent"),
        (["--train.target-score=nan"], "train.target_score=nan"),
        (["--train.diverged-score=-0.1"], "train.diverged_score=-0.1"),
        (["--train.target-score=0.3", "--train.diverged-score=0.3"], "must lie below train.target_score=0.3"),
        (["--train.max-steps=-1"], "train.max_steps=-1 must be at least 0"),
        (["--train.patience=-1"], "train.patience=-1 must be at least 0; 0 switches it off"),
        (["--train.min-epochs=-1"], "train.min_epochs=-1 must be at least 0"),
        (["--train.steps-per-epoch=-1"], "train.steps_per_epoch=-1 must be at least 0"),
        (["--train.eval-from-epoch=-1"], "train.eval_from_epoch=-1 must be at least 0"),
        (["--run.warmup-steps=-1"], "run.warmup_steps=-1 must be at least 0"),
        (["--run.max-cpus=-1"], "run.max_cpus=-1 must be at least 0"),
        (["--run.test-id=x"], "run.test_id='x' goes into benchmark_run.log; add --run.benchmark-log DIR"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_cannot_work_are_refused(flags: list[str], message: str):
    with pytest.raises(UsageError, match=message):
        config.load("demo_classification", flags)


# The base rate


def test_the_base_rate_is_resolved_once(tmp_path: Path, capsys):
    """A checkpoint's value wins over what this start would resolve; another rate that is asked for wins over it."""
    flags = ["--schedule.kind=constant", "--schedule.warmup-epochs=0"]
    train(tmp_path / "run", *flags, "--optimizer.lr=0.125", "--train.max-steps=3")
    assert "base rate 0.125," in capsys.readouterr().out
    assert progress(tmp_path / "run")["base_lr"] == 0.125 == events(tmp_path / "run", "start")[0]["base_lr"]
    path = checkpoint.find(tmp_path / "run", "latest")
    tensors, state = checkpoint.read(path)
    state["progress"]["base_lr"] = 0.5  # as more ranks would have resolved it
    for folder in ("same", "other"):
        checkpoint.write(tmp_path / folder / "checkpoints" / path.name, tensors, state)
    train(tmp_path / "same", *flags, "--optimizer.lr=0.125")
    assert set(seen(tmp_path / "same", "train", "lr")) == {0.5} and progress(tmp_path / "same")["base_lr"] == 0.5
    train(tmp_path / "other", *flags, "--optimizer.lr=0.25", "--run.override")
    assert set(seen(tmp_path / "other", "train", "lr")) == {0.25} and progress(tmp_path / "other")["base_lr"] == 0.25


def test_a_checkpoint_without_a_base_rate_still_loads(tmp_path: Path, finished):
    whole, scores = finished()
    path = checkpoint.find(finished("--train.max-steps=5")[0], "latest")
    tensors, state = checkpoint.read(path)
    for key in ("base_lr", "scored_step"):
        del state["progress"][key]
    del state["stopwatch"]
    checkpoint.write(tmp_path / "checkpoints" / path.name, tensors, state)
    assert train(tmp_path) == scores
    assert bits(tmp_path) == bits(whole)


def test_what_cannot_be_scored_is_refused_before_the_first_step(tmp_path: Path):
    """Regions of brain tumours, asked of a task with other classes."""
    flags = """--data.path=synthetic:samples=8 --data.task=04 --model.width=2 --train.global-batch=8 --train.epochs=1
    --train.precision=fp32 --run.workers=0 --run.device=cpu --run.log-every-steps=1 --task.regions=brats""".split()
    with pytest.raises(UsageError, match=r"task\.regions=brats"):
        api.train(*api.load("unet2d", [*flags, f"--run.out={tmp_path}"]))
    assert events(tmp_path, "start") == events(tmp_path, "train") == []


def test_a_run_with_patience_says_how_much_is_left_of_it_and_counts_no_epochs_to_come(tmp_path: Path, capsys):
    scores = [0.25, 0.125, 0.5, 0.5, 0.375]
    train_scripted(tmp_path, scores, "--train.patience=2", "--train.epochs=10000", "--run.progress=plain")
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("data: ")]
    assert lines[1].startswith("at most 10000 epochs of 3 steps, batch 8, ")
    assert lines[2] == "stops after 2 evaluations without a better top1 (train.patience)"
    assert not any("10000" in line for line in lines[2:])
    shown = [line.split("  ") for line in lines if line.startswith("epoch ") and "(" in line]
    assert [(words[0], words[2]) for words in shown] == [
        ("epoch 1", "top1 0.2500 (best so far)"),
        ("epoch 2", "top1 0.1250 (no better for 1 of 2)"),
        ("epoch 3", "top1 0.5000 (best so far)"),
        ("epoch 4", "top1 0.5000 (no better for 1 of 2)"),
        ("epoch 5", "top1 0.3750 (no better for 2 of 2)"),
    ]
    losses = [event["loss"] for event in events(tmp_path, "epoch")]
    assert [words[1] for words in shown] == [f"loss {loss:.4g}" for loss in losses]


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples(tmp_path: Path):
    train(tmp_path, "--train.epochs=2", "--run.log-every-steps=1")
    steps = seen(tmp_path, "train", "loss")
    assert seen(tmp_path, "epoch", "loss") == pytest.approx([sum(steps[:3]) / 3, sum(steps[3:]) / 3])


def test_the_loss_of_a_resumed_epoch_is_said_to_be_that_of_the_steps_since(tmp_path: Path, capsys):
    flags = ("--run.checkpoint-every-steps=2", "--run.progress=plain", "--train.epochs=2")
    train(tmp_path, *flags)
    for step in (3, 4, 6):  # all that a kill in step 3 leaves is a checkpoint at step 2
        shutil.rmtree(tmp_path / f"checkpoints/ckpt-{step:08d}")
    capsys.readouterr()
    train(tmp_path, *flags)
    first, second = re.findall(r"^epoch \d/2  loss .*", capsys.readouterr().out, re.M)
    [loss] = seen(tmp_path, "train", "loss")[-4:-3]
    assert f"  loss {loss:.4g} (since step 2, where it resumed)  top1 " in first and "since" not in second


@dataclass(frozen=True)
class Slow(Classification):
    """Its first step ends once the line about it has been said for the second time."""

    said: ClassVar[threading.Event] = threading.Event()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        assert self.said.wait(60)
        return super().loss(model, batch)


def test_a_first_step_that_takes_long_says_what_it_waits_for(tmp_path: Path, capsys, monkeypatch):
    say = Screen.say

    def heard(self: Screen, text: str) -> None:
        say(self, text)
        if text.endswith(" s so far"):
            Slow.said.set()

    monkeypatch.setattr(Screen, "say", heard)
    recipe, run = loaded("--train.epochs=1", "--run.progress=plain")
    monkeypatch.setattr("sightline.runs.log.FIRST_STEP_S", 0.5)
    monkeypatch.setattr("sightline.runs.log.AGAIN_S", 0.5)
    api.train(replace(recipe, task=Slow()), replace(run, out=str(tmp_path / "slow")))
    lines = [line for line in capsys.readouterr().out.splitlines() if "first step" in line]
    assert re.fullmatch("(waiting for the loader to read the first|running the first step .) ?8 samples.*", lines[0])
    assert re.fullmatch("running the first step .8 samples.*, [1-9][0-9]* s so far", lines[-2])
    assert len(lines) >= 3 and lines[-1].startswith("first step after ")
    monkeypatch.setattr("sightline.runs.log.FIRST_STEP_S", 60)
    train(tmp_path / "run", "--train.epochs=1", "--run.progress=plain")
    assert "is running" not in capsys.readouterr().out
    for thread in (each for each in threading.enumerate() if each.name == "first step"):
        thread.join(10)
        assert not thread.is_alive()


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),
        (TORCHRUN, True),
        ({"HOME": "/home/me", "TERM": "xterm"}, False),
    ],
)
def test_only_who_was_launched_is_told_how_long_launchers_wait(environ: dict[str, str], expected: bool):
    assert stop_time.is_launched(environ) is expected


@pytest.mark.parametrize("every", [1, 3])
def test_the_first_step_is_reported_and_its_interval_stays_whole(tmp_path: Path, capsys, every: int):
    train(tmp_path / "each", "--train.epochs=1", "--run.log-every-steps=1")
    steps = seen(tmp_path / "each", "train", "loss")
    capsys.readouterr()
    train(tmp_path / "run", "--train.epochs=1", f"--run.log-every-steps={every}", "--run.progress=plain")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first step after ")]
    assert line.endswith(f": loss {steps[0]:.4g}")
    assert seen(tmp_path / "run", "train", "loss")[0] == pytest.approx(sum(steps[:every]) / every)
