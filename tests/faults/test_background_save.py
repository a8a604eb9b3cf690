"""Saves written while training continues: the same bits, no waiting, no lost error."""

import errno
import os
import runpy
import signal
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from sightline import api, config
from sightline.engine import checkpoint
from sightline.engine.checkpoint import Checkpoints
from sightline.errors import DiskError, Interrupted, PeerLost
from sightline.train.saver import Saver

OFTEN = ("--run.checkpoint-every-steps", "2")
FAULTY = str(Path(__file__).with_name("faulty.py"))
EVENTS = runpy.run_path(str(Path(__file__).with_name("conftest.py")))["read_log"]


def test_bits_are_those_of_saves_that_are_waited_for(sightline, reference, tmp_path):
    """The copy is made at once: a write that is slow must not see later weights."""
    flags = (*OFTEN, "--train.ema", "0.9", "--run.keep", "100")
    waited, not_waited = reference(*flags), sightline.run(tmp_path / "run", *flags, "--run.save-in-background")
    assert not_waited.code == 0, not_waited
    assert not_waited.checkpoints == waited.checkpoints and len(waited.checkpoints) == 8
    for name in waited.checkpoints:
        for file in ("model", "optimizer", "ema"):
            ours, theirs = (r.out / "checkpoints" / name / f"{file}.safetensors" for r in (not_waited, waited))
            assert ours.read_bytes() == theirs.read_bytes()
    assert not_waited.progress == waited.progress


def test_a_full_disk_is_a_warning_until_the_end(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", *OFTEN, "--run.save-in-background", FAULT="full50000@train:1")
    assert ended.code == ended.exit_code_in_folder == 7, ended
    assert not ended.checkpoints
    for step in (2, 8, 14):
        assert f"ckpt-{step:08d} could not be written: File too large" in ended.warnings


def train(out: Path, *flags: str) -> None:
    common = [
        "--run.workers=0",
        "--run.device=cpu",
        "--run.threads=1",
        "--run.progress=off",
        "--run.log-every-steps=1",
        "--run.report=off",
    ]
    api.train(*config.load(FAULTY, [*common, f"--run.out={out}", *OFTEN, *flags]))


def test_training_continues_while_a_save_is_written(tmp_path, monkeypatch):
    """The first write does not end before step 4 is done; the save of step 4 waits for it."""
    writers, steps_met = [], []

    def save(self, step, *rest, call=Checkpoints.save, **options):
        writers.append(threading.current_thread() is threading.main_thread())
        deadline = time.monotonic() + 60
        while step == 2 and not any(e.get("step") == 4 for e in EVENTS(tmp_path) if e["event"] == "train"):
            assert time.monotonic() < deadline, "training waits for the disk"
            time.sleep(0.01)
        steps_met.append(step)
        return call(self, step, *rest, **options)

    monkeypatch.setattr(Checkpoints, "save", save)
    train(tmp_path)
    assert steps_met == [2, 4, 6, 8, 8, 10, 12, 14, 16, 16] and not any(writers)
    assert [e["step"] for e in EVENTS(tmp_path) if e["event"] == "checkpoint"] == steps_met


def test_an_error_in_the_background_is_one_of_a_following_step(tmp_path, monkeypatch):
    def save(self, step, *rest, call=Checkpoints.save, **options):
        if step == 4:
            raise OSError(errno.EIO, "the disk is broken")
        return call(self, step, *rest, **options)

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(DiskError, match="the disk is broken"):
        train(tmp_path)
    assert [e["step"] for e in EVENTS(tmp_path) if e["event"] == "checkpoint"] == [2]
    # Met where the next save, at the latest, would wait for it.
    assert 5 <= [e["step"] for e in EVENTS(tmp_path) if e["event"] == "train"][-1] <= 6


def stop_while_a_save_fails(monkeypatch, failures: int) -> None:
    """The second save brings SIGTERM and fails when the last one waits for it; of those after it some may fail too."""
    asked, writes, is_last = count(1), count(1), threading.Event()

    def write(self, step, *rest, call=Checkpoints.save, **options):
        number = next(writes)
        if number == 2:
            assert is_last.wait(60), "the run does not stop"
        if 2 <= number < 2 + failures:
            raise OSError(errno.EIO, f"the disk is broken in save {number}")
        return call(self, step, *rest, **options)

    def save(self, must_succeed=False, call=Saver.save):
        if must_succeed:
            is_last.set()
        call(self, must_succeed)
        if next(asked) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Checkpoints, "save", write)
    monkeypatch.setattr(Saver, "save", save)


def test_a_run_asked_to_stop_retries_a_save_that_failed(tmp_path, monkeypatch):
    stop_while_a_save_fails(monkeypatch, failures=1)
    with pytest.raises(Interrupted):
        train(tmp_path)
    first, last = (e["step"] for e in EVENTS(tmp_path) if e["event"] == "checkpoint")
    assert first == 2 and last >= 4
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"ckpt-{last:08d}"
    (warning,) = (e["text"] for e in EVENTS(tmp_path) if e["event"] == "warning")
    assert "the disk is broken in save 2" in warning and "trying once more" in warning


def test_the_end_is_the_error_of_the_second_try(tmp_path, monkeypatch):
    stop_while_a_save_fails(monkeypatch, failures=2)
    with pytest.raises(DiskError, match="the disk is broken in save 3"):
        train(tmp_path)


def test_a_folder_that_was_taken_over_during_a_slow_write_is_left_alone(tmp_path, monkeypatch):
    def write(folder, *rest, call=checkpoint.write, **options):
        written = call(folder, *rest, **options)
        if folder.name.startswith("ckpt-00000004"):  # a later attempt puts a lock of its own in the place of ours
            (tmp_path / ".lock.other").write_text("pid 1 on elsewhere")
            os.replace(tmp_path / ".lock.other", tmp_path / ".lock")
        return written

    monkeypatch.setattr(checkpoint, "write", write)
    with pytest.raises(PeerLost, match="has taken .* over; this one leaves it alone"):
        train(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").glob("ckpt-*")] == ["ckpt-00000002"]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "ckpt-00000002"
    assert not (tmp_path / "exit.json").exists(), "only the other attempt writes how it ends"


def test_a_save_on_its_way_arrives_however_the_run_ends(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", *OFTEN, "--run.save-in-background", FAULT="nan@train:5")
    assert ended.code == 5, ended
    assert ended.checkpoints == ["ckpt-00000002", "ckpt-00000004"]
    assert [line["step"] for line in ended.events("checkpoint")] == [2, 4]
