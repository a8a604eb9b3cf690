"""Save the state of a run, and resume it: from its newest good checkpoint, the same on all ranks."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from sightline.data.contents import Contents, Digests
from sightline.engine.checkpoint import Checkpoints, HostCopies, NotDamaged, Tensors, find, read, require
from sightline.engine.progress import TrainProgress
from sightline.errors import BadCheckpoint, BadData, DiskFull, NotFinite, PeerLost, SightlineError, UsageError, first_of
from sightline.parts import Dataset
from sightline.recipe import store
from sightline.runs.environment import environment
from sightline.runs.folder import BEST_SCORES, SCORES
from sightline.train import longer
from sightline.train.session import Session
from sightline.train.state import TrainState

# Other weights or optimizer tensors would not fit; the position in the run is counted in steps and epochs of these.
NEVER_OVERRIDDEN = (
    *("model.", "train.global_batch:", "train.last_batch:", "train.steps_per_epoch:", "train.min_epoch_steps:"),
    "train.trainable:",
)

# Origins of values that follow from others.
FOLLOWS = ("decided:", "derived:", "model:")

# Of runs whose checkpoints hold no choices: they were compiled where that was possible.
CHOICES_BEFORE = {"compile": "on"}

Found = tuple[Tensors, dict[str, Any], Path]


class Saved(NamedTuple):
    """A checkpoint that is on disk, and what it took."""

    step: int
    path: Path
    copied_s: float
    written_s: float


class Saver:
    """The state of one run and its checkpoints. The loop decides when to save; `on_saved` hears of each on disk."""

    def __init__(
        self,
        session: Session,
        state: TrainState,
        sets: dict[str, Dataset],
        on_saved: Callable[[Saved], None],
        check_stop: Callable[[], None] = lambda: None,
    ):
        recipe, run, world, log = session.recipe, session.run, session.world, session.log
        self.recipe = recipe
        self.run = run
        self.state = state
        self.sets = sets
        self.world = world
        self.log = log
        self.on_saved = on_saved
        self.contents = Contents(sets, recipe.data.fingerprint)
        self._check_stop = check_stop
        self.checkpoints = Checkpoints(log.folder.path / "checkpoints", run.keep, log.warn, log.folder.prove_ours)
        self.epochs_before = 0  # planned by the run that is resumed
        self._writer = ThreadPoolExecutor(1, "checkpoint")  # a thread starts with the first save
        self._pending: Future[Saved] | None = None
        self._best_is_unsure = False  # until settle_best; alike on all ranks
        self._damage: Future[BadCheckpoint | None] | None = None  # of the best checkpoint
        self._copies = HostCopies(state.device)
        self._leak: str | None = None  # what to say of one; None: not looked for yet
        if world.is_main:
            self.checkpoints.prove_writable()

    def resume(self) -> bool:
        """Load the newest good checkpoint; False if there is none. One of another recipe or other data is refused."""
        run, checkpoints, state = self.run, self.checkpoints, self.state
        if run.resume == "never" and checkpoints.names():
            raise UsageError(
                f"{self.log.folder.path} holds checkpoints and --run.resume never was given; choose another --run.out"
            )
        # PATH is where a run begins; once its folder has checkpoints of its own, the same command resumes from them.
        is_named = run.resume not in ("auto", "never")
        found = self._newest(lambda: find(Path(run.resume), "latest") if is_named and not checkpoints.names() else None)
        if found is None:
            self._read_all()
            return False
        tensors, stored, path = found
        if not run.override:
            longer.refuse_fewer(path, stored["progress"], self.recipe)
        changes = store.diff(stored.get("recipe", {}), self.recipe)
        refused = longer.without_growth(changes, stored.get("recipe", {}), self.recipe)
        if refused and (not run.override or any(change.startswith(NEVER_OVERRIDDEN) for change in refused)):
            raise UsageError(_other_recipe(path, refused, self.recipe.origins))
        if refused:
            self.log.say(f"resuming with other values than before (--run.override): {first_of(refused)}")
        for split, dataset in self.sets.items():
            if stored.get("fingerprints", {}).get(split) != dataset.fingerprint and not run.override:
                raise BadData(
                    f"the {split} data are not those that {path} was trained on (files were added, removed or "
                    f"changed); bring them back, choose another --run.out, or add --run.override to resume with these"
                )
        if not run.override:
            self._check_contents(path, stored.get("contents", {}))
        for name, before, after in _changed(stored.get("environment", {}), environment(state.device, self.world.size)):
            self.log.warn(f"{name} changed from {before} to {after}; results may differ in the last bits")
        state.load(tensors, stored["progress"])
        self.epochs_before = longer.epochs_of(stored.get("recipe", {}))
        state.stopwatch.load(stored.get("stopwatch", {}))
        state.choices = dict(stored.get("choices", CHOICES_BEFORE))
        if any(change.startswith("optimizer.") for change in changes):
            state.progress.base_lr = None  # another rate was asked for
        self.log.event("resume", checkpoint=path.name, step=state.progress.step, changes=changes)
        self._look_at_best(path)
        return True

    def _look_at_best(self, loaded: Path) -> None:
        """Start to compare the best checkpoint with its checksums, which takes a second per GB, on rank 0."""
        self._best_is_unsure = True
        if self.world.is_main:
            best_step = self.state.progress.best_step
            self._damage = self._writer.submit(self.checkpoints.damage_of_best, best_step, loaded)

    def settle_best(self) -> None:
        """Let another checkpoint be the best if that one is damaged, on all ranks alike: a score that later ones must
        beat belongs to weights that exist. Call it once after `resume`, before the first evaluation."""
        if not self._best_is_unsure:
            return
        self._best_is_unsure = False
        progress, found = self.state.progress, (self.state.progress.best_score, self.state.progress.best_step)
        damage = self._damage.result() if self._damage else None
        self._damage = None
        if isinstance(damage, NotDamaged):
            self.log.warn(f"the best checkpoint stays the best, but could not be looked at: {damage}")
        elif damage:
            headline = self.recipe.task.headline
            best = self.checkpoints.replace_best(progress.best_step, damage, headline)
            found = best.scores.get(headline), best.scored_step
            self._replace_best_scores(best)
        told = self.world.gather_texts(json.dumps(found))[0]
        progress.best_score, progress.best_step = json.loads(told)

    def _replace_best_scores(self, best: TrainProgress) -> None:
        """Let scores-best.json belong to the checkpoint that `best` names; older tables are lost."""
        folder = self.log.folder
        if best.scored_step < 0:
            (folder.path / BEST_SCORES).unlink(missing_ok=True)
            return
        scores = folder.read_scores(SCORES)
        if scores.get("step") != best.step:
            scores = {"epoch": best.epoch, "step": best.step, "values": best.scores, "tables": {}, "worst": []}
        folder.write_json(BEST_SCORES, scores)

    def _read_all(self) -> None:
        """Read every byte where that was asked for, before the first step: the first save must not wait for it."""
        if self.contents.how == "full" and self.world.is_main:
            self.log.say("reading all data for their fingerprint (--data.fingerprint full)")
            for split in self.sets:
                self.contents.read(split, "full", self._check_stop)

    def _check_contents(self, path: Path, stored: Digests) -> None:
        """Raise BadData where a file does not hold what it held; rank 0 reads for all. Runs saved by versions without
        such fingerprints have none stored."""
        changed = self.contents.changed(stored, self._check_stop) if self.world.is_main else ""
        if self.world.largest(int(bool(changed))):
            raise BadData(
                f"the data are not those that {path} was trained on: {changed or 'rank 0 names the file'}; bring it "
                f"back, choose another --run.out, or add --run.override to resume with these"
            )
        self._read_all()

    def rewind(self) -> bool:
        """Load the newest good checkpoint in the middle of a run; False if there is none."""
        self.world.beat(is_long=True)
        self.collect(wait=True)
        found = self._newest()
        if found:
            self.state.load(found[0], found[1]["progress"])
            self._look_at_best(found[2])
            self.settle_best()
        return found is not None

    def best_model(self) -> nn.Module:
        """Return the network as the best evaluation saw it. If that was at an earlier step, which is so only at the end
        of a run, its checkpoint replaces the weights."""
        state, model = self.state, self.state.evaluated_model
        if state.progress.best_step != state.progress.step:
            model.load_state_dict(read(find(self.log.folder.path, "best"))[0]["ema" if state.ema else "model"])
        return model

    def _newest(self, elsewhere: Callable[[], Path | None] = lambda: None) -> Found | None:
        """Return the newest good checkpoint, or that of `elsewhere`, the same on all ranks; None where there is none.
        Rank 0 reads first and moves damaged ones away. A checkpoint that only another rank cannot read stays."""
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
        """Raise BadCheckpoint where a checkpoint of this recipe and these data is incomplete or does not fit. One of
        another recipe or other data is not damaged: `resume` refuses it."""
        require(stored, "progress", "recipe", "spec", "fingerprints", "environment")
        changes = store.diff(stored["recipe"], self.recipe)
        is_ours = not longer.without_growth(changes, stored["recipe"], self.recipe)
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
        """Raise PeerLost where ranks read different folders: they would train at different steps, unnoticed."""
        if self.world.size == 1:
            return
        if self.world.largest(place) != -self.world.largest(-place):
            raise PeerLost(
                f"ranks do not find the same newest checkpoint in {self.log.folder.path}; it must be one folder that "
                f"all hosts share (--run.out), and each host must already see what is in it"
            )

    def prove_room(self) -> None:
        """Refuse to train what the disk has no room for."""
        if self.world.is_main:
            self.checkpoints.prove_room(self.state.tensors())

    def save_first(self, resumed: bool) -> None:
        """Save before the first step of a folder, where asked for, or where on_nan may have to rewind to it."""
        # Decided by what all ranks know alike.
        is_new = not resumed or self.run.resume not in ("auto", "never")
        if is_new and (self.run.checkpoint_initial or self.run.on_nan == "rewind"):
            self.save()

    def save_epoch(self, is_over: bool) -> None:
        """Save after an epoch if it is due, the best so far, or the last."""
        progress = self.state.progress
        is_best = progress.best_step == progress.step  # else `best` would name what is no longer there
        if is_over or is_best or progress.epoch % self.run.checkpoint_every_epochs == 0:
            self.save(must_succeed=is_over)

    def save(self, must_succeed: bool = False) -> None:
        """Write a checkpoint on rank 0, from a copy while training continues; at most one is being written. The last
        one of a run must succeed, and all ranks wait for it: a launcher kills the rest as soon as one has left."""
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
                "stopwatch": state.stopwatch.to_json(),
                "choices": state.choices,
                "recipe": store.to_json(self.recipe),
                store.ORIGINS: dict(self.recipe.origins),
                "spec": self.sets["train"].spec.to_json(),
                "fingerprints": {split: dataset.fingerprint for split, dataset in self.sets.items()},
                "environment": environment(state.device, self.world.size),
            }
            started = time.perf_counter()
            self._copies.make(state.tensors())
            copied_s = time.perf_counter() - started
            self._pending = self._writer.submit(self._write, stored, progress.step, progress.best_step, copied_s)
            if is_waited_for:
                self.collect(wait=True, must_succeed=must_succeed)
        if is_waited_for:
            self.world.barrier()

    def _write(self, stored: dict[str, Any], step: int, best_step: int, copied_s: float) -> Saved:
        stored["contents"] = self.contents.to_json()  # read at the first save, unless a resume has compared it
        started = time.perf_counter()
        self._copies.wait()
        path = self.checkpoints.save(step, self._copies.tensors, stored, best_step, are_copies=True)
        saved = Saved(step, path, copied_s, time.perf_counter() - started)
        if self._leak is None:
            self._leak = self.contents.leak()
        return saved

    def collect(self, *, wait: bool = False, must_succeed: bool = False) -> None:
        """Log the save in the background if it is done. A failed one raises here, at the next step; a full disk is only
        a warning unless this save must succeed."""
        self.log.folder.beat()
        if self._pending is None or not (wait or self._pending.done()):
            return
        pending, self._pending = self._pending, None
        try:
            saved = pending.result()
        except DiskFull as error:
            if must_succeed:
                raise
            self.log.warn(str(error))
            return
        self.log.event("checkpoint", step=saved.step, name=saved.path.name)
        self.on_saved(saved)
        if self._leak:
            self.log.warn(self._leak)
        self._leak = ""

    def _collect_last(self, is_tried_again: bool) -> None:
        """Collect the save before this one; its error is only a warning where this one must succeed and tries again."""
        try:
            self.collect(wait=True)
        except (OSError, SightlineError) as error:
            if not is_tried_again or isinstance(error, PeerLost):  # a folder that is no longer ours stays so
                raise
            self.log.warn(f"a save in the background failed: {error}; trying once more")

    def close(self) -> None:
        """Wait for a save in the background, however the run ends."""
        self.world.beat(is_long=True)
        try:
            self.collect(wait=True)
        except (OSError, SightlineError) as error:  # the run ends for a reason of its own
            self.log.warn(f"the last save failed: {error}")
        self._writer.shutdown()


def _other_recipe(path: Path, changes: list[str], origins: Mapping[str, str]) -> str:
    """Return the refusal of changed fields: a line for each that the user changed, and one for all that follow."""
    follows = [each for each in changes if origins.get(each.partition(":")[0], "").startswith(FOLLOWS)]
    own = [each for each in changes if each not in follows] or changes
    listed = own[:50]
    if len(own) < len(changes):
        listed.append(f"and what follows from that: {first_of([each.partition(':')[0] for each in follows])}")
    text = f"{path} was made with another recipe:\n  " + "\n  ".join(listed) + "\nRestore the old values"
    if fixed := [each.partition(":")[0] for each in changes if each.startswith(NEVER_OVERRIDDEN)]:
        run = path.parent.parent
        other = f"or choose another --run.out, or delete {run} if you do not need it"
        return f"{text}, {other}; --run.override cannot change {first_of(fixed)} of a stored run"
    return f"{text}, choose another --run.out, or add --run.override to resume with the new ones"


def _changed(then: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what rounding depends on and is not as it was, with both values; packages one by one."""
    for name in ("threads", "device", "ranks"):
        if then.get(name) != now[name]:
            yield name, then.get(name), now[name]
    before, after = (each.get("packages") or {} for each in (then, now))
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield name, before.get(name, "absent"), after.get(name, "absent")
