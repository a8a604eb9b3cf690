"""Kernels that stand in for plain torch where they apply, and the switch that turns them all off (--run.kernels)."""

from typing import Literal

_choice: Literal["auto", "off"] = "auto"


def use(choice: Literal["auto", "off"]) -> None:
    """auto: a kernel is taken wherever it applies; off: plain torch everywhere. Call it before a step is compiled."""
    global _choice
    _choice = choice


def are_allowed() -> bool:
    """Asked by every kernel's `applies`."""
    return _choice == "auto"
