"""Numbers of a training line (loss, accuracy, rate, images per second, data wait, memory, time left) and of epochs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from sightline.data.loading.loader import Loader
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.train.step import FIXED_TOTALS, Step


class Meter:
    """Measure between readings; restart() leaves out what was not training (evaluation, saving)."""

    def __init__(self, loader: Loader, device: Device, world: World, steps: int):
        self.loader = loader
        self.device = device
        self.world = world
        self.steps = steps
        self._steady_s = 0.0  # training time and steps so far without the first interval, for the time left
        self._steady_steps = 0
        self._last_step = -1
        self._made_at: float | None = time.perf_counter()
        self._start_s = self._start_samples = 0.0  # of all epochs of this start
        self.start_epoch()

    def start_epoch(self) -> None:
        """Begin an epoch, or what a stop has left of one."""
        self._epoch_started = time.perf_counter()
        self._epoch_samples = self._epoch_loss = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin a new interval."""
        self._started = time.perf_counter()
        self._waited = self.loader.wait_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        started = time.perf_counter()
        yield
        paused = time.perf_counter() - started
        self._started += paused
        self._epoch_started += paused

    def read_first(self, step: Step) -> dict[str, float]:
        """Return, once, how long the first step took since this meter was made, the wait for data in it, and its loss;
        {} after that, and before. The totals stay, so that the first interval is whole."""
        if self._made_at is None or not (totals := step.read_totals(self.world, restarts=False))["steps"]:
            return {}
        seconds, self._made_at = time.perf_counter() - self._made_at, None
        return {
            "seconds": seconds,
            "waited_s": self.loader.wait_s,
            "loss": totals["loss"] / max(1.0, totals["samples"]),
        }

    def read(self, step: Step, done: int, rate: float) -> dict[str, float]:
        """Return the numbers of the interval that ends now; wait for the device once."""
        totals = step.read_totals(self.world)
        seconds = time.perf_counter() - self._started
        waited = self.loader.wait_s - self._waited
        if self._last_step >= 0:  # the first interval holds compilation and start-up
            self._steady_s += seconds
            self._steady_steps += max(0, done - self._last_step)  # a rewind goes back
        self._last_step = done
        self._epoch_samples += totals["samples"]
        self._epoch_loss += totals["loss"]
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
        """Return seconds of training since the epoch began, without evaluation and saving, images per second, and the
        mean loss of these images.

        Call it after `read`, which has waited for the device. {} where only the epoch's evaluation was left to do.
        """
        seconds, samples = time.perf_counter() - self._epoch_started, self._epoch_samples
        if not samples:
            return {}
        self._start_s += seconds
        self._start_samples += samples
        return {"seconds": seconds, "images_per_s": samples / seconds, "loss": self._epoch_loss / samples}

    def read_start(self) -> dict[str, float]:
        """Return images per second of all epochs that were read, without evaluation and saving; {} if there is none."""
        return {"images_per_s": self._start_samples / self._start_s} if self._start_samples else {}
