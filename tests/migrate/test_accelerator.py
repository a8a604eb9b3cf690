"""A CUDA script on a device that is not the CPU: twin, with memory of its own (accelerator/twin.cpp)."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sightline_migrate import AUTOLOAD

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent / "accelerator"
TOPICS = [node.name for node in ast.parse((HERE / "checks.py").read_text()).body if isinstance(node, ast.FunctionDef)]
TOPICS = [name for name in TOPICS if name != "where" and not name.startswith("_")]
GUEST = REPO / "packages" / "migrate"
PATHS = {"PYTHONPATH": os.pathsep.join([str(REPO), str(GUEST), str(HERE)])}
TWIN = ("-m", "sightline.migrate", "--target", "twin")
KEPT_TABLE = REPO / "benchmarks" / "results" / "cuda-semantics-twin.json"
Run = Callable[..., Any]


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
def built(once: Callable[..., Path], fork: Run) -> list[str]:
    """[what the device itself does, the path of its library]; compiled once (10 seconds) and kept."""
    missing = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: the test device cannot be compiled")

    def build(folder: Path) -> None:
        (folder / "itself.py").write_text(ITSELF)
        kept = {} if os.access(Path.home(), os.W_OK) else {"TORCH_EXTENSIONS_DIR": str(folder)}
        fork(folder, "itself.py", env=PATHS | kept)

    return (once("twin", build) / "out.txt").read_text().splitlines()[-2:]


@pytest.fixture(scope="session")
def library(built: list[str]) -> str:
    """Only the processes of these tests load it."""
    return built[1]


@pytest.fixture(scope="session")
def topics(once: Callable[..., Path], library: str, fork: Run) -> Path:
    """Where one process went through all topics."""
    environment = PATHS | {"TWIN_LIBRARY": library}
    return once("topics", lambda folder: fork(folder, *TWIN, HERE / "checks.py", env=environment, warm=True))


@pytest.fixture(scope="session")
def ended(topics: Path) -> dict[str, str]:
    """The error of every topic."""
    return json.loads((topics / "out.txt").read_text().splitlines()[-1])


@pytest.mark.parametrize("topic", TOPICS)
def test_topic(ended: dict[str, str], topic: str) -> None:
    assert ended[topic] == "", ended[topic]


def test_the_log_names_what_only_such_a_device_has(topics: Path) -> None:
    documents = [json.loads(path.read_text()) for path in (topics / "migrate_log").glob("migrate_*.json")]
    found = {site["api"]: site["what"] for document in documents for site in document["sites"]}
    names = {"torch.Tensor.pin_memory", "torch.Tensor.device", "torch.get_default_device", "torch.jit.script"}
    assert names <= found.keys() and found["torch.utils.data.DataLoader.__init__"] == "pinned for twin"


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


@pytest.mark.parametrize(
    ("target", "first"),
    [
        ("auto", "ours"),
        # The same script: a target by name, which test_scripts.py has too, and the order that needs nothing of us.
        pytest.param("twin", "ours", marks=pytest.mark.slow),
        pytest.param("twin", "the device's", marks=pytest.mark.slow),
    ],
)
def test_switched_on_by_the_environment(fork: Run, library: str, tmp_path: Path, target: str, first: str) -> None:
    """`import torch` calls the hooks of all backends in the order of the path: ours may come before the device's.

    The worker is a process of its own, as a user starts it.
    """
    (tmp_path / "script.py").write_text(SWITCHED_ON)
    paths = [AUTOLOAD, REPO, GUEST, HERE]
    environment = {
        "TWIN_LIBRARY": library,
        "SIGHTLINE_MIGRATE": "1",
        "SIGHTLINE_MIGRATE_TARGET": target,
        "PYTHONPATH": os.pathsep.join(map(str, paths if first == "ours" else paths[::-1])),
    }
    done = fork(tmp_path, tmp_path / "script.py", env=environment)
    assert done.stdout == "cuda:0 twin:1\nTrue Twin 0 True Twin 0\n", done.stdout + done.stderr


def test_the_reference_script_prints_the_cpus_losses(fork: Run, library: str, tmp_path: Path) -> None:
    fixtures, flags = HERE.parent / "fixtures", ("--fast", "--model-ema", "--clip-grad-norm", "1")
    script = str(fixtures / "train_reference.py")
    runs = json.dumps([(script, "--device", "cpu", *flags), (script, "--device", "cuda", *flags)])
    environment = PATHS | {"TWIN_LIBRARY": library}
    found = fork(tmp_path, *TWIN, fixtures / "several.py", runs, env=environment, warm=True).stdout
    expected, told = ([line for line in part.splitlines() if " loss " in line] for part in found.split("= 1\n"))
    assert len(expected) == 6 and told == expected and "max mem:" in found.split("= 1\n")[1]


TRAINS = """
import json, sys
from sightline import cli
from sightline.hardware import devices
from sightline.hardware.devices import Device

row = eval(sys.argv[1])
devices.KINDS[row.kind] = row
flags = '''--model.width=4 --data.path=synthetic:classes=4,samples=24,size=16 --data.classes=4 --data.size=16
    --data.eval-resize=16 --data.eval-size=16 --train.epochs=1 --train.global-batch=8 --train.precision=fp32
    --run.workers=0 --run.log-every-steps=1'''.split()
for device in ("cpu", row.kind):
    assert cli.main(["train", "demo_classification", *flags, f"--run.device={device}", f"--run.out={device}"]) == 0
"""


def test_a_row_makes_it_a_device_of_sightline(fork: Run, library: str, tmp_path: Path) -> None:
    """The row that docs/howto/contributing.md shows: losses and scores are the CPU's within rounding."""
    text = (REPO / "docs" / "howto" / "contributing.md").read_text(encoding="utf-8").partition("\n## A device\n")[2]
    (tmp_path / "trains.py").write_text(TRAINS)
    row = text.partition("```python\n")[2].partition("```")[0].strip()
    fork(tmp_path, "trains.py", row, env=PATHS | {"TWIN_LIBRARY": library}, warm=True)

    def events(device: str, kind: str, *keys: str) -> list[Any]:
        lines = map(json.loads, (tmp_path / device / "log.jsonl").read_text().splitlines())
        return [line[key] for line in lines if line["event"] == kind for key in keys]

    assert json.loads((tmp_path / "twin" / "environment.json").read_text())["device"] == "Twin 0"
    assert len(events("twin", "train", "loss")) == 3
    for wanted in (("train", "loss"), ("evaluate", "top1", "loss")):
        assert events("twin", *wanted) == pytest.approx(events("cpu", *wanted), rel=1e-3)


def test_the_table_of_moves_is_that_of_the_device(fork: Run, library: str, tmp_path: Path) -> None:
    """The table that test_semantics.py compares migration with."""
    script, environment = REPO / "benchmarks" / "cuda_semantics.py", PATHS | {"TWIN_LIBRARY": library}
    fork(tmp_path, script, "--device", "twin", "--out", "table.json", env=environment, warm=True)
    made, kept = (json.loads(path.read_text()) for path in (tmp_path / "table.json", KEPT_TABLE))
    assert made["cases"] == kept["cases"] and kept["is a GPU"] is made["is a GPU"] is False
