"""A training script written for CUDA, unmodified, on the CPU: what it prints equals what its own --device cpu prints.

The three levels of the reference's story: minimal, performance (--fast), schedule (--lr-table); with EMA, mixed
precision, resume, compile, and two processes under torchrun with synchronised batch norm.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sightline.migrate import AUTOLOAD

REPO = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
SCRIPT = FIXTURES / "train_reference.py"
MIGRATE = ("-m", "sightline.migrate", "--target", "cpu")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
QUIET = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
# Time, memory and images per second differ from run to run; losses and accuracies may not.
TOLD = re.compile(r"^(?:step|Test samples|EMA samples) .*", re.MULTILINE)

LEVELS = {
    "minimal": ("--epochs", "2", "--workers", "1"),
    "performance": ("--epochs", "2", "--fast", "--print-freq", "2", "--clip-grad-norm", "1"),
    "schedule": ("--epochs", "2", "--lr-table", "--model-ema", "--label-smoothing", "0.1"),
    "compiled": ("--compile", "aot_eager", "--samples", "16"),
}


def _python(*words: str | Path, **more: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SIGHTLINE_MIGRATE", "RANK", "WORLD_SIZE"))}
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    with tempfile.TemporaryDirectory() as folder:  # where the logs of migration go
        done = subprocess.run(command, env=kept | QUIET | more, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _several(runs: list[tuple[str, ...]], *start: str, **more: str) -> list[list[str]]:
    """What each run tells of losses, all runs in one process."""
    text = _python(*start, FIXTURES / "several.py", SCRIPT, json.dumps(runs), **more)
    return [TOLD.findall(part) for part in re.split(r"^= \d+$", text, flags=re.MULTILINE)[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, list[str]]:
    """Without migration, by the script's own option."""
    runs = [("--device", "cpu", *flags) for flags in LEVELS.values()]
    return dict(zip(LEVELS, _several(runs), strict=True))


@pytest.fixture(scope="module")
def on_cuda(folder: Path) -> dict[str, list[str]]:
    """Migrated; first the levels, then what only a GPU does: mixed precision, and going on from a checkpoint."""
    saved, amp = str(folder), ("--amp", "--samples", "16")
    more = {
        "saved": ("--epochs", "2", "--model-ema", "--output-dir", saved),
        "resumed": ("--epochs", "2", "--model-ema", "--resume", str(folder / "model_0.pth")),
        "plain": ("--samples", "16"),
        "amp": (*amp, "--output-dir", saved),
        "amp clipped": (*amp, "--clip-grad-norm", "1"),
    }
    runs = LEVELS | more
    told = _several([("--device", "cuda", *flags) for flags in runs.values()], *MIGRATE, "--amp", "keep")
    return dict(zip(runs, told, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_every_printed_digit_is_the_cpus(
    on_cpu: dict[str, list[str]], on_cuda: dict[str, list[str]], level: str
) -> None:
    assert len(on_cpu[level]) >= 3 and on_cuda[level] == on_cpu[level]


def test_the_script_itself_is_what_migrate_starts(on_cpu: dict[str, list[str]]) -> None:
    """As a user types it, all by default: --device is cuda, the target is what is there."""
    text = _python("-m", "sightline.migrate", SCRIPT, *LEVELS["minimal"], CUDA_VISIBLE_DEVICES="0")
    assert "device='cuda'" in text and "max mem:" in text
    assert TOLD.findall(text) == on_cpu["minimal"]


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


def test_float16_becomes_bfloat16(on_cuda: dict[str, list[str]]) -> None:
    """Under the vendor's own names of the switches."""
    more = {"PT_HPU_GPU_MIGRATION": "1", "PT_HPU_CONVERT_FP16_TO_BF16_FOR_MIGRATION": "1"}
    told = _several(
        [("--device", "cuda", "--amp", "--samples", "16")],
        PYTHONPATH=AUTOLOAD, SIGHTLINE_MIGRATE_TARGET="cpu", SIGHTLINE_MIGRATE_AMP="keep", **more,
    )[0]  # fmt: skip
    assert all("bfloat16" in line for line in told[:2])
    assert _loss(told[0]) == pytest.approx(_loss(on_cuda["plain"][0]), abs=5e-2)


def test_two_processes() -> None:
    """nccl, set_device, barrier, DDP with device_ids, all_reduce on cuda; then synchronised batch norm."""
    flags = ("--samples", "64", "--lr", "2", "--model-ema", "--fast")
    expected = TOLD.findall(_python(*TORCHRUN, SCRIPT, "--device", "cpu", *flags))
    found = TOLD.findall(_python(*MIGRATE, *TORCHRUN, SCRIPT, "--device", "cuda", *flags))
    assert len(expected) == 6 and found == expected

    # Two ranks with synchronised statistics do what one rank with both batches does, up to the order of sums.
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    alone = TOLD.findall(_python(SCRIPT, "--device", "cpu", "-b", "16", *flags, **one))
    synced = TOLD.findall(_python(*MIGRATE, *TORCHRUN, SCRIPT, "--device", "cuda", "--sync-bn", *flags))
    assert "samples 32" in alone[-2]
    assert _loss(synced[-2]) == pytest.approx(_loss(alone[-2]), rel=1e-5)
    assert _loss(found[-2]) != pytest.approx(_loss(alone[-2]), rel=1e-5)
