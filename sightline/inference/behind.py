"""What becomes of predictions, on a thread of its own: the next batch goes through the network meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from sightline.hardware.devices import Device
from sightline.parts import Batch

WAITING = 4  # calls, two for a batch: of predicted batches so many wait, and the next one in the network's thread
WAITING_BYTES = 2**28  # of the batches that wait or are in the sink's hands; one of any size has room alone
POLL_S = 0.1  # longest time until an error of the thread is seen by who waits for room


class Sink(Protocol):
    """Receiver of predictions; a Reporter is one."""

    def add(self, names: Sequence[str | None], predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Take one batch's predictions; `names[i]` is None for padding and unreadable files."""

    def note_unreadable(self, name: str, reason: str) -> None:
        """Record a file that cannot be read; the others are still predicted."""


class Behind:
    """Calls a sink in the order in which it is called, one call at a time, and raises at the next call, or at the end,
    what the sink has raised. Left by another error, as a stop, it first hands on what was predicted."""

    def __init__(self, sink: Sink, device: Device):
        self._sink = sink
        self._device = device
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._held = 0  # bytes of batches
        self._has_room = threading.Condition()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sightline-behind", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put(None)
        self._thread.join()
        if error is None and self._failed:
            raise self._failed

    def add(self, names: Sequence[str | None], predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Hand over what the device has been asked to compute."""
        size = sum(values.nbytes for values in (*predictions.values(), *batch.values()))
        with self._has_room:
            while self._held and self._held + size > WAITING_BYTES and self._thread.is_alive():
                self._has_room.wait(POLL_S)
            self._held += size
        ready = None
        if self._device.has_streams:
            ready = self._device.api.Event()
            ready.record()
        self.call(partial(self._add, size, ready, names, predictions, batch))

    def note_unreadable(self, name: str, reason: str) -> None:
        """Hand over a file that cannot be read."""
        self.call(partial(self._sink.note_unreadable, name, reason))

    def call(self, call: Callable[[], None]) -> None:
        """Call this after what was handed over before."""
        self._put(call)
        if self._failed:
            raise self._failed

    def _put(self, call: Callable[[], None] | None) -> None:
        while self._thread.is_alive():
            try:
                return self._waiting.put(call, timeout=POLL_S)
            except queue.Full:
                continue

    def _add(
        self,
        size: int,
        ready: Any,
        names: Sequence[str | None],
        predictions: Mapping[str, Tensor],
        batch: Batch,
    ) -> None:
        stream = self._device.api.current_stream() if ready else None
        if stream:
            stream.wait_event(ready)
        self._sink.add(names, predictions, batch)
        if stream:  # the memory goes back to the other stream, which does not wait for this one
            stream.synchronize()
        with self._has_room:
            self._held -= size
            self._has_room.notify()

    def _run(self) -> None:
        try:
            if self._device.has_streams:  # on the network's own, every copy would wait for the batches after it
                self._device.activate()
                self._device.api.set_stream(self._device.api.Stream())
            with torch.inference_mode():
                while (call := self._waiting.get()) is not None:
                    call()
        except BaseException as error:  # noqa: BLE001  # raised again by who hands over the next batch
            self._failed = error
