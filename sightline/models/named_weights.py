"""Weights by name: torchvision:NAME and timm:NAME, fetched once into the user's cache.

The libraries say where a file is; files/download.py fetches it, checks it and lets other ranks wait.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from sightline.errors import UsageError
from sightline.files.checkpoint_folder import sha256_of
from sightline.files.download import NotFetched, Patience, checksum_in, fetch_by_name, shown_address
from sightline.files.whole import user_cache
from sightline.terminal.progress import shown_progress

HUB = "https://huggingface.co"
PYTORCH = "https://download.pytorch.org/models/"
FILES = {  # of weights that recipes start from by themselves, named here because importing torchvision takes seconds
    "resnet18": "resnet18-f37072fd.pth",
    "resnet34": "resnet34-b627a593.pth",
    "resnet50": "resnet50-11ad3fa6.pth",
}
PATIENCE = Patience(tries=3)  # whoever has no network learns it within seconds


def fetch_named(source: str, patience: Patience | None = None) -> Path | None:
    """Return the file of torchvision:NAME or timm:NAME, fetched unless a cache has it; None for any other source."""
    if (place := _place(source)) is None:
        return None
    url, file_name = place
    if there := _of_torch(file_name):
        return there
    target = cache_folder() / file_name
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with shown_progress() as progress:
            fetch_by_name(url, target, progress, patience or PATIENCE)
    except NotFetched as error:
        raise NotFetched(f"{source}: {error}") from error
    return target


def is_cached(source: str) -> bool:
    """Return whether the file of torchvision:NAME or timm:NAME is on this machine."""
    place = _place(source)
    return place is not None and ((cache_folder() / place[1]).is_file() or _of_torch(place[1]) is not None)


def address(source: str) -> str:
    """Return where the file of torchvision:NAME or timm:NAME can be fetched. UsageError for a name without weights."""
    place = _place(source)
    return place[0] if place else ""


def by_hand(source: str) -> str:
    """Say where the file of torchvision:NAME or timm:NAME comes from, and where a cache would have it."""
    place = _place(source)
    return f"put {shown_address(place[0])} at {cache_folder() / place[1]}" if place else ""


def _place(source: str) -> tuple[str, str] | None:
    """Return address and file name of torchvision:NAME or timm:NAME; None for any other source."""
    library, colon, name = source.partition(":")
    if not colon or library not in ("torchvision", "timm"):
        return None
    return _torchvision(name) if library == "torchvision" else _timm(name)


def _of_torch(file_name: str) -> Path | None:
    """Return a file that torch.hub has fetched, if it has the checksum in its name."""
    home = os.environ.get("TORCH_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "torch")
    path, part = Path(home, "hub", "checkpoints", file_name).expanduser(), checksum_in(file_name)
    return path if part and path.is_file() and sha256_of(path).startswith(part) else None


def cache_folder() -> Path:
    """Return the folder of fetched weights."""
    cache = user_cache()
    if cache is None:
        raise UsageError("there is no home folder for fetched weights; set XDG_CACHE_HOME to an absolute path")
    return cache / "weights"


def _torchvision(name: str) -> tuple[str, str]:
    """Return address and file name of resnet50 (its default weights) or resnet50.IMAGENET1K_V1."""
    if name in FILES:
        return PYTORCH + FILES[name], FILES[name]
    import torchvision

    model, _, member = name.partition(".")
    known = torchvision.models.list_models()
    if model not in known:
        raise UsageError(f"torchvision:{name}: torchvision has no model '{model}'{_near(model, known)}")
    entries = torchvision.models.get_model_weights(model)
    if not len(entries):
        raise UsageError(f"torchvision:{name}: torchvision has no weights of {model}; choose another model")
    if member and member not in entries.__members__:
        raise UsageError(f"torchvision:{name}: {model} has the weights {', '.join(entries.__members__)}")
    url = (entries[member] if member else entries["DEFAULT"]).url
    return url, url.rpartition("/")[2]


def _timm(name: str) -> tuple[str, str]:
    """Return address and file name of resnet50 (its default weights) or resnet50.a1_in1k."""
    try:
        import timm
    except ImportError as error:
        raise UsageError(f"timm:{name} needs the package timm: `pip install timm`") from error
    known = timm.list_models(pretrained=True)  # with their tags
    if name not in {*known, *(each.partition(".")[0] for each in known)}:
        raise UsageError(f"timm:{name}: timm has no weights of this name{_near(name, known)}")
    found = timm.get_pretrained_cfg(name)
    url = found.url if found else None
    if isinstance(url, str) and url:
        return url, url.rpartition("/")[2]
    repository = found.hf_hub_id if found else None
    if found is None or not repository:
        raise UsageError(f"timm:{name}: timm has no address for these weights; choose others")
    # The file has the same name in every repository of the hub.
    file_name = found.hf_hub_filename or "model.safetensors"
    hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")  # the hub's own variable, for mirrors
    return f"{hub}/{repository}/resolve/main/{file_name}", f"{repository.replace('/', '--')}--{file_name}"


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""
