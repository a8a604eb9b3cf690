"""`prepare coco` and `check` of detection data as a user types them."""

import functools
import hashlib
import http.server
import runpy
import threading
from pathlib import Path

import pytest

from sightline.data.prepare import coco

REPO = Path(__file__).resolve().parents[2]
make_zips = runpy.run_path(str(REPO / "tests/unit/data/prepare/coco_zips.py"))["make_zips"]


@pytest.fixture
def check(sightline):
    """The images here have three classes, not COCO's eighty."""
    few = ("--data.classes=0", "--run.workers=0")
    return lambda path, *flags: sightline("check", "ssd_resnet34", f"--data.path={path}", *few, *flags)


@pytest.fixture(scope="module")
def zips(tmp_path_factory) -> Path:
    return make_zips(tmp_path_factory.mktemp("zips"))


def test_help(sightline):
    code, out, _ = sightline("prepare", "coco", "--help")
    assert code == 0
    for flag in ("--source", "--out", "--form", "--download", "--shards", "--val-shards", "--jobs"):
        assert flag in out


@pytest.mark.parametrize("form", ["folder", "tfrecord"])
def test_prepare_then_check(sightline, check, zips, tmp_path, form):
    out = tmp_path / "out"
    code, said, err = sightline(
        "prepare", "coco", "--source", zips, "--out", out, "--form", form, "--shards", 4, "--val-shards", 2, "--jobs", 1
    )
    assert (code, err) == (0, "")
    assert said == f"coco: train 40, train with boxes 28, val 20, boxes left out 42 in {out}\n"
    code, said, err = check(out)
    if form == "folder":  # the json is as it was, and so are its boxes
        assert code == 3 and "box without an area: 36\n" in said and "box outside of the image: 6\n" in said
        assert err == "error: 42 problems; fix what is listed above\n"
    else:
        assert (code, err) == (0, "") and said.endswith("no problems\n")
    assert "person 1" in said and "  without boxes " in said


# --download, from a server on this machine in the place of the official one.


@pytest.fixture
def served(zips, monkeypatch):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(zips))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    remotes = []
    for remote in coco.OFFICIAL:
        data = (zips / remote.name).read_bytes()
        url = f"http://127.0.0.1:{server.server_address[1]}/{remote.name}"
        remotes.append(remote._replace(url=url, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    monkeypatch.setattr(coco, "OFFICIAL", tuple(remotes))
    yield remotes
    server.shutdown()
    server.server_close()


def test_download(sightline, served, zips, tmp_path):
    source, out = tmp_path / "new" / "zips", tmp_path / "out"
    flags = ("prepare", "coco", "--source", source, "--out", out, "--download", "--jobs", 1)
    code, said, err = sightline(*flags)
    assert code == 0 and said.startswith("coco: train 40")
    assert [line.partition(" http")[0] for line in err.splitlines()] == ["fetching"] * len(list(zips.iterdir()))
    assert {path.name: path.read_bytes() for path in source.iterdir()} == {
        path.name: path.read_bytes() for path in zips.iterdir()
    }
    assert sightline(*flags)[0] == 0
    # What was unpacked is not fetched again.
    assert sightline("prepare", "coco", "--source", out, "--out", tmp_path / "again", "--jobs", 1, "--download")[0] == 0
    assert not list(out.glob("*.zip"))


def test_an_out_that_cannot_be_written_is_found_before_a_zip_is_fetched(sightline, served, tmp_path):
    (tmp_path / "file").touch()
    source = tmp_path / "zips"
    code, _, err = sightline("prepare", "coco", "--source", source, "--out", tmp_path / "file/out", "--download")
    assert code == 2 and "file/out cannot be written: Not a directory" in err and not source.exists()


def test_a_wrong_download_is_not_unpacked(sightline, served, tmp_path, monkeypatch):
    served[0] = served[0]._replace(sha256="0" * 64)
    monkeypatch.setattr(coco, "OFFICIAL", tuple(served))
    source, out = tmp_path / "zips", tmp_path / "out"
    code, _, err = sightline("prepare", "coco", "--source", source, "--out", out, "--download")
    assert code == 3 and "its sha256 is " in err and "is kept as " in err
    assert not out.exists()
    assert [path.name.partition(".wrong-")[0] for path in source.iterdir()] == ["annotations_trainval2017.zip"]


def test_what_is_there_is_checked_before_it_is_used(sightline, served, tmp_path):
    source = make_zips(tmp_path / "zips", train=30)
    code, _, err = sightline("prepare", "coco", "--source", source, "--out", tmp_path / "out", "--download")
    assert code == 3 and "were expected; move it away" in err
    assert not (tmp_path / "out").exists()


def test_official_addresses():
    """https only, and a sha256 each."""
    assert {remote.name for remote in coco.OFFICIAL} == {
        "train2017.zip",
        "val2017.zip",
        "annotations_trainval2017.zip",
    }
    assert all(remote.url.startswith("https://") and len(remote.sha256) == 64 for remote in coco.OFFICIAL)
    assert sum(remote.size for remote in coco.OFFICIAL) == 20_405_354_669
