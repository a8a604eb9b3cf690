"""A call from Python leaves the process as it was: files, threads, processes, environment, signals, torch."""

import gc
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from sightline import api
from sightline.errors import SightlineError

FLAGS = {"model.width": 4, "data.size": 24, "data.eval_resize": 24, "data.eval_size": 24, "train.precision": "fp32"}
FLAGS |= {"run.progress": "off", "train.max_steps": 2, "run.benchmark_log": ""}
HERE = {"run.workers": 0}
DATA = "synthetic:classes=10,samples=24,size=24"


def state() -> dict[str, Any]:
    """What a call could change."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0])
        except FileNotFoundError:  # of the list itself
            continue
    return {
        "files": Counter(links),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "processes": sorted(child.pid for child in psutil.Process().children(recursive=True)),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "places of modules": list(sys.path),
        "warnings": len(warnings.filters),
        "temporary": sorted(os.listdir(tempfile.gettempdir())),
        "torch": (
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.distributed.is_initialized(),
        ),
    }


def train(out: Path, data: str = DATA, **flags: Any) -> api.TrainResult:
    given = {"data": data, "epochs": 1, "batch_size": 8, "workers": 0, "device": "cpu"}
    return api.train("demo_classification", out=out, flags={**FLAGS, **flags}, **given)


def fail_to_train(out: Path) -> str:
    with pytest.raises(SightlineError) as found:
        train(out / "run", str(out))
    return str(found.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained") / "run").folder


CALLS: dict[str, Callable[[Path, Path], object]] = {
    "train": lambda run, out: train(out / "run"),
    "train with a log of numbers": lambda run, out: train(out / "run", **{"run.benchmark_log": str(out / "numbers")}),
    "train that fails": lambda run, out: fail_to_train(out),
    "evaluate": lambda run, out: api.evaluate(run, flags=HERE),
    "evaluate all": lambda run, out: api.evaluate_all(run, flags=HERE),
    "predict": lambda run, out: api.predict(run, np.zeros((24, 24, 3), np.uint8)),
    "predict files": lambda run, out: api.write_predictions(run, [out / "a.png"], out / "found", flags=HERE),
    "report": lambda run, out: api.report(run, out / "report.html"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_the_process_as_it_was(name: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    seen = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)  # of files that are closed by chance alone
        for i in range(2):  # the first one may import, and start threads that stay
            (tmp_path / str(i)).mkdir()
            Image.new("RGB", (24, 24)).save(tmp_path / str(i) / "a.png")
            kept = CALLS[name](trained, tmp_path / str(i))
            gc.collect()
            seen.append(state())
            assert kept is not None
    assert seen[0] == seen[1]
    assert not [str(each.message) for each in said if issubclass(each.category, ResourceWarning)]
