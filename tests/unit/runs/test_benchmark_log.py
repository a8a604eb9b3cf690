"""metric.log and benchmark_run.log, as the tools read them that read those of the TensorFlow benchmark logger."""

import json
import math
from datetime import datetime
from pathlib import Path

import psutil
import pytest
import torch
from tiny import tiny

from sightline import api
from sightline.errors import UsageError
from sightline.runs.benchmark_log import BenchmarkLog
from sightline.runs.log import RunLog

FIELDS = {"data.path": "/data/imagenet", "train.epochs": 3, "optimizer.lr": 0.5, "run.override": True, "data.mean": [1]}
KEYS = {"name", "value", "unit", "global_step", "timestamp", "extras"}


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metric.log").read_text().splitlines()]


def about(folder: Path) -> dict:
    return json.loads((folder / "benchmark_run.log").read_text())


def test_a_metric_is_a_line(tmp_path: Path):
    log = BenchmarkLog(tmp_path / "new" / "folder", "resnet50", FIELDS, "nightly")
    log.metric("train/images_per_s", 12, 40)
    log.metric("train/loss", math.nan, 40)
    log.metric("evaluate/top1", 0.5, 41)
    first, second = metrics(tmp_path / "new" / "folder")  # on disk at once
    assert set(first) == KEYS and isinstance(first["value"], float)
    datetime.strptime(first["timestamp"], "%Y-%m-%dT%H:%M:%S.%fZ")
    assert first | {"timestamp": ""} == {
        "name": "train/images_per_s",
        "value": 12.0,
        "unit": "images/s",
        "global_step": 40,
        "timestamp": "",
        "extras": [],
    }
    assert (second["name"], second["unit"], second["global_step"]) == ("evaluate/top1", None, 41)


def test_the_run_and_its_machine_are_described(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("TORCH_API_TOKEN", "hidden")
    monkeypatch.setenv("CUDA_PROXY", "http://me:hidden@proxy")
    monkeypatch.setenv("OTHER", "hidden")
    log = BenchmarkLog(tmp_path, "resnet50", FIELDS, "nightly")
    found = about(tmp_path)
    assert found["status"] == "running" and found["model_name"] == "resnet50" and found["test_id"] == "nightly"
    assert found["dataset"] == {"name": "imagenet"}
    machine = found["machine_config"]
    assert machine["memory_total"] == psutil.virtual_memory().total >= machine["memory_available"] > 0
    assert machine["cpu_info"]["num_cores"] == psutil.cpu_count() and machine["cpu_info"]["cpu_info"]
    assert found["torch_version"]["version"] == torch.__version__
    datetime.strptime(found["run_date"], "%Y-%m-%dT%H:%M:%S.%fZ")
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in found["environment_variables"]
    assert "hidden" not in (tmp_path / "benchmark_run.log").read_text()
    assert found["run_parameters"] == [
        {"name": "data.mean", "string_value": "[1]"},
        {"name": "data.path", "string_value": "/data/imagenet"},
        {"name": "optimizer.lr", "float_value": 0.5},
        {"name": "run.override", "bool_value": "True"},
        {"name": "train.epochs", "long_value": 3},
    ]
    log.close(0)
    assert about(tmp_path) == {**found, "status": "success"}
    BenchmarkLog(tmp_path, "resnet50", FIELDS, "").close(5)
    assert about(tmp_path)["status"] == "failure"


def test_a_second_start_adds_to_the_lines_and_cuts_half_of_one(tmp_path: Path):
    log = BenchmarkLog(tmp_path, "resnet50", FIELDS, "")
    log.metric("train/loss", 1.0, 1)
    with (tmp_path / "metric.log").open("a") as file:
        file.write('{"name": "train/lo')  # as after a kill
    log = BenchmarkLog(tmp_path, "resnet50", FIELDS, "")
    log.metric("train/loss", 2.0, 2)
    assert [line["value"] for line in metrics(tmp_path)] == [1.0, 2.0]


def test_a_folder_that_cannot_be_written_is_usage(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"run.benchmark_log=.*file/x cannot be written: .*; give another folder"):
        BenchmarkLog(tmp_path / "file" / "x", "resnet50", FIELDS, "")


def test_a_run_that_is_refused_its_folder_leaves_the_log_of_the_first_alone(tmp_path: Path):
    first = RunLog(tmp_path / "run")
    flags = [f"--run.out={tmp_path / 'run'}", f"--run.benchmark-log={tmp_path / 'log'}", "--run.device=cpu"]
    with pytest.raises(UsageError, match="another run is using"):
        api.train(*api.load("demo_classification", flags))
    first.close(0, "finished")
    assert not (tmp_path / "log").exists()


def test_a_run_and_its_restart_feed_it(tmp_path: Path):
    flags = [*tiny(), "--train.epochs=2", "--run.log-every-steps=1", "--run.test-id=mine"]
    flags += [f"--run.out={tmp_path / 'run'}", f"--run.benchmark-log={tmp_path / 'log'}"]
    api.train(*api.load("demo_classification", [*flags, "--train.max-steps=3"]))
    api.train(*api.load("demo_classification", flags))
    found = metrics(tmp_path / "log")
    assert all(set(line) == KEYS for line in found)
    by_name = {name: [e["global_step"] for e in found if e["name"] == name] for name in {e["name"] for e in found}}
    for name in ("loss", "lr", "top1", "images_per_s", "steps_per_s"):
        assert by_name[f"train/{name}"] == [1, 2, 3, 4, 5, 6]
    assert by_name["evaluate/top1"] == by_name["time_to_train/wall_s"] == [3, 6]
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in logged if line["event"] == "train"]
    assert [line["value"] for line in found if line["name"] == "train/loss"] == losses
    told = about(tmp_path / "log")
    assert told["status"] == "success" and told["test_id"] == "mine" and told["model_name"] == "demo_classification"
    assert {"name": "train.max_steps", "long_value": 0} in told["run_parameters"]
