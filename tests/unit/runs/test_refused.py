"""A refused start undoes its own files and nobody else's."""

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sightline.errors import RankFailed, UsageError
from sightline.runs.refused import as_before

FILES = {".lock", "log.jsonl", "exit.json"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}


def start_ranks(out: Path, code: int = 2, told: int = 2) -> None:
    """Write what two ranks write that are refused, or fail otherwise; their starter hears only the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (".lock", "log.jsonl", "rank_1.log"):
        (out / name).write_text("")
    (out / "exit.json").write_text(json.dumps({"code": told, "reason": "no data"}))
    raise RankFailed(code, f"rank 0 of 2 ended with exit code {code}")


def start(out: Path, *more: str, told: str | None = "no data") -> None:
    """Write what a start writes before it can be refused, and `more`; then refuse it."""
    (out / "checkpoints").mkdir(parents=True)
    for name in (".lock", "log.jsonl", *more):
        (out / name).write_text("")
    if told is not None:
        (out / "exit.json").write_text(json.dumps({"code": 2, "reason": told}))
    raise UsageError("no data")


def start_beside_another(out: Path, locks: list) -> None:
    try:
        start(out)
    finally:
        locks.append((out / ".lock").open("a"))
        fcntl.flock(locks[0], fcntl.LOCK_EX)


@pytest.fixture
def locks() -> Iterator[list]:
    held: list = []
    yield held
    for each in held:
        each.close()


def test_a_new_folder_goes_with_the_parents_that_were_made(tmp_path: Path):
    out = tmp_path / "a" / "b" / "run"
    with pytest.raises(UsageError, match="no data"), as_before(out):
        start(out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", ["checkpoints/ckpt-1", "config.yaml", "notes.txt"])
def test_a_folder_that_holds_more_stays(tmp_path: Path, more: str):
    out = tmp_path / "run"
    with pytest.raises(UsageError, match="no data"), as_before(out):
        start(out, more)
    assert {path.name for path in out.iterdir()} >= FILES and (out / more).exists()


@pytest.mark.parametrize("told", [None, "another reason"])
def test_a_folder_whose_exit_json_is_not_of_this_start_stays(tmp_path: Path, told: str | None):
    """Two runs began at once, and the other one claimed the folder."""
    with pytest.raises(UsageError, match="no data"), as_before(tmp_path / "run"):
        start(tmp_path / "run", told=told)
    assert (tmp_path / "run" / ".lock").exists()


def test_a_folder_that_another_run_has_locked_since_stays(tmp_path: Path, locks: list):
    with pytest.raises(UsageError, match="no data"), as_before(tmp_path / "run"):
        start_beside_another(tmp_path / "run", locks)
    assert {path.name for path in (tmp_path / "run").iterdir()} >= FILES


def test_under_a_launcher_exit_json_stays_for_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="no data"), as_before(tmp_path / "run"):
        start(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} >= FILES


@pytest.mark.parametrize("code", [0, 143])
def test_the_state_of_a_run_stays(tmp_path: Path, code: int):
    out = tmp_path / "run"
    out.mkdir()
    (out / "exit.json").write_text(json.dumps({"code": code, "reason": "before"}))
    with pytest.raises(UsageError, match="no data"), as_before(out):
        start(out)
    assert json.loads((out / "exit.json").read_text()) == {"code": code, "reason": "before"}


@pytest.mark.parametrize("was_at_work", [True, False], ids=["a run", "no run"])
def test_a_killed_run_is_not_marked_as_failed(tmp_path: Path, was_at_work: bool):
    """It has no exit.json; a folder that never held a run keeps why nothing began."""
    out = tmp_path / "run"
    out.mkdir()
    if was_at_work:
        (out / "config.yaml").write_text("recipe: r")
    with pytest.raises(UsageError, match="no data"), as_before(out):
        start(out)
    assert (out / "exit.json").exists() != was_at_work


@pytest.mark.parametrize("ended", [None, 143])
def test_ranks_of_one_host_leave_the_state_of_a_run_too(tmp_path: Path, ended: int | None):
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.yaml").write_text("recipe: r")
    if ended:
        (out / "exit.json").write_text(json.dumps({"code": ended, "reason": "before"}))
    with pytest.raises(RankFailed), as_before(out):
        start_ranks(out)
    if ended:
        assert json.loads((out / "exit.json").read_text())["code"] == ended
    else:
        assert not (out / "exit.json").exists()


@pytest.mark.parametrize(("code", "told"), [(8, 8), (1, 1), (2, 8)])
def test_ranks_that_failed_otherwise_are_recorded(tmp_path: Path, code: int, told: int):
    (tmp_path / "run").mkdir()
    with pytest.raises(RankFailed), as_before(tmp_path / "run"):
        start_ranks(tmp_path / "run", code, told)
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["code"] == told


def test_a_first_start_of_ranks_that_is_refused_leaves_no_folder(tmp_path: Path):
    out = tmp_path / "a" / "run"
    with pytest.raises(RankFailed), as_before(out):
        start_ranks(out)
    assert list(tmp_path.iterdir()) == []
