"""Terminals that go away, homes that do not exist, a second run in the same folder (B5: 34, 35, 36)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TINY = """demo_classification --data.path synthetic:classes=4,samples=64,size=24 --data.classes 4 --data.size 24
    --data.eval-size 24 --data.eval-resize 24 --model.width 4 --train.global-batch 8 --train.epochs 2
    --train.precision fp32 --run.threads 1 --run.device cpu""".split()


@pytest.mark.parametrize(
    "progress", ["plain", "off", *(pytest.param(name, marks=pytest.mark.slow) for name in ("live", "auto"))]
)
def test_reader_of_the_output_goes_away(sightline, reference, tmp_path, progress):
    ended = sightline.run(tmp_path / "run", progress=progress, closed_stdout=True)
    assert ended.code == ended.exit_code_in_folder == 0, ended
    assert ended.stderr == ""
    assert ended.bits == reference().bits
    assert [line["step"] for line in ended.events("train")] == [8, 10, 16]
    assert [line["step"] for line in ended.events("evaluate")] == [8, 16]


def test_error_is_told_although_the_reader_of_the_output_went_away(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", progress="plain", closed_stdout=True, FAULT="nan@train:3")
    assert ended.code == ended.exit_code_in_folder == 5, ended
    assert "not finite in step 2" in ended.stderr


@pytest.mark.parametrize("progress", ["plain", pytest.param("live", marks=pytest.mark.slow)])
def test_dumb_terminal(sightline, tmp_path, progress):
    ended = sightline.run(tmp_path / "run", progress=progress, TERM="dumb", COLUMNS="20")
    assert ended.code == 0, ended
    if progress == "plain":
        assert "\x1b" not in ended.stdout
        assert "epoch 2/2  step 16/16  loss" in ended.stdout, "lines are not folded to the width of the terminal"


def test_second_run_in_one_folder_is_refused(sightline, reference, tmp_path):
    out = tmp_path / "run"
    first = sightline.start(out, FAULT="stop@train:3")
    first.until(lambda: Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    second = sightline.run(out)
    assert second.code == 2, second
    assert f"pid {first.pid} " in second.stderr and "--run.out" in second.stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    os.kill(first.pid, signal.SIGCONT)
    ended = first.wait()
    assert ended.code == 0, ended
    assert ended.bits == reference().bits


def test_lock_of_a_dead_run_is_no_obstacle(sightline, tmp_path):
    out = tmp_path / "run"
    assert sightline.run(out, FAULT="kill@train:3").code == -signal.SIGKILL
    assert (out / ".lock").exists()
    assert sightline.run(out).code == 0


WATCH = """
import os, sys
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate")
def watch(event, arguments):
    folder = os.getcwd()
    if event == "open":
        writes = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    else:
        writes = event in CHANGES
        if writes and event != "os.truncate" and arguments[-1] not in (-1, None):  # relative to an open folder
            folder = os.readlink(f"/proc/self/fd/{arguments[-1]}")
    if writes and not isinstance(arguments[0], int):
        os.write(WRITER, os.path.join(os.fsencode(folder), os.fsencode(arguments[0])) + b"\\n")
WRITER = os.open(os.environ["WATCHED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.addaudithook(watch)
"""


def test_a_tmpdir_too_long_for_sockets_is_named(tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    command = [sys.executable, "-m", "sightline", "train", *TINY, "--run.workers", "1", "--run.out", "run"]
    environ = {**os.environ, "TMPDIR": str(long)}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert "give a writable TMPDIR with a short path" in ended.stderr and str(long) in ended.stderr


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_nothing_is_written_outside_the_run_folder(tmp_path_factory, workers):
    """A whole process as a user starts it, without a home. Loader workers meet in TMPDIR and clean up after them."""
    tmp_path = tmp_path_factory.mktemp("w")  # a short name: a socket's path has at most 107 bytes
    for name in ("watch", "tmp", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(WATCH)
    environ = {
        "HOME": "/nonexistent",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "watch"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path / "tmp"),
        "WATCHED": str(tmp_path / "watched"),
    }
    command = [sys.executable, "-m", "sightline", "train", *TINY, "--run.workers", workers, "--run.out", "run"]
    ended = subprocess.run(command, cwd=tmp_path / "work", env=environ, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "finished: top1" in ended.stdout
    assert os.listdir(tmp_path / "work") == ["run"]
    # torch itself makes an empty folder there as soon as an optimizer is built.
    assert [name for name in os.listdir(tmp_path / "tmp") if not name.startswith("torchinductor_")] == []
    run = tmp_path / "work" / "run"
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    written = {Path(line) for line in (tmp_path / "watched").read_text().splitlines()}
    assert run / "log.jsonl" in written, "the watch sees what is written"
    allowed = [run, tmp_path / "tmp"]
    outside = {path for path in written if not any(path.is_relative_to(folder) for folder in allowed)}
    assert not {path for path in outside if not path.is_relative_to("/dev")}


@pytest.mark.slow
def test_closed_output(tmp_path):
    """`>&- 2>&-`: there is no terminal at all, not even a broken one."""
    command = [sys.executable, "-m", "sightline", "train", *TINY, "--run.workers", "1", "--run.out", "run"]
    shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    ended = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["code"] == 0
