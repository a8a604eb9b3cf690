"""Keep compiled code in the user's cache folder, and note which networks it holds, so that a second start is fast."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import tempfile

import torch

from sightline.files.whole import cache_folder
from sightline.hardware.devices import Device
from sightline.parts import Batch
from sightline.recipe.recipe import Recipe

INDUCTOR_CACHE, TRITON_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_FORBIDDEN = r'[\\/:*?"<>|]'  # what torch does not write into the name of a file


def keep_compiled_code() -> None:
    """Let Inductor and Triton write to the user's cache folder, unless the user chose others; their defaults are below
    /tmp and ~/.triton. Call it before the first kernel is compiled."""
    for variable, name in ((INDUCTOR_CACHE, "inductor"), (TRITON_CACHE, "triton")):
        folder = cache_folder(name)
        if folder and (variable not in os.environ or _is_default(os.environ[variable])):
            os.environ[variable] = str(folder)


def _is_default(place: str) -> bool:
    """Return whether this is Inductor's own choice, which torch writes into the environment when its compiler is
    imported: for a check of kernels, or by torchvision."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        user = f"uid_{os.getuid()}"
    own = f"torchinductor_{re.sub(_FORBIDDEN, '_', user)}"  # as default_cache_dir of torch; to ask it takes a second
    return place == os.path.abspath(os.path.join(tempfile.gettempdir(), own))


def key_of(recipe: Recipe, device: Device, ranks: int, batch: Batch) -> str:
    """Return in words what a compiled step depends on, of what a user chooses; `recipe.task` knows its data."""
    shapes = {key: (tuple(value.shape), str(value.dtype)) for key, value in sorted(batch.items())}
    return f"{recipe.model} {recipe.task} {recipe.train.precision} on {device.name()} of {ranks} {shapes}"


def is_known(key: str) -> bool:
    """Return whether code for this network and this machine was compiled before, into the cache in use."""
    folder = cache_folder("compiled")
    return bool(folder and (folder / _name(key)).exists())


def note_known(key: str) -> None:
    """Note that code for this network and this machine is in the cache."""
    if folder := cache_folder("compiled"):
        (folder / _name(key)).touch()


def _name(key: str) -> str:
    # The code beside these notes may be mounted elsewhere next time.
    place, ours = os.environ.get(INDUCTOR_CACHE, ""), cache_folder("inductor")
    whole = f"{key} torch {torch.__version__} in {'' if place == str(ours) else place}"
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
