"""A full disk costs checkpoints, not the run; a folder that cannot be written is reported before training (B5: 11, 12).

RLIMIT_FSIZE stands in for the full disk: the kernel lets no file grow beyond it (EFBIG where a disk says ENOSPC).
"""

import errno
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sightline.engine import checkpoint
from sightline.engine.checkpoint import Checkpoints
from sightline.errors import DiskFull

OFTEN = ("--run.checkpoint-every-steps", "2")
FAULTY = str(Path(__file__).with_name("faulty.py"))
Result = runpy.run_path(str(Path(__file__).with_name("conftest.py")))["Result"]
NO_ROOM_FOR_TENSORS, NO_ROOM = "full50000", "full0"


@pytest.mark.parametrize("limit", [pytest.param(NO_ROOM_FOR_TENSORS, marks=pytest.mark.slow), NO_ROOM])
def test_run_continues_without_the_checkpoints_it_cannot_write(sightline, reference, tmp_path, limit):
    ended = sightline.run(
        tmp_path / "run", *OFTEN, "--run.report=auto", progress="plain", FAULT=f"{limit}@train:3,free@train:9"
    )
    assert ended.code == 0, ended
    assert ended.bits == reference().bits
    said = ended.stdout.replace("\n", " ")
    assert "ckpt-00000004 could not be written: File too large; earlier checkpoints are intact" in said
    saved = [line["step"] for line in ended.events("checkpoint")]
    assert saved == [2, 10, 12, 14, 16, 16]
    if limit == NO_ROOM_FOR_TENSORS:
        assert "ckpt-00000008 could not be written" in ended.warnings
    else:
        assert said.count("cannot be written: File too large; the log may lack lines") == 1
        assert {line["step"] for line in ended.events("train")} >= {10, 16}, "lines are whole, and come again"


@pytest.mark.parametrize("limit", [NO_ROOM_FOR_TENSORS, pytest.param(NO_ROOM, marks=pytest.mark.slow)])
def test_last_save_without_room_is_exit_7(sightline, reference, tmp_path, limit):
    out = tmp_path / "run"
    ended = sightline.run(out, *OFTEN, "--run.report=auto", FAULT=f"{limit}@train:11")
    assert ended.code == 7, ended
    assert "ckpt-00000016 could not be written: File too large; earlier checkpoints are intact" in ended.stderr
    assert ended.checkpoints == ["ckpt-00000008", "ckpt-00000010"], "nothing half written is left"
    if limit == NO_ROOM_FOR_TENSORS:
        assert ended.exit_code_in_folder == 7
    again = sightline.run(out, *OFTEN)
    assert again.code == 0, again
    assert again.events("resume")[-1]["step"] == 10
    assert again.bits == reference().bits


@pytest.mark.slow
def test_a_small_disk_that_fills_up_in_mid_run_resumes_to_equal_bits_once_there_is_room(reference, tmp_path):
    """A disk of its own, where another file takes all room after the fifth step; then that file is deleted."""
    disk, out = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=8m none {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this system lets a user mount no disk of its own")
    flags = "--run.device cpu --run.workers 0 --run.threads 1 --run.no-save-in-background --run.report off "
    flags += f"--run.out {disk}/run {' '.join(OFTEN)}"
    train = f"{sys.executable} -m sightline train {FAULTY} {flags}"
    script = f"""
        {mount}
        FAULT=stop@train:5 {train} &
        until grep -q "(stopped)" /proc/$!/status || ! kill -0 $!; do sleep 0.1; done
        dd if=/dev/zero of={disk}/ballast bs=64k
        kill -CONT $!
        wait $!
        echo $? > {tmp_path}/full
        cp -r {disk}/run {tmp_path}/stopped
        rm {disk}/ballast
        {train}
        echo $? > {tmp_path}/again
        cp -r {disk}/run {out}
    """
    ended = subprocess.run(["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert (tmp_path / "full").read_text() == "7\n", ended
    assert "could not be written: No space left on device; earlier checkpoints are intact" in ended.stderr
    assert sorted(path.name for path in (tmp_path / "stopped" / "checkpoints").glob("ckpt-*")) == [
        "ckpt-00000002",
        "ckpt-00000004",
    ]
    assert (tmp_path / "again").read_text() == "0\n", ended
    assert Result(out, 0, "", "").bits == reference().bits


def test_no_room_when_asked_to_stop_is_exit_7(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", *OFTEN, FAULT=f"{NO_ROOM_FOR_TENSORS}@train:3,term@train:5")
    assert ended.code == ended.exit_code_in_folder == 7, ended
    assert ended.checkpoints == ["ckpt-00000002"]


def test_no_room_for_the_run_folder_is_reported_at_once(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", FAULT=f"{NO_ROOM}@recipe:1")
    assert ended.code == 7, ended
    assert "Traceback" not in ended.stderr
    assert str(tmp_path / "run") in ended.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("call", ["_on_host", "_write_json", "_fsync", "_replace_text", "rename"])
def test_every_call_of_a_save_may_find_the_disk_full(tmp_path, monkeypatch, call, number):
    def save(step: int) -> None:
        Checkpoints(tmp_path, 2, print).save(
            step, {"model": {"w": torch.full((9,), float(step))}}, {"n": step, "progress": {"step": step}}, step
        )

    def full(*_: object, **__: object) -> None:
        raise OSError(number, "no room")

    save(1)
    save(2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os if call == "rename" else checkpoint, call, full)
        for step in (2, 3):
            with pytest.raises(DiskFull, match="no room; earlier checkpoints are intact"):
                save(step)
            tensors, state, path = Checkpoints(tmp_path, 2, pytest.fail).newest()
            assert bool((tensors["model"]["w"] == state["n"]).all())
            assert path.name == f"ckpt-{state['n']:08d}" and state["n"] >= 2
        assert not list(tmp_path.glob("*.tmp-*"))
    save(4)
    assert Checkpoints(tmp_path, 2, pytest.fail).newest()[1]["n"] == 4
    assert not [path.name for path in tmp_path.iterdir() if ".tmp" in path.name or ".old" in path.name]


@pytest.mark.parametrize("below", ["", "deeper/run"], ids=["a file", "below a file"])
def test_run_folder_in_the_place_of_a_file(sightline, tmp_path, below):
    (tmp_path / "file").write_text("mine")
    ended = sightline.run(tmp_path / "file" / below)
    assert ended.code == 2, ended
    assert f"run folder {tmp_path / 'file' / below} cannot be written" in ended.stderr
    assert "--run.out" in ended.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_folder_in_the_place_of_a_file_of_the_run(sightline, tmp_path):
    """Found out before training, not at the first save."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("not a folder")
    ended = sightline.run(tmp_path / "run", FAULT="kill@train:1")
    assert ended.code == 2, ended
    assert "checkpoints" in ended.stderr


@pytest.mark.parametrize("which", ["parent", "run", "checkpoints"])
def test_read_only_folder_is_reported_before_training(sightline, halfway, tmp_path, which):
    """Root is told to obey permissions too."""
    out = tmp_path / "parent" / "run"
    out.parent.mkdir()
    if which != "parent":
        halfway(out)
    folder = {"parent": out.parent, "run": out, "checkpoints": out / "checkpoints"}[which]
    before = sorted(folder.iterdir())
    folder.chmod(0o555)
    ended = sightline.run(out, FAULT="powerless@recipe:1,kill@train:1")
    folder.chmod(0o755)
    assert ended.code == 2, ended
    assert f"{folder if which == 'checkpoints' else out} cannot be written: Permission denied" in ended.stderr
    assert "--run.out" in ended.stderr
    assert sorted(folder.iterdir()) == before


def test_finished_run_is_left_alone(sightline, reference, tmp_path):
    out = shutil.copytree(reference().out, tmp_path / "run")
    again = sightline.run(out)
    assert again.code == 0 and again.bits == reference().bits
    assert len(again.events("start")) == 1, "a finished run is not trained again"
