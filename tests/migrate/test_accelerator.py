"""A CUDA script on a device that is not the CPU: twin, with memory of its own (accelerator/twin.cpp)."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sightline.migrate import AUTOLOAD

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent / "accelerator"
TOPICS = [node.name for node in ast.parse((HERE / "checks.py").read_text()).body if isinstance(node, ast.FunctionDef)]
TOPICS = [name for name in TOPICS if name != "where" and not name.startswith("_")]


def _environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SIGHTLINE_MIGRATE")}
    paths = os.pathsep.join([str(REPO), str(HERE)])
    return kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def _run(*words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *map(str, words)], _environment(**more)
    with tempfile.TemporaryDirectory() as folder:  # where the logs of migration go
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


ITSELF = """
import os, torch, twin_backend
os.environ["TWIN_LIBRARY"] = library = twin_backend.build()
twin_backend.autoload()
there, host = torch.ones(2, 2, device="twin"), torch.ones(2, 2)
assert not there.is_cpu and there.device.type == "twin" and not torch.cuda.is_available()
taken = []
for mix in (lambda: there + host, lambda: torch.mm(there, host), lambda: torch.cat([there, host]), there.numpy):
    try:
        taken.append(str(mix()))
    except (RuntimeError, TypeError):
        pass
print(taken, torch.twin.memory_allocated())
print(library)
"""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """[what the device itself does, the path of its library]; compiled once (20 seconds) and kept."""
    missing = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: the test device cannot be compiled")
    script = tmp_path_factory.mktemp("twin") / "itself.py"
    script.write_text(ITSELF)
    return _run(script).stdout.splitlines()[-2:]


@pytest.fixture(scope="session")
def library(built: list[str]) -> str:
    """Only the processes of these tests load it."""
    return built[1]


@pytest.fixture(scope="session")
def ended(library: str) -> dict[str, str]:
    """The error of every topic, from one process."""
    done = _run("-m", "sightline.migrate", "--target", "twin", HERE / "checks.py", TWIN_LIBRARY=library)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("topic", TOPICS)
def test_topic(ended: dict[str, str], topic: str) -> None:
    assert ended[topic] == "", ended[topic]


def test_the_device_refuses_host_tensors(built: list[str]) -> None:
    assert built[0] == "[] 16"  # bytes of the one tensor that is there


SWITCHED_ON = """
import torch
from torch.utils.data import DataLoader, Dataset

class Where(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return f"{torch.cuda.is_available()} {torch.cuda.get_device_name()}"

if __name__ == "__main__":
    print(torch.ones(1).cuda().device, torch._C.TensorBase.device.__get__(torch.ones(1, device="cuda:1")))
    print(*DataLoader(Where(), batch_size=None, num_workers=1, multiprocessing_context="spawn"))
"""


@pytest.mark.parametrize(("target", "first"), [("twin", "ours"), ("auto", "ours"), ("twin", "the device's")])
def test_switched_on_by_the_environment(library: str, tmp_path: Path, target: str, first: str) -> None:
    """`import torch` calls the hooks of all backends in the order of the path: ours may come before the device's."""
    (tmp_path / "script.py").write_text(SWITCHED_ON)
    paths = [AUTOLOAD, HERE]
    done = _run(
        tmp_path / "script.py",
        TWIN_LIBRARY=library,
        SIGHTLINE_MIGRATE="1",
        SIGHTLINE_MIGRATE_TARGET=target,
        PYTHONPATH=os.pathsep.join(map(str, paths if first == "ours" else paths[::-1])),
    )
    assert done.stdout == "cuda:0 twin:1\nTrue Twin 0 True Twin 0\n", done.stdout + done.stderr


def test_the_reference_script_prints_the_cpus_losses(library: str) -> None:
    fixtures, flags = HERE.parent / "fixtures", ("--fast", "--model-ema", "--clip-grad-norm", "1")
    runs = json.dumps([("--device", "cpu", *flags), ("--device", "cuda", *flags)])
    words = (fixtures / "several.py", fixtures / "train_reference.py", runs)
    found = _run("-m", "sightline.migrate", "--target", "twin", *words, TWIN_LIBRARY=library).stdout
    expected, told = ([line for line in part.splitlines() if " loss " in line] for part in found.split("= 1\n"))
    assert len(expected) == 6 and told == expected and "max mem:" in found.split("= 1\n")[1]
