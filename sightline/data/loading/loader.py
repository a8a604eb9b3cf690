"""Batches, prepared ahead: requests to the workers, the copy to the device, bad samples, the wait meter.

A batch stays valid until the next one is requested. Images stay uint8 until they are on the device.
"""

from __future__ import annotations

import collections
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from sightline import terminal
from sightline.data.loading.ahead import POLL_S, THREADS, Ahead
from sightline.data.loading.stalls import StallWatch
from sightline.data.loading.workers import (
    LEFT_OVER,
    MAX_PART,
    PACKED,
    PACKED_AT,
    PARTS_PER_WORKER,
    Bad,
    Feed,
    Filled,
    Request,
    Workers,
    as_arrays,
    fill,
)
from sightline.errors import BadData, PeerLost, UsageError
from sightline.hardware.affinity import cpu_share
from sightline.hardware.devices import Device
from sightline.hardware.limits import prove_descriptors
from sightline.hardware.world import World, local_size
from sightline.parts import Batch, Bound, Layout

Decode = Callable[[Batch, Batch], Batch | None]
SPARE_FILES = 64  # descriptors for images, shards, checkpoints and sockets, which open later
FILES_PER_WORKER = 6  # its two pipes and its sentinel; while it starts, as many again


def worker_count(wanted: int, device: Device, world: World) -> int:
    """Return the number of loader processes of this rank; -1 chooses: few if the cores also compute."""
    if wanted >= 0:
        return wanted
    share = cpu_share(local_size(world))
    return max(1, share // 4) if device.kind == "cpu" else min(16, max(1, share - 1))


class Order(Protocol):
    """Assignment of samples to batches; see order.py."""

    @property
    def local_batch(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...
    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]: ...


Feeds = Mapping[str, tuple[Bound, Order]]  # "train", "val" or "files"


class LoaderFields(Protocol):
    """The fields of a Run that loading needs; a protocol, because data/ does not import config.py."""

    @property
    def workers(self) -> int: ...
    @property
    def prefetch(self) -> int: ...
    @property
    def device_prefetch(self) -> bool: ...
    @property
    def timeout_s(self) -> int: ...


@dataclass(frozen=True)
class BadSamples:
    """Policy for samples that cannot be read."""

    policy: Literal["fail", "skip"]
    most: int  # skip: more than this end the run
    report: Callable[[Bad], None]  # called once for each


class Loader:
    """Training and evaluation batches from one set of workers; while one feed is used, the other rests."""

    def __init__(
        self,
        feeds: Feeds,
        run: LoaderFields,
        device: Device,
        world: World,
        bad_samples: BadSamples,
        check_stop: Callable[[], None],
        warn: Callable[[str], None] = lambda text: terminal.say(f"warning: {text}", "stderr"),
        threads: int = 0,
    ):
        """`threads` of this process load samples where there are no workers; 0: the caller's alone."""
        self.bad_samples = bad_samples
        self.check_stop = check_stop
        self.wait_s = 0.0  # total time inside next(), in which no step is launched, for the data-wait meter
        self._bad_found: collections.deque[Bad] = collections.deque()  # not yet reported
        self._bad_seen: set[tuple[str, str]] = set()  # feed and name: all slices of a volume are one bad sample
        # No more workers than there are items to load.
        items = sum(len(bound.dataset) for bound, _ in feeds.values())
        workers = min(worker_count(run.workers, device, world), items)
        # Decoding on the device keeps the host busy too; threads do it while the step runs.
        works_ahead = device.has_streams and run.device_prefetch
        bringing = THREADS if workers else 1
        shared = (run.prefetch + bringing) * sum(len(bound.layout) + 2 for bound, _ in feeds.values()) if workers else 0
        prove_descriptors(shared + FILES_PER_WORKER * workers + SPARE_FILES)
        filled = {}
        for name, (bound, order) in feeds.items():
            bound.check_batch(order.local_batch)
            in_work = bringing if works_ahead and _goes_ahead(bound) else 1
            slots = 1 if workers == 0 else run.prefetch + in_work
            batches = _allocate(bound.layout, order.local_batch, slots, name, shared=workers > 0)
            filled[name] = Feed(bound, batches, name == "train", bad_samples.policy)
        self.notes = list(dict.fromkeys(note for bound, _ in feeds.values() for note in bound.notes))  # once each
        caches = [bound.cache for bound, _ in feeds.values() if bound.cache]
        self.notes += filter(None, [cache.start(world, check_stop) for cache in caches])
        try:
            self._workers = Workers(workers, filled) if workers else None
        except PeerLost:
            check_stop()  # a stop signal to the whole process group is the reason, not a fault
            raise
        self._stalls = StallWatch(self._workers, run.timeout_s, warn) if self._workers else None
        self.feeds = {
            name: _FeedState(feed, feeds[name][1], _Copier(device, feed, run.device_prefetch))
            for name, feed in filled.items()
        }
        is_ahead = works_ahead and any(_goes_ahead(bound) for bound, _ in feeds.values())
        self._threads = ThreadPoolExecutor(threads, "sightline-loads") if threads and not workers else None
        begin = partial(_begin_thread, device)
        self._ahead = Ahead(bringing, self._collect, begin, check_stop) if is_ahead else None

    @property
    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return self._workers.pids if self._workers else []

    def seek(self, name: str, step: int, stop: int) -> None:
        """Continue this feed with batch `step`; prepare nothing from `stop` on."""
        if self._ahead:
            self._ahead.rest()
        feed = self.feeds[name]
        for request in self._workers.withdraw(name) if self._workers else []:
            feed.pending[request.slot] -= 1
        while any(feed.pending):  # an answer to an old request must not land in a new batch
            self._receive()
        feed.start(step, stop)
        self._request_ahead(name)
        if self._ahead and _goes_ahead(feed.feed.bound):
            self._ahead.start(name, stop - step)
        self._report_bad()

    def next(self, name: str) -> Batch:
        """Return the batch at the feed's position, on the device, and advance."""
        started = time.perf_counter()
        try:
            return self._next(name)
        finally:
            self.wait_s += time.perf_counter() - started
            self._report_bad()

    def _next(self, name: str) -> Batch:
        feed = self.feeds[name]
        if self._ahead and self._ahead.active != name:
            self._ahead.rest()
        if self._ahead and _goes_ahead(feed.feed.bound):
            if self._ahead.active != name:
                self._ahead.resume(name)
            batch = self._ahead.take(name)
            feed.copier.hand_over(batch)
            return batch
        if feed.repeated is not None:
            assert feed.position < feed.stop, "asked for a batch past the end given to seek()"
            self.check_stop()
            feed.position += 1
            return dict(feed.repeated)
        return self._collect(name)()

    def _collect(self, name: str) -> Callable[[], Batch]:
        """Wait until the batch at the feed's position is in its slot, and advance; return what brings it to the
        device."""
        feed = self.feeds[name]
        assert feed.position < feed.stop, "asked for a batch past the end given to seek()"
        self._request_ahead(name)
        number, slot = feed.position, feed.position % len(feed.feed.slots)
        if self._workers is None:
            self._fill_here(name, number, feed.feed)
        while feed.pending[slot]:
            self._receive()
        feed.place_left_over(slot)
        feed.position += 1
        return partial(self._bring, name, number)

    def _bring(self, name: str, number: int) -> Batch:
        """Return batch `number` on the device; its slot is free then. Threads may bring several side by side."""
        feed, bound = self.feeds[name], self.feeds[name].feed.bound
        slot = number % len(feed.feed.slots)
        batch = feed.copier.copy(slot, bound.decode)
        if batch is None:  # the device refuses to decode it
            assert bound.on_host is not None, "what decodes on the device can also load on the host"
            self._fill_here(name, number, replace(feed.feed, bound=bound.on_host))
            batch = feed.copier.copy(slot, None)
            assert batch is not None, "a batch loaded on the host needs nothing of the device"
        epoch, step = divmod(number, feed.order.steps_per_epoch)
        for key, value in bound.draw_batch(epoch, step).items():
            batch[key] = torch.as_tensor(value).to(feed.copier.device, non_blocking=True)
        if self._ahead and self._ahead.is_here():
            feed.copier.finish()
        if bound.repeats_first:
            feed.repeated = {key: tensor.clone() for key, tensor in batch.items()}  # on the CPU the batch is the slot
        feed.release(number)
        return batch

    def close(self) -> None:
        """End the workers and release pinned memory."""
        if self._ahead:
            self._ahead.close()
        for feed in self.feeds.values():
            feed.copier.close()
        if self._workers:
            self._workers.close()
        if self._threads:
            self._threads.shutdown(cancel_futures=True)

    def _request_ahead(self, name: str) -> None:
        feed = self.feeds[name]
        if self._workers is None or feed.repeated is not None:
            return
        # Leave one slot: the batch that was returned last is still in use on the CPU. What is made ahead is a copy.
        horizon = min(feed.stop, feed.free + len(feed.feed.slots) - (0 if self._ahead else 1))
        for number in range(feed.requested, horizon):
            slot = number % len(feed.feed.slots)
            feed.copier.wait(slot)
            epochs, indices = feed.order.batch(number)
            wanted = feed.feed.bound.parts or PARTS_PER_WORKER * len(self._workers)
            count = max(min(wanted, len(indices)), -(-len(indices) // MAX_PART))
            parts = np.array_split(np.arange(len(indices)), count)
            feed.pending[slot] = len(parts)
            for rows in parts:
                self._workers.submit(Request(name, slot, int(rows[0]), epochs[rows], indices[rows]))
        feed.requested = max(feed.requested, horizon)

    def _fill_here(self, name: str, number: int, source: Feed) -> None:
        feed, slot = self.feeds[name], number % len(self.feeds[name].feed.slots)
        feed.copier.wait(slot)
        epochs, indices = feed.order.batch(number)
        # One by one, so that a stop request waits for one sample at most.
        requests = [Request(name, slot, at, epochs[at : at + 1], indices[at : at + 1]) for at in range(len(indices))]
        load = partial(fill, source, feed.arrays[slot])
        answers = self._threads.map(load, requests) if self._threads else map(load, requests)
        for _ in requests:
            self._check()
            self._note(feed, slot, next(answers))

    def _receive(self) -> None:
        assert self._workers is not None and self._stalls is not None
        started = time.monotonic()
        answers = self._workers.receive(POLL_S)
        self._stalls.note(time.monotonic() - started, bool(answers))
        for name, slot, answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            self.feeds[name].pending[slot] -= 1
            self._note(self.feeds[name], slot, answer)
        self._check()

    def _note(self, feed: _FeedState, slot: int, filled: Filled) -> None:
        feed.left_over[slot] |= filled.left_over
        self._bad_found += filled.bad

    def _check(self) -> None:
        """Raise if a stop was requested. A signal is the trainer's; its thread ends with the loader."""
        if self._ahead and self._ahead.is_here():
            self._ahead.check()
        else:
            self.check_stop()

    def _report_bad(self) -> None:
        """Report bad samples, in the caller's thread: the report goes to the log."""
        while self._bad_found:
            record = self._bad_found.popleft()
            if (record.feed, record.name) in self._bad_seen:
                continue
            self._bad_seen.add((record.feed, record.name))
            self.bad_samples.report(record)
            if len(self._bad_seen) > self.bad_samples.most:
                raise BadData(
                    f"{len(self._bad_seen)} samples cannot be read, the last one {record.name}: {record.reason}; "
                    f"fix the data (bad_samples.jsonl lists them) or raise --data.max-bad-samples"
                )


class _FeedState:
    """Position and pending requests of one feed."""

    def __init__(self, feed: Feed, order: Order, copier: _Copier):
        self.feed = feed
        self.order = order
        self.copier = copier
        self.arrays = [as_arrays(slot) for slot in feed.slots]
        self.pending = [0] * len(feed.slots)
        self.left_over: list[dict[int, bytes]] = [{} for _ in feed.slots]  # see workers.PACKED
        self.position = self.requested = self.stop = 0
        self.free = 0  # first batch whose slot is still needed; behind `position` while threads bring batches
        self._released: set[int] = set()
        self._lock = threading.Lock()
        self.repeated: Batch | None = None  # the first batch, once loaded, if it is repeated

    def start(self, step: int, stop: int) -> None:
        """Begin at batch `step`, with empty slots."""
        self.position = self.requested = self.free = step
        self.stop = stop
        self._released.clear()
        self.left_over = [{} for _ in self.left_over]

    def release(self, number: int) -> None:
        """Note that batch `number` has left its slot."""
        with self._lock:
            self._released.add(number)
            while self.free in self._released:
                self._released.remove(self.free)
                self.free += 1

    def place_left_over(self, slot: int) -> None:
        """Put the values of a slot that workers had no room for behind it."""
        values, self.left_over[slot] = self.left_over[slot], {}
        at = self.arrays[slot][PACKED].size if values else 0
        for row, value in values.items():
            self.arrays[slot][PACKED_AT][row] = at
            at += len(value)
        if values:
            self.feed.slots[slot][LEFT_OVER] = torch.frombuffer(bytearray(b"".join(values.values())), dtype=torch.uint8)


class _Copier:
    """Copies slots to the device and decodes them there, on a stream of its own where the device has streams."""

    def __init__(self, device: Device, feed: Feed, overlap: bool):
        self.device = device.torch_device
        self._host_keys = feed.bound.host_keys
        # Keys that stay on the host if the device refuses to decode.
        self._encoded_keys = self._host_keys - set(feed.bound.on_host.layout if feed.bound.on_host else ())
        self._slots = feed.slots
        self._module = torch.get_device_module(self.device) if device.has_streams else None
        # Threads that work ahead have streams of their own.
        overlap = overlap and not _goes_ahead(feed.bound)
        self._stream = self._module.Stream() if self._module and overlap else None
        self._done = [self._module.Event() for _ in feed.slots] if self._module else []
        self._registered: list[torch.Tensor] = []
        if device.kind == "cuda":
            # Pin the shared memory in place, so that no second copy on the host is needed.
            for tensor in (t for slot in feed.slots for t in slot.values()):
                if torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0).value == 0:
                    self._registered.append(tensor)

    def copy(self, slot: int, decode: Decode | None) -> Batch | None:
        """Return the batch on the device, decoded there if it is to be; None if the device refuses to."""
        if self._module is None:
            return self._bring(slot, decode)
        current = self._module.current_stream()
        stream = self._stream or current
        with self._module.stream(stream):
            if self._host_keys:
                # A decoder works on a stream of its own that does not wait for this one (torchvision's), so it must
                # not be given memory that work queued here still uses.
                stream.synchronize()
            batch = self._bring(slot, decode)
            self._done[slot].record(stream)
        current.wait_stream(stream)
        for tensor in (batch or {}).values():
            tensor.record_stream(current)  # the allocator must not reuse it before the step has read it
        return batch

    def finish(self) -> None:
        """Wait until everything queued by this thread is done."""
        assert self._module is not None, "only devices with streams work ahead"
        self._module.current_stream().synchronize()

    def hand_over(self, batch: Batch) -> None:
        """Give the current stream a batch that is whole."""
        assert self._module is not None, "only devices with streams work ahead"
        for tensor in batch.values():
            tensor.record_stream(self._module.current_stream())

    def _bring(self, slot: int, decode: Decode | None) -> Batch | None:
        host, left_out = self._slots[slot], self._host_keys if decode else self._encoded_keys
        travelling = {key: tensor for key, tensor in host.items() if key not in left_out}
        if self.device.type != "cpu":
            travelling = {key: tensor.to(self.device, non_blocking=True) for key, tensor in travelling.items()}
        return decode(host, travelling) if decode else travelling

    def wait(self, slot: int) -> None:
        """Wait until the last copy out of this slot is done and workers may write into it."""
        if self._done:
            self._done[slot].synchronize()

    def close(self) -> None:
        for slot in range(len(self._done)):
            self.wait(slot)
        for tensor in self._registered:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._registered = []


def _goes_ahead(bound: Bound) -> bool:
    """Return whether threads make the batches: the device decodes them, and more than one batch is needed."""
    return bound.decode is not None and not bound.repeats_first


def _begin_thread(device: Device) -> None:
    """Bind a thread to the device, and to a stream of its own: what it queues is short and goes before the step's."""
    device.activate()
    device.api.set_stream(device.api.Stream(**({"priority": -1} if device.kind == "cuda" else {})))


def _allocate(layout: Layout, rows: int, slots: int, name: str, shared: bool) -> list[dict[str, torch.Tensor]]:
    layout = {**layout, "index": ((), "int64")}
    if name != "train":
        layout = {**layout, "valid": ((), "bool")}
    if shared and Path("/dev/shm").is_dir():
        needed = slots * rows * sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in layout.values())
        free = shutil.disk_usage("/dev/shm").free
        if needed > free:
            raise UsageError(
                f"the loader needs {needed >> 20} MiB of shared memory and /dev/shm has {free >> 20} MiB free; "
                f"enlarge it (docker run --shm-size), or lower --run.prefetch, or use --run.workers 0"
            )
    batches = []
    for _ in range(slots):
        slot = {k: torch.from_numpy(np.zeros((rows, *shape), dtype)) for k, (shape, dtype) in layout.items()}
        batches.append({key: t.share_memory_() if shared else t for key, t in slot.items()})
    return batches
