"""Loader worker processes: one pipe each, no locks, so a killed worker is noticed at once and blocks no other.

Start method: forkserver. Fork copies locks and threads of a process that already uses torch; spawn imports torch
once per worker. Samples are written straight into batches in shared memory; pipes carry only indices.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
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

forkserver.remove_socket_folder()
Load = Callable[[], Arrays]
REMEDIES = "`sightline check` lists every such sample, --data.on-bad-sample skip runs without them"
REPLACEMENT_TRIES = 20
SHOW_STACKS = signal.SIGUSR2  # asks a worker for its stack; see stalls.py
CRASHED = "a library crashed in it; `sightline check` tries every sample, --run.workers 0 shows the crash itself"
SOMEBODY = "neither the run nor a crash does that; ask who manages this machine"
HINTS = {  # by the signal that ended a worker
    signal.SIGKILL: "the kernel's out-of-memory killer does this (see dmesg); lower --run.workers or --run.prefetch, "
    "or use --data.cache off",
    signal.SIGBUS: "the shared memory is full (see `df /dev/shm`), or a file became shorter while it was read; enlarge "
    "it (docker run --shm-size=8g), or lower --run.prefetch",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE), CRASHED),
}
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
# Samples that are read before the first of them is decoded. Decoding takes over the processor's caches: Python code
# after it runs at half its speed, so it is better to run it for several images at once (a tenth of the whole).
BEGUN = 16
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 2**25  # the largest threshold that glibc takes


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


def fill(feed: Feed, arrays: Arrays, request: Request, place: np.ndarray | None = None) -> Filled:
    """Load the samples of a request into their rows. `place`: see Workers."""
    rows = _Rows(feed, arrays, request)
    samples = list(zip(request.epochs.tolist(), request.indices.tolist(), strict=True))
    for start in range(0, len(samples), BEGUN):
        begun = []
        for row, sample in enumerate(samples[start : start + BEGUN], start):
            _note_place(place, row)
            begun.append(_begin(feed, request.feed, *sample))
        for row, load in enumerate(begun, start):
            _note_place(place, row)
            rows.fill(request.offset + row, *samples[row], load)
    return rows.filled


def _note_place(place: np.ndarray | None, row: int) -> None:
    if place is not None:
        place[:] = place[0] + 1, row


def _begin(feed: Feed, name: str, epoch: int, index: int) -> Load:
    """Read a sample, where that can be done apart from decoding it; return what loads the rest."""
    if index == PADDING or feed.bound.begin is None:
        return partial(feed.bound.load, epoch, index)
    try:
        with _naming(feed, name, index):
            return feed.bound.begin(epoch, index)
    except BadSample as error:
        return partial(_raise, error)


def _raise(error: BadSample) -> Arrays:
    raise error


@contextlib.contextmanager
def _naming(feed: Feed, name: str, index: int) -> Iterator[None]:
    """Add which sample it was to any error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while loading sample {index} of {name}: {feed.bound.dataset.name(index)}")
        raise


class _Rows:
    """The rows of a slot that a request fills."""

    def __init__(self, feed: Feed, arrays: Arrays, request: Request):
        self.filled = Filled()
        self._feed, self._arrays, self._name = feed, arrays, request.feed
        room = arrays[PACKED].shape[1] if PACKED in arrays else 0
        self._free, self._end = request.offset * room, (request.offset + len(request.indices)) * room

    def fill(self, at: int, epoch: int, index: int, load: Load) -> None:
        """Load a sample into row `at`."""
        if index == PADDING:
            return self._clear(at, PADDING)
        with _naming(self._feed, self._name, index):
            loaded, index = _load_or_replace(self._feed, self._name, epoch, index, load, self.filled.bad)
        if loaded is None:
            return self._clear(at, index)
        for key, value in loaded.items():
            if key == PACKED:
                self._pack(at, value)
            else:  # values in a row may be shorter than the room for them
                self._arrays[key][(at, slice(len(value))) if value.ndim == 1 else at] = value
        self._arrays["index"][at] = index
        if "valid" in self._arrays:
            self._arrays["valid"][at] = True

    def _pack(self, at: int, value: np.ndarray) -> None:
        if self._free + len(value) > self._end:
            self.filled.left_over[at] = value.tobytes()
            return
        self._arrays[PACKED].reshape(-1)[self._free : self._free + len(value)] = value
        self._arrays[PACKED_AT][at] = self._free
        self._free += len(value)

    def _clear(self, at: int, index: int) -> None:
        """Write zeros to a row. Its room for packed values may hold those of other rows."""
        for key, array in self._arrays.items():
            if key != PACKED:
                array[at] = index if key == "index" else 0


def _load_or_replace(
    feed: Feed, name: str, epoch: int, index: int, load: Load, bad: list[Bad]
) -> tuple[Arrays | None, int]:
    """Load a sample; return it with the index that it has. Under `skip` replace a bad one by (epoch, index) alone, so
    that a rerun gets the same bits."""
    chosen = index
    for attempt in range(REPLACEMENT_TRIES):
        try:
            return load(), chosen
        except BadSample as error:
            if feed.on_bad_sample == "fail":
                raise BadSample(error.name, f"{error.reason}. {REMEDIES}") from error
            bad.append(Bad(name, chosen, error.name, error.reason))
            if not feed.replaces_bad:
                return None, index
            chosen = int(generator(0, epoch, index, f"replacement-{attempt}").integers(len(feed.bound.dataset)))
            load = partial(feed.bound.load, epoch, chosen)
    last = feed.bound.dataset.name(chosen)
    raise BadData(f"{REPLACEMENT_TRIES} samples in a row could not be read, the last one {last}")


def _work(connection: Connection, feeds: dict[str, Feed], shared_place: Tensor, stacks: Connection) -> None:
    # The trainer answers a stop signal to the whole process group; workers exit when their pipe closes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(stacks.fileno(), False)  # a stack that nobody reads must not hold the worker
    faulthandler.register(SHOW_STACKS, file=stacks.fileno())
    place = shared_place.numpy()
    terminal.guard()  # libraries may quote names from files in their warnings
    torch.set_num_threads(1)
    _keep_freed_memory()
    arrays = {name: [as_arrays(slot) for slot in feed.slots] for name, feed in feeds.items()}
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        try:
            reply: Any = fill(feeds[request.feed], arrays[request.feed][request.slot], request, place)
        except SightlineError as error:
            reply = error
        except Exception:  # noqa: BLE001  # the trainer shows it
            reply = PeerLost(f"loader worker {os.getpid()} failed; its traceback:\n{traceback.format_exc()}")
        try:
            connection.send((request.feed, request.slot, reply))
        except (BrokenPipeError, ConnectionResetError):
            return


def _keep_freed_memory() -> None:
    """Let malloc keep what is freed: every image needs as much again, and the kernel would clear its pages each time
    (60 to 120 of 1,900 microseconds an image). Other C libraries have no mallopt."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 4 * _KEPT_BYTES)


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
        self._feeds = feeds
        self._processes = []
        self._connections: list[Connection] = []
        self._stacks: list[Connection] = []
        self._queue: collections.deque[Request] = collections.deque()
        self._waiting: list[collections.deque[Request]] = [collections.deque() for _ in range(count)]  # not answered
        places = torch.zeros(count, 2, dtype=torch.int64).share_memory_()  # samples begun, row of the last one
        self._places = places.numpy()
        self._imports_script = needs_script(feeds, (torch.Tensor, np.ndarray, ImageCache))
        for number in range(count):
            (ours, theirs), (stacks, its_stacks) = context.Pipe(), context.Pipe(duplex=False)
            arguments = (theirs, feeds, places[number], its_stacks)
            process = context.Process(target=_work, args=arguments, daemon=True, name=f"sightline-loader-{number}")
            with _explaining(), contextlib.nullcontext() if self._imports_script else without_script():
                process.start()
            theirs.close()
            its_stacks.close()
            self._processes.append(process)
            self._connections.append(ours)
            self._stacks.append(stacks)

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
            assert isinstance(ready, Connection)
            worker = self._connections.index(ready)
            try:
                answers.append(ready.recv())
            except (EOFError, OSError):  # OSError: the worker died in the middle of an answer
                self._raise_dead(worker)
            self._waiting[worker].popleft()
        self._hand_out()
        return answers

    def samples_begun(self) -> int:
        """Return how many samples all workers together have begun to load."""
        return int(self._places[:, 0].sum())

    def late(self) -> tuple[int, str, Connection]:
        """Return the first worker that owes an answer: its pid, the sample it is at, and the pipe for its stack."""
        worker = next(number for number, requests in enumerate(self._waiting) if requests)
        return self.pids[worker], self._sample_at(worker), self._stacks[worker]

    def _sample_at(self, worker: int) -> str:
        """Name the sample that a worker is loading."""
        if not self._waiting[worker]:
            return "no sample"
        request = self._waiting[worker][0]
        index = int(request.indices[min(int(self._places[worker, 1]), len(request.indices) - 1)])
        name = self._feeds[request.feed].bound.dataset.name(max(index, 0))
        return f"{name} ({request.feed})"

    def _hand_out(self) -> None:
        while self._queue:
            worker = min(range(len(self)), key=lambda number: len(self._waiting[number]))
            if len(self._waiting[worker]) >= AHEAD:
                return
            self._waiting[worker].append(self._queue.popleft())
            try:
                self._connections[worker].send(self._waiting[worker][-1])
            except (BrokenPipeError, ConnectionResetError):
                self._raise_dead(worker)

    def _raise_dead(self, worker: int) -> None:
        process = self._processes[worker]
        process.join(5)
        code = process.exitcode
        if code is not None and code < 0:
            cause = f"killed by {signal.Signals(-code).name}"
            hint = f"{HINTS.get(-code, SOMEBODY)}; it was at {self._sample_at(worker)}"
        else:
            cause, hint = f"ended with exit code {code}", "its traceback is above"
            if self._imports_script:
                hint += f"; it has imported your script again, so {GUARD}"
        raise PeerLost(f"loader worker {process.pid} was {cause}: {hint}")

    def close(self) -> None:
        """End the processes; they exit by themselves when their pipe closes."""
        for connection in (*self._connections, *self._stacks):
            connection.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._connections, self._stacks, self._processes = [], [], []
