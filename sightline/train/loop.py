"""train(): the whole story, top to bottom."""

from __future__ import annotations

import json
from pathlib import Path

from sightline import config
from sightline.config import Recipe, Run
from sightline.data.loader import Loader, worker_count
from sightline.data.order import EvalOrder, TrainOrder
from sightline.errors import BadCheckpoint, BadData, DiskFull, Interrupted, NotFinite, UsageError
from sightline.evaluate.run import evaluate
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.log import RunLog, environment
from sightline.measure.profile import ProfileWindow, parse_window
from sightline.parts import Dataset, Scores
from sightline.train.checkpoint import Checkpoints, find, read
from sightline.train.meter import Meter
from sightline.train.schedules import Plan
from sightline.train.signals import StopSignals
from sightline.train.state import TrainState
from sightline.train.step import Step, build_step

# Other weights would not fit, and the position in the run is counted in steps of this many samples.
NEVER_OVERRIDDEN = ("model.", "train.global_batch:", "train.last_batch:")


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
        checkpoints = Checkpoints(log.folder / "checkpoints", run.keep, log.warn)
        if world.is_main:
            checkpoints.prove_writable()
        resumed = _resume(recipe, run, state, checkpoints, sets, device, world, log)
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

        def save(must_succeed: bool = False) -> None:
            _save(recipe, state, checkpoints, sets, device, world, log, must_succeed)

        try:
            # Something of our own to go back to; decided by what all ranks know alike.
            if run.on_nan == "rewind" and (not resumed or run.resume not in ("auto", "never")):
                save()
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
                    if step.take_bad_steps() and _rewound(run, step, state, checkpoints, order, sets["train"], log):
                        loader.seek("train", progress.step, steps)
                        end = (progress.epoch + 1) * plan.steps_per_epoch
                    if progress.step % run.log_every_steps == 0 or progress.step == end:
                        line = meter.read(step, progress.step, rate)
                        log.training(progress.epoch, cfg.epochs, progress.step, steps, line)
                    if run.checkpoint_every_steps and progress.step % run.checkpoint_every_steps == 0:
                        with meter.paused():
                            save()
                    signals.agree()

                last = progress.epoch + 1 == cfg.epochs
                if last or (progress.epoch + 1) % cfg.eval_every_epochs == 0:
                    _share_batch_norm(cfg.bn_eval, state, world)

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
                save(must_succeed=last)
                meter.restart()
        except Interrupted:
            save(must_succeed=True)
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


def _resume(
    recipe: Recipe,
    run: Run,
    state: TrainState,
    checkpoints: Checkpoints,
    sets: dict[str, Dataset],
    device: Device,
    world: World,
    log: RunLog,
) -> bool:
    """Brings the state of the newest good checkpoint back, unless it belongs to another recipe or other data."""
    if run.resume == "never" and checkpoints.names():
        raise UsageError(f"{log.folder} holds checkpoints and --run.resume never was given; choose another --run.out")
    if not world.is_main:
        world.barrier()  # rank 0 first: it moves damaged checkpoints out of the way
    if run.resume in ("auto", "never") or checkpoints.names():
        # PATH is where a run begins; once its folder has checkpoints of its own, the same command goes on from them.
        found = checkpoints.newest()
    else:
        path = find(Path(run.resume), "latest")
        found = (*read(path), path)
    if world.is_main:
        world.barrier()
    if found is None:
        note = recipe.model.start_from(state.model)
        if note:
            log.say(note)
            if state.ema:
                state.ema.model.load_state_dict(state.model.state_dict())
        return False
    tensors, stored, path = found
    changes = config.diff(stored["recipe"], recipe)
    if changes and (not run.override or any(change.startswith(NEVER_OVERRIDDEN) for change in changes)):
        listed = "\n  ".join(changes)
        raise UsageError(
            f"{path} was made with another recipe:\n  {listed}\nGive the old values back, choose another --run.out, "
            f"or add --run.override to go on with the new ones (not for model fields and the batch)"
        )
    for split, dataset in sets.items():
        if stored["fingerprints"][split] != dataset.fingerprint and not run.override:
            raise BadData(
                f"the {split} data are not those that {path} was trained on (files were added, removed or changed); "
                f"bring them back, choose another --run.out, or add --run.override to go on with these"
            )
    now = environment(device, world.size)
    for name in ("threads", "device", "ranks", "packages"):
        if stored["environment"][name] != now[name]:
            log.warn(f"{name} was {stored['environment'][name]} and is {now[name]}: the last bits may differ")
    state.load(tensors, stored["progress"])
    log.event("resume", checkpoint=path.name, step=state.progress.step, changes=changes)
    return True


def _save(
    recipe: Recipe,
    state: TrainState,
    checkpoints: Checkpoints,
    sets: dict[str, Dataset],
    device: Device,
    world: World,
    log: RunLog,
    must_succeed: bool,
) -> None:
    """Writes a checkpoint on rank 0. A full disk is a warning while the run can go on without."""
    _share_batch_norm(recipe.train.bn_eval, state, world)
    if not state.weights_are_finite():
        raise NotFinite(
            f"weights are not finite at step {state.progress.step}; nothing was saved over good checkpoints"
        )
    if world.is_main:
        stored = {
            "progress": state.progress_json(),
            "recipe": config.to_json(recipe),
            "spec": sets["train"].spec.to_json(),
            "fingerprints": {split: dataset.fingerprint for split, dataset in sets.items()},
            "environment": environment(device, world.size),
        }
        try:
            path = checkpoints.save(state.progress.step, state.tensors(), stored, state.progress.best_step)
            log.event("checkpoint", step=state.progress.step, name=path.name)
        except DiskFull as error:
            if must_succeed:
                raise
            log.warn(str(error))
    world.barrier()


def _share_batch_norm(rule: str, state: TrainState, world: World) -> None:
    """Ranks see different pictures, so their statistics differ; `rule` says whose are evaluated and saved."""
    if rule == "averaged":
        world.average(state.batch_norm_statistics())
    elif rule == "rank0":
        world.copy_from_main(state.batch_norm_statistics())


def _rewound(
    run: Run, step: Step, state: TrainState, checkpoints: Checkpoints, order: TrainOrder, dataset: Dataset, log: RunLog
) -> bool:
    """What `--run.on-nan` says about a step that was not finite; True if the state went back to a checkpoint."""
    _, indices = order.batch(step.last_bad_step)
    names = [dataset.name(index) for index in indices[:8].tolist()]
    bad_steps = state.progress.bad_steps = state.progress.bad_steps + 1
    log.event("bad_step", step=step.last_bad_step, samples=[int(i) for i in indices])
    happened = f"loss or gradient not finite in step {step.last_bad_step} (samples {', '.join(names)}, ...)"
    if run.on_nan == "stop" or bad_steps > run.max_bad_steps:
        raise NotFinite(
            f"{happened}; {bad_steps} such steps so far. Checkpoints from before are intact: go on with "
            f"--run.on-nan skip, or with --run.override and a lower --optimizer.lr or --train.clip 1"
        )
    if run.on_nan == "skip":
        log.warn(f"{happened}: skipped")
        return False
    found = checkpoints.newest()
    if found is None:
        raise BadCheckpoint(f"{happened} and there is no checkpoint to rewind to")
    avoid = sorted({*state.progress.avoid, step.last_bad_step})
    state.load(found[0], found[1]["progress"])
    state.progress.avoid, state.progress.bad_steps = avoid, bad_steps
    log.warn(f"{happened}: back to step {state.progress.step}, leaving it out")
    return True
