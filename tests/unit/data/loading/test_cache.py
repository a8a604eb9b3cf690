"""Images kept in memory: when they are, what is said of it, and that processes share them."""

import gc
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from sightline.data.loading import cache
from sightline.data.loading.cache import ImageCache, available_bytes, decide
from sightline.errors import UsageError

FILES, KIB_EACH = 256, 1_000_000  # the original's rule: a million KiB for each of its 256 files
ROOM = np.full(FILES, KIB_EACH << 10, np.int64)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch):
    """memory(**KiB): what /proc/meminfo says from now on; no limit of a container."""

    def pretend(limit: str = "max", **kib: int) -> None:
        (tmp_path / "meminfo").write_text("".join(f"{name}:{value:>16} kB\n" for name, value in kib.items()))
        (tmp_path / "limit").write_text(f"{limit}\n")
        monkeypatch.setattr(cache, "MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(cache, "CGROUP_LIMITS", (tmp_path / "limit", tmp_path / "absent"))
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    return pretend


def test_auto_says_on_or_off_by_the_memory_there_is(memory):
    needed = FILES * KIB_EACH
    memory(MemTotal=2 * needed + 1)  # all that an old kernel reports
    assert decide("auto", ROOM, "train") == (
        True,
        "cache ON: 256 images of train need 244.1 GiB, 488.3 GiB are available",
    )
    memory(MemTotal=2 * needed - 1)
    assert decide("auto", ROOM, "train") == (
        False,
        "cache OFF: 256 images of train need 244.1 GiB, 488.3 GiB are available, of which auto takes 50%",
    )


def test_what_others_use_and_what_a_container_may_not_use_does_not_count(memory):
    memory(MemTotal=4 << 20, MemFree=1 << 10, MemAvailable=3 << 20)
    assert available_bytes() == 3 << 30
    memory(MemTotal=4 << 20, MemAvailable=3 << 20, limit=str(1 << 30))
    assert available_bytes() == 1 << 30


def test_ranks_of_a_machine_share_its_memory(memory, monkeypatch):
    memory(MemAvailable=3 * FILES * KIB_EACH)
    assert decide("auto", ROOM, "train")[0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    is_on, line = decide("auto", ROOM, "train")
    assert not is_on and "488.3 GiB for 2 ranks" in line


def test_off_is_silent_and_ram_is_an_order(memory):
    memory(MemAvailable=FILES * KIB_EACH)
    assert decide("off", ROOM, "train") == (False, "")
    assert decide("ram", ROOM, "val")[0]
    memory(MemAvailable=FILES * KIB_EACH - 1)
    with pytest.raises(UsageError, match=r"--data.cache ram: 256 images of val need .* use --data.cache auto or off"):
        decide("ram", ROOM, "val")


def test_what_was_put_in_comes_out_and_nothing_else():
    kept = ImageCache(np.array([5, 0, 3, 8], np.int64))
    assert [kept.get(index) for index in range(4)] == [None] * 4
    kept.put(0, b"abcde")
    kept.put(2, b"xy")  # smaller than it was listed
    kept.put(3, b"123456789")  # larger
    assert [kept.get(index) for index in range(4)] == [b"abcde", None, b"xy", None]


def test_an_image_that_is_being_written_is_not_used():
    kept = ImageCache(np.array([5, 5], np.int64))
    kept.put(0, b"abcde")
    kept.put(1, b"fghij")
    kept.block[int(kept.starts[1]) + 2] = 0
    assert [kept.get(0), kept.get(1)] == [b"abcde", None]


def _bring(kept: ImageCache) -> None:
    assert kept.get(0) == b"from here"
    kept.put(1, b"from there")


def test_processes_share_it_and_it_goes_with_them():
    before = len(os.listdir("/proc/self/fd"))
    kept = ImageCache(np.array([9, 10], np.int64))
    kept.put(0, b"from here")
    process = multiprocessing.get_context("spawn").Process(target=_bring, args=(kept,))
    process.start()
    process.join()
    assert process.exitcode == 0 and kept.get(1) == b"from there"
    name = os.readlink(f"/proc/self/fd/{kept.descriptor}")
    assert "memfd" in name and name.endswith("(deleted)")  # nothing is left behind, whoever is killed
    del kept, process
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # multiprocessing's own resource sharer may stay
