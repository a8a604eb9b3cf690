"""Lists of operations in bf16 or fp32, which the originals read from files: what autocast and --train.fp32-ops can do.

Autocast runs matrix products and convolutions in bf16 and the loss in fp32; the rest follows its input. What a list
asks for beyond that is named, operation by operation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sightline.errors import UsageError
from sightline.files.regular import regular
from sightline.legacy.start import Row
from sightline.legacy.table import Given

MAX_BYTES = 1 << 18
# The originals' own files, for those who have only the command line.
SHIPPED = {
    "ops_bf16_unet2d.txt": "addmm avg_pool2d bmm conv_transpose2d conv2d dot leaky_relu linear matmul max_pool2d mm mv "
    "relu t",
    "ops_fp32_unet2d.txt": "cross_entropy log_softmax nll_loss softmax",
}
IN_BF16 = set("addmm bmm conv1d conv2d conv3d conv_transpose2d conv_transpose3d dot linear matmul mm mv".split())
FOLLOWING = set("relu leaky_relu max_pool2d avg_pool2d t transpose view reshape cat add mul".split())
IN_LOSS = set("cross_entropy log_softmax nll_loss softmax smooth_l1_loss".split())
MODULES = {
    "conv2d": "Conv2d",
    "conv3d": "Conv3d",
    "conv_transpose2d": "ConvTranspose2d",
    "conv_transpose3d": "ConvTranspose3d",
    "linear": "Linear",
    "addmm": "Linear",
    "batch_norm": "BatchNorm2d",
    "instance_norm": "InstanceNorm2d",
    "group_norm": "GroupNorm",
    "relu": "ReLU",
    "leaky_relu": "LeakyReLU",
}
TF_MODULES = {
    "Conv2D": "Conv2d",
    "MatMul": "Linear",
    "FusedBatchNormV3": "BatchNorm2d",
    "Relu": "ReLU",
    "MaxPool": "MaxPool2d",
}
TF_BASIC = ["BatchNorm2d"]  # only products and convolutions in bf16: what follows a norm in fp32 is in fp32


@dataclass
class Kept:
    """Modules that stay in fp32, and what has no equivalent."""

    modules: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def words(self) -> list[str]:
        return ["--train.fp32-ops", *dict.fromkeys(self.modules)] if self.modules else []


def from_lists(bf16: Iterable[str], fp32: Iterable[str]) -> Kept:
    """Return what two lists of torch operations mean here; an empty list is the original's default."""
    kept, bf16, fp32 = Kept(), list(bf16), list(fp32)
    for name in fp32:
        if name in MODULES:
            kept.modules.append(MODULES[name])
        elif name not in IN_LOSS:
            kept.rows.append((f"fp32 list: {name}", "-", "no field keeps this operation alone in fp32"))
    for name in bf16:
        if name not in IN_BF16 | FOLLOWING:
            kept.rows.append((f"bf16 list: {name}", "-", "autocast leaves this operation in fp32"))
    if bf16:
        for name in ("conv2d", "conv_transpose2d", "linear"):
            if name not in bf16 and not (name == "linear" and "addmm" in bf16):
                kept.modules.append(MODULES[name])
    return kept


def torch_lists(given: Given) -> Kept:
    """Read --hmp-bf16 and --hmp-fp32."""
    if not given["hmp"]:
        return Kept()
    return from_lists(_read_names(given["hmp_bf16"]), _read_names(given["hmp_fp32"]))


def torch(given: Given) -> Sequence[str]:
    """Write the modules that --hmp-fp32 keeps in fp32."""
    return torch_lists(given).words()


def _read_names(path: str) -> list[str]:
    if not path:
        return []
    if not Path(path).is_file() and Path(path).name in SHIPPED:
        return SHIPPED[Path(path).name].split()
    return _text(path).split()


def tensorflow(given: Given) -> Sequence[str]:
    """Write the modules that --bf16_config_path keeps in fp32."""
    return tensorflow_lists(given).words()


def tensorflow_lists(given: Given) -> Kept:
    """Read --bf16_config_path: full, basic or a file in their form."""
    path = given["bf16_config_path"]
    name = Path(path).name.removesuffix(".json")
    if given["dtype"] != "bf16" or (name == "full" and not Path(path).is_file()):
        return Kept()
    if name == "basic" and not Path(path).is_file():
        return Kept(list(TF_BASIC))
    try:
        content = json.loads(_text(path))
    except ValueError as error:
        raise UsageError(f"--bf16_config_path {path} is not JSON: {error}") from error
    listed = set(_strings(content))
    kept = Kept([module for name, module in TF_MODULES.items() if name not in listed])
    if len(kept.modules) == len(TF_MODULES):
        raise UsageError(f"--bf16_config_path {path} names no operation that is in a network of ours; leave it out")
    rows: list[Row] = [
        (f"bf16 list: {name}", "-", "autocast decides about this operation")
        for name in sorted(listed - TF_MODULES.keys())
    ]
    return Kept(kept.modules, rows)


def _strings(content: Any) -> Iterable[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for each in content.values() if isinstance(content, dict) else content:
            yield from _strings(each)


def _text(path: str) -> str:
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is larger than {MAX_BYTES} bytes; a list of operations is a few kB")
        with open(path, encoding="utf-8", opener=regular) as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a list of operations: {error}") from error
