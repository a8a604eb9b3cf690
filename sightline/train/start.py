"""Decide what a recipe leaves open, once, at the first start of a run: its precision, its batch, the volumes
of a batch and its decoder.

config.yaml and every checkpoint hold what was decided. A later start takes it from there, on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from sightline.data.loading.loader import worker_count
from sightline.engine.checkpoint import stored_recipe
from sightline.files.checkpoint_folder import run_of
from sightline.hardware import early_cuda
from sightline.parts import Bound, DataFacts, Dataset
from sightline.recipe.recipe import MEASURED, Recipe, Run
from sightline.train.batch_size import measure_accumulation, measure_batch
from sightline.train.config import AUTO
from sightline.train.session import Session

PRECISIONS: tuple[Literal["bf16", "fp16", "fp32"], ...] = ("bf16", "fp16", "fp32")  # ranks that differ take the later


def settle(session: Session) -> Session:
    """Return the session with precision and batch of its recipe decided, the same on all ranks. `run.out` names the
    folder."""
    stored = _stored_train(session.run)
    session = _with_precision(session, stored)
    session = _with_volumes(session)
    if session.recipe.train.measures_accumulation:
        session = _with_accumulation(session, stored)
    if session.recipe.train.measures_batch:
        session = _with_batch(session, stored)
    for text in session.recipe.schedule.warnings(session.recipe.train.epochs):
        session.log.warn(text)
    return session


def open_data(session: Session, facts: DataFacts) -> tuple[Session, dict[str, Dataset], dict[str, Bound]]:
    """Open both splits and bind them to the device; return them with the session, whose recipe is then as the data and
    the decoder make it. `facts` are what `data.look` returned for this start."""
    recipe, device = session.recipe, session.device
    data = recipe.data.in_run(_where_split_is_kept(session.run, session.log.folder.path))
    sets: dict[str, Dataset] = dict(data.open_splits(recipe.train.seed, facts).items())
    if _decodes_on_host(sets["train"], session):
        recipe = replace(recipe, data=recipe.data.on_host())
        sets = {split: dataset.on_host() for split, dataset in sets.items()}
    early_cuda.load_libraries(device, recipe.train.precision)  # not before the decoders are timed
    recipe = replace(recipe, task=recipe.task.for_data(sets["train"].spec))
    bound = {split: dataset.bind(device, recipe.train.global_batch) for split, dataset in sets.items()}
    return replace(session, recipe=recipe), sets, bound


def _decodes_on_host(dataset: Dataset, session: Session) -> bool:
    """Return whether the first start of the run chose the host's decoder; rank 0 decides for all. Runs from before
    there was a choice have the device's."""
    run, device, world = session.run, session.device, session.world
    if device.kind == "cpu":
        return False
    stored = _stored(run)
    if world.largest(int(bool(stored))):
        fields = stored.get("data")
        return bool(world.largest(int(isinstance(fields, dict) and fields.get("decoder") == "cpu")))
    is_host, line = False, ""
    if world.is_main:
        workers = max(1, worker_count(run.workers, device, world))
        is_host, line = dataset.prefers_host(device, workers, session.recipe.train.deterministic)
    if line:
        session.log.say(line)
    return bool(world.largest(int(is_host)))


def _where_split_is_kept(run: Run, folder: Path) -> Path:
    """Return the run folder, or that of the run which a first start resumes from."""
    if run.resume in ("auto", "never") or any(folder.glob("checkpoints/ckpt-*")):
        return folder
    return run_of(Path(run.resume))


def with_batch_of(recipe: Recipe, run: Run) -> Recipe:
    """Return the recipe with the batch, its parts and its volumes of another run, where its own are left open."""
    stored, cfg = _stored_train(run), recipe.train
    batch = _stored_number(stored, "global_batch") if cfg.measures_batch else 0
    parts = _stored_number(stored, "accumulation") if cfg.measures_accumulation else 0
    cfg = replace(cfg, global_batch=batch or cfg.global_batch, accumulation=parts or cfg.accumulation)
    nvol = _stored_number(_stored_part(run, "data"), "nvol")
    return replace(recipe, train=cfg, data=recipe.data.for_ranks(nvol) if nvol else recipe.data)


def _stored(run: Run) -> Mapping[str, Any]:
    """Return the recipe of the checkpoint that this start resumes from; {} if there is none."""
    return stored_recipe(Path(run.out), None if run.resume in ("auto", "never") else Path(run.resume))


def _stored_train(run: Run) -> Mapping[str, Any]:
    return _stored_part(run, "train")


def _stored_part(run: Run, name: str) -> Mapping[str, Any]:
    fields = _stored(run).get(name)
    return fields if isinstance(fields, dict) else {}


def _stored_number(stored: Mapping[str, Any], name: str) -> int:
    value = stored.get(name)
    return value if isinstance(value, int) else 0


def _with_precision(session: Session, stored: Mapping[str, Any]) -> Session:
    recipe, device, world, log = session.recipe, session.device, session.world, session.log
    wanted, kept = recipe.train.precision, stored.get("precision")
    why = device.no_bf16_because()
    falls_back = wanted == "bf16" and recipe.is_own("train.precision")
    if wanted == AUTO or falls_back:
        # 0: this is the first start. Rank 0 may see a checkpoint that another rank does not see yet.
        known = world.largest(PRECISIONS.index(kept) + 1 if kept in PRECISIONS else 0)
        resolved = PRECISIONS[known - 1] if known else device.precision_of(recipe)
        precision = PRECISIONS[world.largest(PRECISIONS.index(resolved))]
        if not known and falls_back and precision == "fp32":
            log.say(
                f"precision fp32 instead of bf16, which would only be emulated and slower: "
                f"{why or 'so says another rank'}; --train.precision bf16 forces it"
            )
        if known and precision != (now := device.precision_of(recipe)) and not (precision == "bf16" and why):
            log.say(f"precision {precision}, in which the run was started; a new run would use {now} here")
    else:
        precision = device.precision_of(recipe)
    if precision == "bf16" and why:
        advice = "the run was started in it and keeps it" if kept == "bf16" else "--train.precision fp32 is faster"
        log.warn(f"bf16 is only emulated, on a CPU up to 8 times slower than fp32: {why}; {advice}")
    return replace(session, recipe=recipe.decided({"train.precision": precision}, "this device"))


def _with_volumes(session: Session) -> Session:
    """Decide how many volumes share a batch, where that is left open: one per rank of the first start."""
    recipe, world = session.recipe, session.world
    kept = world.largest(_stored_number(_stored_part(session.run, "data"), "nvol"))
    data = recipe.data.for_ranks(kept or world.size)
    if data != recipe.data and not kept and (nvol := getattr(data, "nvol", 1)) > 1:
        session.log.say(
            f"a batch takes its slices from {nvol} volumes, one per device; the run keeps this data.nvol={nvol}"
        )
    return replace(session, recipe=replace(recipe, data=data))


def _with_accumulation(session: Session, stored: Mapping[str, Any]) -> Session:
    """Measure the parts of a batch once, with --run.override again; a batch that is measured too fits in one part."""
    recipe, run, world, log = session.recipe, session.run, session.world, session.log
    parts = world.largest(0 if run.override else _stored_number(stored, "accumulation"))
    if not parts and recipe.train.measures_batch:
        parts = 1
    if not parts:
        log.say("measuring in how many parts a batch fits into memory (train.accumulation=auto)")
        parts, note = measure_accumulation(recipe, run, session.device, world)
        log.say(note)
    return replace(session, recipe=recipe.decided({"train.accumulation": parts}, MEASURED))


def _with_batch(session: Session, stored: Mapping[str, Any]) -> Session:
    recipe, run, world, log = session.recipe, session.run, session.world, session.log
    batch = world.largest(_stored_number(stored, "global_batch"))
    if not batch:
        log.say("measuring the largest batch that is worth its memory (train.global_batch=auto)")
        batch, note = measure_batch(recipe, run, session.device, world)
        log.say(note)
    return replace(session, recipe=recipe.decided({"train.global_batch": batch}, MEASURED))
