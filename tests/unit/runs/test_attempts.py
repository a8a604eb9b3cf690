"""Attempts of one command under an elastic launcher: what they obey, and whose folder they may take."""

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from sightline.errors import BadCheckpoint, BadData, NotFinite, PeerLost, UsageError
from sightline.runs import attempts
from sightline.runs import folder as run_folder
from sightline.runs.attempts import Attempt
from sightline.runs.log import RunLog

FIRST = Attempt("job", "job", 0, 2)
SECOND = Attempt("job", "job", 1, 2)


def fail(folder: Path, code: int, attempt: Attempt = FIRST) -> None:
    RunLog(folder, attempt=attempt).close(code, "it was so")


@pytest.mark.parametrize(("code", "kind"), [(2, UsageError), (3, BadData), (4, BadCheckpoint), (5, NotFinite)])
def test_a_restart_repeats_what_would_end_the_same_way(tmp_path: Path, code: int, kind: type):
    fail(tmp_path, code)
    before = (tmp_path / "exit.json").read_text()
    with pytest.raises(kind, match="it was so .as the attempt before; not tried again") as raised:
        SECOND.obey(tmp_path)
    assert raised.value.exit_code == code and (tmp_path / "exit.json").read_text() == before


@pytest.mark.parametrize("code", [0, 1, 6, 7, 8, 130, 143])
def test_other_ends_are_tried_again(tmp_path: Path, code: int):
    fail(tmp_path, code)
    SECOND.obey(tmp_path)


@pytest.mark.parametrize(
    "attempt",
    [Attempt(), FIRST, Attempt("other", "other", 1, 2), Attempt("job", "job", 1, 4)],
    ids=["no launcher", "a person's new command", "another command", "another number of ranks"],
)
def test_only_a_restart_of_the_same_command_obeys(tmp_path: Path, attempt: Attempt):
    fail(tmp_path, 3)
    attempt.obey(tmp_path)
    RunLog(tmp_path, attempt=attempt).release()
    assert not (tmp_path / "exit.json").exists(), "who claims the folder clears the mark"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"code": 3, "reason": [], "run_id": "job", "ranks": 2}',
        '{"code": "3", "reason": ""}',
        '{"code": 3}',
        "\x00",
        "[" * 10**5,
        " " * 2**20 + '{"code": 3, "reason": "", "run_id": "job", "ranks": 2}',  # longer than any that was written
    ],
)
def test_a_damaged_mark_does_not_count(tmp_path: Path, text: str):
    (tmp_path / "exit.json").write_text(text)
    SECOND.obey(tmp_path)


def test_another_rank_may_leave_the_mark_and_rank_0_keeps_it(tmp_path: Path):
    main = RunLog(tmp_path, attempt=FIRST)
    RunLog(tmp_path, rank=1, attempt=FIRST).close(3, "a bad file")
    main.close(8, "rank 1 ended")
    assert attempts.read_exit(tmp_path)["code"] == 3 and attempts.read_exit(tmp_path)["reason"] == "a bad file"
    assert "ends with exit 3: a bad file" in (tmp_path / "rank_1.log").read_text()
    RunLog(tmp_path, rank=1, attempt=SECOND).close(8, "rank 0 was lost")
    assert attempts.read_exit(tmp_path)["code"] == 3, "only an end in vain is another rank's to tell"


def test_detect(monkeypatch: pytest.MonkeyPatch):
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert attempts.detect() == Attempt()
    for name, value in (("RUN_ID", "job7"), ("RESTART_COUNT", "2")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert attempts.detect() == Attempt("job7", "job7", 2, 4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    found = attempts.detect()
    assert found.run_id == "none" and f"launcher {os.getppid()} on " in found.command, "two commands may share `none`"


@pytest.mark.parametrize("name", ["WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"])
def test_a_wrong_environment_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv(name, "two")
    with pytest.raises(UsageError, match=f"{name}='two' must be a whole number"):
        attempts.detect()


def test_the_folder_of_an_attempt_that_gives_no_sign_is_taken_over(tmp_path: Path, monkeypatch, capsys):
    """As of a host that was cut off: its process lives, and its lock with it."""
    monkeypatch.setattr(run_folder, "TAKE_OVER_S", 0.2)
    old = RunLog(tmp_path, attempt=FIRST)
    old.folder.prove_ours()
    new = RunLog(tmp_path, attempt=SECOND)
    assert f"taken over from pid {os.getpid()} on" in capsys.readouterr().out
    new.folder.prove_ours()
    with pytest.raises(PeerLost, match="a later attempt of this command has taken"):
        old.folder.prove_ours()
    old.close(0, "finished")
    assert not (tmp_path / "exit.json").exists(), "what was taken away is left alone"
    new.close(0, "finished")
    assert json.loads((tmp_path / "exit.json").read_text())["restarts"] == 1
    assert {path.name for path in tmp_path.glob(".lock*")} == {".lock"}


@pytest.mark.parametrize("come_on", [lambda old: old.folder.beat(), lambda old: old.evaluating(1, 9, 0, 9)])
def test_the_folder_of_an_attempt_that_comes_on_is_not(tmp_path: Path, monkeypatch, come_on):
    """Two groups of hosts that do not see each other would take it from each other for ever."""
    monkeypatch.setattr(run_folder, "TAKE_OVER_S", 0.2)
    old = RunLog(tmp_path, attempt=FIRST)
    os.utime(tmp_path / ".lock", (1, 1))
    waited: list[float] = []

    def sleep(seconds: float, call=time.sleep) -> None:
        if not waited:
            come_on(old)
        waited.append(seconds)
        call(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PeerLost, match="another attempt of this command is using") as raised:
        RunLog(tmp_path, attempt=SECOND)
    assert os.listdir("/proc/self/fd") == before, f"open as long as somebody holds {raised.value!r}"
    old.folder.prove_ours()
    old.release()


@pytest.mark.parametrize("attempt", [Attempt(), Attempt("other", "other", 1, 2), Attempt("none", "launcher 7", 1, 2)])
def test_another_command_is_refused(tmp_path: Path, attempt: Attempt):
    held = RunLog(tmp_path, attempt=Attempt("none", "launcher 6", 0, 2))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(UsageError, match=f"another run is using .* .pid {os.getpid()} on ") as raised:
        RunLog(tmp_path, attempt=attempt)
    assert os.listdir("/proc/self/fd") == before, f"open as long as somebody holds {raised.value!r}"
    held.release()


def test_a_lock_that_was_replaced_before_it_was_held_is_not_the_folders(tmp_path: Path, monkeypatch):
    """Of two attempts that take over at once, one renames its lock over the other's."""
    (tmp_path / ".lock").touch()
    (tmp_path / "newer").touch()
    flock, held = fcntl.flock, []

    def hold(file, how: int) -> None:
        if not held:
            os.replace(tmp_path / "newer", tmp_path / ".lock")
        held.append(file)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", hold)
    log = RunLog(tmp_path, attempt=FIRST)
    assert held[0].closed and not held[1].closed and len(held) == 2
    log.folder.prove_ours()
    with pytest.raises(UsageError, match="another run is using"):
        RunLog(tmp_path, attempt=Attempt())
    log.release()
