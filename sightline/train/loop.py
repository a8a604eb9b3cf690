"""train(): the whole story, top to bottom."""

from __future__ import annotations

import json

from sightline import config
from sightline.config import Recipe, Run
from sightline.data.loader import Loader, worker_count
from sightline.data.order import EvalOrder, TrainOrder
from sightline.errors import Interrupted, UsageError
from sightline.evaluate.run import evaluate
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.log import RunLog, environment
from sightline.measure.profile import ProfileWindow, parse_window
from sightline.parts import Dataset, Scores
from sightline.train.meter import Meter
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
        sets = {split: recipe.data.open(split, cfg.seed) for split in ("train", "val")}
        order, eval_order = _orders(recipe, sets, world)
        plan = Plan(cfg.epochs, order.steps_per_epoch, len(sets["train"]), cfg.global_batch)
        steps = plan.epochs * plan.steps_per_epoch
        traced = parse_window(run.profile, steps)  # before anything slow starts

        # What is learnt, and where an earlier start left it.
        state = TrainState(recipe, run, sets["train"].spec, device, plan)
        saver = Saver(recipe, run, state, sets, device, world, log)
        resumed = saver.resume()
        # Only now: what a refused start would have done must not replace what the run was made with.
        log.write_file("environment.json", json.dumps(environment(device, world.size), indent=1) + "\n")
        log.write_file("config.yaml", config.dump(recipe, run))
        progress = state.progress
        if progress.epoch >= cfg.epochs:
            log.say(f"{log.folder} is finished: {progress.scores}; choose another --run.out to train again")
            return Scores(progress.scores, {}, [])
        step = build_step(recipe, run, device, world, state, sets["train"])
        loader = Loader(
            dict(sets),
            {"train": order, "val": eval_order},
            recipe.data,
            device,
            workers=worker_count(run.workers, device, world),
            prefetch=run.prefetch,
            on_bad=log.bad_sample,
            check_stop=signals.check,
        )
        log.event("start", step=progress.step, steps=steps, local_batch=order.local_batch, workers=loader.worker_pids)
        log.say(
            f"{recipe.name}: {len(sets['train'])} training and {len(sets['val'])} evaluation samples, {cfg.epochs} "
            f"epochs of {plan.steps_per_epoch} steps, batch {cfg.global_batch} "
            f"({order.local_batch} on each of {world.size}), {cfg.precision} on {device.name()}"
            + (f"; going on from step {progress.step}" if resumed else "")
        )

        window = ProfileWindow(traced if world.is_main else None, log.folder, device, lambda: loader.wait_s)

        try:
            # Something of our own to go back to; decided by what all ranks know alike.
            if run.on_nan == "rewind" and (not resumed or run.resume not in ("auto", "never")):
                saver.save()
            meter = Meter(loader, device, world, steps)
            loader.seek("train", progress.step, steps)
            while progress.epoch < cfg.epochs:
                end = (progress.epoch + 1) * plan.steps_per_epoch
                while progress.step < end:
                    rate = recipe.schedule.rate(progress.step, recipe.optimizer.lr, plan, progress.history)
                    with window.step(progress.step):
                        batch = loader.next("train")
                        if progress.step not in progress.avoid:
                            step(batch, progress.step, rate)
                    if table := window.take_summary():
                        log.say(table)
                        meter.restart()
                    progress.step += 1
                    if step.take_bad_steps() and saver.rewound(step.last_bad_step, order):
                        loader.seek("train", progress.step, steps)
                        end = (progress.epoch + 1) * plan.steps_per_epoch
                    if progress.step % run.log_every_steps == 0 or progress.step == end:
                        line = meter.read(step, progress.step, rate)
                        log.training(progress.epoch, cfg.epochs, progress.step, steps, line)
                    if run.checkpoint_every_steps and progress.step % run.checkpoint_every_steps == 0:
                        with meter.paused():
                            saver.save()
                    signals.agree()

                last = progress.epoch + 1 == cfg.epochs
                if last or (progress.epoch + 1) % cfg.eval_every_epochs == 0:
                    state.share_batch_norm(cfg.bn_eval, world)

                    def between_batches(done: int, total: int) -> None:
                        signals.agree()
                        log.evaluating(done, total, progress.step, steps)

                    scores = evaluate(
                        state.evaluated_model,
                        recipe.task,
                        sets["val"],
                        loader,
                        device,
                        world,
                        cfg.eval_precision,
                        between_batches,
                    )
                    score = scores.values[recipe.task.headline]
                    progress.scores = scores.values
                    progress.history.append(score)
                    if progress.best_score is None or score > progress.best_score:
                        progress.best_score, progress.best_step = score, progress.step
                    log.scores(scores, "scores.json", epoch=progress.epoch + 1, step=progress.step)
                progress.epoch += 1
                saver.save(must_succeed=last)
                meter.restart()
        except Interrupted:
            saver.save(must_succeed=True)
            log.say(f"saved at step {progress.step}; the same command goes on from there")
            raise
        finally:
            window.close()
            loader.close()
    return scores


def _orders(recipe: Recipe, sets: dict[str, Dataset], world: World) -> tuple[TrainOrder, EvalOrder]:
    """Which samples this rank takes, in training and in evaluation."""
    cfg = recipe.train
    order = TrainOrder(
        len(sets["train"]), cfg.global_batch, cfg.seed, cfg.last_batch, world.rank, world.size, cfg.repeats
    )
    if order.local_batch % cfg.accumulation:
        raise UsageError(
            f"train.accumulation={cfg.accumulation} does not divide the {order.local_batch} samples per device "
            f"(global_batch={cfg.global_batch} over {world.size})"
        )
    return order, EvalOrder(len(sets["val"]), cfg.global_batch, world.rank, world.size)
