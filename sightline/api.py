"""For Python users, and what the command line calls: load a recipe, train it, evaluate a run.

recipe, run = sightline.api.load("demo_classification", ["--data.path", "shapes/classification"])
scores = sightline.api.train(recipe, run)
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from sightline import config
from sightline.config import Recipe, Run, load
from sightline.data.loader import Loader, worker_count
from sightline.data.order import EvalOrder
from sightline.errors import BadData, OutOfMemory, SightlineError
from sightline.evaluate.run import evaluate as evaluate_model
from sightline.hardware import devices, world
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.log import RunLog, environment
from sightline.parts import DataSpec, Scores
from sightline.train import checkpoint, loop
from sightline.train.signals import StopSignals

__all__ = ["evaluate", "load", "train"]


def train(recipe: Recipe, run: Run) -> Scores:
    """Trains on this process's device, together with the other ranks if a launcher started several."""
    here, device, recipe = _set_up(recipe, run)
    log = RunLog(Path(run.out or f"runs/{recipe.name}"), run.progress, here.is_main)
    code, reason = 1, "crashed"
    try:
        here = world.connect(here, device)
        log.write_file("environment.json", json.dumps(environment(device, here.size), indent=1) + "\n")
        log.write_file("config.yaml", config.dump(recipe, run))
        scores = loop.train(recipe, run, device, here, log)
        code, reason = 0, "finished"
        return scores
    except torch.OutOfMemoryError as error:
        peak = device.peak_memory_bytes() / 1e9
        raise OutOfMemory(
            f"{device.name()} ran out of memory (peak {peak:.1f} GB) with {recipe.train.global_batch // here.size} "
            f"samples at once per device; cut them with --train.accumulation {recipe.train.accumulation * 2} ({error})"
        ) from error
    except SightlineError as error:
        code, reason = error.exit_code, str(error)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        log.close(code, reason)
        here.close()


def evaluate(run_folder: str, flags: list[str], which: str = "best", recipe_file: str = "") -> Scores:
    """Scores of a checkpoint on its recipe's val split; flags may change data.path and run fields."""
    path = checkpoint.find(Path(run_folder), which)
    tensors, stored = checkpoint.read(path)
    recipe, run = config.from_json(stored["recipe"], recipe_file, flags)
    here, device, recipe = _set_up(recipe, run)
    dataset = recipe.data.open("val", recipe.train.seed)
    spec = DataSpec.from_json(stored["spec"])
    if dataset.spec != spec:
        raise BadData(f"the data do not fit {path}: it was trained on {_differences(spec, dataset.spec)}")
    here = world.connect(here, device)
    model = recipe.model.build(spec)
    model.load_state_dict(tensors.get("ema", tensors["model"]))
    model = model.to(device.torch_device)
    if run.channels_last:
        model = model.to(memory_format=torch.channels_last)
    order = EvalOrder(len(dataset), recipe.train.global_batch, here.rank, here.size)
    is_run = path.parent.name == "checkpoints"
    log = RunLog(path.parent.parent if is_run else path, run.progress, here.is_main)
    with StopSignals(here) as signals:
        loader = Loader(
            {"val": dataset},
            {"val": order},
            recipe.data,
            device,
            workers=worker_count(run.workers, device, here),
            prefetch=run.prefetch,
            on_bad=log.bad_sample,
            check_stop=signals.check,
        )
        try:
            scores = evaluate_model(
                model,
                recipe.task,
                dataset,
                loader,
                device,
                here,
                recipe.train.precision,
                lambda done, total: log.evaluating(done, total, done, total),
            )
        finally:
            loader.close()
            here.close()
    log.scores(scores, recipe.task.headline, checkpoint=path.name, step=stored["progress"]["step"])
    return scores


def _set_up(recipe: Recipe, run: Run) -> tuple[World, Device, Recipe]:
    """This process's place and device; `auto` values become what they mean here."""
    here = world.detect()
    devices.set_deterministic(recipe.train.deterministic)
    device = devices.select(run.device, here.local_rank)
    device.activate()
    if run.threads:
        torch.set_num_threads(run.threads)
    precision = device.resolve_precision(recipe.train.precision)
    return here, device, dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, precision=precision))


def _differences(trained: DataSpec, found: DataSpec) -> str:
    if trained.classes != found.classes:
        return (
            f"{len(trained.classes)} classes ({', '.join(trained.classes[:3])}, ...), "
            f"found {len(found.classes)} ({', '.join(found.classes[:3])}, ...)"
        )
    return f"{trained}, found {found}"
