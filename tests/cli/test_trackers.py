"""--run.track with the trackers themselves: MLflow's server on SQLite, wandb offline, Trackio's local database.

Each test skips without its packages: `pip install mlflow wandb trackio`, which is 700 MB, and Trackio wants an older
Pillow. What needs none of them is in tests/unit/runs/test_trackers.py.
"""

import importlib.util
import json
import os
import re
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
OURS = ("mlflow", "trackio", "wandb")
LACKS = [name for name in (*OURS, "sqlalchemy") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(LACKS), reason="needs `pip install mlflow wandb trackio`, which is 700 MB")
SECRETS = {  # none of these may be in a file
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MLFLOW_TRACKING_PASSWORD": "open-sesame-1",
    "MLFLOW_TRACKING_USERNAME": "somebody",
    "TRACKIO_WRITE_TOKEN": "write-token-of-mine",
}
TINY = """train demo_classification --model.width=4 --data.size=24 --data.eval-resize=24 --data.eval-size=24 --epochs=3
    --batch-size=16 --device=cpu --workers=0 --run.log-every-steps=1 --run.checkpoint-every-steps=2""".split()
PATIENCE_S = 240


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end and (process is None or process.poll() is None), "it has not come"
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/health", timeout=5).status == 200
    except OSError:
        return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of MLflow's own tracking server, with a database of SQLite."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = f"{sys.executable} -m mlflow server --host 127.0.0.1 --port {port} --workers 1".split()
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", tmp_path / "files"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen([*map(str, command)], cwd=tmp_path, **quiet) as process:
        try:
            wait_for(lambda: answers(address), process)
            yield address
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def started(folder: Path, data: Path, **more: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **SECRETS, "PYTHONPATH": path, "TRACKIO_DIR": str(folder.parent / "trackio"), **more}
    command = [
        sys.executable,
        "-m",
        "sightline",
        *TINY,
        "--data",
        str(data),
        "--out",
        str(folder),
        "--run.track",
        *OURS,
    ]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder.parent, env=environment, **both)


def lines(folder: Path, event: str) -> list[dict]:
    file = folder / "log.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [each for each in found if each["event"] == event]


def warned(said: str) -> list[str]:
    """The trackers that a warning was about."""
    return re.findall(rf"^warning: ({'|'.join(OURS)})", said, re.MULTILINE)


def ids(folder: Path) -> dict[str, str]:
    return {path.stem: json.loads(path.read_text())["run"] for path in (folder / "trackers").glob("*.json")}


def files_with_secrets(folder: Path) -> list[Path]:
    secrets = [value.encode() for name, value in SECRETS.items() if "USERNAME" not in name]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if any(secret in path.read_bytes() for secret in secrets)]


def test_a_run_that_was_killed_continues_in_each_tracker(server: str, shapes: Path, tmp_path: Path):
    out = tmp_path / "run"
    address = {"MLFLOW_TRACKING_URI": server, "WANDB_MODE": "offline"}
    first = started(out, shapes, **address)
    # The processes of the trackers outlive the training, so that they send what they were told.
    wait_for(lambda: len(lines(out, "checkpoint")) >= 1, first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_for(lambda: set(ids(out)) == set(OURS))
    before = ids(out)
    again = started(out, shapes, **address)
    said = again.communicate(timeout=PATIENCE_S)[0]
    assert again.returncode == 0 and warned(said) == [], said
    assert ids(out) == before and lines(out, "start")[1]["step"] > 0

    losses = {line["step"]: line["loss"] for line in lines(out, "train")}
    assert set(losses) == set(range(1, 16))
    scores = json.loads((out / "scores.json").read_text())
    see_mlflow(server, before["mlflow"], out, losses, scores)
    see_wandb(before["wandb"], out, losses, scores)
    see_trackio(before["trackio"], tmp_path / "trackio", losses, scores)
    assert files_with_secrets(tmp_path) == []


def see_mlflow(server: str, run_id: str, out: Path, losses: dict, scores: dict) -> None:
    import mlflow

    client = mlflow.MlflowClient(server)
    (run,) = client.search_runs([client.get_experiment_by_name("sightline").experiment_id])
    assert (run.info.run_id, run.info.status, run.info.run_name) == (run_id, "FINISHED", "run")
    assert run.data.params["train.epochs"] == "3" and run.data.params["optimizer.momentum"] == "0.9"
    assert run.data.tags["origin.train.epochs"] == "flag: --epochs" and run.data.tags["exit"] == "0: finished"
    assert "origin.optimizer.momentum" not in run.data.tags
    assert Path(run.data.tags["checkpoint"]).is_dir()
    assert {each.step: each.value for each in client.get_metric_history(run_id, "train/loss")} == losses
    epochs = {each.step: each.value for each in client.get_metric_history(run_id, "epoch")}
    assert (epochs[1], epochs[4], epochs[15]) == (0, 0, 3)
    for row in scores["tables"]["classes"]:
        assert run.data.metrics[f"evaluate/classes/{row['class']}/top1"] == row["top1"]
    assert run.data.metrics["evaluate/top1"] == scores["values"]["top1"]
    page = Path(client.download_artifacts(run_id, "report.html", str(out.parent)))
    assert page.read_bytes() == (out / "report.html").read_bytes()
    (step,) = {path.path for path in client.list_artifacts(run_id, "worst")} & {
        "worst/step-000005",
        "worst/step-000010",
        "worst/step-000015",
    }
    assert len(client.list_artifacts(run_id, step)) == 12


def records(path: Path) -> Iterator[bytes]:
    """Records of wandb's file: blocks of 32 KiB, as LevelDB writes its log, behind a header of 7 bytes."""
    data, at, part = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if not kind:
            return
        part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield part
            part = b""


def see_wandb(run_id: str, out: Path, losses: dict, scores: dict) -> None:
    from wandb.proto import wandb_internal_pb2

    files = sorted((out / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == len(list((out / "wandb").glob("offline-run-*"))) == 2, "both starts are one run"
    points, config, summary = [], {}, {}
    for file in files:
        for data in records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                assert (record.run.run_id, record.run.project, record.run.display_name) == (run_id, "sightline", "run")
            for update in (*record.config.update, *record.run.config.update):
                config[update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
            for update in record.summary.update:
                summary[update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
            if kind == "history":
                points.append(
                    {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
                )
    found = {each["step"]: each["train/loss"] for each in points if "train/loss" in each}
    assert found == pytest.approx(losses)
    assert config["train.epochs"] == 3 and config["origins"]["train.epochs"] == "flag: --epochs"
    last = [each for each in points if "evaluate/top1" in each][-1]
    assert (last["step"], last["epoch"], last["evaluate/top1"]) == (15, 3, scores["values"]["top1"])
    row = scores["tables"]["classes"][0]
    assert last[f"evaluate/classes/{row['class']}/top1"] == row["top1"]
    assert "worst" in json.dumps(points) and "report" in json.dumps(points)
    assert Path(summary["checkpoint"]).is_dir()


def see_trackio(name: str, folder: Path, losses: dict, scores: dict) -> None:
    with sqlite3.connect(folder / "sightline.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    assert {row[0] for row in rows} == {name}
    points = [(step, json.loads(values)) for _, step, values in rows]
    assert {step: values["train/loss"] for step, values in points if "train/loss" in values} == pytest.approx(losses)
    last = [(step, values) for step, values in points if "evaluate/top1" in values][-1]
    assert last[0] == 15 and last[1]["evaluate/top1"] == scores["values"]["top1"]
    row = scores["tables"]["classes"][0]
    assert last[1][f"evaluate/classes/{row['class']}/top1"] == row["top1"]
    said = json.loads(config)
    assert (said["train.epochs"], said["origin.train.epochs"]) == (3, "flag: --epochs")
    text = json.dumps(points)
    assert "worst/01" in text and "report" in text and "checkpoints/ckpt-" in text


def test_servers_that_are_down_cost_a_warning_each(shapes: Path, tmp_path: Path):
    nobody = f"127.0.0.1:{free_port()}"
    address = {
        "MLFLOW_TRACKING_URI": f"http://somebody:{SECRETS['MLFLOW_TRACKING_PASSWORD']}@{nobody}",
        "WANDB_BASE_URL": f"http://{nobody}",
        "TRACKIO_SERVER_URL": f"http://{nobody}/?write_token={SECRETS['TRACKIO_WRITE_TOKEN']}",
    }
    run = started(tmp_path / "run", shapes, **address)
    said = run.communicate(timeout=PATIENCE_S)[0]
    assert run.returncode == 0 and "finished: best" in said, said
    assert sorted(warned(said)) == sorted(OURS), said
    assert not any(secret in said for name, secret in SECRETS.items() if "USERNAME" not in name), said
    assert files_with_secrets(tmp_path / "run") == []
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")  # for `wandb sync`
    assert any(b"train/loss" in record for record in records(kept))
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == list(range(1, 16))
