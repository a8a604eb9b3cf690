"""train(): the whole story, top to bottom."""

from __future__ import annotations

import json
import sys

from sightline import config
from sightline.config import Recipe, Run
from sightline.data.loader import Loader, Order
from sightline.data.order import EvalOrder, TrainOrder
from sightline.errors import Diverged, Interrupted, UsageError
from sightline.evaluate.run import evaluate, order_for
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.log import RunLog, environment
from sightline.measure.profile import ProfileWindow, parse_window
from sightline.parts import Dataset, Scores
from sightline.train.meter import Meter
from sightline.train.progress import Progress, refuse_unwatchable
from sightline.train.saver import Saver
from sightline.train.schedules import Plan
from sightline.train.signals import StopSignals
from sightline.train.state import TrainState
from sightline.train.step import build_step


def train(recipe: Recipe, run: Run, device: Device, world: World, log: RunLog) -> Scores:
    """Trains a recipe to its end, or on from where its run folder stands, and returns the last scores."""
    cfg = recipe.train
    with StopSignals(world) as signals:
        # What is there: data, and the order in which it comes.
        sets = {split: recipe.data.open(split, cfg.seed).for_batch(cfg.global_batch) for split in ("train", "val")}
        order, eval_order = _orders(recipe, sets, world)
        plan = Plan(cfg.epochs, order.steps_per_epoch, order.samples_per_epoch, cfg.global_batch)
        steps = min(plan.epochs * plan.steps_per_epoch, cfg.max_steps or sys.maxsize)
        traced = parse_window(run.profile, steps)  # before anything slow starts
        metric = recipe.task.metric(sets["val"].spec, device.torch_device)  # likewise: what cannot be scored
        refuse_unwatchable(recipe.schedule, metric.names())  # or watched is refused now

        # What is learnt, and where an earlier start left it.
        state = TrainState(recipe, run, sets["train"].spec, device, plan, world)
        saver = Saver(recipe, run, state, sets, device, world, log)
        resumed = saver.resume()
        # Only now: what a refused start would have done must not replace what the run was made with.
        log.write_file("environment.json", json.dumps(environment(device, world.size), indent=1) + "\n")
        log.write_file("config.yaml", config.dump(recipe, run))
        progress = state.progress
        _find_epoch(progress, plan)
        _refuse_diverged(recipe, progress)
        scores, times = Scores(progress.scores, {}, []), saver.stopwatch.read()
        if over := _why_over(recipe, progress, progress.epoch):
            log.say(f"{log.folder} is finished, {over}: {progress.scores}; choose another --run.out to train again")
            return scores
        base_lr = progress.base_lr = _base_lr(recipe, world, progress.base_lr)
        step = build_step(recipe, run, device, world, state, sets["train"])
        orders: dict[str, Order] = {"train": order, "val": eval_order}
        loader = Loader.of(
            run, sets, orders, recipe.data, device, world, on_bad=log.bad_sample, check_stop=signals.check
        )
        facts = {"step": progress.step, "steps": steps, "local_batch": order.local_samples, "base_lr": base_lr}
        log.event("start", **facts, workers=loader.worker_pids)
        log.say(
            f"{recipe.name}: {plan.samples} training and {len(sets['val'])} evaluation samples, {cfg.epochs} "
            f"epochs of {plan.steps_per_epoch} steps, batch {cfg.global_batch} ({order.local_samples} "
            f"on each of {world.size}), base rate {base_lr:g}, {cfg.precision} on {device.name()}"
            + (f"; going on from step {progress.step}" if resumed else "")
        )
        for note in (*loader.notes, *state.notes):
            log.say(note)
        window = ProfileWindow(traced if world.is_main else None, log.folder, device, lambda: loader.wait_s)
        try:
            saver.save_first(resumed)
            loader.seek("train", progress.step, steps)
            if run.warmup_steps and progress.step < steps:
                step.warm_up(loader.next("train"), run.warmup_steps)
                loader.seek("train", progress.step, steps)
            meter = Meter(loader, device, world, steps)
            saver.stopwatch.start()
            while not over:
                epoch_end = (progress.epoch + 1) * plan.steps_per_epoch
                while progress.step < min(epoch_end, steps):
                    rate = recipe.schedule.rate(progress.step, base_lr, plan, progress.watched(recipe.schedule))
                    with window.step(progress.step):
                        batch = loader.next("train")
                        if progress.step not in progress.avoid:
                            step(batch, progress.step, rate)
                    with meter.paused():  # reading a trace takes seconds
                        if table := window.take_summary():
                            log.say(table)
                    progress.step += 1
                    if step.take_bad_steps() and saver.rewound(step.last_bad_step, order):
                        loader.seek("train", progress.step, steps)
                        epoch_end = (progress.epoch + 1) * plan.steps_per_epoch
                    if progress.step % run.log_every_steps == 0 or progress.step == min(epoch_end, steps):
                        line = meter.read(step, progress.step, rate)
                        log.training(progress.epoch, cfg.epochs, progress.step, steps, line)
                    if run.checkpoint_every_steps and progress.step % run.checkpoint_every_steps == 0:
                        with meter.paused():
                            saver.save()
                    saver.collect(answer_s=signals.answer_s)
                    signals.agree()

                if line := meter.read_epoch():
                    log.epoch(progress.epoch, cfg.epochs, progress.step, line)
                is_whole = progress.step == epoch_end  # max_steps may end within an epoch
                epochs_done = progress.epoch + is_whole
                is_planned = is_whole and cfg.evaluates_after(epochs_done)
                # A run that is over is evaluated too: patience may end it in an epoch without an evaluation.
                ends = progress.step == steps or bool(_why_over(recipe, progress, epochs_done))
                if is_planned or (ends and cfg.eval_at_end):
                    state.share_batch_norm(cfg.bn_eval, world)
                    log.evaluation("begin", progress.step)

                    def between_batches(done: int, total: int) -> None:
                        signals.agree()
                        log.evaluating(done, total, progress.step, steps)

                    model, how = state.evaluated_model, (cfg.eval_precision, between_batches, cfg.eval_shards)
                    scores = evaluate(model, recipe.task, sets["val"], loader, device, world, *how)
                    times = saver.stopwatch.read()
                    log.evaluation("end", progress.step, **times)
                    is_best = progress.note(scores.values, recipe.task.headline, is_planned)
                    log.scores(scores, "scores.json", times, is_best, epoch=progress.epoch + 1, step=progress.step)
                progress.epoch = epochs_done
                over = _why_over(recipe, progress, epochs_done)
                saver.save_epoch(bool(over))
                _refuse_diverged(recipe, progress)
                meter.start_epoch()
            if progress.scored_step >= 0:
                log.finished(over, progress.scored_step, times)
            else:
                log.say(f"{over}; nothing was evaluated")
        except Interrupted:
            saver.save(must_succeed=True)
            log.say(f"saved at step {progress.step}; the same command goes on from there")
            raise
        finally:
            window.close()
            loader.close()
            saver.close()
    return scores


def _orders(recipe: Recipe, sets: dict[str, Dataset], world: World) -> tuple[TrainOrder, EvalOrder]:
    """Which samples this rank takes, in training and in evaluation."""
    cfg = recipe.train
    order = TrainOrder(
        len(sets["train"]),
        cfg.global_batch,
        cfg.seed,
        cfg.last_batch,
        world.rank,
        world.size,
        cfg.repeats,
        cfg.steps_per_epoch,
        sets["train"].samples_per_item,
    )
    if order.local_batch % cfg.accumulation:
        each = order.samples_per_item
        held = f"{order.local_batch} items of {each} samples" if each > 1 else f"{order.local_batch} samples"
        raise UsageError(
            f"train.accumulation={cfg.accumulation} does not divide the {held} per device "
            f"(global_batch={cfg.global_batch} over {world.size})"
            + (f"; use --data.nvol {cfg.accumulation * world.size} or a multiple of it" if each > 1 else "")
        )
    return order, order_for(cfg, len(sets["val"]), world)


def _find_epoch(progress: Progress, plan: Plan) -> None:
    """Where other data (--run.override) have made epochs shorter or longer, the place in the order is that of the step;
    a step at the end of an epoch may still lack its evaluation."""
    if not progress.epoch <= progress.step / plan.steps_per_epoch <= progress.epoch + 1:
        progress.epoch = progress.step // plan.steps_per_epoch


def _base_lr(recipe: Recipe, world: World, resolved: float | None) -> float:
    """The rate that the schedule starts from: as the first start resolved it, else resolved now."""
    return recipe.optimizer.base_lr(recipe.train.global_batch, world.size) if resolved is None else resolved


def _why_over(recipe: Recipe, progress: Progress, epochs_done: int) -> str:
    """Return why the run is over, "" while it is not. A function of progress, so that a restart decides alike."""
    cfg, headline = recipe.train, recipe.task.headline
    score = progress.scores.get(headline)
    if cfg.target_score and score is not None and score >= cfg.target_score:
        return f"{headline} {score:.4f} has reached the target {cfg.target_score:g} at step {progress.scored_step}"
    if epochs_done >= cfg.epochs:
        return f"{epochs_done} epochs are done"
    waited = progress.evaluations_since_best()
    if cfg.patience and waited >= cfg.patience and epochs_done >= cfg.min_epochs:
        best = f"{headline} that is a number"
        if progress.best_score is not None:
            best = f"better {headline} than {progress.best_score:.4f} at step {progress.best_step}"
        return f"{waited} evaluations brought no {best} (train.patience={cfg.patience})"
    is_done = progress.scored_step == progress.step or not cfg.eval_at_end
    is_past = progress.step > cfg.max_steps or (progress.step == cfg.max_steps and is_done)
    return f"train.max_steps={cfg.max_steps} steps are done" if cfg.max_steps and is_past else ""


def _refuse_diverged(recipe: Recipe, progress: Progress) -> None:
    cfg, headline = recipe.train, recipe.task.headline
    score = progress.scores.get(headline)
    if cfg.diverged_score and score is not None and not score > cfg.diverged_score:
        raise Diverged(
            f"diverged: {headline} {score:.4f} at step {progress.scored_step} is not above "
            f"train.diverged_score={cfg.diverged_score:g}. Begin anew with another --run.out and a lower "
            f"--optimizer.lr or a longer warm-up; to go on all the same, add --train.diverged-score 0"
        )
