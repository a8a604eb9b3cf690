"""`predict` on several ranks: each takes whole batches, and rank 0 writes one table of all files.

The batches are those of one rank, so predictions have the same bits. Masks and drawings are written by the rank that
made them; rows of the table and lines for the terminal travel as JSON, at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from sightline.data.loading.loader import Order
from sightline.data.loading.order import EvalOrder
from sightline.errors import BadData, PeerLost, UsageError
from sightline.hardware import world
from sightline.hardware.world import CONNECT_TIMEOUT, World
from sightline.inference.checkpoints import Trained
from sightline.inference.predictions import ResultFolder
from sightline.inference.reporter import Reporter

BEAT_S = 1.0
POLL_S = 0.02
ENDLESS = timedelta(days=30)
Say = Callable[[str], None]


@contextlib.contextmanager
def joined(trained: Trained, say: Say) -> Iterator[Trained]:
    """Join the other ranks; a rank that is lost is an error that says what is missing."""
    remedy = "predictions.json was not written; give the command again"
    with world.joined(trained.world, trained.device, "predicting", remedy, say) as here:
        yield dataclasses.replace(trained, world=here)


@dataclass(frozen=True)
class EveryNth:
    """Every `ranks`-th batch of an order, from batch `rank` on."""

    order: EvalOrder
    rank: int
    ranks: int

    @property
    def local_batch(self) -> int:
        """Return the samples of one batch."""
        return self.order.local_batch

    @property
    def steps_per_epoch(self) -> int:
        """Return the batches of this rank; a rank may have none."""
        return len(range(self.rank, self.order.steps_per_epoch, self.ranks))

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, indices) of the samples of this rank's batch `step`."""
        return self.order.batch(self.rank + step * self.ranks)


def shared(order: EvalOrder, engine: Any) -> Order:
    """Return this rank's part of an order."""
    here: World = engine.world
    return EveryNth(order, here.rank, here.size) if here.size > 1 else order


class Share:
    """What one rank keeps until the end: its lines, with the numbers of their batches. One rank prints at once."""

    def __init__(self, here: World, timeout_s: float, say: Say):
        self.here = here
        self.limit_s = max(timeout_s, CONNECT_TIMEOUT.total_seconds())
        self._say = say
        self._batch = here.rank
        self._lines: list[tuple[int, str]] = []
        self._beaten = 0.0
        # A group of its own, because there is no limit: a rank may have hours more to predict than another.
        self._group: Any = dist.new_group(backend="gloo", timeout=ENDLESS) if here.size > 1 else None

    def say(self, text: str) -> None:
        """Print a line about a file, or keep it for rank 0 to print."""
        if self.here.size == 1:
            self._say(text)
        else:
            self._lines.append((self._batch, text))

    def begin(self, at: int) -> None:
        """Note that the next lines are about this rank's batch `at`."""
        self._batch = self.here.rank + at * self.here.size

    def beat(self, at: int) -> None:
        """Tell the other ranks that this one has come to batch `at`, at most once a second."""
        if self.here.size > 1 and time.monotonic() - self._beaten > BEAT_S:
            self._beaten = time.monotonic()
            self.here.store.set(f"predict/{self.here.rank}", str(at))

    def checked(self, reporter: Reporter) -> Reporter:
        """Refuse a reporter whose rows cannot be merged."""
        if self.here.size > 1 and not isinstance(reporter, ResultFolder):
            kind = type(reporter).__name__
            raise UsageError(f"{kind} is not a ResultFolder, so ranks cannot share its files; predict on one device")
        return reporter

    def merge(self, reporter: Reporter) -> None:
        """Give every rank what all have found, and print the lines of all in the order of one rank."""
        if self.here.size == 1:
            return
        assert isinstance(reporter, ResultFolder), "checked before"
        self._wait_for_all()
        told = json.dumps({**reporter.found(), "lines": self._lines})
        found = [json.loads(text) for text in self.here.gather_texts(told)]
        reporter.take(found, self.here.is_main)
        for _, line in sorted((line for each in found for line in each["lines"]), key=lambda line: line[0]):
            self._say(line)

    def _wait_for_all(self) -> None:
        """Wait until no rank has a batch left. A rank that has ended is an error at once, by its connection; one that
        hangs, when it has begun no batch for a while."""
        work: Any = dist.barrier(group=self._group, async_op=True)
        seen: dict[int, bytes] = {}
        looked = since = time.monotonic()
        while not work.is_completed():
            time.sleep(POLL_S)
            if time.monotonic() - looked < BEAT_S:
                continue
            looked = time.monotonic()
            found = self._beats()
            if found != seen:
                seen, since = found, looked
            if looked - since > self.limit_s:
                raise PeerLost(
                    f"no rank of {self.here.size} began a batch in {self.limit_s:.0f} s, and predictions.json was not "
                    "written; if one file takes that long, raise --run.timeout-s"
                )
        work.wait()

    def _beats(self) -> dict[int, bytes]:
        keys = {rank: f"predict/{rank}" for rank in range(self.here.size)}
        return {rank: self.here.store.get(key) for rank, key in keys.items() if self.here.store.check([key])}


def from_main(here: World, text: str) -> str:
    """Return rank 0's text on every rank."""
    told: str = json.loads(here.gather_texts(json.dumps(text))[0])  # as JSON: a path may hold bytes that are not text
    return told


def refuse_other_files(here: World, files: Iterable[str]) -> None:
    """Refuse ranks that find different files: some would be predicted by none."""
    names = list(files)
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    found = here.gather_texts(f"{len(names)} {digest}")
    for rank, each in enumerate(found):
        if each != found[0]:
            counts = " and ".join(text.partition(" ")[0] for text in (found[0], each))
            raise BadData(
                f"ranks 0 and {rank} find different files ({counts}); give a folder that all of them see, and that "
                "nobody changes meanwhile"
            )
