"""Files that would make their reader wait are refused or read as empty, and all others as `open` reads them."""

import os
import socket
from pathlib import Path

import pytest

from sightline.errors import UsageError
from sightline.files.plain_yaml import read_yaml
from sightline.files.regular import is_file, regular


@pytest.mark.parametrize("content", [b"", b"a\n\xff", bytes(3_000_000)])
def test_a_file_is_read_as_open_reads_it(tmp_path: Path, content: bytes):
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open(tmp_path / name, "rb", opener=regular) as file:
            assert file.read() == content
            assert os.fstat(file.fileno()).st_size == len(content)


def test_pipes_sockets_and_devices_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # a socket's path has to be short
    os.mkfifo("pipe")  # nobody writes to it
    Path("link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("socket")
        for path in ("pipe", "link", "socket", "/dev/zero", "/dev/null"):
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(OSError, match="a pipe or a device" if path != "socket" else "No such device"):
                os.close(regular(path, os.O_RDONLY))
            assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        regular("missing", os.O_RDONLY)
    with pytest.raises(IsADirectoryError), open(tmp_path, "rb", opener=regular):
        pass


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="needs root and /proc/kmsg")
def test_a_file_of_the_system_that_waits_for_news_is_empty(tmp_path: Path):
    (tmp_path / "labels.csv").symlink_to("/proc/kmsg")
    with open(tmp_path / "labels.csv", "rb", opener=regular) as file:
        assert file.read() == b""


def test_a_pipe_is_read_as_yaml_where_the_user_named_it():
    read, write = os.pipe()
    os.write(write, b"train: {epochs: 3}")
    os.close(write)
    assert read_yaml(Path(f"/proc/self/fd/{read}"), may_wait=True) == {"train": {"epochs": 3}}
    os.close(read)


def test_only_what_is_not_there_at_all_counts_as_missing(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "lost").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    assert is_file(tmp_path / "file") and is_file(str(tmp_path / "link"))
    for name in ("missing", "file/below", "", "a\0b"):
        assert not is_file(os.path.join(tmp_path, name))
    for name, told in (("lost", "leads nowhere"), ("circle", "cannot be read: Too many"), ("pipe", "is a pipe")):
        with pytest.raises(UsageError, match=rf"{name}.*{told}.*remove it"):
            is_file(tmp_path / name)
