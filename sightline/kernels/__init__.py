"""Kernels that replace plain torch where they apply, and the switch that turns them all off (--run.kernels)."""

from typing import Literal

_choice: Literal["auto", "off"] = "auto"


def use(choice: Literal["auto", "off"]) -> None:
    """Turn kernels on (auto: wherever they apply) or off (plain torch). Call it before a step is compiled."""
    global _choice
    _choice = choice


def are_allowed() -> bool:
    """Return whether kernels are on; every kernel's `applies` asks, those of the stem, norms and bottlenecks too."""
    return _choice == "auto"
