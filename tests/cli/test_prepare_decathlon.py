"""`prepare decathlon` as a user types it, and its download from a server on this machine."""

import ast
import functools
import hashlib
import http.server
import importlib.util
import io
import os
import runpy
import shutil
import socket
import tarfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from sightline.data.prepare.decathlon.fetched import BUCKET, MD5
from sightline.data.volumes.plan import TASKS, read_plan

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
    for flag in ("source", "out", "task", "dim", "mode", "dilation", "download", "url", "sha256", "size-bytes", "jobs"):
        assert f"--{flag}" in out
    assert "--memory-gb" in out


def test_prepare(prepare, folder, tmp_path):
    out = tmp_path / "out"
    flags = ("--source", folder, "--out", out, "--dim", 3, "--jobs", 1, "--memory-gb", 0.5)
    found = "found the Decathlon's layout: 3 volumes with labels and 2 for testing, channels MRI, classes background, "
    found += "one, two\n"
    assert prepare(*flags) == (0, f"{found}prepared 3 cases of task 04 in {out}\n", "")
    assert prepare(*flags) == (0, f"{found}prepared 3 cases of task 04 in {out}; 3 of them were there already\n", "")
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
        (("--download",), "--download needs --task 01 to 10, not auto"),
        (("--download", "--task", "own", "--url", "https://example.invalid/tars"), "--download needs --task"),
        (("--download", "--task", "04", "--sha256", "0" * 63), "must have 64 hexadecimal digits"),
        (("--download", "--task", "04", "--size-bytes", "9"), "--sha256 '' must have 64 hexadecimal digits"),
        (("--download", "--task", "04", "--url", "http://example.invalid"), "only https is fetched"),
        (("--download", "--task", "04", "--url", "file:///data"), "only https is fetched"),
        (("--download", "--task", "04", "--url", "https://[::1/data"), "is not an address"),
        (("--sha256", "0" * 64), "--url, --sha256 and --size-bytes are of what --download fetches"),
        (("--url", "https://example.invalid"), "--url, --sha256 and --size-bytes are of what --download fetches"),
        (("--task", "11"), "'11'"),
        (("--dim", "4"), "'4'"),
        (("--memory-gb", "-1"), "memory_gb=-1"),
        (("--jobs", "-1"), "--jobs -1"),
        (("--mode", "val", "--dilation"), "--dilation changes labels"),
    ],
    ids=str,
)
def test_flags_that_cannot_be(prepare, folder, tmp_path, flags, told):
    source = tmp_path / "empty" if "--download" in flags else folder
    code, _, err = prepare("--source", source, "--out", tmp_path / "out", *flags)
    assert code == 2 and told in err
    assert not (tmp_path / "out").exists() and not (tmp_path / "empty").exists()


# --download, from a server on this machine.


class Server(http.server.ThreadingHTTPServer):
    """Serves files by name, with ranges; the answers to the next requests can be cut after so many bytes."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked, self.cuts = {}, [], []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.server.asked.append((self.path, begin))
        data = self.server.files.get(self.path, b"")
        count = self.server.cuts.pop(0) if self.server.cuts else len(data)
        self.send_response((206 if begin else 200) if count else 503)
        self.send_header("Content-Length", str(len(data) - begin if count else 0))
        self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(data[begin:][:count])

    def log_message(self, *_):
        """Silent."""


@pytest.fixture
def server():
    server = Server()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def tar(folder, tmp_path, server) -> bytes:
    """What the server has as /Task04_Hippocampus.tar: not the real one, hence not of its MD5."""
    data = MADE["pack"](folder, tmp_path / "Task04_Hippocampus.tar").read_bytes()
    server.files["/Task04_Hippocampus.tar"] = data
    return data


@pytest.fixture
def download(prepare, server, tmp_path, monkeypatch):
    """download(*flags): `prepare decathlon --download` in an empty folder, with neither --source nor --out."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between tries
    return functools.partial(prepare, "--download", "--jobs", 1, "--url")


def test_download_of_a_task_whose_checksum_the_user_knows(download, prepare, server, tar, tmp_path):
    known = ("--task", "04", "--sha256", hashlib.sha256(tar).hexdigest().upper())
    code, said, err = download(server.url, *known, "--size-bytes", len(tar))
    assert err == f"fetching {server.url}/Task04_Hippocampus.tar; the server has 60 s to answer\n"
    assert code == 0 and said.endswith("prepared 3 cases of task 04 in prepared\n")
    assert (
        sorted(os.listdir()) == ["Task04_Hippocampus.tar", "prepared"] and len(read_plan(Path("prepared")).cases) == 3
    )
    assert download(server.url, *known)[1].endswith(
        "prepared 3 cases of task 04 in prepared; 3 of them were there already\n"
    )
    # A tar by name, which is there already; and what was unpacked is not fetched.
    assert download(server.url, *known, "--source", "Task04_Hippocampus.tar", "--out", "b")[0] == 0
    assert download(server.url, *known, "--source", tmp_path / "in", "--out", "c")[0] == 0
    assert os.listdir(tmp_path / "in") == ["Task04_Hippocampus"] and len(server.asked) == 1


def test_a_tar_that_is_not_the_published_one_is_not_unpacked(download, server, tar):
    """By the MD5 that is known of each task, without a flag."""
    found, wanted = hashlib.md5(tar).hexdigest(), MD5["04"]
    code, _, err = download(server.url, "--task", "04")
    assert code == 3 and f"its md5 is {found}, {wanted} was expected; what came is kept as Task04" in err
    assert [name.partition(".wrong-")[0] for name in os.listdir()] == ["Task04_Hippocampus.tar"]
    Path("Task04_Hippocampus.tar").write_bytes(tar)
    code, _, err = download(server.url, "--task", "04")
    assert code == 3 and f"Task04_Hippocampus.tar: its md5 is {found}, {wanted} was expected; move it away" in err
    assert not Path("prepared").exists()


def test_the_first_download_of_an_unknown_tar_is_recorded_and_later_ones_are_compared(download, server, tar):
    server.files["/more/Dataset027_Mine.tar"], url = tar, f"{server.url}/more/Dataset027_Mine.tar"
    code, said, err = download(url, "--task", "04")  # of the task's tar more is known than its name
    assert code == 3 and "md5" in err
    code, said, err = download(url, "--task", "own", "--source", "raw")
    assert (code, len(err.splitlines())) == (0, 1)  # what is fetched
    assert "raw/Dataset027_Mine.tar: this first download could not be checked, since no checksum" in said
    assert f"Its sha256 {hashlib.sha256(tar).hexdigest()} is recorded in Dataset027_Mine.tar.sha256.json" in said
    os.remove("raw/Dataset027_Mine.tar")
    server.files["/more/Dataset027_Mine.tar"] = tar[:-1] + b"x"
    code, said, err = download(url, "--task", "own", "--source", "raw")
    assert code == 3 and "its sha256 is " in err and "first download" not in said
    server.files["/more/Dataset027_Mine.tar"] = tar
    code, said, err = download(url, "--task", "own", "--source", "raw")
    assert code == 0 and "first download" not in said


def test_a_download_that_broke_off_resumes(download, server, tar):
    known = ("--task", "04", "--sha256", hashlib.sha256(tar).hexdigest())
    server.cuts = [20_000, *[0] * 5]
    code, _, err = download(server.url, *known)
    assert code == 3 and "20000 of" in err and "the same command resumes from there" in err
    assert Path("Task04_Hippocampus.tar.part").read_bytes() == tar[:20_000] and not Path("prepared").exists()
    server.cuts = [700]
    code, said, err = download(server.url, *known)
    assert code == 0 and "bytes; try 2 of 6 in " in err and "prepared 3 cases" in said
    assert [begin for _, begin in server.asked][-2:] == [20_000, 20_700]


def test_a_tar_that_was_cut_off_or_leads_out_of_its_folder_is_not_unpacked(download, server, tar, tmp_path):
    evil = io.BytesIO(tar)
    with tarfile.open(fileobj=evil, mode="a") as archive:
        archive.addfile(tarfile.TarInfo("../../../../escaped"), io.BytesIO())
    server.files |= {"/cut.tar": tar[:15_000], "/evil.tar": evil.getvalue()}
    for name, told in (("cut", "fetch it again"), ("evil", "'../../../../escaped' leads out of its folder")):
        code, _, err = download(f"{server.url}/{name}.tar", "--task", "own", "--out", name)
        assert code == 3 and told in err, err
        assert not list(Path(name).rglob("*.nii.gz")) and not list(Path(name).glob("*.npy"))
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize("flag", ["--source", "--out"])
def test_a_folder_that_cannot_be_looked_at_is_reported(download, server, tar, flag):
    """As one below a folder of somebody else is: even the question whether it exists is an error."""
    code, _, err = download(f"{server.url}/Task04_Hippocampus.tar", flag, "x" * 300)
    assert code == 2 and "cannot be written: File name too long" in err


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("file", "file is a file, a folder to write into was expected"),
        ("file/below", "file/below cannot be written: Not a directory"),
        ("mine", "mine holds thesis.txt, not written by this command"),
        ("closed/below", "closed/below cannot be written: Permission denied"),
        ("x" * 300, "cannot be written: File name too long"),
        ("made/" + "x" * 300, "cannot be written: File name too long"),
        ("dangling", "dangling cannot be written: No such file or directory"),
    ],
    ids=lambda value: value[:20],
)
def test_an_out_that_cannot_be_written_is_found_before_the_first_byte(download, server, tar, not_root, out, told):
    Path("file").touch()
    Path("mine").mkdir()
    Path("mine/thesis.txt").touch()
    Path("closed").mkdir(mode=0o555)
    Path("dangling").symlink_to("nowhere")
    with not_root() if out.startswith("closed") else nullcontext():
        code, _, err = download(f"{server.url}/Task04_Hippocampus.tar", "--task", "04", "--out", out)
    assert code == 2 and told in err and server.asked == [], err
    assert sorted(os.listdir()) == ["closed", "dangling", "file", "mine"] and os.listdir("closed") == []


def test_without_a_network_nothing_is_made(download, server, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        code, _, err = download(url, "--task", "04")
    assert code == 3 and f"{url}/Task04_Hippocampus.tar: " in err and "Connection refused" in err
    assert "tried 6 times; check the network" in err and os.listdir() == []
    assert "; fetch it by hand and put it at Task04_Hippocampus.tar, or try again later\n" in err


def test_room_for_the_tar_and_for_what_is_in_it_is_looked_for_first(download, server, tar, monkeypatch):
    """Both are on one disk, which has room for one."""
    usage = shutil.disk_usage(".")
    before = 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=before))
    server.files["/Task04_Hippocampus.tar"] = range(6 * 10**8)  # has a length, and is never sent
    code, _, err = download(server.url, "--task", "04")
    assert code == 7 and "to be unpacked in prepared, needs 1.2 GB" in err and os.listdir() == []


def test_addresses_and_checksums_are_those_of_monai():
    file = Path(importlib.util.find_spec("monai").origin).with_name("apps") / "datasets.py"
    (theirs,) = (n for n in ast.parse(file.read_text()).body if getattr(n, "name", "") == "DecathlonDataset")
    tables = {n.targets[0].id: ast.literal_eval(n.value) for n in theirs.body if isinstance(n, ast.Assign)}
    assert tables["md5"] == {task.folder: MD5[code] for code, task in TASKS.items()}
    assert tables["resource"] == {task.folder: f"{BUCKET}/{task.folder}.tar" for task in TASKS.values()}
