"""Kernels that replace plain torch where they apply, and the switch that turns them all off (--run.kernels)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

_choice: Literal["auto", "off"] = "auto"
_is_deterministic = False


def use(choice: Literal["auto", "off"], is_deterministic: bool = False) -> None:
    """Turn kernels on (auto: wherever they apply) or off (plain torch). Call it before a step is compiled."""
    global _choice, _is_deterministic
    _choice, _is_deterministic = choice, is_deterministic


@contextmanager
def kept_out(if_so: bool) -> Iterator[None]:
    """Turn kernels off within the context, if so: where less is computed than loading or compiling them would take."""
    global _choice
    before = _choice
    _choice = "off" if if_so else before
    try:
        yield
    finally:
        _choice = before


def are_allowed() -> bool:
    """Return whether kernels are on; every kernel's `applies` asks, those of the stem, norms and bottlenecks too."""
    return _choice == "auto"


def must_repeat() -> bool:
    """Return whether the run wants equal bits after a resume; kernels for which that was not seen stay out then."""
    return _is_deterministic
