"""Whole scripts, written for CUDA and left as they are, in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sightline_migrate import AUTOLOAD
from sightline_migrate.reporting import advice

REPO = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]

TRAINING = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
is_cuda = sys.argv[1] == "cuda"
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
if is_cuda:
    assert torch.cuda.is_available(), "this script needs a GPU"
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.cuda.manual_seed_all(1)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    model.cuda()
    scaler = torch.cuda.amp.GradScaler()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    weights = torch.cuda.FloatTensor([1.0, 2.0, 3.0])
else:
    device = torch.device("cpu")
    weights = torch.FloatTensor([1.0, 2.0, 3.0])
loss_of = torch.nn.CrossEntropyLoss(weight=weights).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for epoch in range(2):
    for x, y in DataLoader(data, 16, shuffle=True, pin_memory=False):
        if is_cuda:
            start.record()
            x, y = x.to("cuda:0", non_blocking=True), y.cuda(non_blocking=True)
            with torch.cuda.amp.autocast():
                loss = loss_of(model(x) + torch.rand(len(x), 3, device="cuda") * 0.01, y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            end.record()
            torch.cuda.synchronize()
            assert start.elapsed_time(end) > 0 and torch.cuda.max_memory_allocated() > 0
        else:
            loss = loss_of(model(x) + torch.rand(len(x), 3) * 0.01, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{loss.item():.17g}")
"""


def test_losses_equal_those_of_the_cpu(run_script: Run):
    """In float32 and every digit; autocast is off, as `--amp auto` decides on CPUs that only emulate 16 bits."""
    cuda = run_script(TRAINING, "--target", "cpu", "--amp", "off", args=("cuda",), warm=True)
    cpu = run_script(TRAINING, args=("cpu",), plain=True, warm=True)
    assert (
        len(cpu.stdout.split()) == 6
        and [line for line in cuda.stdout.split() if line[0].isdigit()] == cpu.stdout.split()
    )


ENVIRONMENT = """
import torch
print("available", torch.cuda.is_available())
if torch.cuda.is_available():
    print("dtype", torch.zeros(1, device="cuda").half().dtype)
"""


def environment(**values: str) -> dict[str, str]:
    return {"PYTHONPATH": AUTOLOAD, **values}


def test_environment_activates(run_script: Run):
    values = environment(SIGHTLINE_MIGRATE="1", SIGHTLINE_MIGRATE_TARGET="cpu", SIGHTLINE_MIGRATE_FP16_TO_BF16="1")
    done = run_script(ENVIRONMENT, plain=True, env=values)
    assert "available True" in done.stdout and "dtype torch.bfloat16" in done.stdout


def test_hook_never_raises(run_script: Run):
    """An error there would make `import torch` fail for every program of the machine."""
    done = run_script(ENVIRONMENT, plain=True, env=environment(SIGHTLINE_MIGRATE="1", SIGHTLINE_MIGRATE_TARGET="warp"))
    assert done.stdout == "available False\n" and "not active" in done.stderr and "torch.warp" in done.stderr


@pytest.mark.parametrize(("source", "says"), [("", "ImportError("), ("def", "SyntaxError(")])
def test_entry_point_never_raises(source: str, says: str, tmp_path: Path):
    """Not even where the rest of the package is gone or broken."""
    folder = tmp_path / "sightline_migrate" / "autoload"
    shutil.copytree(AUTOLOAD, folder)
    (tmp_path / "sightline_migrate" / "__init__.py").write_text(source)
    code = "from importlib.metadata import entry_points as e; [each.load()() for each in e(group='torch.backends')]"
    command, variables = [sys.executable, "-S", "-c", code], {"PYTHONPATH": str(folder), "SIGHTLINE_MIGRATE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.startswith(f"sightline migrate: not active, {says}")


def test_import_activates(run_script: Run):
    done = run_script("import sightline.migrate.auto\n" + ENVIRONMENT, plain=True)
    assert "available True" in done.stdout


@pytest.mark.parametrize("package", ["sightline_migrate", "sightline.migrate"])
def test_importing_the_package_imports_no_torch(package: str):
    code = f"import sys; from {package} import hook; hook.autoload(); assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "packages" / "migrate")])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


REFUSED = {
    "triton": (
        "import triton\n@triton.jit\ndef kernel(x):\n    pass\nkernel[(1,)](torch.zeros(1).cuda())  # here",
        "Triton kernel 'kernel' cannot run on cpu",
    ),
    "no rule": ("torch._C.TensorBase.cuda(torch.ones(1))  # here", "needs a real CUDA device, not cpu"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_says_where(what: str, run_script: Run, tmp_path: Path):
    if what == "triton":
        pytest.importorskip("triton")
    text, message = REFUSED[what]
    text = f"import torch\n{text}\n"
    done = run_script(text, "--target", "cpu", check=False, env={"PATH": "/nonexistent"})
    line = text.splitlines().index(next(each for each in text.splitlines() if "# here" in each)) + 1
    assert done.returncode != 0
    place = f"{tmp_path}/script.py:{line}: "
    assert [each for each in done.stderr.splitlines() if message in each and place in each], done.stderr


@pytest.mark.parametrize("text", ["Found no NVIDIA driver on your system.", "No CUDA GPUs are available"])
def test_a_call_without_a_rule_says_so_with_and_without_a_driver(text: str):
    told = advice.advise(RuntimeError(text), "cpu")
    assert told.endswith(": RuntimeError: needs a real CUDA device, not cpu; this call has no rule")
