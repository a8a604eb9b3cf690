"""Files that are there whole or not at all, and flushed to the disk before they have their name where that is asked."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sightline.errors import DiskFull
from sightline.files import whole


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda folder, **how: whole.replace_text(folder / "file", "text", **how),
        lambda folder, **how: whole.write_text(folder, "file", "text", **how),
    ],
    ids=["by its path", "below a folder"],
)
def test_what_must_outlast_a_power_cut_is_on_the_disk_before_it_has_its_name(
    write: Callable[..., None], durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    flushed: list[tuple[bool, int, bool]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        seen = os.fstat(descriptor)
        flushed.append((stat.S_ISREG(seen.st_mode), seen.st_size, (tmp_path / "file").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write(tmp_path, durable=durable)
    assert flushed == ([(True, len("text"), False)] if durable else [])
    write(tmp_path)
    assert len(flushed) == durable and (tmp_path / "file").read_text() == "text"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_room_is_what_is_wanted_and_64_mib_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Path] = []
    free = [0]
    monkeypatch.setattr("shutil.disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=free[0]))
    wanted = 3_000_000_000
    free[0] = wanted + 64 * 1024 * 1024
    whole.check_room(tmp_path / "of" / "nobody", wanted, "it")
    free[0] -= 1
    with pytest.raises(
        DiskFull, match=rf"^it needs 3\.0 GB, {tmp_path} has 3\.1 GB free; make room or choose a folder"
    ):
        whole.check_room(tmp_path / "of" / "nobody", wanted, "it")
    assert asked == [tmp_path] * 2, "the nearest folder that is there"
