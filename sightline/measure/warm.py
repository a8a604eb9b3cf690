"""`sightline warm RECIPE`: make a first step in each way in which a run may make it.

The user's cache folder then holds all that is compiled, checked and chosen for it, and a start that finds this folder,
on any machine of the kind, reads it there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from sightline.engine.compile_cache import INDUCTOR_CACHE, TRITON_CACHE, keep_compiled_code, key_of, note_known
from sightline.engine.setup import set_up
from sightline.errors import UsageError
from sightline.files.whole import cache_folder, user_cache
from sightline.hardware.devices import Device
from sightline.hardware.world import World, joined
from sightline.measure.benchmark import bound_of, synthetic_data
from sightline.measure.our_step import OurStep
from sightline.measure.peers import Say, free
from sightline.parts import Bound
from sightline.recipe.recipe import Recipe, Run


def warm(recipe: Recipe, run: Run, say: Say) -> None:
    """Make first steps on the recipe's data, or on synthetic ones of their size where no path is given."""
    if cache_folder("compiled") is None:
        raise UsageError(f"{user_cache() or '~/.cache'} cannot be written; set XDG_CACHE_HOME to a folder that can")
    here, device, recipe = set_up(recipe, run)
    keep_compiled_code()
    ways = _ways(run, device)
    recipe = replace(recipe, data=recipe.data.for_ranks(here.size))
    is_real = bool(getattr(recipe.data, "path", ""))
    say = say if here.is_main else (lambda _: None)
    with joined(here, device, "warming", "give the command again", say) as here:
        bound = bound_of(recipe, device) if is_real else synthetic_data(recipe, device)
        for way in ways:
            what = "compiled" if way == "on" else "not compiled"
            say(f"making a first step, {what}; with empty caches it takes a minute or more")
            seconds = _first_step(recipe, replace(run, compile=way), bound, device, is_real, say, here)
            say(f"first step, {what}: {seconds:.1f} s")
            free(device)
    for folder in _folders():
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        say(f"{folder}: {len(sizes)} files, {sum(sizes) / 1e6:.0f} MB")


def _ways(run: Run, device: Device) -> Sequence[Literal["on", "off"]]:
    """Return whether a run with this --run.compile will be compiled: maybe both, one after the other."""
    if run.compile == "auto" and device.compile_auto:
        return ("on", "off")
    if run.compile == "on" or device.kind == "cuda":
        return ("on" if run.compile == "on" else "off",)
    raise UsageError(f"nothing is compiled on {device.kind} unless --run.compile on says so; add it, or use a GPU")


def _first_step(recipe: Recipe, run: Run, bound: Bound, device: Device, is_real: bool, say: Say, here: World) -> float:
    step = OurStep(recipe, run, bound, device, is_real, say, (0, 0), here)
    try:
        if run.compile == "on":
            note_known(key_of(step.recipe, device, here.size, step.kept[0]))
        return step.first_s
    finally:
        step.close()


def _folders() -> list[Path]:
    """Return the folders that hold what was made: one, unless variables of torch name others."""
    ours = user_cache()
    named = [Path(os.environ[name]) for name in (INDUCTOR_CACHE, TRITON_CACHE) if name in os.environ]
    others = [folder for folder in named if ours is None or not folder.is_relative_to(ours)]
    return [folder for folder in ([ours] if ours else []) + others if folder.is_dir()]
