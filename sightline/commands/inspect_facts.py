"""Describe a recipe without training it: size, work, groups, steps, learning rates, resolved fields."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from sightline.engine.model import choose_trainable
from sightline.engine.orders import train_order
from sightline.errors import SightlineError, UsageError
from sightline.parts import DataSpec
from sightline.recipe import store
from sightline.recipe.recipe import Recipe, Run
from sightline.train.optimizers import said_rate
from sightline.train.schedules import length_of


def inspect(
    recipe: Recipe, run: Run, lr_at: Sequence[int] = (), ranks: int | None = None, has_started: bool = False
) -> dict[str, Any]:
    """Return facts about a recipe on `ranks` devices, by default those that --run.devices starts; facts that depend on
    the data only with --data.path. The weights of a run that has started may be gone."""
    ranks = max(1, run.devices) if ranks is None else ranks
    if ranks < 1:
        raise UsageError(f"--ranks {ranks} must be at least 1")
    if any(step < 0 for step in lr_at):
        raise UsageError(f"--lr-at {min(lr_at)} is not a step; steps are counted from 0")
    spec, items, each = _data(recipe)
    with torch.device("meta"):
        model = recipe.model.build(spec).eval()
        choose_trainable(model, recipe.train.trainable)
        image = torch.zeros(1, spec.channels, *spec.size)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(image)
    found: dict[str, Any] = {
        "recipe": recipe.name,
        "classes": len(spec.classes),
        "parameters": sum(p.numel() for p in model.parameters()),
        "forward_gflop": counter.get_total_flops() / 1e9,  # a multiply and an add are two
        "groups": [
            {"weight_decay": decay, "tensors": len(group), "parameters": sum(p.numel() for _, p in group)}
            for decay, group in recipe.optimizer.groups(model)
        ],
    }
    cfg = recipe.train
    found["base_lr"] = {str(n): recipe.optimizer.base_lr(cfg.global_batch, n) for n in sorted({1, 2, ranks})}
    if items:
        length = length_of(cfg, train_order(cfg, items, each, ranks=ranks))
        found |= {"samples": length.samples, "steps_per_epoch": length.steps_per_epoch, "steps": length.steps}
        found["lr_at"] = {str(step): recipe.schedule.rate(step, found["base_lr"][str(ranks)], length) for step in lr_at}
    elif lr_at:
        raise UsageError("--lr-at needs to know the steps per epoch: give --data.path or --data.samples too")
    if getattr(recipe.model, "weights", ""):
        try:
            loaded = recipe.model.load_weights(recipe.model.build(spec))
            found["weights"] = {"note": loaded.note, "tensors": [asdict(row) for row in loaded.tensors]}
        except SightlineError as error:
            if not has_started:
                raise
            note = f"{str(error).removeprefix('weights ')}; the run has what it loaded at its start"
            found["weights"] = {"note": note, "tensors": []}
    found["config"] = {**store.to_json(recipe), "run": vars(run)}
    return found


def as_text(found: dict[str, Any], why: Sequence[str], as_json: bool) -> str:
    """Format the facts as JSON, or for people, then with the values that differ from the recipe, and why."""
    if as_json:
        return json.dumps(found, indent=1)
    lines = [
        f"{found['recipe']}: {found['parameters']:,} parameters, {found['forward_gflop']:.3g} GFLOP forward per "
        f"image, {found['classes']} classes"
    ]
    form = found["config"]["optimizer"]["decay_form"]
    lines += [
        f"  {group['parameters']:,} parameters in {group['tensors']} tensors decay by {group['weight_decay']:g}"
        + (f" ({form})" if group["weight_decay"] and form != "gradient" else "")
        for group in found["groups"]
    ]
    rates = found["base_lr"]
    if len(set(rates.values())) > 1:
        lines.append("  base rate " + ", ".join(f"{rate:g} on {n} rank(s)" for n, rate in rates.items()))
    else:
        optimizer = found["config"]["optimizer"]
        said = said_rate(rates["1"], optimizer.get("lr", 0.0), optimizer.get("lr_for_batch", 0))
        lines.append(f"  base rate {said}")
    if "steps" in found:
        lines.append(
            f"  {found['samples']:,} samples, {found['steps_per_epoch']} steps per epoch, {found['steps']} in all"
        )
        lines += [f"  learning rate at step {step}: {rate:.6g}" for step, rate in found["lr_at"].items()]
    if "weights" in found:
        lines += _weights_table(**found["weights"])
    lines.append("  differs from the recipe:" if why else "  every value is the recipe's own")
    return "\n".join([*lines, *(f"    {line}" for line in why)])


def _weights_table(note: str, tensors: list[dict[str, str]]) -> list[str]:
    """Return a line per tensor that was not loaded as it is: what became of it, its name, its shape in the model, and
    its shape in the file."""
    counts = Counter(row["state"] for row in tensors)
    others = [row for row in tensors if row["state"] != "loaded"]
    width = max((len(row["name"]) for row in others), default=0)
    every = " (--json lists every one)" if len(others) < len(tensors) else ""
    return [
        f"  weights: {note}",
        *(["  " + ", ".join(f"{count} tensors {state}" for state, count in counts.items()) + every] if counts else []),
        *(
            f"    {row['state']:9} {row['name']:{width}}  {row['here'] or '-'} <- {row['there'] or '-'}"
            for row in others
        ),
    ]


def _data(recipe: Recipe) -> tuple[DataSpec, int, int]:
    """Return spec, items and samples of an item, of the data or, without any, as the recipe declares them."""
    declared, batch = recipe.data.declared(), recipe.train.global_batch
    if declared is not None:
        return (*declared, recipe.data.declared_per_item(batch))
    dataset = recipe.data.open("train", recipe.train.seed)
    return dataset.spec, len(dataset), dataset.samples_per_item(batch)
