"""What a training line shows: loss, accuracy, rate, pictures per second, data wait, memory, time left; and an epoch's.

Also the time to train: from the first step to the end of the evaluation that decides, over all starts of a run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from sightline.data.loading.loader import Loader
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.train.step import FIXED_TOTALS, Step


class Meter:
    """Measures between readings; restart() leaves out what was not training (evaluation, saving)."""

    def __init__(self, loader: Loader, device: Device, world: World, steps: int):
        self.loader = loader
        self.device = device
        self.world = world
        self.steps = steps
        self._steady_s = 0.0  # training time and steps so far without the first interval, for the time left
        self._steady_steps = 0
        self._last_step = -1
        self.start_epoch()

    def start_epoch(self) -> None:
        """Begins an epoch, or what a stop has left of one, now."""
        self._epoch_started = time.perf_counter()
        self._epoch_samples = 0.0
        self.restart()

    def restart(self) -> None:
        """Begins a new interval now."""
        self._started = time.perf_counter()
        self._waited = self.loader.wait_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not training's."""
        started = time.perf_counter()
        yield
        paused = time.perf_counter() - started
        self._started += paused
        self._epoch_started += paused

    def read(self, step: Step, done: int, rate: float) -> dict[str, float]:
        """The numbers of the interval that ends now; waits for the device once."""
        totals = step.read_totals(self.world)
        seconds = time.perf_counter() - self._started
        waited = self.loader.wait_s - self._waited
        if self._last_step >= 0:  # the first interval holds compilation and start-up
            self._steady_s += seconds
            self._steady_steps += max(0, done - self._last_step)  # a rewind goes back
        self._last_step = done
        self._epoch_samples += totals["samples"]
        self.restart()
        samples = max(1.0, totals["samples"])
        line = {"loss": totals["loss"] / samples}
        line.update({name: total / samples for name, total in totals.items() if name not in FIXED_TOTALS})
        line |= {
            "lr": rate,
            "grad_norm": totals["grad_norm"] / max(1.0, totals["steps"]),
            "images_per_s": totals["samples"] / seconds,
            "steps_per_s": totals["steps"] / self.world.size / seconds,
            "data_wait": waited / seconds,
            "memory_gb": self.device.peak_memory_bytes() / 1e9,
        }
        if self.world.size > 1:
            line["images_per_s_per_rank"] = line["images_per_s"] / self.world.size
        if self._steady_steps:
            line["eta_s"] = self._steady_s / self._steady_steps * (self.steps - done)
        return line

    def read_epoch(self) -> dict[str, float]:
        """Seconds of training since the epoch began, without evaluation and saving, and pictures per second.

        After a reading of the last interval, which has waited for the device. Nothing where only its evaluation was
        left to do.
        """
        seconds = time.perf_counter() - self._epoch_started
        return {"seconds": seconds, "images_per_s": self._epoch_samples / seconds} if self._epoch_samples else {}


class Stopwatch:
    """Time since the first step of a run: on the wall, and in processes that trained."""

    def __init__(self) -> None:
        self._first_step_at: float | None = None  # seconds since 1970
        self._earlier_s = 0.0  # of earlier starts, up to the checkpoint this one goes on from
        self._started: float | None = None

    def start(self) -> None:
        """Before the first step of this start."""
        self._started = time.perf_counter()
        if self._first_step_at is None:
            self._first_step_at = time.time()

    def read(self) -> dict[str, float]:
        """wall_s counts pauses between starts too; running_s neither these nor work that a crash has lost."""
        here = time.perf_counter() - self._started if self._started is not None else 0.0
        wall = time.time() - self._first_step_at if self._first_step_at is not None else 0.0
        return {"wall_s": max(0.0, wall), "running_s": self._earlier_s + here}

    def to_json(self) -> dict[str, float | None]:
        """For a checkpoint. Not among the numbers of progress, which are equal in equal runs."""
        return {"first_step_at": self._first_step_at, "running_s": self.read()["running_s"]}

    def load(self, stored: Mapping[str, float | None]) -> None:
        """Goes on from a checkpoint; an old one has nothing stored."""
        self._first_step_at, self._earlier_s = stored.get("first_step_at"), stored.get("running_s") or 0.0
