"""train(): the whole story, top to bottom."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from sightline.data.loading.loader import Loader
from sightline.data.loading.order import TrainOrder
from sightline.engine.evaluate import evaluate
from sightline.engine.progress import TrainProgress
from sightline.engine.signals import StopSignals
from sightline.errors import Interrupted
from sightline.files.typed_json import read_json
from sightline.hardware.devices import Device
from sightline.parts import NOTHING_OPENED, DataFacts, Scores
from sightline.recipe.recipe import Run
from sightline.results import TrainResult
from sightline.runs.folder import MAX_SCORES_BYTES, SCORES
from sightline.runs.log import RunLog
from sightline.runs.screen import RunSize
from sightline.train import memory
from sightline.train.memory import advised
from sightline.train.opening import make_ready, open_run
from sightline.train.over import refuse_diverged, why_over
from sightline.train.session import Session
from sightline.train.warnings import young_statistics


def train(session: Session, looked: DataFacts = NOTHING_OPENED) -> TrainResult:
    """Train a recipe to its end, resuming where its run folder stands, and return the last scores."""
    run, device, world, log = session.run, session.device, session.world, session.log
    with StopSignals(world) as signals, ExitStack() as stack:
        opened = open_run(session, signals, stack, looked)
        recipe, state, saver = opened.session.recipe, opened.state, opened.saver
        cfg, progress, length, steps, over = recipe.train, state.progress, opened.length, opened.steps, opened.over
        scores, times = Scores(progress.scores, {}, []), state.stopwatch.read()
        if over:
            opened.write_facts()
            saver.settle_best()
            log.say(f"{log.folder.path} is finished, {over}; raise --train.epochs, or choose another --run.out")
            return _result(_kept_scores(log.folder.path, scores, progress.scored_step), progress, over, log)
        ready = make_ready(opened, signals)
        step, loader, meter, window = ready.step, ready.loader, ready.meter, ready.window
        size = RunSize(cfg.epochs, steps, length.steps_per_epoch, is_limit=bool(cfg.patience))
        first_loss, explained = 0.0, ""
        try:
            saver.settle_best()
            saver.save_first(opened.resumed)
            signals.has_begun = True
            if progress.step < min((progress.epoch + 1) * length.steps_per_epoch, steps):  # else it evaluates first
                log.await_first_step(partial(_first_step_waits_for, loader, ready.compiling.run, opened.order, device))
            loader.seek("train", progress.step, steps)
            if run.warmup_steps and progress.step < steps:
                step.warm_up(loader.next("train"), run.warmup_steps)
                loader.seek("train", progress.step, steps)
            meter.start_epoch()
            state.stopwatch.start()
            while not over:
                epoch_end = (progress.epoch + 1) * length.steps_per_epoch
                while progress.step < (end := min(epoch_end, steps)):
                    rate = recipe.schedule.rate(progress.step, ready.base_lr, length, progress.watched(recipe.schedule))
                    with window.step(progress.step + 1):  # as the log will call it
                        batch = loader.next("train")
                        if progress.step not in progress.avoid:
                            step(batch, progress.step, rate)
                    with meter.paused():  # reading a trace takes seconds
                        if table := window.take_summary():
                            log.say(table)
                    progress.step += 1
                    ready.compiling.after_step(step, batch, progress.epoch, loader, meter, signals)
                    log.stepped(progress.epoch, progress.step, size)
                    if first := meter.read_first(step):
                        log.first_step(**first)
                        first_loss = first["loss"]
                    if step.take_bad_steps(progress.step == end) and ready.bad_steps.rewound(step.last_bad_step):
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
                ends = progress.step == steps or bool(why_over(recipe, progress, epochs_done, length))
                if is_planned or (ends and cfg.eval_at_end):
                    state.share_batch_norm(cfg.bn_eval, world)
                    log.evaluation("begin", progress.step)
                    watch = partial(_watch_evaluation, signals, log, size.place(progress.epoch, progress.step))
                    with advised(device, partial(memory.evaluating, opened.evaluated, opened.sets["val"].spec)):
                        scores = found = evaluate(
                            state.evaluated_model, recipe, opened.bound["val"], loader, device, world, watch
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
                over = why_over(recipe, progress, epochs_done, length)
                saver.save_epoch(bool(over))
                log.keep_facts(bool(over))  # after an epoch, so that no step waits for it
                refuse_diverged(recipe, progress)
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
