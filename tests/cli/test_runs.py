"""`sightline runs` as a user types it: what its folders say, whatever is in them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import tiny

from sightline import cli
from sightline.runs.log import RunLog

NAME = "demo_classification"
HERE = [*tiny.HERE, "--run.progress=off"]


@pytest.fixture(scope="module")
def trained(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs in two starts; for reading only."""
    out = tmp_path_factory.mktemp("trained") / "run"
    flags = [NAME, *tiny.SMALL, *HERE, f"--data.path={shapes}", f"--run.out={out}", "--train.epochs=3"]
    assert cli.main(["train", *flags, "--train.max-steps=10"]) == 0
    assert cli.main(["train", *flags]) == 0
    return out


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A folder of runs with one in it."""
    shutil.copytree(trained, tmp_path / "runs" / "good")
    return tmp_path / "runs"


def listed(sightline, folder: Path) -> dict[str, dict]:
    said = sightline("runs", folder, "--json")
    assert (said.code, said.err) == (0, ""), said
    return {row["name"]: row for row in json.loads(said.out)}


def test_a_finished_run_is_described_as_its_log_says(sightline, folder: Path, shapes: Path):
    events = [json.loads(line) for line in (folder / "good" / "log.jsonl").read_text().splitlines()]
    evaluations = {event["epoch"]: event for event in events if event["event"] == "evaluate"}
    scores = {epoch: event["top1"] for epoch, event in evaluations.items()}
    epoch = max(scores, key=lambda each: (scores[each], -evaluations[each]["loss"]))
    starts = [event["time"] for event in events if event["event"] == "start"]
    ends = [event["time"] for event in events if event["event"] == "exit"]
    assert len(starts) == len(ends) == 2
    row = listed(sightline, folder)["good"]
    assert row == {
        "name": "good",
        "path": str(folder / "good"),
        "recipe": NAME,
        "data": str(shapes),
        "headline": "top1",
        "best": scores[epoch],
        "best_epoch": epoch,
        "epochs_done": 3,
        "epochs": 3,
        "seconds": pytest.approx(sum(end - start for start, end in zip(starts, ends, strict=True))),
        "state": "finished",
        "exit_code": 0,
        "reason": "finished",
    }
    header, line = sightline("runs", folder).out.splitlines()
    assert header.split() == ["run", "recipe", "data", "best", "at", "epoch", "epochs", "time", "state"]
    shown = ["good", NAME, "/".join(shapes.parts[-2:]), "top1", f"{scores[epoch]:.4f}", str(epoch), "3/3"]
    assert line.split()[:7] == shown and line.split()[-1] == "finished"


def test_runs_is_the_folder_by_default_and_a_run_itself_may_be_given(sightline, folder: Path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert sightline("runs").out == sightline("runs", "runs").out == sightline("runs", "runs/good").out
    monkeypatch.chdir(folder)
    refused = sightline("runs")
    assert refused.code == 2 and "runs is not a folder; give the one that holds your runs" in refused.err


def test_states(sightline, folder: Path):
    for name, code in (("failed", 3), ("stopped", 130), ("killed", None), ("running", None), ("starting", None)):
        shutil.copytree(folder / "good", folder / "deep" / name)
        (folder / "deep" / name / "exit.json").unlink()
        if code:
            reason = {"code": code, "reason": "why \x1b[31mit\nended"}
            (folder / "deep" / name / "exit.json").write_text(json.dumps(reason))
    for kept in ("log.jsonl", "config.yaml", "scores-best.json"):
        (folder / "deep" / "starting" / kept).unlink()
    at_work = [RunLog(folder / "deep" / name) for name in ("running", "starting")]
    rows = listed(sightline, folder)
    found = {Path(name).name: row["state"] for name, row in rows.items()}
    assert found == {
        "good": "finished",
        "failed": "failed",
        "stopped": "stopped",
        "killed": "stopped",
        "running": "running",
        "starting": "running",
    }
    assert rows["deep/failed"]["exit_code"] == 3 and "killed" in rows["deep/killed"]["reason"]
    said = sightline("runs", folder)
    assert "failed, exit 3" in said.out and said.out.splitlines()[-1] == "deep/failed: why \\x1b[31mit"
    for log in at_work:
        log.close(0, "finished")
    assert listed(sightline, folder)["deep/running"]["state"] == "finished"


@pytest.mark.parametrize("name", ["config.yaml", "exit.json", "log.jsonl", "scores-best.json"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff{[", b'{"event": "start"}\n{"event": "train"}\n', b"[" * 99_999])
def test_a_damaged_file_costs_no_other_run(sightline, folder: Path, name: str, content: bytes):
    shutil.copytree(folder / "good", folder / "bad")
    (folder / "bad" / name).write_bytes(content)
    rows = listed(sightline, folder)
    assert rows["good"]["state"] == "finished"
    if name == "log.jsonl" and b'"start"' not in content:  # no line that it would count
        assert (rows["bad"]["state"], rows["bad"]["epochs_done"], rows["bad"]["seconds"]) == ("finished", None, None)
    else:
        assert rows["bad"]["state"] == "damaged"
        assert f"bad: {name} cannot be read" in sightline("runs", folder).out


def test_half_a_last_line_is_not_damage(sightline, folder: Path):
    log = folder / "good" / "log.jsonl"
    whole = log.read_bytes()
    last = whole.rindex(b'{"event": "epoch"')
    log.write_bytes(whole[: last + 30])
    row = listed(sightline, folder)["good"]
    assert (row["state"], row["epochs_done"]) == ("finished", 2)


def test_what_is_not_a_run_is_left_out_and_links_are_not_followed(sightline, folder: Path, tmp_path: Path):
    shutil.move(folder / "good", tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "files").mkdir()
    for name in ("config.yaml", "log.jsonl", "exit.json"):
        (folder / "files" / name).symlink_to(tmp_path / "outside" / name)
    (folder / "other").mkdir()
    (folder / "other" / "config.yaml").write_text("lr: 0.1\n")
    (folder / "other" / "log.jsonl").write_text("{}\n")
    (folder / "pipes").mkdir()
    for name in ("config.yaml", ".lock", "exit.json"):
        os.mkfifo(folder / "pipes" / name)  # whoever opens one waits
    (folder / "loop").symlink_to(folder)
    said = sightline("runs", folder)
    assert (said.code, said.out) == (0, f"no runs below {folder}\n")
    assert listed(sightline, folder) == {}
