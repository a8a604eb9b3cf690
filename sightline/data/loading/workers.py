"""Loader worker processes: one pipe each, no locks, so a killed worker is noticed at once and blocks no other.

Start method: forkserver. Fork copies locks and threads of a process that already uses torch; spawn imports torch
once per worker. Samples are written straight into batches in shared memory; pipes carry only indices.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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

Load = Callable[[], Arrays]
REMEDIES = "`sightline check` lists every such sample, --data.on-bad-sample skip runs without them"
REPLACEMENT_TRIES = 20
# Parts of a batch that wait at a worker. Enough to bridge a training step, during which no new ones are sent; not
# more, because a part that waits at a slow worker cannot go to a fast one.
AHEAD = 4
PARTS_PER_WORKER = 2  # a batch is cut into this many parts per worker: small parts even out slow images
# Most samples of a part. The requests that wait at a worker must fit into its pipe. Otherwise the trainer blocks on the
# pipe, ignores stop requests meanwhile, and deadlocks if the worker has a long list of bad samples to report.
MAX_PART = 512
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


def fill(feed: Feed, arrays: Arrays, request: Request) -> list[Bad]:
    """Load the samples of a request into their rows; return those that were skipped."""
    bad: list[Bad] = []
    samples = list(zip(request.epochs.tolist(), request.indices.tolist(), strict=True))
    for start in range(0, len(samples), BEGUN):
        chosen = samples[start : start + BEGUN]
        begun = [_begin(feed, request.feed, *sample) for sample in chosen]
        for at, (sample, load) in enumerate(zip(chosen, begun, strict=True), request.offset + start):
            _fill_row(feed, arrays, request.feed, at, sample, load, bad)
    return bad


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


def _fill_row(
    feed: Feed, arrays: Arrays, name: str, at: int, sample: tuple[int, int], load: Load, bad: list[Bad]
) -> None:
    epoch, index = sample
    if index == PADDING:
        for key, array in arrays.items():
            array[at] = PADDING if key == "index" else 0
        return
    with _naming(feed, name, index):
        loaded = _load_or_replace(feed, name, epoch, index, load, bad)
    if loaded is None:
        for array in arrays.values():
            array[at] = 0
        arrays["index"][at] = index
        return
    for key, value in loaded.items():
        # Encoded images are shorter than the room for them.
        arrays[key][(at, slice(len(value))) if value.ndim == 1 else at] = value
    arrays["index"][at] = index
    if "valid" in arrays:
        arrays["valid"][at] = True


def _load_or_replace(feed: Feed, name: str, epoch: int, index: int, load: Load, bad: list[Bad]) -> Arrays | None:
    """Load a sample. Under `skip` replace a bad one by (epoch, index) alone, so that a rerun gets the same bits."""
    chosen = index
    for attempt in range(REPLACEMENT_TRIES):
        try:
            return load()
        except BadSample as error:
            if feed.on_bad_sample == "fail":
                raise BadSample(error.name, f"{error.reason}. {REMEDIES}") from error
            bad.append(Bad(name, chosen, error.name, error.reason))
            if not feed.replaces_bad:
                return None
            chosen = int(generator(0, epoch, index, f"replacement-{attempt}").integers(len(feed.bound.dataset)))
            load = partial(feed.bound.load, epoch, chosen)
    last = feed.bound.dataset.name(chosen)
    raise BadData(f"{REPLACEMENT_TRIES} samples in a row could not be read, the last one {last}")


def _work(connection: multiprocessing.connection.Connection, feeds: dict[str, Feed]) -> None:
    # The trainer answers a Ctrl-C, SIGTERM or SIGHUP to the whole process group; workers exit when their pipe closes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
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
            reply: Any = fill(feeds[request.feed], arrays[request.feed][request.slot], request)
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
