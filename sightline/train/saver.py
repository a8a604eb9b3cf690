"""Where a run goes on and what it leaves behind: resume, save, rewind. The loop decides when."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sightline import config
from sightline.config import Recipe, Run
from sightline.data.loading.order import TrainOrder
from sightline.errors import BadCheckpoint, BadData, DiskFull, NotFinite, PeerLost, SightlineError, UsageError
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.parts import Dataset
from sightline.runs.environment import environment
from sightline.runs.log import RunLog
from sightline.train.checkpoint import Checkpoints, copies, find, read, require
from sightline.train.meter import Stopwatch
from sightline.train.state import Tensors, TrainState

# Other weights or optimizer tensors would not fit; the position in the run is counted in steps and epochs of these.
NEVER_OVERRIDDEN = ("model.", "train.global_batch:", "train.last_batch:", "train.steps_per_epoch:", "train.trainable:")
GRACE_S = 30  # after which torchrun, Kubernetes and Slurm kill, unless told otherwise

Found = tuple[Tensors, dict[str, Any], Path]


class Saver:
    """The state of one run and its checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        state: TrainState,
        sets: dict[str, Dataset],
        device: Device,
        world: World,
        log: RunLog,
    ):
        self.recipe = recipe
        self.run = run
        self.state = state
        self.sets = sets
        self.device = device
        self.world = world
        self.log = log
        self.stopwatch = Stopwatch()
        self.checkpoints = Checkpoints(log.folder.path / "checkpoints", run.keep, log.warn, log.folder.prove_ours)
        self._writer = ThreadPoolExecutor(1, "checkpoint")  # a thread starts with the first save
        self._pending: Future[tuple[int, Path, float]] | None = None
        self._copied_s = self._answer_s = 0.0
        self._has_told_times = False
        if world.is_main:
            self.checkpoints.prove_writable()

    def resume(self) -> bool:
        """Brings the state of the newest good checkpoint back, unless it belongs to another recipe or other data."""
        run, checkpoints, state = self.run, self.checkpoints, self.state
        if run.resume == "never" and checkpoints.names():
            raise UsageError(
                f"{self.log.folder.path} holds checkpoints and --run.resume never was given; choose another --run.out"
            )
        # PATH is where a run begins; once its folder has checkpoints of its own, the same command goes on from them.
        is_named = run.resume not in ("auto", "never")
        found = self._newest(lambda: find(Path(run.resume), "latest") if is_named and not checkpoints.names() else None)
        if found is None:
            return False
        tensors, stored, path = found
        changes = config.diff(stored.get("recipe", {}), self.recipe)
        if changes and (not run.override or any(change.startswith(NEVER_OVERRIDDEN) for change in changes)):
            listed = "\n  ".join(changes[:50])
            raise UsageError(
                f"{path} was made with another recipe:\n  {listed}\nGive the old values back, choose another "
                f"--run.out, or add --run.override to go on with the new ones (not for model fields, the batch, "
                f"train.steps_per_epoch and train.trainable)"
            )
        for split, dataset in self.sets.items():
            if stored.get("fingerprints", {}).get(split) != dataset.fingerprint and not run.override:
                raise BadData(
                    f"the {split} data are not those that {path} was trained on (files were added, removed or "
                    f"changed); bring them back, choose another --run.out, or add --run.override to go on with these"
                )
        now = environment(self.device, self.world.size)
        then = stored.get("environment", {})
        for name in ("threads", "device", "ranks", "packages"):
            if then.get(name) != now[name]:
                self.log.warn(f"{name} was {then.get(name)} and is {now[name]}: the last bits may differ")
        state.load(tensors, stored["progress"])
        self.stopwatch.load(stored.get("stopwatch", {}))
        if any(change.startswith("optimizer.") for change in changes):
            state.progress.base_lr = None  # another rate was asked for
        self.log.event("resume", checkpoint=path.name, step=state.progress.step, changes=changes)
        return True

    def _newest(self, elsewhere: Callable[[], Path | None] = lambda: None) -> Found | None:
        """The newest good checkpoint, or that of `elsewhere`, the same on all ranks; None where there never was one.
        Rank 0 first: it moves damaged ones out of the way. What only another cannot read is whole, so it stays."""
        if self.world.is_main:
            path = elsewhere()
            found = (*read(path), path) if path else self.checkpoints.newest(self._check)
            if found:
                require(found[1], "progress")
            self.world.barrier()
        else:
            self.world.barrier()
            found = self._as_main_found(elsewhere)
        self._prove_one_start(0 if found is None else int(found[1]["progress"]["step"]) + 1)
        return found

    def _check(self, tensors: Tensors, stored: dict[str, Any]) -> None:
        """BadCheckpoint where a checkpoint of this recipe and these data lacks something or does not fit. One of others
        is for `resume` to refuse: it is not damaged."""
        require(stored, "progress", "recipe", "spec", "fingerprints", "environment")
        is_ours = not config.diff(stored["recipe"], self.recipe)
        if is_ours and all(stored["fingerprints"].get(name) == s.fingerprint for name, s in self.sets.items()):
            self.state.check_fit(tensors)

    def _as_main_found(self, elsewhere: Callable[[], Path | None]) -> Found | None:
        try:
            names = self.checkpoints.names()
            path = elsewhere() or (self.checkpoints.folder / names[0] if names else None)
            return (*read(path), path) if path else None
        except BadCheckpoint as error:
            raise BadCheckpoint(
                f"rank {self.world.rank} on {platform.node()}: {error}. Rank 0 could read it, so it stays in place; "
                f"look at the disk and the mount of this host, then give the command again"
            ) from error

    def _prove_one_start(self, place: int) -> None:
        """Ranks that read different folders would train at different steps, and only the result would show it."""
        if self.world.size == 1:
            return
        highest, lowest = (self.world.start_max(value) for value in (place, -place))
        for _, work in (highest, lowest):
            work.wait()
        if int(highest[0]) != -int(lowest[0]):
            raise PeerLost(
                f"ranks do not find the same newest checkpoint in {self.log.folder.path}; it must be one folder that "
                f"all hosts share (--run.out), and each host must already see what is in it"
            )

    def save_first(self, resumed: bool) -> None:
        """Before the first step of a folder, where asked for, or where something to go back to is needed."""
        # Decided by what all ranks know alike.
        is_new = not resumed or self.run.resume not in ("auto", "never")
        if is_new and (self.run.checkpoint_initial or self.run.on_nan == "rewind"):
            self.save()

    def save_epoch(self, is_over: bool) -> None:
        """When an epoch has ended and been counted: if it is its turn, is the best so far, or the last."""
        progress = self.state.progress
        is_best = progress.best_step == progress.step  # else `best` would name what is no longer there
        if is_over or is_best or progress.epoch % self.run.checkpoint_every_epochs == 0:
            self.save(must_succeed=is_over)

    def save(self, must_succeed: bool = False) -> None:
        """Writes a checkpoint on rank 0, from a copy while the run goes on; at most one is on its way. The one that a
        run ends with must succeed, and all wait for it: a launcher kills the rest as soon as one rank has left."""
        state, progress = self.state, self.state.progress
        is_waited_for = must_succeed or not self.run.save_in_background
        self.world.beat(is_long=True)
        self._collect_last(must_succeed)
        self.world.barrier()  # a slow disk is waited for here, where no step is timed
        state.share_batch_norm(self.recipe.train.bn_eval, self.world)
        if not state.weights_are_finite():
            raise NotFinite(f"weights are not finite at step {progress.step}; nothing was saved over good checkpoints")
        if self.world.is_main:
            self.log.folder.prove_ours()
            stored = {
                "progress": state.progress_json(),
                "stopwatch": self.stopwatch.to_json(),
                "recipe": config.to_json(self.recipe),
                "spec": self.sets["train"].spec.to_json(),
                "fingerprints": {split: dataset.fingerprint for split, dataset in self.sets.items()},
                "environment": environment(self.device, self.world.size),
            }
            started = time.perf_counter()
            held = copies(state.tensors())
            self._copied_s = time.perf_counter() - started
            self._pending = self._writer.submit(self._write, progress.step, held, stored, progress.best_step)
            if is_waited_for:
                self.collect(wait=True, must_succeed=must_succeed)
        if is_waited_for:
            self.world.barrier()

    def _write(self, step: int, held: Tensors, stored: dict[str, Any], best_step: int) -> tuple[int, Path, float]:
        started = time.perf_counter()
        path = self.checkpoints.save(step, held, stored, best_step, are_copies=True)
        return step, path, time.perf_counter() - started

    def collect(self, *, wait: bool = False, must_succeed: bool = False, answer_s: float = 0.0) -> None:
        """Tells what became of the save on its way, if it is done. An error in it is one of the step that meets it; a
        full disk is a warning while the run can go on without. `answer_s`: see StopSignals."""
        self.log.folder.beat()
        self._answer_s = max(self._answer_s, answer_s)
        if self._pending is None or not (wait or self._pending.done()):
            return
        pending, self._pending = self._pending, None
        try:
            step, path, written_s = pending.result()
        except DiskFull as error:
            if must_succeed:
                raise
            self.log.warn(str(error))
            return
        self.log.event("checkpoint", step=step, name=path.name)
        if self._answer_s and not self._has_told_times:
            self._tell_times(path, written_s)

    def _collect_last(self, is_tried_again: bool) -> None:
        """What became of the save before this one; where this is the last chance, its error must not be the end."""
        try:
            self.collect(wait=True)
        except (OSError, SightlineError) as error:
            if not is_tried_again or isinstance(error, PeerLost):  # a folder that is no longer ours stays so
                raise
            self.log.warn(f"a save in the background failed: {error}; trying once more")

    def close(self) -> None:
        """Lets a save that is on its way arrive, however the run ends."""
        self.world.beat(is_long=True)
        try:
            self.collect(wait=True)
        except (OSError, SightlineError) as error:  # the run has an end of its own to tell
            self.log.warn(f"the last save failed: {error}")
        self._writer.shutdown()

    def _tell_times(self, path: Path, written_s: float) -> None:
        """Once: what a checkpoint costs, and what a launcher must leave a run that it tells to stop."""
        self._has_told_times = True
        size = sum(file.stat().st_size for file in path.glob("*")) / 1e6
        how = ", in the background," if self.run.save_in_background else ""
        needed = self._answer_s + self._copied_s + written_s
        self.log.event("stop_time", seconds=round(needed, 3), copied_s=self._copied_s, written_s=written_s)
        told = (
            f"a checkpoint is {size:,.2f} MB, copied into host memory in {self._copied_s:.2f} s and written{how} in "
            f"{written_s:.2f} s; "
            f"to stop takes up to {needed:.1f} s"
        )
        if needed > GRACE_S:
            self.log.warn(f"{told}, more than the {GRACE_S} s that launchers leave by default: give it more time")
        else:
            self.log.say(told)

    def rewound(self, bad_step: int, order: TrainOrder) -> bool:
        """What `--run.on-nan` says about a step that was not finite; True if the state went back to a checkpoint."""
        run, progress = self.run, self.state.progress
        _, indices = order.batch(bad_step)
        names = [self.sets["train"].name(index) for index in indices[:8].tolist()]
        progress.bad_steps += 1
        self.log.event("bad_step", step=bad_step, samples=[int(i) for i in indices])
        happened = f"loss or gradient not finite in step {bad_step} (samples {', '.join(names)}, ...)"
        if run.on_nan == "stop" or progress.bad_steps > run.max_bad_steps:
            raise NotFinite(
                f"{happened}; {progress.bad_steps} such steps so far. Checkpoints from before are intact: go on with "
                f"--run.on-nan skip, or with --run.override and a lower --optimizer.lr or --train.clip 1"
            )
        if run.on_nan == "skip":
            self.log.warn(f"{happened}: skipped")
            return False
        self.world.beat(is_long=True)
        self.collect(wait=True)
        found = self._newest()
        if found is None:
            raise BadCheckpoint(f"{happened} and there is no checkpoint to rewind to")
        bad_steps, avoid, base_lr = progress.bad_steps, sorted({*progress.avoid, bad_step}), progress.base_lr
        self.state.load(found[0], found[1]["progress"])
        progress.avoid, progress.bad_steps, progress.base_lr = avoid, bad_steps, base_lr
        self.log.warn(f"{happened}: back to step {progress.step}, leaving it out")
        return True
