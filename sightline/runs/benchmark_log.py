"""Two files as the TensorFlow benchmark logger writes them, for the tools that read those (`--run.benchmark-log DIR`).

metric.log has one JSON object per number and line; benchmark_run.log is one object about the run and its machine.
Nothing is sent anywhere.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

import psutil
import torch

from sightline.errors import UsageError
from sightline.files.whole import no_link, open_text, replace_text
from sightline.hardware.devices import KINDS
from sightline.runs.loggers import Logger

METRICS = "metric.log"
RUN = "benchmark_run.log"
TIMESTAMP = "%Y-%m-%dT%H:%M:%S.%fZ"
OUR_VARIABLES = ("TORCH", "CUDA", "NCCL", "SIGHTLINE")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|://[^/\s]*@", re.IGNORECASE)
UNITS = {  # by the last part of a metric's name
    "images_per_s": "images/s",
    "images_per_s_per_rank": "images/s",
    "steps_per_s": "steps/s",
    "eta_s": "s",
    "seconds": "s",
    "wall_s": "s",
    "running_s": "s",
    "memory_gb": "GB",
}


class BenchmarkLog(Logger):
    """Opened by rank 0. A resumed run appends to metric.log and replaces benchmark_run.log."""

    def __init__(self, folder: Path, name: str, fields: Mapping[str, Any], test_id: str):
        self.folder = folder
        self.about = {
            "model_name": name,
            "dataset": {"name": PurePath(str(fields.get("data.path", ""))).name},
            "machine_config": _machine(),
            "test_id": test_id,
            "run_date": datetime.now(UTC).strftime(TIMESTAMP),
            "torch_version": {"version": torch.__version__, "git_hash": torch.version.git_version},
            "environment_variables": [
                {"name": key, "value": value}
                for key, value in sorted(os.environ.items())
                if key.startswith(OUR_VARIABLES) and not SECRET.search(f"{key}={value}")
            ],
            "run_parameters": [_parameter(key, fields[key]) for key in sorted(fields)],
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(folder / METRICS)
            self._metrics = open_text(folder / METRICS, "a")
            self._write_about("running")
        except OSError as error:
            raise UsageError(
                f"run.benchmark_log={folder} cannot be written: {error.strerror}; give another folder, or leave it out"
            ) from error

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Append the numbers, one line each."""
        for name, value in values.items():
            self.metric(f"{group}/{name}", value, step)

    def metric(self, name: str, value: float, step: int) -> None:
        """Append one number; JSON has no NaN or infinity, so these are left out: log.jsonl reports them anyway."""
        if not math.isfinite(value):
            return
        line = {
            "name": name,
            "value": float(value),
            "unit": UNITS.get(name.rpartition("/")[2]),
            "global_step": step,
            "timestamp": datetime.now(UTC).strftime(TIMESTAMP),
            "extras": [],
        }
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()

    def close(self, code: int, reason: str = "") -> None:
        """Write how the run ended."""
        self._metrics.close()
        self._write_about("success" if code == 0 else "failure")

    def _write_about(self, status: str) -> None:
        replace_text(self.folder / RUN, json.dumps({**self.about, "status": status}, indent=1) + "\n")


def _machine() -> dict[str, Any]:
    frequency, memory = psutil.cpu_freq(), psutil.virtual_memory()
    cpu: dict[str, Any] = {"num_cores": os.cpu_count(), "cpu_info": KINDS["cpu"].name()}
    if frequency:
        cpu["mhz_per_cpu"] = frequency.max or frequency.current
    return {"cpu_info": cpu, "memory_total": memory.total, "memory_available": memory.available}


def _parameter(name: str, value: Any) -> dict[str, Any]:
    """Format a field as the original does: the type of a value is in the name of its key."""
    if isinstance(value, bool):
        return {"name": name, "bool_value": str(value)}
    if isinstance(value, int):
        return {"name": name, "long_value": value}
    if isinstance(value, float):
        return {"name": name, "float_value": value}
    return {"name": name, "string_value": value if isinstance(value, str) else json.dumps(value)}


def _cut_torn_line(path: Path) -> None:
    """Remove half a line that a killed process left, which would spoil the next one."""
    if not path.exists():
        return
    with open(path, "rb+", opener=no_link) as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)
