"""The pretrained weights that a plan starts from, and the network that they belong to.

Imports torchvision or timm only where a name that the user typed has to be looked up.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sightline.errors import SightlineError, UsageError
from sightline.files.checkpoint_folder import run_of
from sightline.files.download import NotFetched, Patience
from sightline.models.config import OURS, TIMM
from sightline.models.named_weights import address, by_hand, fetch_named, is_cached
from sightline.recipe.plan import Known
from sightline.recipe.store import stored_in

TORCHVISION = "torchvision:"
ONCE = Patience(timeout_s=10, tries=1)  # nobody asked for these weights by name
_CHECKSUM = re.compile(r"-[0-9a-f]{6,8}$")  # ends the names of torchvision's and timm's files


def start_from(known: Known, published: str) -> bool:
    """Decide the weights of a training, `published` unless the user typed some; return whether there are any.

    Without a file in the cache and without a network the training begins at random, and says what that costs."""
    if known["model.weights"] or known.is_typed("model.weights"):
        return bool(known["model.weights"])
    if not published or str(known["data.path"]).startswith("synthetic:"):  # no photos
        return False
    if not is_cached(published) and known.purpose != "train":
        known.lines.append(f"`sightline train` fetches {published} first; here the network has random weights")
        return True
    try:
        fetch_named(published, ONCE)
    except SightlineError as error:
        remedy = f"{by_hand(published)}, or give" if isinstance(error, NotFetched) else "give"
        known.lines.append(
            f"no pretrained weights ({_reason(error)}): training takes longer and learns much less from few images; "
            f"{remedy} `--weights FILE`, or `--weights none` if this is meant"
        )
        return False
    known.decide("model.weights", published, "weights of ImageNet are better than random ones for most photos")
    return True


def network_of(weights: str) -> str:
    """Return the network that weights belong to, as their name, their run or the name of their file tells; "" if none
    of them does."""
    if weights.startswith(TORCHVISION):
        return weights.removeprefix(TORCHVISION).partition(".")[0]
    if weights.startswith(TIMM):
        return weights
    if Path(weights).is_dir():
        arch = model_of_run(weights).get("arch")
        return arch if isinstance(arch, str) else ""
    stem = _CHECKSUM.sub("", Path(weights).stem) if weights else ""
    return next((name for name in (stem, TIMM + stem) if stem and _is_known(name)), "")


def model_of_run(weights: str) -> dict[str, Any]:
    """Return the model fields of the run that weights belong to; {} if they are none's."""
    model = stored_in(run_of(Path(weights))).get("model") if weights and Path(weights).is_dir() else {}
    return model if isinstance(model, dict) else {}


def weights_of(arch: str) -> str:
    """Return the name of the published weights of a network; "" if there are none."""
    source = arch if arch.startswith(TIMM) else TORCHVISION + arch
    try:
        return source if arch and address(source) else ""
    except UsageError:
        return ""


def _reason(error: BaseException) -> str:
    """Return what the network or the server said, without the addresses around it."""
    while error.__cause__ and not isinstance(error.__cause__, OSError):
        error = error.__cause__
    return str(error)


def _is_known(arch: str) -> bool:
    if arch in OURS:
        return True
    from sightline.models.arch import is_known

    try:
        return is_known(arch)
    except UsageError:  # timm is missing
        return False
