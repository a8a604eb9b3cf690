"""Images kept in memory: when they are, what is said of it, and that processes and ranks share them."""

import gc
import multiprocessing
import os
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from sightline.data.loading import cache
from sightline.data.loading.cache import ImageCache, as_pixels, available_bytes, choose, estimated, exact, with_sides
from sightline.errors import UsageError
from sightline.hardware import limits
from sightline.hardware.world import World

FILES, KIB_EACH = 256, 1_000_000  # the original's rule: a million KiB for each of its 256 files
ALL = exact(np.full(FILES, KIB_EACH << 10, np.int64))


@pytest.fixture
def memory(tmp_path: Path, monkeypatch):
    """memory(**KiB): what /proc/meminfo says from now on; no limit of a container."""

    def pretend(limit: str = "max", **kib: int) -> None:
        (tmp_path / "meminfo").write_text("".join(f"{name}:{value:>16} kB\n" for name, value in kib.items()))
        (tmp_path / "own").write_text("0::/job\n")
        job = tmp_path / "cgroup" / "job"
        job.mkdir(parents=True, exist_ok=True)
        facts = {"max": limit, "current": str(5 << 28), "stat": f"anon {1 << 28}\ninactive_file {1 << 30}"}
        for name, text in facts.items():  # 1 GiB of what is taken can be dropped
            (job / f"memory.{name}").write_text(f"{text}\n")
        monkeypatch.setattr(cache, "MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(cache, "_alive", weakref.WeakSet())  # caches of earlier tests may not be collected yet
        monkeypatch.setattr(limits, "OWN_CGROUP", tmp_path / "own")
        monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    return pretend


def test_auto_says_on_or_off_by_the_memory_there_is(memory):
    needed = FILES * KIB_EACH
    memory(MemTotal=2 * needed + 1)  # all that an old kernel reports
    assert choose("auto", [ALL], "train") == (
        ALL,
        "cache ON: 256 images of train need 244.1 GiB, 488.3 GiB are available",
    )
    memory(MemTotal=2 * needed - 1)
    assert choose("auto", [ALL], "train") == (
        None,
        "cache OFF: 256 images of train need 244.1 GiB, 488.3 GiB are available, of which auto takes 50%",
    )


@pytest.mark.parametrize("mode", ["auto", "ram"])
def test_decoded_images_are_kept_where_they_fit_into_half_and_else_encoded_ones(memory, mode):
    decoded = estimated("decoded images", [4096 * 100] * 3, 1000, is_decoded=True)  # 400 MB
    encoded = estimated("encoded images", [4000 * 10, 4096 * 10], 1000)
    assert (decoded.needed, encoded.needed) == (409_600_000, 40_960_000)  # of whole pages
    memory(MemAvailable=810_000)
    assert choose(mode, [decoded, encoded], "train")[0] is decoded
    memory(MemAvailable=700_000)
    assert choose(mode, [decoded, encoded], "train")[0] is encoded


def test_what_others_use_and_what_a_container_may_not_use_does_not_count(memory):
    memory(MemTotal=4 << 20, MemFree=1 << 10, MemAvailable=3 << 20)
    assert available_bytes() == 3 << 30
    memory(MemTotal=4 << 20, MemAvailable=3 << 20, limit=str(5 << 28))  # of the job, which has taken a quarter
    assert available_bytes() == 1 << 30


def test_memory_that_another_cache_will_fill_is_not_available(memory):
    memory(MemAvailable=4 << 20)
    kept = ImageCache(exact(np.array([1 << 30, 1 << 30], np.int64)))
    assert 2 << 30 <= available_bytes() < (2 << 30) + 2**16
    kept.put(0, bytes(1 << 20))
    assert available_bytes() >= (2 << 30) + (1 << 20)
    del kept
    gc.collect()
    assert available_bytes() == 4 << 30


def test_off_is_silent_and_ram_is_an_order(memory):
    memory(MemAvailable=FILES * KIB_EACH)
    assert choose("off", [ALL], "train") == (None, "")
    assert choose("ram", [ALL], "val")[0]
    memory(MemAvailable=FILES * KIB_EACH - 1)
    with pytest.raises(UsageError, match=r"--data.cache ram: 256 images of val need .* use --data.cache auto or off"):
        choose("ram", [ALL], "val")


def test_what_was_put_in_comes_out_and_nothing_else():
    kept = ImageCache(exact(np.array([5, 0, 3, 8], np.int64)))
    assert [kept.get(index) for index in range(4)] == [None] * 4
    kept.put(0, b"abcde")
    kept.put(2, b"xy")  # smaller than it was listed
    kept.put(3, b"123456789")  # larger
    assert [kept.get(index) for index in range(4)] == [b"abcde", None, b"xy", None]


def test_an_image_that_is_being_written_is_not_used():
    kept = ImageCache(exact(np.array([5, 5], np.int64)))
    kept.put(0, b"abcde")
    kept.put(1, b"fghij")
    kept.block[int(kept.starts[1]) + 2] = 0  # before it was read, as another process would
    assert [kept.get(0), kept.get(1)] == [b"abcde", None]


THERE = 'assert kept.get(0) == b"from here"; kept.put(1, b"from there")'


def test_processes_share_it_and_it_goes_with_them():
    before = len(os.listdir("/proc/self/fd"))
    kept = ImageCache(exact(np.array([9, 10], np.int64)))
    kept.put(0, b"from here")
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(THERE, {"kept": kept}))
    process.start()
    process.join()
    assert process.exitcode == 0 and kept.get(1) == b"from there"
    name = os.readlink(f"/proc/self/fd/{kept.descriptor}")
    assert "memfd" in name and name.endswith("(deleted)")  # nothing is left behind, whoever is killed
    del kept, process
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # multiprocessing's own resource sharer may stay


def test_ranks_of_a_host_share_the_memory_of_the_first(monkeypatch):
    store = dist.HashStore()
    first, second, alone = (ImageCache(exact(np.array([9, 10], np.int64))) for _ in range(3))
    for rank, kept in ((0, first), (1, second)):
        monkeypatch.setattr(cache, "_started", Counter())  # as in the process of another rank
        assert kept.start(World(rank, 2, rank, store=store), lambda: None) == ""
    assert alone.start(World(), lambda: None) == ""
    first.put(0, b"of first")
    second.put(1, b"of second")
    assert [kept.get(1) for kept in (first, second, alone)] == [b"of second", b"of second", None]
    assert second.get(0) == b"of first" and second.view(1).tobytes() == b"of second"


def test_ranks_that_keep_other_things_share_nothing(monkeypatch):
    """One of two ranks may find too little memory for decoded images."""
    store = dist.HashStore()
    forms = (estimated("decoded images", [100], 2, is_decoded=True), estimated("encoded images", [100], 2))
    first, second = (ImageCache(form, "train") for form in forms)
    for rank, kept in ((0, first), (1, second)):
        monkeypatch.setattr(cache, "_started", Counter())
        assert kept.start(World(rank, 2, rank, store=store), lambda: None) == ""
    first.put(0, b"pixels")
    assert second.get(0) is None


def test_a_rank_that_cannot_reach_the_first_keeps_nothing_and_says_so(monkeypatch):
    store = dist.HashStore()
    first, second = (ImageCache(exact(np.array([9], np.int64))) for _ in range(2))
    for rank, kept in ((0, first), (1, second)):
        monkeypatch.setattr(cache, "_started", Counter())
        if rank:  # what another process has under this number
            where = f"{cache.BOOT.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
            place = f"cache/{second._kind}/1/{where}"
            store.set(place, f"{os.getpid()} {os.open(os.devnull, os.O_RDWR)} 0")
        note = kept.start(World(rank, 2, rank, store=store), lambda: None)
    assert note.startswith("cache OFF on rank 1: it cannot share the memory of its host's first rank (file ")
    second.put(0, b"anything")
    assert second.get(0) is None


def test_pixels_come_back_with_their_sides():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    kept = ImageCache(estimated("decoded images", [1000], 3, is_decoded=True))
    kept.put(1, *with_sides(pixels))
    assert np.array_equal(as_pixels(kept.view(1)), pixels) and kept.view(0) is None


def test_more_than_was_estimated_is_not_kept():
    kept = ImageCache(estimated("decoded images", [2**18], 3, is_decoded=True))
    for index in range(3):
        kept.put(index, bytes([index]) * 2**20)
    assert [kept.get(index) is not None for index in range(3)] == [True, False, False]


def test_without_memory_of_the_system_nothing_is_kept_unless_it_was_asked_for(memory, monkeypatch):
    memory(MemTotal=1 << 20)
    small = exact(np.full(4, 1000, np.int64))

    def refused(*words: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refused)
        assert cache.open_cache("auto", [small], "train") == (
            None,
            "cache OFF: the system refuses its memory (Cannot allocate memory)",
        )
        with pytest.raises(UsageError, match=r"--data.cache ram: the system refuses its memory .*; use off"):
            cache.open_cache("ram", [small], "train")
    monkeypatch.delattr(os, "memfd_create")
    assert choose("auto", [small], "train") == (None, "cache OFF: only Linux has the memory it needs")
    assert choose("off", [small], "train") == choose("auto", [exact(np.zeros(0, np.int64))], "train") == (None, "")
    with pytest.raises(UsageError, match="--data.cache ram needs Linux; use --data.cache off"):
        choose("ram", [small], "train")


def test_memory_is_unknown_where_linux_does_not_tell_it(memory, monkeypatch, tmp_path: Path):
    memory(MemTotal=1 << 20)
    assert available_bytes() == 1 << 30
    monkeypatch.setattr(cache, "MEMINFO", tmp_path / "none")
    assert available_bytes() == 0
