"""The share of the machine that a process may take: files, and memory of its cgroups."""

import errno
import math
import os
import resource
from pathlib import Path

import pytest

from sightline.errors import UsageError
from sightline.files import whole
from sightline.hardware import limits

NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "made"),
    [
        (200, 4096, 100, None),  # exactly enough
        (200, 4096, 101, (1024, 4096)),  # as many as usual
        (200, 4096, 3000, (3100, 4096)),
        (200, 4096, 3996, (4096, 4096)),
        (200, 500, 150, (500, 500)),
        (200, NONE, 5000, (5100, NONE)),
        (NONE, NONE, 10**9, None),
    ],
)
def test_a_process_lets_itself_open_more_files(soft: int, hard: int, wanted: int, made, monkeypatch):
    asked: list[tuple] = []
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(limits.resource, "setrlimit", lambda kind, both: asked.append((kind, both)))
    monkeypatch.setattr(limits.psutil.Process, "num_fds", lambda self: 100)
    limits.prove_descriptors(wanted)
    assert asked == ([(resource.RLIMIT_NOFILE, made)] if made else [])


def test_where_it_may_not_it_says_how_many_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (200, 500))
    monkeypatch.setattr(limits.psutil.Process, "num_fds", lambda self: 100)
    with pytest.raises(UsageError, match=r"may open 500 files \(ulimit -Hn\) and needs 501; .*--ulimit nofile=1024, "):
        limits.prove_descriptors(401)
    with pytest.raises(UsageError, match=r"needs 2101; start the container with --ulimit nofile=2101, or ask who"):
        limits.prove_descriptors(2001)


def put(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_memory_that_is_left_is_that_of_the_narrowest_of_all_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "OWN_CGROUP", tmp_path / "own")
    left, most = limits.memory_left, limits.memory_limit
    assert left() == math.inf
    put(tmp_path, own="0::/a/b")
    put(tmp_path / "cgroup/a/b", memory__max="max", memory__current=5)
    assert left() == math.inf
    put(tmp_path / "cgroup/a", memory__max=1000, memory__current=700, memory__stat="file 9\ninactive_file 50\nodd")
    assert left() == 350.0, "what the kernel has read ahead does not count"
    put(tmp_path / "cgroup/a/b", memory__max=100, memory__current=99)
    assert left() == 1.0
    put(tmp_path / "cgroup/a/b", memory__max=100, memory__current=300)
    assert left() == 1.0, "never nothing"
    assert most() == 100.0
    put(tmp_path, own="4:cpu,cpuacct:/y\n5:memory:/x")
    put(tmp_path / "cgroup/memory/x", memory__limit_in_bytes=900, memory__usage_in_bytes=100,
        memory__stat="inactive_file 1\ntotal_inactive_file 20")  # fmt: skip
    assert left() == 820.0, "of version 1"


@pytest.mark.parametrize(("number", "done"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, None)])
def test_a_file_system_that_cannot_flush_is_told_from_a_disk_that_failed(number: int, done, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(whole.os, "fsync", fail)
    if done is None:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            whole.sync(3)
    else:
        assert whole.sync(3) is done
    monkeypatch.setattr(whole.os, "fsync", lambda descriptor: None)
    assert whole.sync(3) is True
