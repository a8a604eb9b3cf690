"""Terminals that go away, homes that do not exist, a second run in the same folder (B5: 34, 35, 36)."""

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import warm
from PIL import Image

from sightline import cli

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


def test_error_is_reported_although_the_reader_of_the_output_went_away(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", progress="plain", closed_stdout=True, FAULT="nan@train:3")
    assert ended.code == ended.exit_code_in_folder == 5, ended
    assert "not finite in step 2" in ended.stderr


@pytest.mark.parametrize("progress", ["plain", pytest.param("live", marks=pytest.mark.slow)])
def test_dumb_terminal(sightline, tmp_path, progress):
    ended = sightline.run(tmp_path / "run", "--run.report=auto", progress=progress, TERM="dumb", COLUMNS="20")
    assert ended.code == 0 and ended.stdout.splitlines()[-1].startswith("report: "), ended
    if progress == "plain":
        assert "\x1b" not in ended.stdout
        assert "\nepoch 2/2  loss " in ended.stdout, "lines are not folded to the width of the terminal"


@pytest.mark.parametrize("jumps", ["back@train:3", pytest.param("ahead@train:3,back@train:9", marks=pytest.mark.slow)])
def test_clock_that_jumps_while_training(sightline, reference, tmp_path, jumps):
    ended = sightline.run(tmp_path / "run", "--run.report=auto", FAULT=jumps)
    assert ended.code == ended.exit_code_in_folder == 0, ended
    assert ended.bits == reference().bits
    assert min(line["seconds"] for line in ended.events("epoch")) > 0
    times = [(line["running_s"], line["wall_s"]) for line in sightline.log(ended.out) if "wall_s" in line]
    assert times and all(0 < running <= wall for running, wall in times)
    assert "report.html" in os.listdir(ended.out)


@pytest.mark.slow
def test_files_from_the_future_resume(sightline, reference, halfway, tmp_path):
    """The clock was set back, or the host that wrote them had another one."""
    out = halfway(tmp_path / "run")
    for path in [out, *out.rglob("*")]:
        os.utime(path, (2**32, 2**32))  # the year 2106
    again = sightline.run(out)
    assert again.code == 0, again
    assert again.bits == reference().bits


def test_names_as_long_as_a_file_system_allows(sightline, tmp_path):
    """Of the run folder, of classes and of images; two bytes for each letter of a class."""
    out = tmp_path / ("r" * 255)
    for number, letter in enumerate("äö"):
        folder = tmp_path / "data" / (letter * 127)
        folder.mkdir(parents=True)
        for image in range(10):
            pixels = np.full((24, 24, 3), 60 + 100 * number + image, np.uint8)
            Image.fromarray(pixels).save(folder / f"{image}{'x' * 250}.png")
    data = ("--data.path", str(tmp_path / "data"), "--data.classes", "0", "--run.report=auto")
    ended = sightline.run(out, *data, progress="plain", COLUMNS="40", FAULT="term@train:2")
    assert ended.code == 143, ended
    again = sightline.run(out, *data, progress="live", terminal="", COLUMNS="40", TERM="xterm")
    assert again.code == 0, again
    assert "ä" * 127 in (out / "report.html").read_text()
    assert "x" * 250 in json.dumps(json.loads((out / "split.json").read_text()))


def test_second_run_in_one_folder_is_refused(sightline, reference, tmp_path):
    out = tmp_path / "run"
    first = sightline.start(out, FAULT="stop@train:3")
    first.until_stopped()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    second = sightline.run(out)
    assert second.code == 2, second
    assert f"pid {first.pid} " in second.stderr and "--run.out" in second.stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    os.kill(first.pid, signal.SIGCONT)
    ended = first.wait()
    assert ended.code == 0, ended
    assert ended.bits == reference().bits


def test_lock_of_a_dead_run_is_not_an_obstacle(sightline, tmp_path):
    out = tmp_path / "run"
    assert sightline.run(out, FAULT="kill@train:3").code == -signal.SIGKILL
    assert (out / ".lock").exists()
    assert sightline.run(out).code == 0


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("words", [["evaluate", "FOLDER"], ["train", *TINY, "--model.weights", "FOLDER"]])
def test_metadata_of_a_distributed_checkpoint_are_never_unpickled(tmp_path, capsys, words):
    folder, marker = tmp_path / "dcp", tmp_path / "marker"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(marker)))
    (folder / "__0_0.distcp").write_bytes(pickle.dumps(Payload(marker)))
    out = ["--run.out", str(tmp_path / "run")]
    assert cli.main([word.replace("FOLDER", str(folder)) for word in words] + out) in (2, 4)
    told = capsys.readouterr().err
    assert str(folder) in told and "neither" in told and "manifest.json" in told
    assert not marker.exists()


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


def test_a_tmpdir_too_long_for_sockets_is_named(sightline, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    ended = sightline.run(tmp_path / "run", "--run.workers", "1", TMPDIR=str(long))
    assert ended.code == 2, ended
    assert "give a writable TMPDIR with a short path" in ended.stderr and str(long) in ended.stderr


def surroundings(folder: Path) -> dict[str, str]:
    """Without a home; a hook reports every file that is written."""
    for name in ("watch", "tmp", "work"):
        (folder / name).mkdir()
    (folder / "watch" / "sitecustomize.py").write_text(WATCH)
    return {
        "HOME": "/nonexistent",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join([str(folder / "watch"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
        "WATCHED": str(folder / "watched"),
    }


def train_watched(folder: Path) -> None:
    """The command with two workers, for warm.py."""
    environ = surroundings(folder)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder / "work")
    exec(WATCH, {})
    sys.exit(cli.main(["train", *TINY, "--run.workers", "2", "--run.out", "run"]))


def assert_nothing_is_outside(folder: Path) -> None:
    """But for TMPDIR, where loader workers meet and clean up after them."""
    assert os.listdir(folder / "work") == ["run"]
    # torch itself makes an empty folder there as soon as an optimizer is built.
    assert [name for name in os.listdir(folder / "tmp") if not name.startswith("torchinductor_")] == []
    run = folder / "work" / "run"
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    written = {Path(line) for line in (folder / "watched").read_text().splitlines()}
    assert run / "log.jsonl" in written, "the watch sees what is written"
    allowed = [run, folder / "tmp"]
    outside = {path for path in written if not any(path.is_relative_to(each) for each in allowed)}
    assert not {path for path in outside if not path.is_relative_to("/dev")}


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a short name: a socket's path has at most 107 bytes."""
    return tmp_path_factory.mktemp("w")


def test_nothing_is_written_outside_the_run_folder(short):
    ended = warm.start("function", __file__, "train_watched", short).wait()
    assert ended.code == 0, ended
    assert_nothing_is_outside(short)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_nothing_is_written_outside_the_run_folder_by_what_is_imported(short, workers):
    """A whole process as a user starts it."""
    command = [sys.executable, "-m", "sightline", "train", *TINY, "--run.workers", workers, "--run.out", "run"]
    environ = surroundings(short)
    ended = subprocess.run(command, cwd=short / "work", env=environ, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "finished: best top1" in ended.stdout
    assert_nothing_is_outside(short)


@pytest.mark.slow
def test_closed_output(tmp_path):
    """`>&- 2>&-`: there is no terminal at all, not even a broken one."""
    command = [sys.executable, "-m", "sightline", "train", *TINY, "--run.workers", "1", "--run.out", "run"]
    shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    ended = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["code"] == 0
