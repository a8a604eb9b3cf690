"""`prepare decathlon` as a user types it, and its download from a server on this machine."""

import functools
import hashlib
import http.server
import runpy
import shutil
import threading
from pathlib import Path

import pytest

from sightline.data.prepare import decathlon
from sightline.data.volumes.decathlon import TASKS, read_plan

REPO = Path(__file__).resolve().parents[2]
MADE = runpy.run_path(str(REPO / "tests/unit/data/prepare/decathlon_folders.py"))


@pytest.fixture
def prepare(sightline):
    """prepare(*arguments): `sightline prepare decathlon`."""
    return functools.partial(sightline, "prepare", "decathlon")


@pytest.fixture
def folder(tmp_path):
    return MADE["make_folder"](tmp_path / "in" / "Task04_Hippocampus")


def test_help(prepare):
    code, out, _ = prepare("--help")
    assert code == 0
    for flag in ("source", "out", "task", "dim", "mode", "dilation", "download", "sha256", "size-bytes", "jobs"):
        assert f"--{flag}" in out
    assert "--memory-gb" in out


def test_prepare(prepare, folder, tmp_path):
    out = tmp_path / "out"
    flags = ("--source", folder, "--out", out, "--dim", 3, "--jobs", 1, "--memory-gb", 0.5)
    found = "found the Decathlon's layout: 3 volumes with labels and 2 for testing, channels MRI, classes background, "
    found += "one, two\n"
    assert prepare(*flags) == (0, f"{found}decathlon: cases of task 04 3, made now 3 in {out}\n", "")
    assert prepare(*flags) == (0, f"{found}decathlon: cases of task 04 3, made now 0 in {out}\n", "")
    assert read_plan(out).dim == 3
    code, _, err = prepare("--source", folder, "--out", out, "--dim", 2)
    assert code == 2 and f"{out} was begun with dim=3, now it is 2" in err


def test_a_bad_case_is_named(prepare, folder, tmp_path):
    shutil.copy(folder / "imagesTr" / "case_000.nii.gz", folder / "imagesTr" / "case_002.nii.gz")
    code, out, err = prepare("--source", folder, "--out", tmp_path / "out", "--jobs", 1)
    assert code == 3 and out.startswith("found ")
    assert "1 of 3 cases cannot be prepared" in err and "case_002: labelsTr/case_002.nii.gz has the shape" in err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--download",), "--download needs --task"),
        (("--download", "--task", "04"), "--download needs --task"),
        (("--download", "--task", "04", "--sha256", "0" * 64), "--download needs --task"),
        (("--download", "--task", "auto", "--sha256", "0" * 64, "--size-bytes", "9"), "--download needs --task"),
        (("--sha256", "0" * 64), "--sha256 and --size-bytes"),
        (("--task", "11"), "'11'"),
        (("--dim", "4"), "'4'"),
        (("--memory-gb", "-1"), "memory_gb=-1"),
        (("--jobs", "-1"), "--jobs -1"),
        (("--mode", "val", "--dilation"), "--dilation changes labels"),
    ],
    ids=str,
)
def test_flags_that_cannot_be(prepare, folder, tmp_path, flags, told):
    code, _, err = prepare("--source", folder, "--out", tmp_path / "out", *flags)
    assert code == 2 and told in err
    assert not (tmp_path / "out").exists()


# --download, from a server on this machine in the place of the official one.


@pytest.fixture
def served(folder, tmp_path, monkeypatch):
    (tmp_path / "server").mkdir()
    tar = MADE["pack"](folder, tmp_path / "server" / "Task04_Hippocampus.tar")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tar.parent))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(decathlon, "BUCKET", f"http://127.0.0.1:{server.server_address[1]}")
    data = tar.read_bytes()
    yield ("--size-bytes", len(data), "--sha256", hashlib.sha256(data).hexdigest())
    server.shutdown()
    server.server_close()


def test_download(prepare, served, tmp_path):
    source, out = tmp_path / "new" / "data", tmp_path / "out"
    asked = ("--download", "--task", "04", "--jobs", 1, *served)
    flags = ("--source", source, "--out", out, *asked)
    code, said, err = prepare(*flags)
    assert (code, err) == (0, "") and "\ndecathlon: cases of task 04 3, made now 3" in said
    assert [path.name for path in source.iterdir()] == ["Task04_Hippocampus.tar"]
    assert prepare(*flags)[0] == 0
    # A tar by name, which is there already; and what was unpacked is not fetched.
    tar = source / "Task04_Hippocampus.tar"
    assert prepare("--source", tar, "--out", tmp_path / "b", *asked)[0] == 0
    around = tmp_path / "in"
    assert prepare("--source", around, "--out", tmp_path / "c", *asked)[0] == 0
    assert [path.name for path in around.iterdir()] == ["Task04_Hippocampus"]


def test_a_wrong_download_is_not_unpacked(prepare, served, tmp_path):
    flags = ("--download", "--task", "04", *served[:2], "--sha256", "0" * 64)
    code, _, err = prepare("--source", tmp_path / "new", "--out", tmp_path / "out", *flags)
    assert code == 3 and "its sha256 is " in err
    assert not (tmp_path / "out").exists()


def test_official_addresses():
    assert decathlon.BUCKET.startswith("https://") and len({task.folder for task in TASKS.values()}) == 10
