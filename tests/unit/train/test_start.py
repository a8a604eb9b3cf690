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
from sightline.train import start

NATIVE = replace(devices.select("cpu"), has_bf16=lambda: True)
EMULATES = replace(devices.select("cpu"), has_bf16=lambda: False)
FALLS_BACK = "precision fp32 instead of bf16, which would only be emulated and slower"
SLOW = "warning: bf16 is only emulated, on a CPU up to 8 times slower than fp32"


def settled(folder: Path, wanted: str, kept: str, device: devices.Device, capsys) -> tuple[str, str]:
    """The precision that is decided, and what is said; `kept` is that of the checkpoint, "" without one."""
    if kept:
        saved = folder / "checkpoints" / "ckpt-00000001"
        saved.mkdir(parents=True)
        (saved / "state.json").write_text(json.dumps({"recipe": {"train": {"precision": kept}}}))
    recipe, run = config.load("demo_classification", [f"--train.precision={wanted}", f"--run.out={folder}"])
    log = RunLog(folder, Screen(), attempt=None)
    found = start.settle(recipe, run, device, World(), log)
    return found.train.precision, capsys.readouterr().out


@pytest.mark.parametrize(
    ("wanted", "kept", "device", "decided", "said"),
    [
        ("auto", "", NATIVE, "bf16", ""),
        ("auto", "", EMULATES, "fp32", ""),
        ("bf16_or_fp32", "", NATIVE, "bf16", ""),
        ("bf16_or_fp32", "", EMULATES, "fp32", FALLS_BACK),
        ("bf16", "", NATIVE, "bf16", ""),
        ("bf16", "", EMULATES, "bf16", f"{SLOW}: "),
        ("fp16", "", EMULATES, "fp16", ""),
        ("auto", "bf16", NATIVE, "bf16", ""),
        ("auto", "bf16", EMULATES, "bf16", f"{SLOW}: "),
        ("auto", "fp16", EMULATES, "fp16", "precision fp16, in which the run was started; a new run would use fp32"),
        ("auto", "fp16", NATIVE, "fp16", "precision fp16, in which the run was started; a new run would use bf16"),
        ("bf16_or_fp32", "fp32", NATIVE, "fp32", "precision fp32, in which the run was started; a new run would use"),
        ("bf16_or_fp32", "fp32", EMULATES, "fp32", ""),
    ],
)
def test_the_first_start_decides_the_precision_and_later_ones_keep_it(
    tmp_path: Path, capsys, wanted: str, kept: str, device: devices.Device, decided: str, said: str
):
    precision, lines = settled(tmp_path, wanted, kept, device, capsys)
    assert precision == decided
    assert lines.startswith(said) and lines.count("\n") == bool(said), lines
    if said.startswith(SLOW):
        assert ("the run was started in it and keeps it" if kept else "--train.precision fp32 is faster") in lines
