"""Batches with and without worker processes: the same bits, from any position, and what happens to bad samples."""

import array
import dataclasses
import fcntl
import multiprocessing.forkserver
import os
import shutil
import signal
import termios
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from sightline.config import Run
from sightline.data.classification import ClassificationData
from sightline.data.loading import loader as loader_module
from sightline.data.loading.loader import BadSamples, Loader, worker_count
from sightline.data.loading.order import PADDING, EvalOrder, TrainOrder
from sightline.errors import BadData, BadSample, Interrupted, PeerLost, UsageError
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.parts import Bound, Dataset, DataSpec

CPU = devices.select("cpu")
BATCH = 6
CONFIG = ClassificationData(size=16, eval_resize=16, eval_size=16, mixup=0.3)
SYNTHETIC = dataclasses.replace(CONFIG, path="synthetic:classes=4,samples=88,size=20")  # 88 train, 11 val
both_ways = pytest.mark.parametrize("workers", [0, 2])


def nothing(*_: object) -> None:
    pass


@contextmanager
def opened(config: ClassificationData, workers: int, on_bad=nothing, check_stop=nothing, prefetch: int = 2):
    """A loader over both splits, and what a test needs to know about it."""
    train, val = (config.open(split, seed=3).bind(CPU, BATCH) for split in ("train", "val"))
    feeds = {
        "train": (train, TrainOrder(len(train.dataset), BATCH, 3)),
        "val": (val, EvalOrder(len(val.dataset), BATCH)),
    }
    bad_samples = BadSamples(config.on_bad_sample, config.max_bad_samples, on_bad)
    loader = Loader(feeds, Run(workers=workers, prefetch=prefetch), CPU, World(), bad_samples, check_stop)
    try:
        yield loader
    finally:
        loader.close()


def take(loader: Loader, feed: str, start: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Copies, because a batch is valid until the next one is asked for."""
    loader.seek(feed, start, start + count)
    return [{key: value.clone() for key, value in loader.next(feed).items()} for _ in range(count)]


def assert_same(some: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]), key


@pytest.fixture(scope="module")
def reference() -> dict[str, list[dict[str, torch.Tensor]]]:
    """Two epochs of training and one of evaluation, made without the loader."""
    found = {}
    for split, order, steps in (("train", TrainOrder(88, BATCH, 3), 28), ("val", EvalOrder(11, BATCH), 2)):
        bound = SYNTHETIC.open(split, seed=3).bind(CPU, BATCH)
        found[split] = []
        for step in range(steps):
            rows = []
            for epoch, index in zip(*map(np.ndarray.tolist, order.batch(step)), strict=True):
                padded = index == PADDING
                row = {key: np.zeros(shape, dtype) for key, (shape, dtype) in bound.layout.items()}
                row |= {} if padded else bound.load(epoch, index)
                row["index"] = np.asarray(index)
                if split == "val":
                    row["valid"] = np.asarray(not padded)
                rows.append(row)
            batch = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
            for key, value in bound.draw_batch(*divmod(step, 14)).items():
                batch[key] = torch.from_numpy(value)
            found[split].append(batch)
    return found


@pytest.fixture(scope="module")
def with_workers():
    with opened(SYNTHETIC, workers=2) as loader:
        yield loader


@pytest.fixture(params=[0, 2], ids=["no workers", "2 workers"])
def loader(request):
    if request.param == 2:
        yield request.getfixturevalue("with_workers")
        return
    with opened(SYNTHETIC, workers=0) as loader:
        yield loader


def test_batches_are_the_same_however_they_are_loaded(loader: Loader, reference):
    assert_same(take(loader, "train", 0, 28), reference["train"])
    assert_same(take(loader, "val", 0, 2), reference["val"])
    assert {"image", "label", "index", "mix"} == set(reference["train"][0])


@pytest.mark.parametrize("start", [1, 9, 13, 14, 17])
def test_from_the_middle_they_are_the_same_as_from_the_start(loader: Loader, reference, start: int):
    assert_same(take(loader, "train", start, 4), reference["train"][start : start + 4])


def test_seeking_away_from_batches_already_asked_for(loader: Loader, reference):
    """Answers to requests for the old position must not land in the batches of the new one."""
    for start in (0, 20, 3, 24):
        loader.seek("train", start, 28)
        assert_same([loader.next("train")], reference["train"][start : start + 1])


def test_evaluation_in_the_middle_of_training_disturbs_neither(loader: Loader, reference):
    loader.seek("train", 5, 28)
    first = {key: value.clone() for key, value in loader.next("train").items()}
    assert_same(take(loader, "val", 0, 2), reference["val"])
    assert_same([first, loader.next("train")], reference["train"][5:7])


def test_a_batch_stays_valid_while_the_next_ones_are_prepared(loader: Loader, reference):
    loader.seek("train", 0, 28)
    for step in range(8):
        batch = loader.next("train")
        loader.seek("val", 0, 2)  # waits for workers, who meanwhile fill what they may
        assert_same([batch], reference["train"][step : step + 1])


def test_the_rest_of_an_evaluation_batch_is_padding(loader: Loader):
    last = take(loader, "val", 0, 2)[1]
    assert last["valid"].tolist() == [True] * 5 + [False]
    assert last["index"].tolist() == [6, 7, 8, 9, 10, PADDING]
    assert not last["image"][5].any() and last["label"][5] == 0
    full = take(loader, "val", 0, 1)[0]
    assert full["valid"].all() and full["index"].tolist() == list(range(6))  # the padding of before is gone


def test_nothing_is_handed_out_past_the_end(loader: Loader):
    take(loader, "val", 0, 2)
    with pytest.raises(AssertionError, match="past the end"):
        loader.next("val")


def test_processes_are_there_and_go(reference):
    with opened(SYNTHETIC, workers=2) as loader:
        pids = loader.worker_pids
        assert len(set(pids)) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        loader.seek("train", 0, 28)  # closing with batches under way
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with opened(SYNTHETIC, workers=0) as loader:
        assert loader.worker_pids == []


def test_the_wait_meter_counts_time_in_next_and_no_other(monkeypatch):
    """On a clock that only moves when a sample is loaded, or when we say so."""
    now = [0.0]
    monkeypatch.setattr(loader_module.time, "perf_counter", lambda: now[0])

    def load_takes_a_second() -> None:  # called before each sample
        now[0] += 1

    with opened(SYNTHETIC, workers=0, check_stop=load_takes_a_second) as loader:
        loader.seek("train", 0, 10)
        assert loader.wait_s == 0
        for number in range(1, 4):
            loader.next("train")
            assert loader.wait_s == number * BATCH
            now[0] += 1000  # the step


def test_the_wait_meter_counts_what_the_device_decodes_and_copies(monkeypatch):
    """A clock that moves when the batch is decoded, and at no other time."""
    now = [0.0]

    def decode(slot, batch):
        now[0] += 5.0
        return batch

    monkeypatch.setattr(loader_module.time, "perf_counter", lambda: now[0])
    bound = dataclasses.replace(SYNTHETIC.open("train", seed=3).bind(CPU, BATCH), decode=decode)
    feeds = {"train": (bound, TrainOrder(88, BATCH, 3))}
    loader = Loader(feeds, Run(workers=0), CPU, World(), BadSamples("fail", 0, nothing), nothing)
    loader.seek("train", 0, 2)
    for _ in range(2):
        loader.next("train")
        now[0] += 100.0  # the step
    assert loader.wait_s == 10.0


@both_ways
def test_a_stop_request_is_answered_while_waiting(workers: int):
    stop = []

    def check() -> None:
        if stop:
            raise Interrupted(15)

    with opened(SYNTHETIC, workers, check_stop=check) as loader:
        loader.seek("train", 0, 4)
        loader.next("train")
        stop.append(True)
        with pytest.raises(Interrupted):
            [loader.next("train") for _ in range(3)]  # batches on their way may still come


# Bad samples


@pytest.fixture(scope="module")
def damaged(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes with one training and one evaluation image cut short."""
    root = tmp_path_factory.mktemp("damaged") / "shapes"
    shutil.copytree(shapes, root)
    for split, index in (("train", 11), ("val", 7)):
        path = root / split / dataclasses.replace(CONFIG, path=str(root)).open(split, 0).name(index)
        path.write_bytes(path.read_bytes()[:100])
    return root


@both_ways
def test_fail_ends_with_the_name_of_the_sample(damaged: Path, workers: int):
    config = dataclasses.replace(CONFIG, path=str(damaged))
    name = config.open("val", 3).name(7)
    with opened(config, workers) as loader, pytest.raises(BadSample) as error:
        take(loader, "val", 0, 4)
    assert str(error.value).startswith(f"{name}: ") and error.value.exit_code == 3


def test_skip_replaces_in_training_and_marks_in_evaluation(damaged: Path, shapes: Path):
    config = dataclasses.replace(CONFIG, path=str(damaged), on_bad_sample="skip")
    with opened(dataclasses.replace(config, path=str(shapes)), workers=0) as loader:
        whole = {feed: take(loader, feed, 0, count) for feed, count in (("train", 26), ("val", 7))}
    seen = {}
    for workers in (0, 2):
        reported = []
        with opened(config, workers, on_bad=reported.append) as loader:
            seen[workers] = {feed: take(loader, feed, 0, count) for feed, count in (("train", 26), ("val", 7))}
            assert take(loader, "val", 0, 7)[1]["valid"].tolist() == [True, False, True, True, True, True]
        # Once each, although both were met twice.
        assert sorted((bad.feed, bad.index) for bad in reported) == [("train", 11), ("val", 7)]
        assert all(bad.name == config.open(bad.feed, 3).name(bad.index) and bad.reason for bad in reported)
    for feed in ("train", "val"):
        assert_same(seen[0][feed], seen[2][feed])
        for step, (healthy, batch) in enumerate(zip(whole[feed], seen[0][feed], strict=True)):
            bad = healthy["index"] == {"train": 11, "val": 7}[feed]
            assert torch.equal(batch["index"] == healthy["index"], ~bad | (feed == "val"))
            assert torch.equal(batch["image"][~bad], healthy["image"][~bad])
            if feed == "val":
                assert torch.equal(batch["valid"], healthy["valid"] & ~bad)
            elif bad.any():
                assert batch["image"][bad].any(), f"step {step} trains on an empty image"


def test_replacements_of_a_sample_differ_by_epoch_and_carry_their_own_index(damaged: Path, shapes: Path):
    rows = {}
    for path in (shapes, damaged):
        config = dataclasses.replace(CONFIG, path=str(path), on_bad_sample="skip", augment="off")
        with opened(config, workers=0) as loader:
            batches = take(loader, "train", 0, 13 * 6)
        rows[path] = [row for batch in batches for row in zip(batch["index"].tolist(), batch["image"], strict=True)]
    images = dict(rows[shapes])
    met = [replaced for (index, _), replaced in zip(rows[shapes], rows[damaged], strict=True) if index == 11]
    assert len(met) >= 3 and len({index for index, _ in met} - {11}) > 1
    assert all(torch.equal(image, images[index]) for index, image in met)
    assert [index for index, _ in met][:3] == [
        23,
        79,
        20,
    ]  # as ever: a run of an earlier version goes on with equal bits


def test_too_many_bad_samples_end_the_run_after_all(damaged: Path):
    config = dataclasses.replace(CONFIG, path=str(damaged), on_bad_sample="skip", max_bad_samples=1)
    name = config.open("val", 3).name(7)
    with opened(config, workers=0) as loader:
        take(loader, "train", 0, 26)
        with pytest.raises(
            BadData, match=r"2 samples cannot be read, the last one .*; .*--data.max-bad-samples"
        ) as error:
            take(loader, "val", 0, 7)
    assert name in str(error.value)


def test_a_set_without_one_good_sample_does_not_loop_forever(tmp_path: Path):
    for split in ("train", "val"):
        (tmp_path / split / "ant").mkdir(parents=True)
        for number in range(8):
            (tmp_path / split / "ant" / f"{number}.jpg").write_text("no image")
    config = dataclasses.replace(CONFIG, path=str(tmp_path), on_bad_sample="skip")
    with opened(config, workers=0) as loader, pytest.raises(BadData, match="samples in a row could not be read"):
        take(loader, "train", 0, 1)


class Unreadable(Dataset):
    """Many samples, none of which can be read."""

    spec = DataSpec(("ant",), 3, (1, 1), (0.0,), (1.0,))
    fingerprint = ""

    def __init__(self, folder: str = "val/ant"):
        self.folder = folder

    def __len__(self):
        return 60_000

    def name(self, index):
        return f"{self.folder}/{index:08d}.jpg"

    def bind(self, device, global_batch):
        return Bound(self, {"label": ((), "int64")}, self.load, self.finish)

    def load(self, epoch, index):
        raise BadSample(self.name(index), "empty file (0 bytes); fetch it again or remove it")

    def finish(self, batch, dtype):
        return batch


class Meeting(Unreadable):
    """Samples of which as many must be loaded at once as a barrier lets through."""

    def __init__(self, threads: int):
        super().__init__()
        self.together = threading.Barrier(max(threads, 1))
        self.seen: set[int] = set()

    def load(self, epoch, index):
        self.together.wait(30)
        self.seen.add(threading.get_ident())
        return {"label": np.int64(index)}


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_process_without_workers_loads_on_as_many_threads_as_it_is_told(threads: int):
    dataset = Meeting(threads)
    feeds = {"files": (dataset.bind(CPU, BATCH), EvalOrder(60_000, BATCH))}
    bad_samples = BadSamples("fail", 0, nothing)
    loader = Loader(feeds, Run(workers=0), CPU, World(), bad_samples, nothing, threads=threads)
    try:
        [batch] = take(loader, "files", 0, 1)
    finally:
        loader.close()
    assert batch["label"].tolist() == list(range(BATCH))
    assert (dataset.seen == {threading.get_ident()}) is not bool(threads) and len(dataset.seen) <= max(threads, 1)


def test_long_requests_and_long_answers_do_not_wait_for_each_other():
    met = []
    feeds = {"val": (Unreadable().bind(CPU, 20_000), EvalOrder(60_000, 20_000))}
    bad_samples = BadSamples("skip", 10**6, met.append)
    loader = Loader(feeds, Run(workers=1, prefetch=3), CPU, World(), bad_samples, nothing)
    try:
        batches = take(loader, "val", 0, 3)
    finally:
        loader.close()
    assert [index for batch in batches for index in batch["index"].tolist()] == list(range(60_000))
    assert not any(batch["valid"].any() for batch in batches)
    assert len(met) == 60_000


def test_a_worker_killed_in_the_middle_of_an_answer():
    feeds = {"val": (Unreadable("x" * 2**20).bind(CPU, 1), EvalOrder(60_000, 1))}  # answers of a megabyte
    bad_samples = BadSamples("skip", 10**6, nothing)
    loader = Loader(feeds, Run(workers=1, prefetch=1), CPU, World(), bad_samples, nothing)
    try:
        loader.seek("val", 0, 1)
        [answers] = loader._workers._connections
        sent = array.array("i", [0])
        while sent[0] < 2**16:  # until it waits for room in the pipe
            assert answers.poll(60)
            fcntl.ioctl(answers.fileno(), termios.FIONREAD, sent)
        [pid] = loader.worker_pids
        os.kill(pid, signal.SIGKILL)
        loader._workers._processes[0].join()
        with pytest.raises(PeerLost, match=f"loader worker {pid} was killed by SIGKILL"):
            loader.next("val")
    finally:
        loader.close()


# Sizes


def test_more_shared_memory_than_there_is_is_refused_before_it_is_taken():
    with pytest.raises(UsageError, match=r"MiB of shared memory and /dev/shm has .*--run.prefetch"):  # noqa: SIM117
        with opened(dataclasses.replace(SYNTHETIC, size=2**14), workers=2, prefetch=100):  # 5 GB a batch
            pass


@pytest.mark.parametrize(("samples", "wanted", "workers", "slots"), [(88, 2, 2, 5), (8, 2, 1, 5), (88, 0, 0, 1)])
def test_a_run_says_how_it_is_loaded(samples: int, wanted: int, workers: int, slots: int):
    """And no worker is started that nothing could be given to; without one a batch is made when it is asked for."""
    config = dataclasses.replace(CONFIG, path=f"synthetic:classes=4,samples={samples},size=20")
    bound = config.open("val", 3).bind(CPU, BATCH)
    assert len(bound.dataset) == samples // 8
    feeds, run = {"val": (bound, EvalOrder(len(bound.dataset), BATCH))}, Run(workers=wanted, prefetch=4)
    loader = Loader(feeds, run, CPU, World(), BadSamples("fail", 0, nothing), nothing)
    try:
        assert (len(loader.worker_pids), len(loader.feeds["val"].feed.slots)) == (workers, slots)
    finally:
        loader.close()


def test_worker_count_follows_the_wish_or_the_cores(monkeypatch):
    cuda = dataclasses.replace(CPU, kind="cuda")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [worker_count(wanted, CPU, World()) for wanted in (0, 1, 5)] == [0, 1, 5]
    assert worker_count(-1, CPU, World()) == 4  # the cores also compute
    assert worker_count(-1, cuda, World()) == 15
    assert worker_count(-1, cuda, World(size=4)) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # 4 ranks on 2 hosts
    assert worker_count(-1, cuda, World(size=4)) == 7
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert worker_count(-1, CPU, World()) == 1


def test_a_frozen_machine_is_not_a_stalled_worker():
    """Time in which this process itself stood still counts as one second, however long it was."""
    with opened(SYNTHETIC, workers=1) as loader:
        take(loader, "train", 0, 1)  # later only --run.timeout-s counts
        worker = psutil.Process(loader.worker_pids[0])
        worker.suspend()
        while worker.status() != psutil.STATUS_STOPPED:
            pass
        loader.seek("train", 0, 10)
        stalls = loader._stalls
        stalls.note(0.0, is_answered=True)
        stalls.note(1e6, is_answered=False)
        for _ in range(int(Run().timeout_s) - 1):
            stalls.note(1.0, is_answered=False)
        limit = f"loader worker {worker.pid} has begun no sample for {Run().timeout_s + 1} s"
        with pytest.raises(PeerLost, match=limit):
            stalls.note(1.0, is_answered=False)


def test_ctrl_c_cannot_end_the_forkserver_while_it_starts(monkeypatch):
    """SIGINT is blocked where workers start it, so from its first instruction on, and free again afterwards."""
    really, blocked = multiprocessing.forkserver.ensure_running, []

    def ensure_running() -> None:
        blocked.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        really()

    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", ensure_running)
    with opened(SYNTHETIC, workers=1):
        assert blocked == [True] and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_batches_that_left_their_slots_before_a_new_start_count_no_more():
    """Threads may give slots back in any order; what one gives back late belongs to an earlier start."""
    with opened(SYNTHETIC, workers=0) as loader:
        feed = loader.feeds["train"]
        feed.start(0, 9)
        for number, free in ((1, 0), (2, 0), (0, 3), (4, 3), (5, 3)):
            feed.release(number)
            assert feed.free == free
        feed.start(3, 9)
        feed.release(3)
        assert feed.free == 4, "4 and 5 are to be loaded again"
        feed.start(1, 9)
        assert feed.free == feed.position == 1


def test_batches_for_workers_may_take_all_of_the_shared_memory_and_no_more(monkeypatch):
    layout, slots, rows = {"image": ((3, 4), "float32")}, 2, 5
    needed = slots * rows * (3 * 4 * 4 + 8 + 1)  # with the number and the validity of each row
    monkeypatch.setattr(loader_module.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(1, 0, needed))
    batches = loader_module._allocate(layout, rows, slots, "val", shared=True)
    assert [{key: tensor.is_shared() for key, tensor in batch.items()} for batch in batches] == [
        dict.fromkeys(("image", "index", "valid"), True)
    ] * 2
    monkeypatch.setattr(loader_module.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(1, 0, needed - 1))
    with pytest.raises(UsageError, match=r"the loader needs 0 MiB of shared memory and /dev/shm has 0 MiB free"):
        loader_module._allocate(layout, rows, slots, "val", shared=True)
    assert set(loader_module._allocate(layout, rows, 1, "train", shared=False)[0]) == {"image", "index"}
