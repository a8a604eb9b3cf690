"""Batches, ahead of time: requests to the workers, the copy to the device, the bad-sample policy, the wait meter.

A batch stays valid until the next one is asked for. Pictures stay uint8 until they are on the device.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from sightline.data.loading.workers import MAX_PART, PARTS_PER_WORKER, Bad, Feed, Request, Workers, as_arrays, fill
from sightline.errors import BadData, UsageError
from sightline.hardware.affinity import cpu_share
from sightline.hardware.devices import Device
from sightline.hardware.world import World, local_size
from sightline.parts import Batch, DataConfig, Dataset

POLL_S = 0.1  # how fast a stop request is seen while waiting for data


def worker_count(wanted: int, device: Device, world: World) -> int:
    """Loader processes of this rank; -1 leaves the choice to us: few where the cores also compute."""
    if wanted >= 0:
        return wanted
    share = cpu_share(local_size(world))
    return max(1, share // 4) if device.kind == "cpu" else min(16, max(1, share - 1))


class Order(Protocol):
    """Which samples each batch holds; see order.py."""

    @property
    def local_batch(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...
    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]: ...


class LoaderFields(Protocol):
    """What a Run says of loading; a protocol, because data stand below the file of Run."""

    @property
    def workers(self) -> int: ...
    @property
    def prefetch(self) -> int: ...
    @property
    def device_prefetch(self) -> bool: ...


class Loader:
    """Training and evaluation batches from one set of workers: while one feed is used the other rests."""

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        orders: Mapping[str, Order],
        config: DataConfig,
        device: Device,
        *,
        workers: int,
        prefetch: int,
        overlap: bool = True,
        on_bad: Callable[[Bad], None],
        check_stop: Callable[[], None],
    ):
        self.config = config
        self.on_bad = on_bad
        self.check_stop = check_stop
        self.wait_s = 0.0  # how long next() has stood still, for the data-wait meter
        self._bad_seen: set[tuple[str, str]] = set()  # feed and name: all slices of a volume are one bad sample
        slots = 1 if workers == 0 else prefetch + 1
        # Before layouts are looked at; what the data sets say, once each.
        self.notes = list(dict.fromkeys(filter(None, (dataset.settle_on(device) for dataset in datasets.values()))))
        feeds = {
            name: Feed(
                dataset,
                _allocate(dataset, orders[name].local_batch, slots, name, shared=workers > 0),
                replace_bad=name == "train",
                on_bad_sample=config.on_bad_sample,
            )
            for name, dataset in datasets.items()
        }
        self._workers = Workers(workers, feeds) if workers else None
        self.feeds = {
            name: _FeedState(feed, orders[name], _Copier(device, feed, overlap)) for name, feed in feeds.items()
        }

    @classmethod
    def of(
        cls,
        run: LoaderFields,
        datasets: Mapping[str, Dataset],
        orders: Mapping[str, Order],
        config: DataConfig,
        device: Device,
        world: World,
        *,
        most_workers: int | None = None,
        on_bad: Callable[[Bad], None],
        check_stop: Callable[[], None],
    ) -> Loader:
        """The loader that a run asks for, with no more workers than there can be work for."""
        workers = worker_count(run.workers, device, world)
        return cls(
            datasets,
            orders,
            config,
            device,
            workers=workers if most_workers is None else min(workers, most_workers),
            prefetch=run.prefetch,
            overlap=run.device_prefetch,
            on_bad=on_bad,
            check_stop=check_stop,
        )

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._workers.pids if self._workers else []

    def seek(self, name: str, step: int, stop: int) -> None:
        """The next batch of this feed is number `step`; nothing is prepared from `stop` on."""
        feed = self.feeds[name]
        for request in self._workers.withdraw(name) if self._workers else []:
            feed.pending[request.slot] -= 1
        while any(feed.pending):  # an answer to an old request must not land in a new batch
            self._receive()
        feed.position, feed.requested, feed.stop = step, step, stop
        self._request_ahead(name)

    def next(self, name: str) -> Batch:
        """The batch at the feed's position, on the device."""
        feed = self.feeds[name]
        assert feed.position < feed.stop, "asked for a batch past the end given to seek()"
        self._request_ahead(name)
        slot = feed.position % len(feed.feed.slots)
        started = time.perf_counter()
        if self._workers is None:
            self._fill_here(name, slot, feed.feed)
        while feed.pending[slot]:
            self._receive()
        self.wait_s += time.perf_counter() - started
        batch = feed.copier.copy(slot)
        if batch is None:
            self._fill_here(name, slot, feed.feed.on_host())
            batch = feed.copier.copy(slot)
            assert batch is not None, "a batch loaded on the host needs nothing of the device"
        epoch, step = divmod(feed.position, feed.order.steps_per_epoch)
        for key, value in feed.feed.dataset.draw_batch(epoch, step).items():
            batch[key] = torch.as_tensor(value).to(feed.copier.device, non_blocking=True)
        feed.position += 1
        return batch

    def close(self) -> None:
        """Ends the workers and releases pinned memory."""
        for feed in self.feeds.values():
            feed.copier.close()
        if self._workers:
            self._workers.close()

    def _request_ahead(self, name: str) -> None:
        if self._workers is None:
            return
        feed = self.feeds[name]
        # One slot less than there are: the batch last handed out is still in use on the CPU.
        horizon = min(feed.stop, feed.position + len(feed.feed.slots) - 1)
        for number in range(feed.requested, horizon):
            slot = number % len(feed.feed.slots)
            feed.copier.wait(slot)
            epochs, indices = feed.order.batch(number)
            count = max(min(PARTS_PER_WORKER * len(self._workers), len(indices)), -(-len(indices) // MAX_PART))
            parts = np.array_split(np.arange(len(indices)), count)
            feed.pending[slot] = len(parts)
            for rows in parts:
                self._workers.submit(Request(name, slot, int(rows[0]), epochs[rows], indices[rows]))
        feed.requested = max(feed.requested, horizon)

    def _fill_here(self, name: str, slot: int, source: Feed) -> None:
        feed = self.feeds[name]
        feed.copier.wait(slot)
        epochs, indices = feed.order.batch(feed.position)
        for at in range(len(indices)):  # sample by sample, so that a stop request is answered within one
            self.check_stop()
            request = Request(name, slot, at, epochs[at : at + 1], indices[at : at + 1])
            self._note_bad(fill(source, feed.arrays[slot], request))

    def _receive(self) -> None:
        assert self._workers is not None
        for name, slot, answer in self._workers.receive(POLL_S):
            if isinstance(answer, BaseException):
                raise answer
            self.feeds[name].pending[slot] -= 1
            self._note_bad(answer)
        self.check_stop()

    def _note_bad(self, bad: list[Bad]) -> None:
        for record in bad:
            if (record.feed, record.name) in self._bad_seen:
                continue
            self._bad_seen.add((record.feed, record.name))
            self.on_bad(record)
            if len(self._bad_seen) > self.config.max_bad_samples:
                raise BadData(
                    f"{len(self._bad_seen)} samples cannot be read, the last one {record.name}: {record.reason}; "
                    f"mend the data (bad_samples.jsonl lists them) or raise --data.max-bad-samples"
                )


class _FeedState:
    """Where one feed stands."""

    def __init__(self, feed: Feed, order: Order, copier: _Copier):
        self.feed = feed
        self.order = order
        self.copier = copier
        self.arrays = [as_arrays(slot) for slot in feed.slots]
        self.pending = [0] * len(feed.slots)
        self.position = self.requested = self.stop = 0


class _Copier:
    """Slots to the device and through the data set's `decode`, on a stream of its own where the device has streams."""

    def __init__(self, device: Device, feed: Feed, overlap: bool):
        self.device = device.torch_device
        self._dataset = feed.dataset
        self._slots = feed.slots
        self._module = torch.get_device_module(self.device) if device.has_streams else None
        self._stream = self._module.Stream() if self._module and overlap else None
        self._done = [self._module.Event() for _ in feed.slots] if self._module else []
        self._registered: list[torch.Tensor] = []
        if device.kind == "cuda":
            # Shared memory is pinned where it lies, so that no second copy on the host is needed.
            for tensor in (t for slot in feed.slots for t in slot.values()):
                if torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0).value == 0:
                    self._registered.append(tensor)

    def copy(self, slot: int) -> Batch | None:
        """The batch on the device; None where the data set cannot decode it there."""
        if self._module is None:
            return self._bring(slot)
        current = self._module.current_stream()
        stream = self._stream or current
        with self._module.stream(stream):
            if self._dataset.host_keys:
                # A decoder works on a stream of its own that does not wait for this one (torchvision's), so it must
                # not be given memory that work queued here still uses.
                stream.synchronize()
            batch = self._bring(slot)
            self._done[slot].record(stream)
        current.wait_stream(stream)
        for tensor in (batch or {}).values():
            tensor.record_stream(current)  # the allocator must not reuse it before the step has read it
        return batch

    def _bring(self, slot: int) -> Batch | None:
        host = self._slots[slot]
        travelling = {key: tensor for key, tensor in host.items() if key not in self._dataset.host_keys}
        if self.device.type != "cpu":
            travelling = {key: tensor.to(self.device, non_blocking=True) for key, tensor in travelling.items()}
        return self._dataset.decode(host, travelling)

    def wait(self, slot: int) -> None:
        """Until the last copy out of this slot is over and workers may write into it."""
        if self._done:
            self._done[slot].synchronize()

    def close(self) -> None:
        for slot in range(len(self._done)):
            self.wait(slot)
        for tensor in self._registered:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        self._registered = []


def _allocate(dataset: Dataset, rows: int, slots: int, name: str, shared: bool) -> list[dict[str, torch.Tensor]]:
    layout = {**dataset.layout, "index": ((), "int64")}
    if name != "train":
        layout["valid"] = ((), "bool")
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
