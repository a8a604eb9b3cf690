"""Open a run: its data and order, its network, its checkpoint; then all that the steps need, and the first lines."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from sightline.data.loading.loader import BadSamples, Feeds, Loader
from sightline.data.loading.order import EvalOrder, TrainOrder
from sightline.engine.model import build_model
from sightline.engine.orders import eval_order, train_order_of
from sightline.engine.progress import TrainProgress, refuse_unwatchable
from sightline.engine.signals import StopSignals
from sightline.hardware.world import World
from sightline.parts import Bound, DataFacts, Dataset
from sightline.recipe import store
from sightline.recipe.recipe import Recipe
from sightline.runs.environment import environment
from sightline.runs.page import Shown
from sightline.train import longer, memory, trials
from sightline.train.bad_steps import BadSteps
from sightline.train.compiling import Compiling
from sightline.train.memory import advised
from sightline.train.meter import Meter
from sightline.train.optimizers import said_rate
from sightline.train.over import refuse_diverged, why_over
from sightline.train.profile import ProfileWindow, parse_window
from sightline.train.saver import Saver
from sightline.train.schedules import RunLength, length_of
from sightline.train.session import Session
from sightline.train.start import open_data
from sightline.train.state import TrainState
from sightline.train.step import Step, build_step
from sightline.train.stop_time import StopTime
from sightline.train.warnings import start_warnings


@dataclass(frozen=True)
class Opened:
    """A run as its folder left it; nothing of it has begun."""

    session: Session  # its recipe is final: as the data and the decoder make it
    sets: dict[str, Dataset]
    bound: dict[str, Bound]
    order: TrainOrder
    evaluated: EvalOrder
    length: RunLength
    steps: int  # of the whole run
    traced: tuple[int, int] | None  # first and last step of --run.profile
    names: tuple[str, ...]  # of the scores
    state: TrainState
    saver: Saver
    resumed: bool
    over: str  # why it is over already; "" if it is not

    def write_facts(self) -> None:
        """Write what this start runs with; what is kept of the data stays as the first start wrote it."""
        session, folder = self.session, self.session.log.folder
        folder.write("environment.json", json.dumps(environment(session.device, session.world.size), indent=1) + "\n")
        folder.write("config.yaml", store.dump(session.recipe, session.run))
        for name, text in self.sets["train"].kept.items():
            if not self.resumed or not (folder.path / name).exists():
                folder.write(name, text, durable=True)  # the next start reads it


def open_run(session: Session, signals: StopSignals, stack: ExitStack, looked: DataFacts) -> Opened:
    """Open the data and choose their order, build the model, then resume it; a new run begins with pretrained weights
    where it names some. What cannot be traced, scored or watched fails before slow work. `stack` ends with the run."""
    session, sets, bound = open_data(session, looked)
    recipe, run, device, world, log = session.recipe, session.run, session.device, session.world, session.log
    cfg = recipe.train
    order = train_order_of(cfg, bound["train"], world)
    length = length_of(cfg, order)
    steps = min(length.steps, cfg.max_steps or sys.maxsize)
    traced = parse_window(run.profile, steps)
    names = _score_names(session, sets["val"])

    with advised(device, partial(memory.building, recipe, sets["train"].spec)):
        built = build_model(recipe, run, sets["train"].spec, device, world)
        state = TrainState(recipe, built, device, length)
    stack.enter_context(advised(device, partial(memory.training, recipe, state, world)))
    saver = Saver(session, state, sets, on_saved=StopTime(signals, log), check_stop=signals.check)
    resumed = saver.resume()
    if not resumed and (note := state.load_pretrained(recipe.model)):
        log.say(note)
    progress = _at_its_epoch(state.progress, length)
    over = why_over(recipe, progress, progress.epoch, length)
    state.notes += longer.notes(recipe, progress, saver.epochs_before, length, over)
    refuse_diverged(recipe, progress)
    if not over:
        saver.prove_room()
    evaluated = eval_order(cfg, len(sets["val"]), world, sets["val"].eval_batch)
    return Opened(session, sets, bound, order, evaluated, length, steps, traced, names, state, saver, resumed, over)


def _score_names(session: Session, data: Dataset) -> tuple[str, ...]:
    """Return the names of an evaluation's scores, as far as they are known; refuse a schedule that watches another."""
    task = session.recipe.task
    names = task.build().metric(data.spec, session.device.torch_device).names()
    refuse_unwatchable(session.recipe.schedule, names)
    return names or (task.headline,)


def _at_its_epoch(progress: TrainProgress, length: RunLength) -> TrainProgress:
    """If the dataset changed size (--run.override), recompute the epoch from the step. A step at the end of an epoch
    may still lack its evaluation."""
    if not progress.epoch <= progress.step / length.steps_per_epoch <= progress.epoch + 1:
        progress.epoch = progress.step // length.steps_per_epoch
    return progress


@dataclass(frozen=True)
class Ready:
    """What the steps of a run are made with."""

    base_lr: float
    compiling: Compiling
    step: Step
    bad_steps: BadSteps
    loader: Loader
    meter: Meter
    window: ProfileWindow


def make_ready(opened: Opened, signals: StopSignals) -> Ready:
    """Build the step and the loader, write what the run starts with, and say it. It comes after all that may refuse a
    start, which must not overwrite the run's config."""
    session, state, saver, order = opened.session, opened.state, opened.saver, opened.order
    recipe, run, device, world, log = session.recipe, session.run, session.device, session.world, session.log
    progress, sets, bound = state.progress, opened.sets, opened.bound
    base_lr = progress.base_lr = _base_lr(recipe, world, progress.base_lr)
    is_longer = saver.epochs_before < recipe.train.epochs
    trials.decide(session, state, opened.steps, opened.resumed, is_longer)
    compiling = Compiling(session, state, opened.steps, is_longer)
    head_steps = recipe.train.head_epochs * opened.length.steps_per_epoch
    step = build_step(recipe, compiling.run, device, world, state, bound["train"], head_steps)
    bad_steps = BadSteps(session, state, saver, order, sets["train"])
    bad_samples = BadSamples(recipe.data.on_bad_sample, recipe.data.max_bad_samples, log.bad_sample)
    feeds: Feeds = {"train": (bound["train"], order), "val": (bound["val"], opened.evaluated)}
    loader = Loader(feeds, run, device, world, bad_samples, signals.check, log.warn)
    opened.write_facts()
    facts = {
        "steps": opened.steps,
        "local_batch": order.local_samples,
        "base_lr": base_lr,
        "workers": loader.worker_pids,
    }
    log.started(store.leaves(recipe, run), opened.names, progress.step, recipe.origins, **facts)
    for note in (*_start_lines(opened, base_lr), *loader.notes, *state.notes):
        log.say(note)
    for text in start_warnings(recipe, base_lr, sets["train"].spec.classes, len(sets["train"])):
        log.warn(text)
    meter = Meter(loader, device, world, opened.steps)
    at_once = opened.evaluated.local_batch
    log.show(Shown(recipe, sets, bound["train"], order, bound["val"], at_once, device, saver.best_model))
    traced = opened.traced if world.is_main else None
    window = ProfileWindow(traced, log.folder.path, device, lambda: loader.wait_s)
    return Ready(base_lr, compiling, step, bad_steps, loader, meter, window)


def _base_lr(recipe: Recipe, world: World, resolved: float | None) -> float:
    """Return the base rate of the schedule, as the first start of the run resolved it."""
    return recipe.optimizer.base_lr(recipe.train.global_batch, world.size) if resolved is None else resolved


def _start_lines(opened: Opened, base_lr: float) -> list[str]:
    """Say what will be trained, on what and for how long."""
    recipe, world, progress = opened.session.recipe, opened.session.world, opened.state.progress
    cfg, per_epoch = recipe.train, opened.length.steps_per_epoch
    epochs = f"{cfg.epochs} epoch{'s' * (cfg.epochs > 1)} of {per_epoch} step{'s' * (per_epoch > 1)}"
    shares = f" ({cfg.global_batch // world.size} on each of {world.size})" if world.size > 1 else ""
    per = recipe.optimizer.lr_for_batch
    rate = said_rate(base_lr, recipe.optimizer.base_lr(per, world.size), per)
    can_stop = 0 < cfg.patience * cfg.eval_every_epochs < cfg.epochs
    lines = [
        f"{recipe.name}: {opened.length.samples} training and {len(opened.sets['val'])} evaluation samples",
        f"{'at most ' * can_stop}{epochs}, batch {cfg.global_batch}{shares}, base rate {rate}, "
        f"{cfg.precision} on {opened.session.device.name()}",
    ]
    if can_stop:
        evaluations = f"{cfg.patience} evaluation{'s' * (cfg.patience > 1)}"
        lines.append(f"stops after {evaluations} without a better {recipe.task.headline} (train.patience)")
    if progress.step:
        lines.append(f"resuming from step {progress.step}")
    return lines
