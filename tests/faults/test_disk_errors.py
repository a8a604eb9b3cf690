"""Errors of the disk other than a full one end a run with exit 7, a file and a remedy; what was saved resumes to equal
bits (B5: 11). The kernel itself refuses the calls, by a seccomp filter; see faulty.py."""

import errno
import os
import signal
from pathlib import Path

import pytest
import torch

from sightline.engine.checkpoint import Checkpoints, verify
from sightline.errors import DISK_REMEDIES
from sightline.files.whole import rename, replace_text

OFTEN = ("--run.checkpoint-every-steps", "2")
REMEDIES = {
    "EIO": "look at `dmesg`",
    "ESTALE": "mount it again",
    "EACCES": "let this user write there",
    "EROFS": "mount it writable",
    "EXDEV": "all on one file system",
    "EDQUOT": "your quota on this disk is used up",
    "ENOSPC": "free some space",
}
# Every call once; of the other errors only the remedy differs.
FAULTS = ["rename-EXDEV", "fsync-EIO", "open-EROFS", "write-ENOSPC"]
SLOW = ["rename-ESTALE", "open-EACCES", "open-EDQUOT"]


@pytest.mark.parametrize("fault", [*FAULTS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_any_call_that_fails_is_exit_7_and_a_healthy_restart_ends_with_equal_bits(
    sightline, reference, tmp_path, fault
):
    out = tmp_path / "run"
    number = getattr(errno, fault.partition("-")[2])
    ended = sightline.run(out, *OFTEN, "--run.report=auto", FAULT=f"deny-{fault}@train:11")
    assert ended.code == 7, ended
    assert f"could not be written: {os.strerror(number)}; " in ended.stderr and str(out) in ended.stderr
    assert REMEDIES[errno.errorcode[number]] in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    kept = ended.checkpoints[:2]
    assert kept == ["ckpt-00000008", "ckpt-00000010"]
    for name in kept:
        verify(out / "checkpoints" / name)
    again = sightline.run(out, *OFTEN)
    assert again.code == again.exit_code_in_folder == 0, again
    assert again.events("resume")[-1]["step"] == 10
    assert again.bits == reference().bits


def test_every_error_has_its_remedy():
    for name, remedy in REMEDIES.items():
        assert remedy in DISK_REMEDIES[getattr(errno, name)]


def test_a_file_system_that_cannot_sync_is_a_warning(sightline, reference, tmp_path):
    ended = sightline.run(tmp_path / "run", *OFTEN, FAULT="deny-fsync-EINVAL@recipe:1")
    assert ended.code == 0, ended
    assert ended.warnings.count("cannot sync files: a power cut may damage checkpoints") == 1
    assert ended.bits == reference().bits


def test_a_disk_that_fails_at_the_start_is_exit_7_before_training(sightline, tmp_path):
    ended = sightline.run(tmp_path / "run", FAULT="deny-fsync-EIO@recipe:1,kill@train:1")
    assert ended.code == 7, ended
    assert f"{tmp_path / 'run' / 'checkpoints'} could not be written: Input/output error" in ended.stderr


def test_a_finished_run_that_cannot_say_so_is_exit_7(sightline, reference, tmp_path):
    """A folder in the place of exit.json: the rename fails, after everything else went well."""
    out = tmp_path / "run"
    started = sightline.start(out, FAULT="stop@train:12")
    started.until_stopped()
    (out / "exit.json").mkdir()
    os.kill(started.pid, signal.SIGCONT)
    ended = started.wait()
    assert ended.code == 7, ended
    said = (
        f"training is done and its checkpoints are saved, but {out / 'exit.json'} could not be written: Is a directory"
    )
    assert said in ended.stderr and "Traceback" not in ended.stderr
    assert ended.bits == reference().bits
    (out / "exit.json").rmdir()
    again = sightline.run(out)
    assert again.code == again.exit_code_in_folder == 0, again
    assert len(again.events("start")) == 1, "it is finished"


def save(folder: Path, step: int) -> None:
    state = {"n": step, "progress": {"step": step}}
    Checkpoints(folder, 2, pytest.fail).save(step, {"model": {"w": torch.full((9,), float(step))}}, state, step)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])
def test_a_rename_that_the_file_server_has_done_is_not_an_error(tmp_path, monkeypatch, number):
    """NFS asks again when an answer is lost, and then hears that there is no such file any more."""

    def done(*names, call=os.rename, **folders):
        call(*names, **folders)
        raise OSError(number, "asked again")

    monkeypatch.setattr(os, "rename", done)
    for step in (1, 2, 2, 3):
        save(tmp_path, step)
    replace_text(tmp_path / "other", "text", durable=True)
    assert (tmp_path / "other").read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        "ckpt-00000002",
        "ckpt-00000003",
        "latest",
        "other",
    ]
    assert (tmp_path / "latest").read_text() == (tmp_path / "best").read_text() == "ckpt-00000003\n"
    assert bool((Checkpoints(tmp_path, 2, pytest.fail).newest()[0]["model"]["w"] == 3.0).all())


def test_a_rename_below_an_open_folder_looks_nowhere_else(tmp_path, monkeypatch):
    """A file of the same name in the current folder is not the one that was to be renamed."""

    def done(*names, call=os.rename, **folders):
        call(*names, **folders)
        raise OSError(errno.ESTALE, "asked again")

    (tmp_path / "below").mkdir()
    for folder in (tmp_path, tmp_path / "below"):
        (folder / "a").write_text(folder.name)
    monkeypatch.chdir(tmp_path)
    below = os.open(tmp_path / "below", os.O_RDONLY | os.O_DIRECTORY)
    monkeypatch.setattr(os, "rename", done)
    try:
        rename("a", "b", below)
    finally:
        os.close(below)
    assert (tmp_path / "below" / "b").read_text() == "below" and (tmp_path / "a").read_text() == tmp_path.name
    assert not (tmp_path / "b").exists() and not (tmp_path / "below" / "a").exists()


@pytest.mark.parametrize("target", ["absent", "another file", "the same file by a second link"])
def test_a_rename_that_was_not_done_is_an_error(tmp_path, monkeypatch, target):
    (tmp_path / "a").write_text("new")
    if target == "another file":
        (tmp_path / "b").write_text("old")
    elif target != "absent":
        (tmp_path / "b").hardlink_to(tmp_path / "a")

    def fails(*names, **folders):
        if target == "another file":
            os.unlink(names[0])  # by somebody else
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="stale"):
        rename(tmp_path / "a", tmp_path / "b")
