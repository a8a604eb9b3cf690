"""For Python users, and what the command line calls: load a recipe, train it, evaluate a run.

`api.train(*api.load("demo_classification", ["--data.path", DIR]))`, in a script under `if __name__ == "__main__":`,
because loader workers import the script again.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from sightline import config
from sightline.benchmark_log import BenchmarkLog
from sightline.config import Recipe, Run, load
from sightline.data.loader import Loader, worker_count
from sightline.errors import BadData, OutOfMemory, SightlineError
from sightline.evaluate.run import evaluate as evaluate_model
from sightline.evaluate.run import order_for
from sightline.hardware import world
from sightline.hardware.precision import keep_fp32
from sightline.hardware.setup import set_up
from sightline.log import RunLog
from sightline.parts import DataSpec, Scores
from sightline.train import checkpoint, loop
from sightline.train.signals import StopSignals

__all__ = ["evaluate", "load", "train"]


def train(recipe: Recipe, run: Run) -> Scores:
    """Trains on this process's device, together with the other ranks if a launcher started several."""
    here, device, recipe = set_up(recipe, run)
    folder = Path(run.out or f"runs/{recipe.name}")
    log = RunLog(folder, run.progress, here.is_main, tensorboard=run.tensorboard)
    code, reason = 1, "crashed"
    try:
        if run.benchmark_log and here.is_main:  # now that the folder is ours
            log.feed(BenchmarkLog(Path(run.benchmark_log), recipe.name, config.leaves(recipe, run), run.test_id))
        here = world.connect(here, device)
        scores = loop.train(recipe, run, device, here, log)
        log.hyperparameters(config.leaves(recipe, run), scores.values)
        code, reason = 0, "finished"
        return scores
    except torch.OutOfMemoryError as error:
        peak = device.peak_memory_bytes() / 1e9
        samples = recipe.train.global_batch // here.size // recipe.train.accumulation
        reason = (
            f"{device.name()} ran out of memory (peak {peak:.1f} GB) with {samples} samples at once per device; "
            f"cut them with --train.accumulation {recipe.train.accumulation * 2} --run.override ({error})"
        )
        code = OutOfMemory.exit_code
        raise OutOfMemory(reason) from error
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
    here, device, recipe = set_up(recipe, run)
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
    keep_fp32(model, recipe.train.fp32_ops, device)
    order = order_for(recipe.train, len(dataset), here)
    is_run = path.parent.name == "checkpoints"
    folder = Path(run.out) if run.out else path.parent.parent if is_run else path
    folder.mkdir(parents=True, exist_ok=True)
    log = RunLog(folder, run.progress, here.is_main, claims=False)
    with contextlib.ExitStack() as stack:
        stack.callback(log.release)
        stack.callback(here.close)
        signals = stack.enter_context(StopSignals(here))
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
        stack.callback(loader.close)
        for note in loader.notes:
            log.say(note)
        scores = evaluate_model(
            model,
            recipe.task,
            dataset,
            loader,
            device,
            here,
            recipe.train.eval_precision,
            lambda done, total: log.evaluating(done, total, done, total),
            recipe.train.eval_shards,
        )
        log.scores(scores, f"scores-{path.name}.json", checkpoint=path.name, step=stored["progress"]["step"])
    return scores


def _differences(trained: DataSpec, found: DataSpec) -> str:
    if trained.classes != found.classes:
        return (
            f"{len(trained.classes)} classes ({', '.join(trained.classes[:3])}, ...), "
            f"found {len(found.classes)} ({', '.join(found.classes[:3])}, ...)"
        )
    return f"{trained}, found {found}"
