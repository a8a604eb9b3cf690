"""Set a process up: find its place among the ranks and its device, and resolve `auto` values."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from sightline import kernels
from sightline.engine.compile_cache import keep_compiled_code
from sightline.errors import UsageError
from sightline.hardware import affinity, devices, world
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.recipe.recipe import Recipe, Run


def set_up(recipe: Recipe, run: Run) -> tuple[World, Device, Recipe]:
    """Return this process's place and device, and the recipe with its precision resolved."""
    if run.max_cpus:
        bind_to_cpus(run.max_cpus)  # before anything starts threads or processes, which inherit it
    here = world.detect()
    if run.devices and run.devices != world.local_size(here):
        raise UsageError(
            f"run.devices={run.devices}, but this process is one of {world.local_size(here)} on this host; only the "
            "commands train, evaluate, predict and benchmark start ranks by themselves. Other commands use one device: "
            f"leave --run.devices out; start a script of your own with `torchrun --nproc-per-node {run.devices}`"
        )
    devices.set_deterministic(recipe.train.deterministic)  # before anything initialises the device
    device = devices.select(run.device, here.local_rank, world.local_size(here))
    device.activate()
    if device.kind == "cuda":
        keep_compiled_code()
    cpus = run.max_cpus
    if run.affinity != "disabled":
        # After the device is known, before loader processes and torch's threads start.
        cpus = len(affinity.bind(run.affinity, device, here.local_rank, world.local_size(here)))
    kernels.use(run.kernels, recipe.train.deterministic)
    if run.threads:
        torch.set_num_threads(run.threads)
    elif cpus:
        torch.set_num_threads(min(torch.get_num_threads(), cpus))
    precision = device.precision_of(recipe)
    return here, device, recipe.decided({"train.precision": precision}, "this device")


@contextmanager
def torch_as_before() -> Iterator[None]:
    """Restore what a call changes for the whole process: random numbers, determinism, TF32, the number of threads."""
    cudnn: Any = torch.backends.cudnn
    settings = [(cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")]
    settings.append((torch.backends.cuda.matmul, "allow_tf32"))
    before = []
    for owner, name in settings:
        with suppress(RuntimeError):  # of a script that uses torch's newer names for TF32
            before.append((owner, name, getattr(owner, name)))
    determinism, threads = _determinism(), torch.get_num_threads()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(gpus, device_type="cuda"):
            yield
    finally:
        if _determinism() != determinism:  # to set it imports torch's compiler, a second of every command
            torch.use_deterministic_algorithms(determinism[0], warn_only=determinism[1])
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for owner, name, value in before:
            setattr(owner, name, value)


def _determinism() -> tuple[bool, bool]:
    """Return whether only deterministic algorithms are allowed, and whether others only cause a warning."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def bind_to_cpus(count: int) -> None:
    """Bind this process to the first `count` of the CPUs it may use."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"run.max_cpus={count}: {sys.platform} cannot bind a process to CPUs; leave it out")
    allowed = sorted(os.sched_getaffinity(0))
    if count > len(allowed):
        raise UsageError(
            f"run.max_cpus={count}, but this process may use {len(allowed)} CPUs ({', '.join(map(str, allowed))}); "
            f"give at most {len(allowed)}, or leave it out"
        )
    os.sched_setaffinity(0, allowed[:count])
