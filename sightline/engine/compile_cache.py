"""Keep compiled code in the user's cache folder, and note which networks it holds, so that a second start is fast."""

from __future__ import annotations

import hashlib
import os

import torch

from sightline.files.whole import cache_folder

INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's own lies below, unless TRITON_CACHE_DIR is set


def keep_compiled_code() -> None:
    """Let Inductor write to the user's cache folder, unless the user chose another; its default is below /tmp."""
    folder = cache_folder("inductor")
    if folder:
        os.environ.setdefault(INDUCTOR_CACHE, str(folder))


def is_known(key: str) -> bool:
    """Return whether code for this network and this machine was compiled before, into the cache in use."""
    folder = cache_folder("compiled")
    return bool(folder and (folder / _name(key)).exists())


def note_known(key: str) -> None:
    """Note that code for this network and this machine is in the cache."""
    if folder := cache_folder("compiled"):
        (folder / _name(key)).touch()


def _name(key: str) -> str:
    whole = f"{key} torch {torch.__version__} in {os.environ.get(INDUCTOR_CACHE, '')}"
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
