"""Kernels that replace plain torch where they apply, and the switch that turns them all off (--run.kernels)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

_choice: Literal["auto", "off"] = "auto"
_is_deterministic = False
_compiles = True


def use(choice: Literal["auto", "off"], is_deterministic: bool = False) -> None:
    """Turn kernels on (auto: wherever they apply) or off (plain torch). Call it before a step is compiled."""
    global _choice, _is_deterministic
    _choice, _is_deterministic = choice, is_deterministic


@contextmanager
def only_uncompiled(if_so: bool) -> Iterator[None]:
    """Keep kernels out that are compiled first, within the context, if so: where less is computed than that takes."""
    global _compiles
    before = _compiles
    _compiles = before and not if_so
    try:
        yield
    finally:
        _compiles = before


def are_allowed() -> bool:
    """Return whether kernels are on; every kernel's `applies` asks, those of the stem, norms and bottlenecks too."""
    return _choice == "auto"


def may_compile() -> bool:
    """Return whether kernels are on, those of Triton too; the `applies` of those asks that a network calls which does
    not train."""
    return _choice == "auto" and _compiles


def must_repeat() -> bool:
    """Return whether the run wants equal bits after a resume; kernels for which that was not seen stay out then."""
    return _is_deterministic
