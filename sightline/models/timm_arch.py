"""Classifiers of timm, where it is installed: by the name it gives them, with the images that they were made for.

models/arch.py calls this for `timm:NAME`. timm is imported when a name is first looked up: that takes seconds.
"""

from __future__ import annotations

import difflib
import glob
import importlib
import itertools
import math
from typing import Any

from torch import nn

from sightline.errors import UsageError
from sightline.models.config import TIMM
from sightline.parts import DataSpec

INTERPOLATIONS = ("bilinear", "bicubic")  # timm also has "random" and lanczos; then the recipe's stays


def is_known(arch: str) -> bool:
    """Return whether timm has the network `timm:NAME` or `timm:NAME.TAG`; UsageError if timm is missing."""
    timm, name = _imported(arch), arch.removeprefix(TIMM)
    itself = glob.escape(name)  # sorting all names would take ten times as long as looking for one
    return name in timm.list_models(itself) or name in timm.list_models(itself, pretrained=True)


def refuse_unknown(arch: str) -> None:
    """Raise UsageError if timm is missing, or does not have the network `timm:NAME` or `timm:NAME.TAG`."""
    if is_known(arch):
        return
    timm = _imported(arch)
    known = {*timm.list_models(), *timm.list_models(pretrained=True)}  # the latter with tags of weights
    near = difflib.get_close_matches(arch.removeprefix(TIMM), sorted(known), n=3)
    hint = f"; did you mean {', '.join(TIMM + each for each in near)}?" if near else "."
    raise UsageError(
        f"model.arch='{arch}' is unknown to timm {timm.__version__}{hint} "
        f"timm.list_models() lists its {len(timm.list_models())} networks"
    )


def build(arch: str, spec: DataSpec) -> nn.Module:
    """Build the network for `spec`'s classes, channels and, if its layers depend on it, size; with random weights."""
    fixed = {"img_size": spec.size} if _made_for(arch).fixed_input_size else {}
    model: nn.Module = _imported(arch).create_model(
        arch.removeprefix(TIMM), num_classes=len(spec.classes), in_chans=spec.channels, **fixed
    )
    return model


def build_encoder(arch: str, channels: int) -> tuple[nn.Module, list[int], list[int]]:
    """Build the network without its head, with random weights: it answers features of several resolutions. Return also
    their channels, and how many times smaller than the image each is."""
    refuse_unknown(arch)
    made_for = _made_for(arch)
    why = f"it is made for images of {made_for.input_size[1:]}" if made_for.fixed_input_size else ""
    if not why:
        try:
            model: nn.Module = _imported(arch).create_model(
                arch.removeprefix(TIMM), features_only=True, in_chans=channels
            )
            info: Any = model.feature_info
            sizes = list(info.reduction())
            if sizes[0] in (2, 4) and all(low == 2 * high for high, low in itertools.pairwise(sizes)):
                return model, list(info.channels()), sizes
            why = f"its features are {', '.join(map(str, sizes))} times smaller than the image"
        except (RuntimeError, AttributeError, AssertionError, TypeError, ValueError) as error:  # timm's, of a network
            why = str(error).partition("\n")[0][:120] or type(error).__name__  # without features
    raise UsageError(
        f"model.arch='{arch}' cannot be the way down of a U-Net ({why}); use a convolutional network, whose features "
        f"are 2, 4, 8, 16 and 32 times smaller, e.g. resnet34 or {TIMM}tf_efficientnet_lite0"
    )


def head_prefixes(arch: str) -> tuple[str, ...]:
    """Name the classifier; a distilled network has two."""
    found = _made_for(arch).classifier or ()
    return tuple(f"{name}." for name in ((found,) if isinstance(found, str) else found))


def data_fields(arch: str) -> dict[str, Any]:
    """Return mean, std, size and filter of the images that the network's weights were trained with."""
    made_for = _made_for(arch)
    fields: dict[str, Any] = {"mean": tuple(made_for.mean), "std": tuple(made_for.std)}
    height, width = made_for.input_size[1:]
    if height == width:
        resize = math.floor(height / (made_for.crop_pct or 1))  # as timm's evaluation
        fields |= {"size": height, "eval_size": height, "eval_resize": resize}
    if made_for.interpolation in INTERPOLATIONS:
        fields["interpolation"] = made_for.interpolation
    return fields


def takes_any_size(arch: str) -> bool:
    """Return whether the network's weights do not depend on the size of the images."""
    return not _made_for(arch).fixed_input_size


def _made_for(arch: str) -> Any:
    """Return timm's description of the weights: those of the tag, or its default ones."""
    return _imported(arch).get_pretrained_cfg(arch.removeprefix(TIMM))


def _imported(arch: str) -> Any:
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise UsageError(
            f"model.arch='{arch}' needs timm, which cannot be imported ({error}); install it with `pip install timm`"
        ) from error
