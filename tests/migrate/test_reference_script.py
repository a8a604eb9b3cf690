"""A training script written for CUDA, unmodified, on the CPU: what it prints equals what its own --device cpu prints.

The three levels of the reference's story: minimal, performance (--fast), schedule (--lr-table); with EMA, mixed
precision, resume and compile. Two ranks of it: test_distributed.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sightline_migrate import AUTOLOAD

REPO = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
SCRIPT = str(FIXTURES / "train_reference.py")
# Time, memory and images per second differ from run to run; losses and accuracies may not.
TOLD = re.compile(r"^(?:step|Test samples|EMA samples) .*", re.MULTILINE)
Run = Callable[..., Any]
Once = Callable[..., Path]

LEVELS = {
    "minimal": ("--samples", "24", "--workers", "1"),
    "performance": ("--fast", "--print-freq", "2", "--clip-grad-norm", "1"),
    "schedule": ("--epochs", "2", "--lr-table", "--model-ema", "--label-smoothing", "0.1"),
    "compiled": ("--compile", "eager", "--samples", "16"),
}


def _words(device: str, runs: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """All runs in one process."""
    return str(FIXTURES / "several.py"), json.dumps([(SCRIPT, "--device", device, *flags) for flags in runs.values()])


def _told(text: str, runs: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """What each run tells of losses."""
    parts = re.split(r"^= \d+$", text, flags=re.MULTILINE)[1:]
    return {name: TOLD.findall(part) for name, part in zip(runs, parts, strict=True)}


@pytest.fixture(scope="module")
def on_cpu(once: Once, fork: Run) -> dict[str, list[str]]:
    """Without migration, by the script's own option."""
    folder = once("reference_on_cpu", lambda folder: fork(folder, *_words("cpu", LEVELS), warm=True))
    return _told((folder / "out.txt").read_text(), LEVELS)


@pytest.fixture(scope="module")
def on_cuda(once: Once, fork: Run) -> dict[str, list[str]]:
    """Migrated; first the levels, then what only a GPU does: mixed precision, and going on from a checkpoint."""
    amp = ("--amp", "--samples", "16")
    runs = LEVELS | {
        "saved": ("--epochs", "2", "--model-ema", "--output-dir", "."),
        "resumed": ("--epochs", "2", "--model-ema", "--resume", "model_0.pth"),
        "plain": ("--samples", "16"),
        "amp": (*amp, "--output-dir", "."),
        "amp clipped": (*amp, "--clip-grad-norm", "1"),
    }

    def run(folder: Path) -> None:
        migrate = ("-m", "sightline.migrate", "--target", "cpu", "--amp", "keep")
        fork(folder, *migrate, *_words("cuda", runs))

    return _told((once("reference_on_cuda", run) / "out.txt").read_text(), runs)


@pytest.mark.parametrize("level", LEVELS)
def test_every_printed_digit_is_the_cpus(
    on_cpu: dict[str, list[str]], on_cuda: dict[str, list[str]], level: str
) -> None:
    assert len(on_cpu[level]) >= 3 and on_cuda[level] == on_cpu[level]


def test_the_script_itself_is_what_migrate_starts(fork: Run, on_cpu: dict[str, list[str]], tmp_path: Path) -> None:
    """As a user types it, all by default: --device is cuda, the target is what is there."""
    done = fork(tmp_path, "-m", "sightline.migrate", SCRIPT, *LEVELS["minimal"], warm=True)
    assert "device='cuda'" in done.stdout and "max mem:" in done.stdout
    assert TOLD.findall(done.stdout) == on_cpu["minimal"]


def test_resume(on_cuda: dict[str, list[str]]) -> None:
    second = [line for line in on_cuda["saved"] if line.startswith("step 1.")]
    assert len(second) == 4 and on_cuda["resumed"] == on_cuda["saved"][-len(on_cuda["resumed"]) :]
    assert on_cuda["resumed"][0] == second[0]


def _loss(line: str) -> float:
    return float(re.search(r"loss (\S+)", line)[1])  # type: ignore[index]


@pytest.mark.parametrize("run", ["amp", "amp clipped"])
def test_mixed_precision(on_cuda: dict[str, list[str]], run: str) -> None:
    lines, plain = on_cuda[run], on_cuda["plain"]
    assert all("float16" in line for line in lines[:2]) and lines[0] != plain[0]
    assert _loss(lines[0]) == pytest.approx(_loss(plain[0]), abs=5e-3)


def test_float16_becomes_bfloat16(fork: Run, on_cuda: dict[str, list[str]], tmp_path: Path) -> None:
    """Under the vendor's own names of the switches."""
    environment = {
        "PYTHONPATH": os.pathsep.join([AUTOLOAD, str(REPO), str(REPO / "packages" / "migrate")]),
        "SIGHTLINE_MIGRATE_TARGET": "cpu",
        "SIGHTLINE_MIGRATE_AMP": "keep",
        "PT_HPU_GPU_MIGRATION": "1",
        "PT_HPU_CONVERT_FP16_TO_BF16_FOR_MIGRATION": "1",
    }
    done = fork(tmp_path, SCRIPT, "--device", "cuda", "--amp", "--samples", "16", env=environment, warm=True)
    told = TOLD.findall(done.stdout)
    assert len(told) == 3 and all("bfloat16" in line for line in told[:2])
    assert _loss(told[0]) == pytest.approx(_loss(on_cuda["plain"][0]), abs=5e-2)
