"""Decide what a recipe leaves open, once, at the first start of a run: its precision and its batch.

config.yaml and every checkpoint hold what was decided. A later start takes it from there, on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from sightline.config import Recipe, Run
from sightline.hardware.devices import BF16_OR_FP32, Device
from sightline.hardware.world import World
from sightline.runs.log import RunLog
from sightline.train.batch_size import measure_batch
from sightline.train.checkpoint import stored_recipe
from sightline.train.config import AUTO

PRECISIONS: tuple[Literal["bf16", "fp16", "fp32"], ...] = ("bf16", "fp16", "fp32")  # ranks that differ take the later


def settle(recipe: Recipe, run: Run, device: Device, world: World, log: RunLog) -> Recipe:
    """Return the recipe with its precision and batch decided, the same on all ranks. `run.out` names the folder."""
    stored = _stored_train(run)
    recipe = _with_precision(recipe, stored, device, world, log)
    if recipe.train.measures_batch:
        recipe = _with_batch(recipe, run, stored, device, world, log)
    for text in recipe.schedule.warnings(recipe.train.epochs):
        log.warn(text)
    return recipe


def with_batch_of(recipe: Recipe, run: Run) -> Recipe:
    """Return the recipe with the batch that another run has measured, where its own is left open."""
    batch = _stored_batch(_stored_train(run)) if recipe.train.measures_batch else 0
    return replace(recipe, train=replace(recipe.train, global_batch=batch)) if batch else recipe


def _stored_train(run: Run) -> Mapping[str, Any]:
    """Return the train fields of the checkpoint that this start resumes from; {} if there is none."""
    elsewhere = None if run.resume in ("auto", "never") else Path(run.resume)
    fields = stored_recipe(Path(run.out), elsewhere).get("train")
    return fields if isinstance(fields, dict) else {}


def _stored_batch(stored: Mapping[str, Any]) -> int:
    batch = stored.get("global_batch")
    return batch if isinstance(batch, int) else 0


def _with_precision(recipe: Recipe, stored: Mapping[str, Any], device: Device, world: World, log: RunLog) -> Recipe:
    wanted, kept = recipe.train.precision, stored.get("precision")
    why = device.no_bf16_because()
    if wanted in (AUTO, BF16_OR_FP32):
        # 0: this is the first start. Rank 0 may see a checkpoint that another rank does not see yet.
        known = world.largest(PRECISIONS.index(kept) + 1 if kept in PRECISIONS else 0)
        resolved = PRECISIONS[known - 1] if known else device.resolve_precision(wanted)
        precision = PRECISIONS[world.largest(PRECISIONS.index(resolved))]
        if not known and wanted == BF16_OR_FP32 and precision == "fp32":
            log.say(
                f"precision fp32 instead of bf16, which would only be emulated and slower: "
                f"{why or 'so says another rank'}; --train.precision bf16 forces it"
            )
    else:
        precision = device.resolve_precision(wanted)
    if precision == "bf16" and why:
        advice = "the run was started in it and keeps it" if kept == "bf16" else "--train.precision fp32 is faster"
        log.warn(f"bf16 is only emulated, on a CPU up to 8 times slower than fp32: {why}; {advice}")
    return replace(recipe, train=replace(recipe.train, precision=precision))


def _with_batch(
    recipe: Recipe, run: Run, stored: Mapping[str, Any], device: Device, world: World, log: RunLog
) -> Recipe:
    batch = world.largest(_stored_batch(stored))
    if not batch:
        log.say("measuring the largest batch that is worth its memory (train.global_batch=auto)")
        batch, note = measure_batch(recipe, run, device, world)
        log.say(note)
    return replace(recipe, train=replace(recipe.train, global_batch=batch))
