"""Every recipe: its text, its round trip, a few steps, an evaluation, and a resume from anywhere to the same bits.

By default the matrices take one recipe for every kind of data or part, see cover.py; all others are slow.
"""

import json
import os
import re
import runpy
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sightline import api, config, recipes
from sightline.errors import Interrupted
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.runs.log import RunLog
from sightline.train import loop
from sightline.train.session import Session

COVER = runpy.run_path(str(Path(__file__).with_name("cover.py")))
EVERY_RECIPE = pytest.mark.parametrize("name", recipes.names())
EACH_DATA, EACH_PART = COVER["recipe_of_each"](COVER["data"]), COVER["recipe_of_each"](COVER["parts"])
RICHEST = COVER["recipe_of_each"](COVER["richest"])
STEPS = 6  # two epochs of three
HELD_OUT = {"ClassificationData": 3, "DetectionData": 3, "MaskData": 3, "SegmentationData": 12}  # slices of two volumes
HELD_OUT_VOLUMES = 6
CLASSIFIERS = [n for n in recipes.names() if recipes.find(n).recipe().task.headline == "top1"]
for _name in ("classification", "finetune_classification"):  # for pretrained weights, see test_finetune.py
    CLASSIFIERS.remove(_name)
LEARNS_WELL = {
    "ResNetConfig": ["--model.width=8", "--optimizer.lr=0.1"],
    "ArchConfig": ["--optimizer.lr=0.02", "--optimizer.lr-for-batch=0", "--schedule.warmup-epochs=1"],
    "lars": ["--model.arch=resnet18", "--optimizer.lr=3", "--optimizer.lr-many=0", "--train.epochs=8"],
}


@EVERY_RECIPE
def test_its_text_gives_the_command_and_the_expected_result(name: str):
    text = recipes.describe(name)
    assert recipes.find(name).__doc__.strip().startswith(text.splitlines()[0])
    assert len(text.splitlines()[0]) < 120, "the first line is what `sightline list` shows"
    assert f"    sightline train {name} --data.path " in text
    (expected,) = re.findall(r"^Expected: (.+)", text, flags=re.MULTILINE)
    assert re.search(r"\d", expected), "an expected result is a number"


@EVERY_RECIPE
def test_it_is_called_by_the_name_of_its_file(name: str):
    assert recipes.find(name).recipe().name == name
    assert config.load(name)[0] == recipes.find(name).recipe()


@EACH_PART
def test_it_trains_evaluates_and_writes_its_run_folder(name: str, finished):
    result = finished(name)
    assert result.error is None
    assert [e["step"] for e in result.events("train")] == list(range(1, STEPS + 1))
    assert [e["epoch"] for e in result.events("evaluate")] == [1, 2]
    assert [c.name for c in result.checkpoints] == ["ckpt-00000003", "ckpt-00000006"]
    [end] = result.events("exit")
    assert end.items() >= {"event": "exit", "code": 0, "reason": "finished"}.items()
    assert 0 < end["running_s"] <= end["wall_s"] and end["images_per_s"] > 0
    told = json.loads((result.folder / "scores.json").read_text())
    assert told["values"] == result.scores.values and told["tables"] == result.scores.tables
    headline = recipes.find(name).recipe().task.headline
    assert 0 <= result.scores.values[headline] <= 1
    held_out = int(result.scores.values["samples"])
    data = recipes.find(name).recipe().data
    assert held_out == (HELD_OUT_VOLUMES if getattr(data, "dim", 2) == 3 else HELD_OUT[type(data).__name__])
    assert f"{name}: 24 training and {held_out} evaluation samples\n" in result.shown
    assert "2 epochs of 3 steps, batch 8, base rate " in result.shown
    recipe, _ = config.load(name, [], result.folder / "config.yaml")
    metric = recipe.task.build().metric(recipe.data.open("val", 0).spec, torch.device("cpu"))
    assert metric.names() == tuple(result.scores.values)  # known before anything is learnt


@EACH_DATA
def test_the_config_of_a_run_makes_it_again_bit_for_bit_with_any_number_of_workers(name: str, tmp_path: Path, finished):
    result = finished(name)
    path = result.folder / "config.yaml"
    again = config.load(config.recipe_named_in(path), [f"--run.out={tmp_path / 'again'}", "--run.workers=1"], path)
    scores = api.train(*again)
    copy = type(result)(tmp_path / "again")
    assert len(copy.events("start")[0]["workers"]) == 1 and not result.events("start")[0]["workers"]
    assert copy.bits() == result.bits() and scores == result.scores
    assert [e["loss"] for e in copy.events("train")] == [e["loss"] for e in result.events("train")]


@COVER["recipe_of_each"](lambda name: {name} & {"resnet50_mlperf", "ssd_resnet34"})  # scores alone, and with tables
def test_a_checkpoint_is_evaluated_to_the_scores_it_was_saved_with(name: str, finished):
    result = finished(name, "--train.ema=0.5")
    flags = ["--run.workers=0", "--run.device=cpu"]
    latest = api.evaluate(str(result.folder), flags, which="latest")
    assert latest.values == result.scores.values and latest.tables == result.scores.tables
    first = api.evaluate(str(result.checkpoints[0]), flags)
    logged = result.events("evaluate")[0]
    assert first.values == {key: logged[key] for key in first.values}


@EACH_PART
def test_checkpoints_have_the_names_of_the_model(name: str, finished):
    result = finished(name, "--train.ema=0.5")
    recipe, _ = config.of_stored(json.loads((result.checkpoints[0] / "state.json").read_text())["recipe"]).build()
    model = recipe.model.build(recipe.data.open("train", 0).spec)
    for file in ("model", "ema"):
        stored = load_file(result.checkpoints[0] / f"{file}.safetensors")
        assert {n: t.shape for n, t in stored.items()} == {n: t.shape for n, t in model.state_dict().items()}
        model.load_state_dict(stored)


VARIANTS = {
    "as it is": [],
    "everything on": [
        "--train.ema=0.9",
        "--train.accumulation=2",
        "--train.clip=1",
        "--train.last-batch=wrap",
        "--data.mixup=0.3",
        "--data.mixup-per=batch",
        "--data.cutmix=0.3",
        "--data.random-erase=0.5",
        "--data.path=synthetic:classes=10,samples=28,size=28",  # a wrapped batch spans two epochs
        "--data.fold=3",  # of volumes: the one that leaves seven of eight
    ],
    "fp16 and adamw": [
        "--train.precision=fp16",
        "--optimizer.kind=adamw",
        "--optimizer.momentum=0.9",
        "--optimizer.no-nesterov",
        "--optimizer.lr=0.01",
    ],
}


def known_to(name: str, flags: list[str]) -> list[str]:
    """Return those flags that name fields of the recipe: detection data do not mix images, and volumes have a path but
    no images in it."""
    made = recipes.find(name).recipe()

    def is_known(flag: str) -> bool:
        part, _, field = flag.partition("=")[0].removeprefix("--").partition(".")
        fields = [field.removeprefix("no-").replace("-", "_"), *(["classes"] if "classes=" in flag else [])]
        return part == "run" or all(hasattr(getattr(made, part), each) for each in fields)

    return [flag for flag in flags if is_known(flag)]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        # Slow: the tests of signals resume these to the same bits, in an epoch, after it and in an evaluation.
        *(pytest.param(name, "as it is", marks=pytest.mark.slow) for name in recipes.names()),
        # Of all kinds of data at once: the same state, and the signals' tests resume each kind.
        *COVER["params"](COVER["richest"], "everything on"),
        *COVER["params"](lambda name: {name} & {"unet2d"}, "fp16 and adamw"),  # the cheapest: the state is the engine's
    ],
)
def test_resumed_from_any_step_it_ends_with_the_same_bits(name: str, variant: str, tmp_path: Path, train, request):
    is_slow = request.node.get_closest_marker("slow") is not None
    flags = [*known_to(name, VARIANTS[variant]), "--run.checkpoint-every-steps=1", "--run.keep=100"]
    whole = train(name, tmp_path / "whole", *flags)
    assert [c.name for c in whole.checkpoints] == [f"ckpt-{step:08d}" for step in range(1, STEPS + 1)]
    # By default from the end of the first epoch and in the second.
    for step in (1, 2, 3, 4, 5) if is_slow else (3, 5):
        copy = tmp_path / f"from {step}"
        shutil.copytree(whole.folder, copy)
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(copy / "checkpoints" / f"ckpt-{later:08d}")
        (copy / "log.jsonl").unlink()
        resumed = train(name, copy, *flags)
        assert resumed.error is None and [e["step"] for e in resumed.events("resume")] == [step]
        assert resumed.bits() == whole.bits()
        assert resumed.scores == whole.scores
        expected = [e["loss"] for e in whole.events("train")][step:]
        assert [e["loss"] for e in resumed.events("train")] == expected


class Stopping(RunLog):
    """A log that sends this process a signal when training, or an evaluation, has come so far."""

    signal_at: tuple[str, int] = ("", 0)
    number = signal.SIGTERM
    step = 0

    def training(self, epoch, step, size, line):
        super().training(epoch, step, size, line)
        self.step = step
        if self.signal_at == ("step", step):
            os.kill(os.getpid(), self.number)

    def evaluating(self, done, total, run_done, run_total):
        super().evaluating(done, total, run_done, run_total)
        if self.signal_at == ("evaluation of step", self.step):
            os.kill(os.getpid(), self.number)


SIGNALS = [
    (signal.SIGTERM, ("step", 2)),
    (signal.SIGTERM, ("evaluation of step", 3)),
    (signal.SIGINT, ("step", 2)),
    (signal.SIGTERM, ("step", 3)),
    (signal.SIGTERM, ("evaluation of step", 6)),
]
# Where the kind of data makes no difference: by default one of them, with the first recipe only; tests/faults has more.
LATER = [SIGNALS[0], *SIGNALS[2:]]
ONCE = SIGNALS[2]


@pytest.mark.parametrize(
    ("name", "number", "signal_at"),
    [
        pytest.param(
            *param.values,
            number,
            at,
            id=f"{param.id}-{number.name}-{at[0]} {at[1]}",
            marks=pytest.mark.slow
            if (number, at) in LATER and (param.id != COVER["RICHEST"][0] or (number, at) != ONCE)
            else param.marks,
        )
        for param in COVER["params"](COVER["data"])
        for number, at in SIGNALS
    ],
)
def test_a_signal_saves_and_the_same_command_resumes(
    name: str, tmp_path: Path, train, finished, load, number: signal.Signals, signal_at: tuple[str, int]
):
    whole = finished(name)
    stopped = type(whole)(tmp_path / "stopped")
    recipe, run = load(name)
    recipe = replace(recipe, data=recipe.data.for_ranks(1))  # as a start decides
    log = Stopping(stopped.folder)
    log.signal_at, log.number = signal_at, number
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Interrupted) as interrupted:
        loop.train(Session(recipe, replace(run, out=str(stopped.folder)), devices.select("cpu"), World(), log))
    log.close(interrupted.value.exit_code, str(interrupted.value))
    assert interrupted.value.exit_code == 128 + number
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert stopped.checkpoints[-1].name == f"ckpt-{signal_at[1]:08d}"
    resumed = train(name, stopped.folder)
    assert resumed.error is None and f"resuming from step {signal_at[1]}" in resumed.shown
    assert resumed.bits() == whole.bits() and resumed.scores == whole.scores


def test_a_planned_evaluation_that_a_signal_cut_off_is_made_up_without_one_at_the_end(tmp_path: Path, train, load):
    flags = ("--train.max-steps=3", "--train.no-eval-at-end")
    whole = train("demo_classification", tmp_path / "whole", *flags)
    recipe, run = load("demo_classification", *flags)
    log = Stopping(tmp_path / "stopped")
    log.signal_at = ("evaluation of step", 3)
    with pytest.raises(Interrupted) as interrupted:
        loop.train(Session(recipe, replace(run, out=str(tmp_path / "stopped")), devices.select("cpu"), World(), log))
    log.close(interrupted.value.exit_code, str(interrupted.value))
    resumed = train("demo_classification", tmp_path / "stopped", *flags)
    assert [e["epoch"] for e in resumed.events("evaluate")] == [1] and resumed.scores == whole.scores


@RICHEST
def test_a_finished_run_started_again_says_so_and_changes_nothing(name: str, tmp_path: Path, train, finished):
    first = finished(name)
    before = first.bits()
    shutil.copytree(first.folder, tmp_path / "run")
    second = train(name, tmp_path / "run")
    assert second.error is None and "is finished" in second.shown
    assert second.scores.values == first.scores.values and second.bits() == before


# By default none: test_by_heart.py has every optimizer.
@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_it_learns(name: str, tmp_path: Path, train):
    """A handful of images, to 0.95 and more, within seconds; the val split has the same patterns and other noise."""
    made = recipes.find(name).recipe()
    result = train(
        name,
        tmp_path / "run",
        "--schedule.kind=cosine",
        "--data.path=synthetic:classes=10,samples=320,size=28",
        "--data.augment=off",
        "--train.epochs=6",
        "--train.global-batch=32",
        "--train.eval-every-epochs=8",
        "--run.checkpoint-every-epochs=8",
        *LEARNS_WELL["lars" if made.optimizer.kind == "lars" else type(made.model).__name__],
    )
    assert result.scores.values["samples"] == 40
    assert result.scores.values["top1"] >= 0.95
    losses = [e["loss"] for e in result.events("train")]
    assert sum(losses[-10:]) < sum(losses[:10]) / 2


@RICHEST
def test_the_average_is_what_is_evaluated_and_called_best(name: str, finished):
    plain, averaged = finished(name), finished(name, "--train.ema=0.75")
    assert averaged.bits()["model.safetensors"] == plain.bits()["model.safetensors"]
    if plain.scores.values[recipes.find(name).recipe().task.headline]:  # a detector finds nothing in so few steps
        assert averaged.scores != plain.scores
    ema, model = (load_file(averaged.checkpoints[-1] / f"{file}.safetensors") for file in ("ema", "model"))
    assert any(not torch.equal(ema[key], model[key]) for key in model)
