"""The line of advice after an error that ends a script: which package is missing, which question misled a library."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline_migrate.reporting import advice
from sightline_migrate.stand_ins import missing


def advised(text: str, folder: Path, may_claim: bool = True) -> str:
    """The advice on the error with which a script of these lines ends."""
    path = folder / "a_script.py"
    path.write_text(text)
    with pytest.raises(Exception, match="(?s).*") as caught:
        exec(compile(text, str(path), "exec"), {"__name__": "a_script", "__file__": str(path)})
    # Without the frame of this test, as in a process of the script's own.
    error = caught.value.with_traceback(caught.tb.tb_next)
    return advice.advise(error, "cpu", may_claim).replace(str(path), "a_script.py")


@pytest.mark.parametrize("line", [
    "import diff_gaussian_rasterization", "import cupy as cp", "from flash_attn.bert_padding import pad_input",
    "from nvidia.dali import pipeline_def", "import kernels", "import amp_C", "from simple_knn._C import distCUDA2",
])  # fmt: skip
def test_a_missing_package_of_cuda_kernels_is_explained(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = missing.find(line.split()[1])
    monkeypatch.setattr(sys, "path", [tmp_path, os.path.dirname(os.__file__)])  # nothing is installed
    for name in [name for name in sys.modules if missing.find(name)]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    said = advised(f"x = 1\n{line}\n", tmp_path)
    expected = f"a_script.py:2: ModuleNotFoundError: {package} is not installed: {missing.PACKAGES[package]}"
    assert package and said == expected


def test_other_missing_modules_are_not_explained(tmp_path: Path):
    assert advised("import no_such_module_anywhere", tmp_path) == ""
    assert missing.find("cupyx") == missing.find("cudatools") == "" and missing.find("cuda.bindings.driver") == "cuda"


LIBRARY = """
def find_device(x):
    return x.device
def configured():
    return torch.device("cuda")
class State:
    device = torch.device("cuda", 0)
"""
COMPARED = {
    "if": "x = torch.ones(2)\nif State().device.type != find_device(x).type:\n    raise ValueError('move it')",
    "assert": "x = torch.ones(2)\nassert x.is_cuda, 'CUDA only'",
    "elif": "x = torch.ones(2)\nif x.dim() > 1:\n    pass\nelif x.get_device() < 0:\n    raise TypeError('GPU')",
    "words": "raise RuntimeError('tensors were not on the cpu while it is configured for cuda')",
    "else": "x = torch.ones(2)\nif x.is_cuda:\n    pass\nelse:\n    raise NotImplementedError",
}
NOT_COMPARED = {
    "an option": "class args: device = 'tpu'\nif args.device not in ('cpu', 'cuda'):\n    raise ValueError('device?')",
    "another error in the block": "x = torch.ones(2)\nif not x.is_cuda:\n    int('one')",
    "nothing about devices": "x = torch.ones(2)\nassert x.dim() == 2",
    "torch's own": "x = torch.ones(2)\nassert_ = torch.ones(3) + x if not x.is_cuda else 0",
    "a device is made": "if torch.device('cuda').type == 'cuda' and True:\n    raise ValueError('nothing to do')",
}


@pytest.mark.parametrize("case", COMPARED)
def test_claim_is_proposed_where_devices_are_compared(case: str, tmp_path: Path):
    text = f"import torch{LIBRARY}{COMPARED[case]}\n"
    last = len(text.splitlines())
    said = advised(text, tmp_path)
    assert said.startswith(f"a_script.py:{last}: ") and said.endswith(advice.CLAIM)
    assert advised(text, tmp_path, may_claim=False) == ""


@pytest.mark.parametrize("claim", [False, True])
def test_the_line_follows_the_traceback(claim: bool, on_cpu: Callable[..., Any], capsys: pytest.CaptureFixture[str]):
    on_cpu(claim=claim)
    with pytest.raises(ValueError, match="cpu") as caught:
        raise ValueError("expected cuda, found cpu")
    sys.excepthook(caught.type, caught.value, caught.tb)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sightline migrate: ")]
    assert len(said) == (not claim) and all(__file__ in line and line.endswith(advice.CLAIM) for line in said)


def test_a_command_that_is_not_there(tmp_path: Path):
    said = advised("raise FileNotFoundError(2, 'No such file or directory', 'nvidia-smi')\n", tmp_path)
    assert said == f"a_script.py:1: FileNotFoundError: {advice.NO_NVIDIA_SMI}"


@pytest.mark.parametrize("case", NOT_COMPARED)
def test_claim_is_not_proposed_for_other_errors(case: str, tmp_path: Path):
    assert advised(f"import torch{LIBRARY}{NOT_COMPARED[case]}\n", tmp_path) == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("DEVICE = triton.runtime.driver.active.get_active_torch_device()", advice.NO_DRIVER_FOR_DEVICE),
        ("benchmark = triton.runtime.driver.active.get_benchmarker()", advice.NO_DRIVER),
    ],
)
def test_triton_without_a_driver(line: str, said: str, tmp_path: Path):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton has a driver here")
    assert advised(f"import triton\n{line}\n", tmp_path) == f"a_script.py:2: RuntimeError: {said.format(target='cpu')}"
