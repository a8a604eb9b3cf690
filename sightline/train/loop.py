"""train(): the whole story, top to bottom."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from sightline.data.loading.loader import BadSamples, Feeds, Loader
from sightline.data.loading.order import TrainOrder
from sightline.engine.evaluate import evaluate
from sightline.engine.model import build_model
from sightline.engine.orders import eval_order, length_of, train_order_of
from sightline.engine.progress import TrainProgress, refuse_unwatchable
from sightline.engine.signals import StopSignals
from sightline.errors import Diverged, Interrupted
from sightline.files.typed_json import read_json
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.parts import NOTHING_OPENED, DataFacts, Dataset, Scores
from sightline.recipe import store
from sightline.recipe.recipe import Recipe, Run
from sightline.results import TrainResult
from sightline.runs.environment import environment
from sightline.runs.folder import MAX_SCORES_BYTES, SCORES
from sightline.runs.log import RunLog
from sightline.runs.page import Shown
from sightline.runs.screen import RunSize
from sightline.train import longer, memory
from sightline.train.bad_steps import BadSteps
from sightline.train.compiling import Compiling
from sightline.train.memory import advised
from sightline.train.meter import Meter
from sightline.train.profile import ProfileWindow, parse_window
from sightline.train.saver import Saver
from sightline.train.schedules import RunLength
from sightline.train.start import open_data
from sightline.train.state import TrainState
from sightline.train.step import build_step
from sightline.train.stop_time import StopTime
from sightline.train.warnings import start_warnings, young_statistics


def train(
    recipe: Recipe, run: Run, device: Device, world: World, log: RunLog, looked: DataFacts = NOTHING_OPENED
) -> TrainResult:
    """Train a recipe to its end, resuming where its run folder stands, and return the last scores."""
    cfg = recipe.train
    with StopSignals(world) as signals, ExitStack() as stack:
        # Open the data and choose their order. What cannot be traced, scored or watched fails here, before slow work.
        recipe, sets, bound = open_data(recipe, run, device, world, log, looked)
        order = train_order_of(cfg, bound["train"], world)
        length = length_of(cfg, order)
        steps = min(length.steps, cfg.max_steps or sys.maxsize)
        traced = parse_window(run.profile, steps)
        names = _score_names(recipe, sets["val"], device)

        # Build the model, then resume it; a new run begins with pretrained weights where it names some.
        with advised(device, partial(memory.building, recipe, sets["train"].spec)):
            built = build_model(recipe, run, sets["train"].spec, device, world)
            state = TrainState(recipe, built, device, length)
        stack.enter_context(advised(device, partial(memory.training, recipe, state, world)))  # until the end
        saver = Saver(recipe, run, state, sets, world, log, on_saved=StopTime(signals, log), check_stop=signals.check)
        resumed = saver.resume()
        if not resumed and (note := state.load_pretrained(recipe.model)):
            log.say(note)
        progress = _at_its_epoch(state.progress, length)
        over = _why_over(recipe, progress, progress.epoch, length)
        state.notes += longer.notes(recipe, progress, saver.epochs_before, length, over)
        _refuse_vain_start(recipe, progress, saver, over)
        scores, times = Scores(progress.scores, {}, []), state.stopwatch.read()
        write_facts = partial(_write_facts, recipe, run, device, world, sets["train"], log, resumed)
        if over:
            write_facts()
            saver.settle_best()
            log.say(f"{log.folder.path} is finished, {over}; raise --train.epochs, or choose another --run.out")
            return _result(_kept_scores(log.folder.path, scores, progress.scored_step), progress, over, log)
        base_lr = progress.base_lr = _base_lr(recipe, world, progress.base_lr)
        compiling = Compiling(recipe, run, device, world, state, steps, is_longer=saver.epochs_before < cfg.epochs)
        head_steps = cfg.head_epochs * length.steps_per_epoch
        step = build_step(recipe, compiling.run, device, world, state, bound["train"], head_steps)
        bad_steps = BadSteps(run, state, saver, order, sets["train"], log)
        bad_samples = BadSamples(recipe.data.on_bad_sample, recipe.data.max_bad_samples, log.bad_sample)
        evaluated = eval_order(cfg, len(sets["val"]), world, sets["val"].eval_batch)
        feeds: Feeds = {"train": (bound["train"], order), "val": (bound["val"], evaluated)}
        loader = Loader(feeds, run, device, world, bad_samples, signals.check, log.warn)
        write_facts()  # after all that may refuse a start, which must not overwrite the run's config
        facts = {"steps": steps, "local_batch": order.local_samples, "base_lr": base_lr, "workers": loader.worker_pids}
        log.started(store.leaves(recipe, run), names, progress.step, recipe.origins, **facts)
        about = _start_lines(recipe, length, len(sets["val"]), device, world, progress)
        for note in (*about, *loader.notes, *state.notes):
            log.say(note)
        for text in start_warnings(recipe, base_lr, sets["train"].spec.classes, len(sets["train"])):
            log.warn(text)
        size = RunSize(cfg.epochs, steps, length.steps_per_epoch, is_limit=bool(cfg.patience))
        meter = Meter(loader, device, world, steps)
        at_once = evaluated.local_batch
        log.show(Shown(recipe, sets, bound["train"], order, bound["val"], at_once, device, saver.best_model))
        first_loss, explained = 0.0, ""
        window = ProfileWindow(traced if world.is_main else None, log.folder.path, device, lambda: loader.wait_s)
        try:
            saver.settle_best()
            saver.save_first(resumed)
            if progress.step < min((progress.epoch + 1) * length.steps_per_epoch, steps):  # else it evaluates first
                log.await_first_step(partial(_first_step_waits_for, loader, compiling.run, order, device))
            loader.seek("train", progress.step, steps)
            if run.warmup_steps and progress.step < steps:
                step.warm_up(loader.next("train"), run.warmup_steps)
                loader.seek("train", progress.step, steps)
            meter.start_epoch()
            state.stopwatch.start()
            while not over:
                epoch_end = (progress.epoch + 1) * length.steps_per_epoch
                while progress.step < (end := min(epoch_end, steps)):
                    rate = recipe.schedule.rate(progress.step, base_lr, length, progress.watched(recipe.schedule))
                    with window.step(progress.step + 1):  # as the log will call it
                        batch = loader.next("train")
                        if progress.step not in progress.avoid:
                            step(batch, progress.step, rate)
                    with meter.paused():  # reading a trace takes seconds
                        if table := window.take_summary():
                            log.say(table)
                    progress.step += 1
                    compiling.after_step(step, batch, progress.epoch, loader, meter, signals, log)
                    log.stepped(progress.epoch, progress.step, size)
                    if first := meter.read_first(step):
                        log.first_step(**first)
                        first_loss = first["loss"]
                    if step.take_bad_steps(progress.step == end) and bad_steps.rewound(step.last_bad_step):
                        loader.seek("train", progress.step, steps)
                        epoch_end = (progress.epoch + 1) * length.steps_per_epoch
                    if progress.step % run.log_every_steps == 0 or progress.step == min(epoch_end, steps):
                        log.training(progress.epoch, progress.step, size, meter.read(step, progress.step, rate))
                    if run.checkpoint_every_steps and progress.step % run.checkpoint_every_steps == 0:
                        with meter.paused():
                            saver.save()
                    saver.collect()
                    signals.agree()

                if line := meter.read_epoch():
                    log.epoch(progress.epoch, progress.step, line)
                found: Scores | None = None
                epochs_done = progress.epoch + (is_whole := progress.step == epoch_end)  # max_steps may end within one
                is_planned = is_whole and cfg.evaluates_after(epochs_done)
                # A run that is over is evaluated too: patience may end it in an epoch without an evaluation.
                ends = progress.step == steps or bool(_why_over(recipe, progress, epochs_done, length))
                if is_planned or (ends and cfg.eval_at_end):
                    state.share_batch_norm(cfg.bn_eval, world)
                    log.evaluation("begin", progress.step)
                    watch = partial(_watch_evaluation, signals, log, size.place(progress.epoch, progress.step))
                    with advised(device, partial(memory.evaluating, evaluated, sets["val"].spec)):
                        scores = found = evaluate(
                            state.evaluated_model, recipe, bound["val"], loader, device, world, watch
                        )
                    times = state.stopwatch.read()
                    log.evaluation("end", progress.step, **times)
                    is_best = progress.note(scores.values, recipe.task.headline, is_planned)
                    log.scores(scores, SCORES, times, is_best, epoch=progress.epoch + 1, step=progress.step)
                standing = progress.standing(cfg.patience)
                log.epoch_end(progress.epoch, size, line, found, recipe.task.headline, standing)
                if found and line and not explained:
                    highest, validated = max(first_loss, line["loss"]), found.values.get("loss", 0.0)
                    if explained := young_statistics(state.model, progress.step, highest, validated):
                        log.warn(explained)
                progress.epoch = epochs_done
                over = _why_over(recipe, progress, epochs_done, length)
                saver.save_epoch(bool(over))
                log.keep_facts(bool(over))  # after an epoch, so that no step waits for it
                _refuse_diverged(recipe, progress)
                meter.start_epoch()
            total = {**state.stopwatch.read(), **meter.read_start()}
            log.finished(over, progress.step, progress.scored_step, times, total)
        except Interrupted as stop:
            saver.save(must_succeed=True)
            saved = f"saved at step {progress.step}; the same command resumes from there"
            raise Interrupted(stop.signal_number, saved) from None
        finally:
            window.close()
            loader.close()
            saver.close()
    return _result(scores, progress, over, log)


def _score_names(recipe: Recipe, data: Dataset, device: Device) -> tuple[str, ...]:
    """Return the names of an evaluation's scores, as far as they are known; refuse a schedule that watches another."""
    names = recipe.task.build().metric(data.spec, device.torch_device).names()
    refuse_unwatchable(recipe.schedule, names)
    return names or (recipe.task.headline,)


def _first_step_waits_for(loader: Loader, run: Run, order: TrainOrder, device: Device) -> str:
    batch = f"{order.local_samples} sample{'s' * (order.local_samples > 1)}"
    if not loader.wait_s:
        return f"waiting for the loader to read the first {batch}"
    does = "compiling, then running" if run.compile == "on" else "running"
    return f"{does} the first step ({batch} on {device.name()})"


def _watch_evaluation(signals: StopSignals, log: RunLog, place: tuple[int, int], done: int, total: int) -> None:
    signals.agree(is_step=False)
    log.evaluating(done, total, *place)


def _kept_scores(folder: Path, scores: Scores, step: int) -> Scores:
    """Return the last scores of a run that is over with their tables, if its folder still has them."""
    try:
        kept = read_json(folder / SCORES, MAX_SCORES_BYTES)
        return Scores(scores.values, kept["tables"], kept["worst"]) if kept["step"] == step else scores
    except (OSError, ValueError, LookupError, TypeError):
        return scores


def _result(scores: Scores, progress: TrainProgress, over: str, log: RunLog) -> TrainResult:
    best = (progress.best_score, progress.best_step)
    return TrainResult(scores.values, scores.tables, scores.worst, log.folder.path, *best, over)


def _write_facts(
    recipe: Recipe, run: Run, device: Device, world: World, data: Dataset, log: RunLog, resumed: bool
) -> None:
    """Write what this start runs with; what is kept of the data stays as the first start wrote it."""
    log.folder.write("environment.json", json.dumps(environment(device, world.size), indent=1) + "\n")
    log.folder.write("config.yaml", store.dump(recipe, run))
    for name, text in data.kept.items():
        if not resumed or not (log.folder.path / name).exists():
            log.folder.write(name, text, durable=True)  # the next start reads it


def _at_its_epoch(progress: TrainProgress, length: RunLength) -> TrainProgress:
    """If the dataset changed size (--run.override), recompute the epoch from the step. A step at the end of an epoch
    may still lack its evaluation."""
    if not progress.epoch <= progress.step / length.steps_per_epoch <= progress.epoch + 1:
        progress.epoch = progress.step // length.steps_per_epoch
    return progress


def _start_lines(
    recipe: Recipe, length: RunLength, held_out: int, device: Device, world: World, progress: TrainProgress
) -> list[str]:
    """Say what will be trained, on what and for how long."""
    cfg, per_epoch = recipe.train, length.steps_per_epoch
    epochs = f"{cfg.epochs} epoch{'s' * (cfg.epochs > 1)} of {per_epoch} step{'s' * (per_epoch > 1)}"
    shares = f" ({cfg.global_batch // world.size} on each of {world.size})" if world.size > 1 else ""
    can_stop = 0 < cfg.patience * cfg.eval_every_epochs < cfg.epochs
    lines = [
        f"{recipe.name}: {length.samples} training and {held_out} evaluation samples",
        f"{'at most ' * can_stop}{epochs}, batch {cfg.global_batch}{shares}, base rate {progress.base_lr:g}, "
        f"{cfg.precision} on {device.name()}",
    ]
    if can_stop:
        evaluations = f"{cfg.patience} evaluation{'s' * (cfg.patience > 1)}"
        lines.append(f"stops after {evaluations} without a better {recipe.task.headline} (train.patience)")
    if progress.step:
        lines.append(f"resuming from step {progress.step}")
    return lines


def _base_lr(recipe: Recipe, world: World, resolved: float | None) -> float:
    """Return the base rate of the schedule, as the first start of the run resolved it."""
    return recipe.optimizer.base_lr(recipe.train.global_batch, world.size) if resolved is None else resolved


def _why_over(recipe: Recipe, progress: TrainProgress, epochs_done: int, length: RunLength) -> str:
    """Return why the run is over, "" while it is not. A function of progress, so that a restart decides alike."""
    cfg, headline = recipe.train, recipe.task.headline
    score = progress.scores.get(headline)
    if cfg.target_score and score is not None and score >= cfg.target_score:
        return f"{headline} {score:.4f} has reached the target {cfg.target_score:g} at step {progress.scored_step}"
    if epochs_done >= cfg.epochs:
        return f"{epochs_done} epochs are done" if epochs_done > 1 else "1 epoch is done"
    waited = progress.evaluations_since_best()
    if cfg.patience and waited >= cfg.patience and epochs_done >= cfg.min_epochs:
        best = f"{headline} that is a number"
        if progress.best_score is not None:
            best = f"better {headline} than {progress.best_score:.4f} at step {progress.best_step}"
        return f"{waited} evaluations brought no {best} (train.patience={cfg.patience})"
    epochs, steps_left = divmod(progress.step, length.steps_per_epoch)
    is_due = cfg.eval_at_end or (not steps_left and cfg.evaluates_after(epochs))  # a stop may have come before it
    is_done = progress.scored_step == progress.step or not is_due
    is_past = progress.step > cfg.max_steps or (progress.step == cfg.max_steps and is_done)
    return f"train.max_steps={cfg.max_steps} steps are done" if cfg.max_steps and is_past else ""


def _refuse_vain_start(recipe: Recipe, progress: TrainProgress, saver: Saver, over: str) -> None:
    """Refuse to train on after a divergence, or what the disk has no room for."""
    _refuse_diverged(recipe, progress)
    if not over:
        saver.prove_room()


def _refuse_diverged(recipe: Recipe, progress: TrainProgress) -> None:
    cfg, headline = recipe.train, recipe.task.headline
    score = progress.scores.get(headline)
    if cfg.diverged_score and score is not None and not score > cfg.diverged_score:
        raise Diverged(
            f"diverged: {headline} {score:.4f} at step {progress.scored_step} is not above "
            f"train.diverged_score={cfg.diverged_score:g}. Start again with another --run.out and a lower "
            f"--optimizer.lr or a longer warm-up; to continue all the same, add --train.diverged-score 0"
        )
