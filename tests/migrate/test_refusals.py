"""What no other device can do ends with one clear line that names the script's own file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
PICKLE = """
import argparse, torch

torch.save({"args": argparse.Namespace(lr=0.1)}, "checkpoint.pt")
torch.load("checkpoint.pt", weights_only=True)  # here
"""
FLEX = """
import torch
from torch.nn.attention.flex_attention import flex_attention

x = torch.ones(1, 1, 16, 16, device="cuda", requires_grad=True)
flex_attention(x, x, x).sum().backward()  # here
"""
POINTER = """
import torch

torch.cuda.caching_allocator_alloc(16)  # here
"""
SCRIPTS = {
    "graph": (CAPTURE, "CUDA graphs cannot be captured"),
    "extension": (SOURCE, "CUDA sources of extension 'kernels' cannot be compiled for cpu"),
    "inline": (INLINE, "CUDA sources of extension 'kernels' cannot be compiled for cpu"),
    "pickle": (PICKLE, "--legacy-load reads whole pickles"),
    "attention": (FLEX, "FlexAttention cannot train on cpu"),
    "refused": (POINTER, "it returns CUDA memory or CUDA objects"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_line_says_what_and_where(name: str, run_script: Callable[..., Any], tmp_path: Path) -> None:
    text, expected = SCRIPTS[name]
    here = next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here"))
    nvcc = tmp_path / "nvcc"  # where it is installed, its code cannot run either
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    done = run_script(text, "--target", "cpu", check=False, env={"PATH": str(tmp_path)}, warm=name == "attention")
    assert done.returncode != 0
    start = f"sightline migrate: {tmp_path / 'script.py'}:{here}: "
    told = [line for line in done.stderr.splitlines() if line.startswith(start)]
    assert len(told) == 1 and expected in told[0], done.stderr
