"""What no other device can do ends with one clear line that names the script's own file and line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

CAPTURE = """
import torch

static = torch.zeros(8, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # here
    static += 1
graph.replay()
"""
SOURCE = """
import torch
from torch.utils.cpp_extension import load

x = torch.ones(8, device="cuda")
kernels = load(name="kernels", sources=["kernels.cpp", "kernels.cu"])  # here
print(kernels.scale(x))
"""
INLINE = """
import torch
from torch.utils.cpp_extension import load_inline

text = "__global__ void scale(float* x) { x[threadIdx.x] *= 2; }"
kernels = load_inline("kernels", cpp_sources="", cuda_sources=text, functions=["scale"])  # here
"""
SCRIPTS = {
    "graph": (CAPTURE, "CUDA graphs cannot be captured"),
    "extension": (SOURCE, "CUDA sources of extension 'kernels' cannot be compiled for cpu"),
    "inline": (INLINE, "CUDA sources of extension 'kernels' cannot be compiled for cpu"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_line_says_what_and_where(name: str, tmp_path: Path) -> None:
    text, expected = SCRIPTS[name]
    script = tmp_path / "train.py"
    script.write_text(text)
    here = next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here"))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SIGHTLINE_MIGRATE")}
    done = subprocess.run(
        [sys.executable, "-m", "sightline.migrate", "--target", "cpu", str(script)],
        env=kept | {"PYTHONPATH": str(REPO), "PATH": "/nonexistent"},  # where no nvcc is
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith(f"sightline migrate: {script}:{here}: ")]
    assert len(told) == 1 and expected in told[0], done.stderr
