"""`prepare` that is killed and started again leaves the bytes of one that never stopped."""

import os
import runpy
import signal
import time
from pathlib import Path

import pytest
import warm

from sightline import cli

REPO = Path(__file__).resolve().parents[2]
MADE = runpy.run_path(str(REPO / "tests/unit/data/prepare/archives.py"))
MADE_COCO = runpy.run_path(str(REPO / "tests/unit/data/prepare/coco_zips.py"))
LIMIT_S = 120


def command(archives: list[str], out: Path, form: str, jobs: int) -> list[str]:
    shards = ["--shards", "300", "--val-shards", "10"]
    return ["prepare", "imagenet", *archives, "--out", str(out), "--form", form, *shards, "--jobs", str(jobs)]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def kill_in_the_middle(arguments: list[str], out: Path, record: str = "prepared.json") -> bool:
    """SIGKILL as soon as some pieces are written; False if the process was done before it could be killed."""
    before = len(list((out / ".prepare").glob("*-*")))
    process = warm.start("sightline", *arguments)
    deadline = time.monotonic() + LIMIT_S
    while not process.poll(0.002) and len(list((out / ".prepare").glob("*-*"))) < before + 2:
        assert time.monotonic() < deadline
    if not process.poll():
        os.kill(process.pid, signal.SIGKILL)
    return process.wait().code == -signal.SIGKILL and not (out / record).exists()


def finish(arguments: list[str]) -> None:
    ended = warm.start("sightline", *arguments).wait()
    assert ended.code == 0, ended


@pytest.mark.parametrize(
    ("form", "jobs"),
    [
        ("tfrecord", 1),
        # Each of two processes imports what it needs; one that is killed with them is below.
        pytest.param("tfrecord", 2, marks=pytest.mark.slow),
        pytest.param("folder", 1, marks=pytest.mark.slow),
        pytest.param("tar", 2, marks=pytest.mark.slow),
        pytest.param("folder", 2, marks=pytest.mark.slow),
    ],
)
def test_killed_twice_then_finished_gives_the_same_bytes(tmp_path, form, jobs):
    per_class = 500 if form == "folder" else 100  # a piece of the folder form has 250 files
    archives = MADE["make_archives"](tmp_path / "in", per_class, 40)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert cli.main(command(archives, whole, form, 1)) == 0
    killed = [kill_in_the_middle(command(archives, out, form, jobs), out) for _ in range(2)]
    assert killed[0], "the process was faster than the test; give it more images"
    finish(command(archives, out, form, jobs))
    assert contents(out) == contents(whole)
    assert not list(out.rglob("*.part-*")) and not (out / ".prepare").exists()


@pytest.mark.slow  # by the same code as ImageNet above
@pytest.mark.parametrize(("form", "jobs"), [("tfrecord", 2), ("folder", 1)])
def test_coco_killed_twice_then_finished_gives_the_same_bytes(tmp_path, form, jobs):
    source = MADE_COCO["make_zips"](tmp_path / "in", 2000 if form == "folder" else 300, 40)
    whole, out = tmp_path / "whole", tmp_path / "out"

    def arguments(out: Path, jobs: int) -> list[str]:
        places = ["--source", str(source), "--out", str(out), "--form", form, "--jobs", str(jobs)]
        return ["prepare", "coco", *places, "--shards", "150", "--val-shards", "10"]

    assert cli.main(arguments(whole, 1)) == 0
    killed = [kill_in_the_middle(arguments(out, jobs), out) for _ in range(2)]
    assert killed[0], "the process was faster than the test; give it more images"
    finish(arguments(out, jobs))
    assert contents(out) == contents(whole)
    assert not list(out.rglob("*.part-*")) and not (out / ".prepare").exists()


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_shapes_killed_twice_then_finished_give_the_same_bytes(tmp_path, jobs):
    whole, out = tmp_path / "whole", tmp_path / "out"
    counts = ["--train-pictures", "60" if jobs == 1 else "310", "--val-pictures", "5"]  # from 300 on in two processes

    def arguments(out: Path) -> list[str]:
        return ["prepare", "shapes", "--out", str(out), "--only", "detection", *counts]

    assert cli.main(arguments(whole)) == 0
    killed = [kill_in_the_middle(arguments(out), out / "detection", "shapes.json") for _ in range(2)]
    assert killed[0], "the process was faster than the test; draw more"
    finish(arguments(out))
    assert contents(out) == contents(whole)
    assert not list(out.rglob("*.part-*")) and not (out / "detection" / ".prepare").exists()


def test_processes_leave_when_their_parent_is_killed(tmp_path):
    archives = MADE["make_archives"](tmp_path / "in", 100, 40)
    out = tmp_path / "out"
    process = warm.start("sightline", *command(archives, out, "tfrecord", 2))
    process.until(lambda: list((out / ".prepare").glob("train-*")))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL and len(children) >= 2
    deadline = time.monotonic() + LIMIT_S
    while any(_is_running(int(child)) for child in children):
        assert time.monotonic() < deadline, f"{children} stayed behind"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
