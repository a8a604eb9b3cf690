"""What a start decides by itself: the precision, on devices with and without bf16, at the first start and later."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sightline import config
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.runs.log import RunLog
from sightline.runs.screen import Screen
from sightline.train import batch_size, start
from sightline.train.session import Session

NATIVE = replace(devices.select("cpu"), has_bf16=lambda: True)
EMULATES = replace(devices.select("cpu"), has_bf16=lambda: False)
OWN_BF16 = "the recipe's own bf16"  # which nobody typed
FALLS_BACK = "precision fp32 instead of bf16, which would only be emulated and slower"
SLOW = "warning: bf16 is only emulated, on a CPU up to 8 times slower than fp32"


@pytest.fixture
def settled(tmp_path: Path, capsys, monkeypatch):
    """settled(stored, device, *flags): the train fields that are decided, and what is said; `stored` are those of the
    checkpoint, {} without one."""

    monkeypatch.setattr(batch_size, "TIMED_S", 0.0)

    def settle(stored: dict, device: devices.Device, *flags: str) -> tuple[config.TrainConfig, str]:
        saved = tmp_path / "checkpoints" / "ckpt-00000001"
        if stored:
            saved.mkdir(parents=True, exist_ok=True)
            (saved / "state.json").write_text(json.dumps({"recipe": {"train": stored}}))
        typed = [flag for flag in flags if flag != OWN_BF16]
        recipe, run = config.load("demo_classification", [*typed, f"--run.out={tmp_path}"])
        if OWN_BF16 in flags:
            recipe = replace(recipe, train=replace(recipe.train, precision="bf16"))
        log = RunLog(tmp_path, Screen(), attempt=None)
        found = start.settle(Session(recipe, run, device, World(), log))
        return found.recipe.train, capsys.readouterr().out

    return settle


@pytest.mark.parametrize(
    ("wanted", "kept", "device", "decided", "said"),
    [
        ("auto", "", NATIVE, "bf16", ""),
        ("auto", "", EMULATES, "fp32", ""),
        (OWN_BF16, "", NATIVE, "bf16", ""),
        (OWN_BF16, "", EMULATES, "fp32", FALLS_BACK),
        ("bf16", "", NATIVE, "bf16", ""),
        ("bf16", "", EMULATES, "bf16", f"{SLOW}: "),
        ("fp16", "", EMULATES, "fp16", ""),
        ("auto", "bf16", NATIVE, "bf16", ""),
        ("auto", "bf16", EMULATES, "bf16", f"{SLOW}: "),
        ("auto", "fp16", EMULATES, "fp16", "precision fp16, in which the run was started; a new run would use fp32"),
        ("auto", "fp16", NATIVE, "fp16", "precision fp16, in which the run was started; a new run would use bf16"),
        (OWN_BF16, "fp32", NATIVE, "fp32", "precision fp32, in which the run was started; a new run would use"),
        (OWN_BF16, "fp32", EMULATES, "fp32", ""),
    ],
)
def test_the_first_start_decides_the_precision_and_later_ones_keep_it(
    settled, wanted: str, kept: str, device: devices.Device, decided: str, said: str
):
    flag = wanted if wanted == OWN_BF16 else f"--train.precision={wanted}"
    train, lines = settled({"precision": kept} if kept else {}, device, flag)
    assert train.precision == decided
    assert lines.startswith(said) and lines.count("\n") == bool(said), lines
    if said.startswith(SLOW):
        assert ("the run was started in it and keeps it" if kept else "--train.precision fp32 is faster") in lines


TINY = ["--data.path=synthetic:classes=10,samples=24,size=16", "--data.size=16", "--model.width=4"]
MEASURES_BATCH = "measuring the largest batch that is worth its memory (train.global_batch=auto)\n"
MEASURES_PARTS = "measuring in how many parts a batch fits into memory (train.accumulation=auto)\n"


@pytest.mark.parametrize(
    ("stored", "flags", "batch", "parts", "said"),
    [
        ({}, "--train.global-batch=auto", 2, 1, f"{MEASURES_BATCH}batch 2: a larger one leaves fewer than 10 steps"),
        ({}, "--train.global-batch=2 --train.accumulation=auto", 2, 1, f"{MEASURES_PARTS}accumulation 1: all 2 "),
        ({}, "--train.global-batch=auto --train.accumulation=auto", 2, 1, f"{MEASURES_BATCH}batch 2: "),
        ({"global_batch": 6}, "--train.global-batch=auto", 6, 1, ""),
        ({"global_batch": 6, "accumulation": 3}, "--train.global-batch=6 --train.accumulation=auto", 6, 3, ""),
        ({"accumulation": 2}, "--train.global-batch=2 --train.accumulation=auto --run.override", 2, 1, MEASURES_PARTS),
        ({"global_batch": 6}, "--train.global-batch=4", 4, 1, ""),  # given; resume() refuses it
    ],
)
def test_the_first_start_measures_what_is_left_open_and_later_ones_keep_it(
    settled, stored: dict, flags: str, batch: int, parts: int, said: str
):
    train, lines = settled(stored, NATIVE, "--train.precision=fp32", *TINY, *flags.split())
    assert (train.global_batch, train.accumulation) == (batch, parts)
    assert lines.startswith(said) and bool(lines) == bool(said), lines
