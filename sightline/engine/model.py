"""Build the network of a recipe on its device. Train, evaluate, predict and benchmark all build it here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from sightline.errors import UsageError
from sightline.hardware.devices import Device, place
from sightline.hardware.precision import keep_fp32
from sightline.hardware.world import World
from sightline.kernels import batch_norm_check, bottleneck_check
from sightline.models import norm
from sightline.parts import DataSpec, ModelConfig
from sightline.recipe.recipe import Recipe, Run

ShapesOf = Callable[[int], list[tuple[int, ...]]]


class BuiltModel(NamedTuple):
    """A network on its device, and notes for the user about how it was built."""

    model: nn.Module
    notes: list[str]


def build_model(
    recipe: Recipe,
    run: Run,
    spec: DataSpec,
    device: Device,
    world: World | None = None,
    within: contextlib.AbstractContextManager[object] | None = None,
) -> BuiltModel:
    """Build the network with random weights, which are a function of the seed on any device.

    `world` is given for training only: its ranks may share batch-norm statistics. The network itself is made inside
    the context `within`, where evaluation limits the size that a checkpoint may ask for.
    """
    torch.manual_seed(recipe.train.seed)
    with within or contextlib.nullcontext():
        model = recipe.model.build(spec)
    model = place(model, device, run.channels_last)
    joined = join_batch_norms(model, recipe.train.bn_group, world) if world else ""
    not_kept = keep_fp32(model, recipe.train.fp32_ops, device)
    missing = f"train.fp32_ops: the model has no module {', '.join(not_kept)}; left alone" if not_kept else ""
    chosen = choose_kernels(model, recipe, run, spec, world) if world else []
    return BuiltModel(model, [note for note in (joined, missing, *chosen) if note])


def choose_kernels(model: nn.Module, recipe: Recipe, run: Run, spec: DataSpec, world: World) -> list[str]:
    """Let a network that trains use kernels that work here; return notes for the user.

    Before it is compiled or captured, so that a kernel's `applies` only looks up what was decided.
    """
    cfg, local_batch = recipe.train, int(recipe.train.global_batch) // world.size
    notes = [
        bottleneck_check.choose(model, cfg.precision, cfg.deterministic, run.channels_last),
        batch_norm_check.choose(model, cfg.precision, run.channels_last, local_batch, spec.size),
    ]
    if any(isinstance(module, _InstanceNorm) for module in model.modules()):
        from sightline.kernels import instance_norm_check  # 30 ms that networks without such norms need not wait for

        parts = 1 if cfg.measures_accumulation else int(cfg.accumulation)
        shapes_of: ShapesOf | None = getattr(model, "norm_shapes", None)  # of those that know them
        shapes = shapes_of(local_batch // parts) if shapes_of else []
        notes.append(instance_norm_check.choose(model, cfg.precision, run.channels_last, shapes))
    return notes


def join_batch_norms(model: nn.Module, bn_group: int, world: World) -> str:
    """Let groups of `bn_group` ranks share their batch-norm statistics; return a note for the user."""
    if bn_group > 1 and world.size % bn_group:
        raise UsageError(
            f"train.bn_group={bn_group} does not divide the number of ranks, {world.size}; "
            f"use 0 (each its own), -1 (all) or a divisor"
        )
    if world.size == 1 or bn_group in (0, 1):
        return ""
    joined = norm.convert(model, bn_group)
    if not joined:
        return f"train.bn_group={bn_group}: the model has no batch-norm; left alone"
    of = world.size if bn_group == norm.ALL_RANKS else bn_group
    return f"train.bn_group: {joined} batch-norms have the statistics of {of} ranks in training"


def head_of(config: ModelConfig, model: nn.Module) -> tuple[str, ...]:
    """Return the beginnings of the names of the head's parameters; the last linear layer if the config names none."""
    linear = [f"{name}." for name, module in model.named_modules() if name and isinstance(module, nn.Linear)]
    head = config.head_prefixes(model) or tuple(linear[-1:])
    names = [name for name, _ in model.named_parameters()]
    if not head or all(name.startswith(head) for name in names):
        raise UsageError(
            f"train.head_epochs and optimizer.trunk_lr_scale need a head and a trunk, {type(model).__name__} has only "
            f"one of them; add --train.head-epochs 0 --optimizer.trunk-lr-scale 1"
        )
    return head


def choose_trainable(model: nn.Module, rule: str) -> None:
    """Freeze all parameters but those of the last linear layer where the rule is "head"."""
    if rule == "all":
        return
    heads = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not heads:
        raise UsageError(f"train.trainable=head needs a linear layer, {type(model).__name__} has none; use all")
    model.requires_grad_(False)
    heads[-1].requires_grad_(True)
