"""Decide whether the step is compiled (`--run.compile auto`): only where that pays within the run.

A run on CUDA starts with the plain step, times some steps, and compiles in place if enough is left. Where bits must not
depend on time (--train.deterministic), the number of steps decides before the first one. Checkpoints hold the choice.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal

from sightline.data.loading.loader import Loader
from sightline.engine import compile_cache
from sightline.engine.signals import StopSignals
from sightline.parts import Batch
from sightline.train.meter import Meter
from sightline.train.session import Session
from sightline.train.state import TrainState
from sightline.train.step import Step

Choice = Literal["on", "off", ""]  # "": not decided yet

COMPILE = "compile"  # name of the choice in a checkpoint
SKIPPED_STEPS = 5  # allocate, capture, choose cuDNN's kernels
TIMED_STEPS = 30
# Share of a step that compilation saves. Measured on the H200 in bf16, eager against compiled: ResNet-50 0.29,
# ResNeXt-101 0.24, U-Net 2D 0.46 of the time; ResNet-50 0.31 where both are captured as a graph.
SAVING = 0.25
# Seconds of compilation, with timed tile sizes: 22 to 27 (ResNet-18) and up to 40 on the H200 with 16 cores; 6 if the
# compiler's files are in memory, 62 if nothing is (ResNet-50). With code that is in the cache it is 1.5, and 3 to
# import the compiler; twice that, as others have slower disks.
COLD_S, WARM_S = 40.0, 9.0
# Steps of a run that is compiled where time must not decide: a quarter of 10,000 steps of 20 ms is about COLD_S.
MANY_STEPS = 10_000


def choose_by_count(
    wanted: Choice | Literal["auto"], can: bool, deterministic: bool, stored: str, steps: int
) -> Choice:
    """Return the choice that needs no clock; "" if the run has to be timed. `can`: auto may compile on this device."""
    if wanted != "auto":
        return wanted
    if not can:
        return "off"
    if stored in ("on", "off"):
        return "on" if stored == "on" else "off"
    if deterministic:
        return "on" if steps >= MANY_STEPS else "off"
    return ""


def pays(seconds_left: float, is_cached: bool) -> bool:
    """Return whether compiling saves more than it takes."""
    return SAVING * seconds_left > (WARM_S if is_cached else COLD_S)


def as_line(is_on: bool, steps_left: int, step_s: float, is_cached: bool) -> str:
    """Say what was decided, and why."""
    left_s, cost_s = steps_left * step_s, WARM_S if is_cached else COLD_S
    left = f"{steps_left:,} steps of {1000 * step_s:.3g} ms are left, {_duration(left_s)}"
    if is_on:
        return f"compiling, about {cost_s:.0f} s: {left}, of which it saves about {_duration(SAVING * left_s)}"
    return f"not compiled: {left}, and compiling takes about {cost_s:.0f} s (--run.compile on forces it)"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


class Compiling:
    """The choice of one run. `run` says how its first step is built; call `after_step` after each."""

    def __init__(self, session: Session, state: TrainState, steps: int, is_longer: bool):
        recipe, run, device, world = session.recipe, session.run, session.device, session.world
        self._session = session
        self.world = world
        self.log = session.log
        self.state = state
        self.steps = steps
        deterministic = recipe.train.deterministic
        stored = state.choices.get(COMPILE, "")
        if is_longer and stored == "off" and not deterministic:  # more epochs than it was decided for
            stored = ""
        self._choice = choose_by_count(run.compile, device.compile_auto, deterministic, stored, steps)
        if run.compile != "auto" or device.compile_auto:
            self._keep()
        self.run = replace(run, compile="on" if self._choice == "on" else "off")
        self._left_out = SKIPPED_STEPS  # steps that are not timed
        self._timed = 0
        self._seconds = 0.0  # of the timed steps, without the wait for data, which compilation does not shorten
        self._last = (-1, 0.0)  # step and time of the last call

    def _keep(self) -> None:
        others = {name: value for name, value in self.state.choices.items() if name != COMPILE}
        self.state.choices = {**others, COMPILE: self._choice} if self._choice else others

    def after_step(
        self, step: Step, batch: Batch, epoch: int, loader: Loader, meter: Meter, signals: StopSignals
    ) -> None:
        """Time a step that was just made; once enough are timed, decide, and compile if that pays."""
        if self._choice:
            return
        # The host is two steps ahead of the device at most (Step reads the bad steps), so its clock does.
        now = time.perf_counter() - loader.wait_s
        last_epoch, before = self._last
        self._last = (epoch, now)
        if step.is_head_only or epoch != last_epoch:  # the time between epochs is not that of a step
            return
        if self._left_out:
            self._left_out -= 1
            return
        self._timed += 1
        self._seconds += now - before
        if self._timed < TIMED_STEPS:
            return
        is_cached = compile_cache.is_known(self._key_of(batch))
        left, step_s = self.steps - self.state.progress.step, self._seconds / self._timed
        # Rank 0 decides for all.
        is_on = bool(self.world.largest(int(self.world.is_main and pays(left * step_s, is_cached))))
        self._choice = "on" if is_on else "off"
        self._keep()
        self.log.say(as_line(is_on, left, step_s, is_cached))
        if is_on:
            self.world.beat(is_long=True)
            with meter.paused():
                step.compile(batch)
            signals.restart()
            compile_cache.note_known(self._key_of(batch))

    def _key_of(self, batch: Batch) -> str:
        session = self._session
        return compile_cache.key_of(session.recipe, session.device, self.world.size, batch)
