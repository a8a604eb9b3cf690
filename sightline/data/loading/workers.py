"""Loader worker processes: one pipe each, no locks, so a killed worker is noticed at once and blocks no other.

Start method: forkserver. Fork copies locks and threads of a process that already uses torch; spawn imports torch
once per worker. Samples are written straight into batches in shared memory; pipes carry only indices.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.multiprocessing  # registers how shared tensors are sent to a worker

from sightline import terminal
from sightline.data.draws import generator
from sightline.data.loading import forkserver
from sightline.data.loading.cache import ImageCache
from sightline.data.loading.forkserver import START_METHOD
from sightline.data.loading.order import PADDING
from sightline.data.processes import GUARD, needs_script, without_script
from sightline.errors import BadData, BadSample, PeerLost, SightlineError, UsageError
from sightline.parts import Arrays, Bound

if TYPE_CHECKING:
    from torch import Tensor

REMEDIES = "`sightline check` lists every such sample, --data.on-bad-sample skip runs without them"
REPLACEMENT_TRIES = 20
# Parts of a batch that wait at a worker. Enough to bridge a training step, during which no new ones are sent; not
# more, because a part that waits at a slow worker cannot go to a fast one.
AHEAD = 4
PARTS_PER_WORKER = 2  # a batch is cut into this many parts per worker: small parts even out slow images
# Most samples of a part. The requests that wait at a worker must fit into its pipe. Otherwise the trainer blocks on the
# pipe, ignores stop requests meanwhile, and deadlocks if the worker has a long list of bad samples to report.
MAX_PART = 512
# A key of a layout whose values have any length. The rows of a request share their room in the slot and lie there one
# after another; PACKED_AT says where in the whole slot. What does not fit comes with the answer.
PACKED, PACKED_AT, LEFT_OVER = "encoded", "encoded_at", "left_over"


@dataclass(frozen=True)
class Request:
    """Fill rows `offset`.. of a slot with these samples."""

    feed: str  # "train" or "val"
    slot: int
    offset: int
    epochs: np.ndarray
    indices: np.ndarray


@dataclass(frozen=True)
class Bad:
    """A sample that could not be read."""

    feed: str
    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class Feed:
    """A dataset with the shared batches that its items go into."""

    bound: Bound
    slots: list[dict[str, Tensor]]
    replaces_bad: bool  # training replaces what it cannot read; evaluation marks it as not valid
    on_bad_sample: str


@dataclass
class Filled:
    """The answer to a request: samples that were skipped, and packed values that had no room, by row."""

    bad: list[Bad] = field(default_factory=list)
    left_over: dict[int, bytes] = field(default_factory=dict)


def fill(feed: Feed, arrays: Arrays, request: Request) -> Filled:
    """Load the samples of a request into their rows."""
    filled = Filled()
    bad = filled.bad
    room = arrays[PACKED].shape[1] if PACKED in arrays else 0
    free, end = request.offset * room, (request.offset + len(request.indices)) * room
    for row, (epoch, index) in enumerate(zip(request.epochs.tolist(), request.indices.tolist(), strict=True)):
        at = request.offset + row
        if index == PADDING:
            _clear(arrays, at, PADDING)
            continue
        try:
            loaded = _load_or_replace(feed, request.feed, epoch, index, bad)
        except Exception as error:
            error.add_note(f"while loading sample {index} of {request.feed}: {feed.bound.dataset.name(index)}")
            raise
        if loaded is None:
            _clear(arrays, at, index)
            continue
        for key, value in loaded.items():
            if key != PACKED:
                arrays[key][at] = value
            elif free + len(value) > end:
                filled.left_over[at] = value.tobytes()
            else:
                arrays[PACKED].reshape(-1)[free : free + len(value)] = value
                arrays[PACKED_AT][at] = free
                free += len(value)
        arrays["index"][at] = index
        if "valid" in arrays:
            arrays["valid"][at] = True
    return filled


def _clear(arrays: Arrays, at: int, index: int) -> None:
    """Write zeros to a row. Its room for packed values may hold those of other rows."""
    for key, array in arrays.items():
        if key != PACKED:
            array[at] = index if key == "index" else 0


def _load_or_replace(feed: Feed, name: str, epoch: int, index: int, bad: list[Bad]) -> Arrays | None:
    """Load a sample. Under `skip` replace a bad one by (epoch, index) alone, so that a rerun gets the same bits."""
    chosen = index
    for attempt in range(REPLACEMENT_TRIES):
        try:
            return feed.bound.load(epoch, chosen)
        except BadSample as error:
            if feed.on_bad_sample == "fail":
                raise BadSample(error.name, f"{error.reason}. {REMEDIES}") from error
            bad.append(Bad(name, chosen, error.name, error.reason))
            if not feed.replaces_bad:
                return None
            chosen = int(generator(0, epoch, index, f"replacement-{attempt}").integers(len(feed.bound.dataset)))
    last = feed.bound.dataset.name(chosen)
    raise BadData(f"{REPLACEMENT_TRIES} samples in a row could not be read, the last one {last}")


def _work(connection: multiprocessing.connection.Connection, feeds: dict[str, Feed]) -> None:
    # The trainer answers a Ctrl-C, SIGTERM or SIGHUP to the whole process group; workers exit when their pipe closes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    terminal.guard()  # libraries may quote names from files in their warnings
    torch.set_num_threads(1)
    arrays = {name: [as_arrays(slot) for slot in feed.slots] for name, feed in feeds.items()}
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        try:
            reply: Any = fill(feeds[request.feed], arrays[request.feed][request.slot], request)
        except SightlineError as error:
            reply = error
        except Exception:  # noqa: BLE001  # the trainer shows it
            reply = PeerLost(f"loader worker {os.getpid()} failed; its traceback:\n{traceback.format_exc()}")
        try:
            connection.send((request.feed, request.slot, reply))
        except (BrokenPipeError, ConnectionResetError):
            return


def as_arrays(slot: Mapping[str, Tensor]) -> Arrays:
    """Return NumPy views of a slot's tensors."""
    return {key: tensor.numpy() for key, tensor in slot.items()}


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """Turn what starting a process raises into errors with a remedy."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise PeerLost(
            "the forkserver, which starts loader workers, has died: its traceback is above, or it was killed "
            "(see dmesg); start again, or use --run.workers 0"
        ) from error
    except OSError as error:  # most often: the path of the forkserver's socket, in TMPDIR, is too long
        raise UsageError(
            f"loader workers cannot be started: {error}; give a writable TMPDIR with a short path "
            f"(now {tempfile.gettempdir()}), or use --run.workers 0"
        ) from error


class Workers:
    """A fixed set of processes that fill slots of any feed."""

    def __init__(self, count: int, feeds: dict[str, Feed]):
        context: Any = multiprocessing.get_context(START_METHOD)
        if START_METHOD == "forkserver":
            with _explaining():
                forkserver.start(type(next(iter(feeds.values())).bound.dataset).__module__)
        self._processes = []
        self._connections: list[multiprocessing.connection.Connection] = []
        self._queue: collections.deque[Request] = collections.deque()
        self._waiting = [0] * count  # requests at each worker that it has not answered
        self._imports_script = needs_script(feeds, (torch.Tensor, np.ndarray, ImageCache))
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, feeds), daemon=True, name=f"sightline-loader-{number}"
            )
            with _explaining(), contextlib.nullcontext() if self._imports_script else without_script():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        """Return the process ids, for logs and tests."""
        return [process.pid or 0 for process in self._processes]

    def submit(self, request: Request) -> None:
        """Queue a request; the worker with the shortest queue gets it."""
        self._queue.append(request)
        self._hand_out()

    def withdraw(self, feed: str) -> list[Request]:
        """Remove and return the requests of a feed that no worker has received yet."""
        withdrawn = [request for request in self._queue if request.feed == feed]
        self._queue = collections.deque(request for request in self._queue if request.feed != feed)
        return withdrawn

    def receive(self, timeout_s: float) -> list[tuple[str, int, Any]]:
        """Return the answers that arrive within `timeout_s`: (feed, slot, bad samples or an error)."""
        answers = []
        for ready in multiprocessing.connection.wait(self._connections, timeout_s):
            assert isinstance(ready, multiprocessing.connection.Connection)
            worker = self._connections.index(ready)
            try:
                answers.append(ready.recv())
            except (EOFError, OSError):  # OSError: the worker died in the middle of an answer
                self._raise_dead(worker)
            self._waiting[worker] -= 1
        self._hand_out()
        return answers

    def _hand_out(self) -> None:
        while self._queue:
            worker = min(range(len(self)), key=self._waiting.__getitem__)
            if self._waiting[worker] >= AHEAD:
                return
            try:
                self._connections[worker].send(self._queue.popleft())
            except (BrokenPipeError, ConnectionResetError):
                self._raise_dead(worker)
            self._waiting[worker] += 1

    def _raise_dead(self, worker: int) -> None:
        process = self._processes[worker]
        process.join(5)
        code = process.exitcode
        if code is not None and code < 0:
            cause = f"killed by {signal.Signals(-code).name}"
            hint = "the kernel's out-of-memory killer does this (see dmesg); lower --run.workers or --run.prefetch"
        else:
            cause, hint = f"ended with exit code {code}", "its traceback is above"
            if self._imports_script:
                hint += f"; it has imported your script again, so {GUARD}"
        raise PeerLost(f"loader worker {process.pid} was {cause}: {hint}")

    def close(self) -> None:
        """End the processes; they exit by themselves when their pipe closes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._connections, self._processes = [], []
