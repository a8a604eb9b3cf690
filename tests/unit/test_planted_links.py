"""Folders that others may write into: a link planted under a name that we use leads nowhere.

The names under `REPLACED` are those that temporary files had while they could be guessed.
"""

import contextlib
import grp
import hashlib
import io
import os
import pwd
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sightline.data.classification import ClassificationData
from sightline.data.loading.static import dump
from sightline.data.loading.workers import Bad
from sightline.data.prepare import shapes
from sightline.data.prepare.decathlon.raw import unpack
from sightline.data.sources import index_files
from sightline.data.writing.pieces import Journal, alone_in
from sightline.engine.checkpoint import Checkpoints
from sightline.errors import UsageError
from sightline.files import whole
from sightline.files.whole import cache_folder, write_text, write_whole
from sightline.runs import folder as run_folder
from sightline.runs.attempts import Attempt
from sightline.runs.benchmark_log import BenchmarkLog
from sightline.runs.log import RunLog

MINE = "a file of mine\n"


@contextlib.contextmanager
def run_log(folder: Path, **options):
    opened = RunLog(folder, **options)
    try:
        yield opened
    finally:
        opened.release()


def claim(folder: Path) -> None:
    with run_log(folder):
        pass


def tell(folder: Path) -> None:
    with run_log(folder) as opened:
        opened.event("start")


def tell_as_rank_1(folder: Path) -> None:
    with run_log(folder, rank=1):
        pass


def skip_sample(folder: Path) -> None:
    with run_log(folder) as opened:
        opened.bad_sample(Bad("train", 0, "a.jpg", "is no picture"))


def measure(folder: Path) -> None:
    BenchmarkLog(folder, "a", {}, "").close(0)


def draw(folder: Path) -> None:
    options = shapes.ShapesOptions(folder, only=("segmentation",), train_volumes=1, test_volumes=1)
    shapes.prepare(options, lambda what, done, total: None)


def prepare(folder: Path) -> None:
    with alone_in(folder):
        pass


def extract(folder: Path) -> None:
    archive = folder.with_name("a.tar")
    with tarfile.open(archive, "w") as tar:
        member = tarfile.TarInfo("dataset.json")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"{}"))
    (folder / "raw").mkdir(exist_ok=True)
    unpack(archive, folder / "raw", lambda what, done, total: None)


Act = Callable[[Path], object]
REFUSED: list[tuple[str, Act]] = [
    (".lock", claim),
    ("log.jsonl", tell),
    ("rank_1.log", tell_as_rank_1),
    ("bad_samples.jsonl", skip_sample),
    ("metric.log", measure),
    (".prepare.lock", prepare),
]
REFUSED_FOLDERS: list[tuple[str, Act]] = [
    ("segmentation", draw),
    (".prepare", lambda folder: Journal(folder).begin({})),
    ("raw", extract),
]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """What the one who plants a link would have us change."""
    (tmp_path / "home").mkdir()
    file = tmp_path / "home" / "file"
    file.write_text(MINE)
    return file


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.mark.parametrize(("name", "act"), REFUSED, ids=[name for name, _ in REFUSED])
def test_a_link_in_the_place_of_a_lock_or_log_is_refused(name: str, act: Act, shared: Path, victim: Path):
    (shared / name).symlink_to(victim)
    with pytest.raises(UsageError, match=f"{name} is a symbolic link, which is not followed; delete it, or choose"):
        act(shared)
    assert victim.read_text() == MINE


@pytest.mark.parametrize(("name", "act"), REFUSED, ids=[name for name, _ in REFUSED])
def test_a_link_to_nothing_makes_no_file_elsewhere(name: str, act: Act, shared: Path, victim: Path):
    (shared / name).symlink_to(victim.with_name("new"))
    with pytest.raises(UsageError, match="is a symbolic link"):
        act(shared)
    assert [path.name for path in victim.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(("name", "act"), REFUSED, ids=[name for name, _ in REFUSED])
def test_a_pipe_in_the_place_of_a_lock_or_log_is_not_waited_for(name: str, act: Act, shared: Path):
    os.mkfifo(shared / name)  # nobody reads it
    assert not run_folder.is_at_work(shared)
    with pytest.raises(UsageError, match=f"{name} is a pipe or a device, expected a file; delete it"):
        act(shared)
    reader = os.open(shared / name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(UsageError, match=f"{name} is a pipe or a device"):
            act(shared)
        assert os.read(reader, 1) == b""  # nothing was written
    finally:
        os.close(reader)


@pytest.mark.parametrize(("name", "act"), REFUSED_FOLDERS, ids=[name for name, _ in REFUSED_FOLDERS])
def test_a_link_in_the_place_of_a_folder_is_refused(name: str, act: Act, shared: Path, victim: Path):
    (shared / name).symlink_to(victim.parent)
    with pytest.raises(UsageError, match=f"{name} is a symbolic link"):
        act(shared)
    assert [path.name for path in victim.parent.iterdir()] == ["file"] and victim.read_text() == MINE


# Temporary files


def write_config(folder: Path) -> None:
    with run_log(folder) as opened:
        opened.folder.write("config.yaml", "a: 1\n")


def take_over(folder: Path) -> None:
    first, second = (Attempt("job", "job", restarts, 2) for restarts in range(2))
    with run_log(folder, attempt=first), run_log(folder, attempt=second):
        pass


REPLACED: list[tuple[str, Act, str]] = [  # the planted name, what is done, and a file that must be there afterwards
    (".config.yaml.0.tmp", write_config, "config.yaml"),
    (".lock.PID", take_over, ".lock"),
    (".benchmark_run.log.tmp", measure, "benchmark_run.log"),
    (
        ".predicted-PID.txt",
        lambda folder: write_whole(folder / "a.txt", lambda p: p.write_text("")),
        "a.txt",
    ),
    (
        ".sightline-index-a.tmp-PID-THREAD",
        lambda folder: index_files.save(folder, "a", "key", {}),
        ".sightline-index-a",
    ),
    ("segmentation/.shapes.json.part", draw, "segmentation/shapes.json"),
    (f".{hashlib.sha256(b'a').hexdigest()[:16]}.part-PID", lambda folder: write_text(folder, "a", ""), "a"),
    ("raw/.unpacked", extract, "raw/.unpacked"),
]


@pytest.mark.parametrize(("name", "act", "written"), REPLACED, ids=[name for name, _, _ in REPLACED])
def test_a_link_at_the_name_of_a_temporary_file_is_not_followed(
    name: str, act: Act, written: str, shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_folder, "TAKE_OVER_S", 0.1)
    planted = shared / name.replace("PID", str(os.getpid())).replace("THREAD", str(threading.get_ident()))
    planted.parent.mkdir(exist_ok=True)
    planted.symlink_to(victim)
    act(shared)
    assert victim.read_text() == MINE
    assert (shared / written).is_file() and not (shared / written).is_symlink()


def test_a_save_follows_no_link(shared: Path, victim: Path):
    """One lies there before it begins, others are planted while it writes."""
    (shared / f"ckpt-00000001.tmp-{os.getpid()}").symlink_to(victim.parent)

    def plant() -> None:
        for name in ("latest.tmp", "best.tmp"):
            (shared / name).symlink_to(victim)

    saved = Checkpoints(shared, 1, print, plant).save(1, {"model": {"a": torch.ones(1)}}, {}, best_step=1)
    assert saved.is_dir() and not saved.is_symlink()
    assert [(shared / name).read_text() for name in ("latest", "best")] == ["ckpt-00000001\n"] * 2
    assert [path.name for path in victim.parent.iterdir()] == ["file"] and victim.read_text() == MINE


def test_batches_follow_no_link(shared: Path, victim: Path):
    """Planted once the folder, which must be empty, is being written."""
    planted = [shared / name for name in ("batch-000001.safetensors", "batches.json")]

    def plant(what: str, done: int, total: int) -> None:
        for path in planted if done == 1 else ():
            path.symlink_to(victim)

    data = ClassificationData(path="synthetic:classes=4,samples=30,size=12", size=8, eval_resize=8, eval_size=8)
    dump(data, shared, 4, 2, 0, plant)
    assert victim.read_text() == MINE and not any(path.is_symlink() for path in planted)


# The user's cache


def test_a_cache_that_others_can_write_to_is_not_used(shared: Path, monkeypatch: pytest.MonkeyPatch):
    """Compiled code is loaded from it; XDG_CACHE_HOME may be /tmp."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    shared.chmod(0o1777)
    before = os.umask(0)
    try:
        folder = cache_folder("compiled")
    finally:
        os.umask(before)
    assert folder == shared / "sightline" / "compiled" and folder.stat().st_mode & 0o777 == 0o700
    for place, mode in ((folder, 0o777), (folder.parent, 0o1777), (shared, 0o777)):
        kept = place.stat().st_mode
        place.chmod(mode)
        assert cache_folder("compiled") is None
        place.chmod(kept)
    assert cache_folder("compiled") == folder
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache_folder("compiled") is None


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `compiled` of a cache below `home/cache`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    folder = cache_folder("compiled")
    assert folder == tmp_path / "home" / "cache" / "sightline" / "compiled"
    return folder


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("mode", [0o770, 0o2775, 0o777])
def test_a_cache_below_a_folder_of_a_group_is_not_used(own_cache: Path, depth: int, mode: int, monkeypatch, capsys):
    place = [own_cache, *own_cache.parents][depth]
    place.chmod(mode)
    group = grp.struct_group(("staff", "x", place.stat().st_gid, []))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    whole._say_unused.cache_clear()
    assert cache_folder("compiled") is None and cache_folder("compiled") is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"the cache is not used: {place} belongs to another user, or others may" in said
    place.chmod(0o755)
    assert cache_folder("compiled") == own_cache


@pytest.mark.parametrize(("others", "is_used"), [([], True), (["me"], True), (["me", "eve"], False)])
def test_a_cache_of_a_users_private_group_is_used(own_cache: Path, others: list[str], is_used: bool, monkeypatch):
    """As umask 002 leaves it, where each user has a group of the same name."""
    for place in (own_cache, *own_cache.parents[:3]):
        place.chmod(0o2775)
    info = own_cache.stat()
    user = pwd.struct_passwd(("me", "x", info.st_uid, info.st_gid, "", "/", ""))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("me", "x", gid, others)))
    assert (cache_folder("compiled") == own_cache) == is_used


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives a folder to another user")
@pytest.mark.parametrize("depth", range(4))
def test_a_cache_below_a_folder_of_another_user_is_not_used(own_cache: Path, depth: int):
    os.chown([own_cache, *own_cache.parents][depth], 12345, -1)
    assert cache_folder("compiled") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives a folder to another group")
@pytest.mark.parametrize(("user", "is_used"), [(4242, True), (4243, False)])
def test_a_volume_of_a_pod_is_used_whose_group_has_the_users_number(
    own_cache: Path, user: int, is_used: bool, monkeypatch: pytest.MonkeyPatch
):
    """As Kubernetes gives it to a pod's fsGroup; neither user nor group has a name there."""
    for place in (own_cache, own_cache.parent):
        os.chown(place, 0, 4242)
        place.chmod(0o2775)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert (cache_folder("compiled") == own_cache) == is_used
