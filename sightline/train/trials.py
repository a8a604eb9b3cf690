"""Decide whether cuDNN tries its kernels, or takes those of its own rules: trials pay in long runs alone.

First steps with trials took 27 s longer on an idle H200 (EfficientNet-lite0, batch 32, 224 pixels, bf16), and the
others were no faster: benchmarks/notes/startup.md. What cuDNN took stays for the life of a process, so this is decided
before the first step, when no step has been timed, by the number of steps. Checkpoints hold the choice.
"""

from __future__ import annotations

from sightline.hardware import devices
from sightline.train.compiling import MANY_STEPS
from sightline.train.session import Session
from sightline.train.state import TrainState

TRIALS = "cudnn"  # name of the choice in a checkpoint


def choose(steps: int, stored: str, resumed: bool, is_longer: bool) -> str:
    """Return "on" or "off" for a run of so many steps. Runs that began before there was a choice tried all kernels; a
    run that is longer than it was decides again, but what was tried stays."""
    if resumed and not stored:
        return "on"
    if stored in ("on", "off") and not (stored == "off" and is_longer):
        return stored
    return "on" if steps >= MANY_STEPS else "off"


def decide(session: Session, state: TrainState, steps: int, resumed: bool, is_longer: bool) -> None:
    """Let cuDNN try its kernels if the run is long, or was started so. Where bits must be equal it never does."""
    if not session.device.tries_kernels or session.recipe.train.deterministic:
        return
    choice = choose(steps, state.choices.get(TRIALS, ""), resumed, is_longer)
    state.choices = {**state.choices, TRIALS: choice}
    if choice == "off":
        devices.follow_rules()
