"""The time to train: from the first step to the end of the evaluation that decides, over all starts of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Stopwatch:
    """Time since the first step of a run: on the wall, and in processes that trained."""

    def __init__(self) -> None:
        self._first_step_at: float | None = None  # seconds since 1970
        self._earlier_s = 0.0  # of earlier starts, up to the checkpoint that this one resumes from
        self._started: float | None = None

    def start(self) -> None:
        """Begin to count, before the first step of this start."""
        self._started = time.perf_counter()
        if self._first_step_at is None:
            self._first_step_at = time.time()

    def read(self) -> dict[str, float]:
        """Return wall_s, which includes pauses between starts, and running_s, without them and work lost in crashes."""
        here = time.perf_counter() - self._started if self._started is not None else 0.0
        wall = time.time() - self._first_step_at if self._first_step_at is not None else 0.0
        running = self._earlier_s + here
        return {"wall_s": max(running, wall), "running_s": running}  # a clock may have been set back

    def to_json(self) -> dict[str, float | None]:
        """Return what a checkpoint stores, apart from the numbers of progress, which are equal in equal runs."""
        return {"first_step_at": self._first_step_at, "running_s": self.read()["running_s"]}

    def load(self, stored: Mapping[str, float | None]) -> None:
        """Continue from a checkpoint; an old one has nothing stored."""
        self._first_step_at, self._earlier_s = stored.get("first_step_at"), stored.get("running_s") or 0.0
