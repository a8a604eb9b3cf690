"""The head before the trunk on an accelerator, where the captured step must be captured again at the switch."""

import os

# cuBLAS repeats its bits only with this, and only if it is set before CUDA is initialised.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sightline import api
from sightline.hardware import devices

pytestmark = pytest.mark.device

TINY = """--data.path synthetic:classes=4,samples=96,size=40 --data.classes 4 --data.size 32 --data.eval-size 32
--data.eval-resize 36 --model.width 16 --train.global-batch 32 --train.epochs 2 --train.head-epochs 1
--optimizer.trunk-lr-scale 0.5 --train.deterministic --run.checkpoint-initial --run.keep 9 --run.workers 0
--run.progress off""".split()


def trained(folder: Path, *flags: str) -> list[dict[str, torch.Tensor]]:
    """Return the weights before the first step, at the switch and at the end."""
    if devices.select().kind != "cuda":
        pytest.skip("written for cuda")
    api.train(*api.load("demo_classification", [*TINY, *flags, f"--run.out={folder}"]))
    torch.use_deterministic_algorithms(False)
    return [load_file(folder / "checkpoints" / f"ckpt-{step:08d}" / "model.safetensors") for step in (0, 3, 6)]


@pytest.mark.parametrize("kind", ["sgd", "adamw", "sgd_keras"])
def test_a_captured_run_has_the_bits_of_an_eager_one(kind: str, tmp_path: Path):
    flags = ["--run.compile", "off", "--optimizer.kind", kind, "--optimizer.lr", "0.01"]
    eager = trained(tmp_path / "eager", *flags, "--run.graph", "off")
    captured = trained(tmp_path / "captured", *flags, "--run.graph", "on")
    for ours, theirs in zip(captured, eager, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    start, switch, end = ({n: t for n, t in each.items() if n.endswith((".weight", ".bias"))} for each in captured)
    assert {name for name in start if not torch.equal(start[name], switch[name])} == {"fc.weight", "fc.bias"}
    assert {name for name in start if torch.equal(switch[name], end[name])} == set()


def test_a_compiled_run_learns_the_same_layers(tmp_path: Path):
    start, switch, end = trained(tmp_path / "compiled", "--run.compile", "on")
    names = [name for name in start if name.endswith((".weight", ".bias"))]
    assert {name for name in names if not torch.equal(start[name], switch[name])} == {"fc.weight", "fc.bias"}
    assert {name for name in names if torch.equal(switch[name], end[name])} == set()
