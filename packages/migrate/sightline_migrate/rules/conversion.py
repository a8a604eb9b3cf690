"""Replace 16-bit types that a script asks for: float16 by bfloat16, or both by float32. Data keep their type."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from sightline_migrate import zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Rule

if TYPE_CHECKING:
    from sightline_migrate.session import Session

FOLDER_OF_TORCH = os.path.dirname(torch.__file__)
GIVE_BYTES_A_TYPE = frozenset(
    os.path.join(FOLDER_OF_TORCH, *name.split("/"))
    for name in ("_utils.py", "multiprocessing/reductions.py", "serialization.py", "storage.py")
)
"""files of torch that make tensors of bytes which a file or a process holds: another type would misread them"""
Convert = Callable[[Any], Any]
"""dtype -> the dtype used instead; anything else is returned unchanged"""


def convert_of(session: Session) -> Convert | None:
    """Return the conversion that the options ask for, or None; simple enough for dynamo to trace."""
    if not (session.options.fp16_to_bf16 or session.options.float32):
        return None
    used = torch.float32 if session.options.float32 else torch.bfloat16

    def convert(dtype: Any) -> Any:
        return used if dtype is torch.float16 or dtype is torch.bfloat16 else dtype

    return convert


def converts_here() -> bool:
    """Return True if a request of this caller may be converted: not in compilers and kernels, nor for given bytes."""
    if is_dynamo_compiling():
        return True
    filename = zones.caller(2).f_code.co_filename
    return filename not in GIVE_BYTES_A_TYPE and zones.zone_of(filename) != zones.MACHINERY


def dtype_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the dtype among the arguments of `.to()`, or None."""
    if "dtype" in kwargs:
        return kwargs["dtype"]
    return next((value for value in args if isinstance(value, torch.dtype)), None)


class Conversions:
    """Counts the conversions of one rule as a class of their own; a call that is also moved counts once, here."""

    def __init__(self, rule: Rule) -> None:
        self.rule = Rule(rule.name, "converted", rule.make, "another type than the script asks for")

    def hit(self, asked: Any, used: Any, args: Sequence[Any] = (), kwargs: Any = None) -> None:
        record.hit(self.rule, args, kwargs, f"{name_of(used)} instead of {name_of(asked)}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
