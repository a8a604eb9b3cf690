"""Weights & Biases: a run in the project of WANDB_PROJECT; its own files lie in the run folder, below wandb/."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image as Pillow

from sightline.runs.loggers import RunStart
from sightline.runs.trackers.tracker import PROJECT, Image, Tracker, settings_of

ANSWERS_S = 10.0  # of a server, when a run starts; without an answer the run is kept in files
LEAVES_S = 15.0  # for what has not been sent at the end; `wandb sync` sends the rest


def tracker(say: Callable[[str], None]) -> WandB:
    """Return the tracker."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to the makers of the package
    return WandB(say)


class WandB(Tracker):
    """One run of Weights & Biases for a run folder, through all of its starts. wandb has a process of its own, which
    keeps in files what it cannot send."""

    name = "wandb"

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        import wandb

        self._wandb: Any = wandb
        self._say = say
        self._run: Any = None

    def open(self, run: RunStart) -> None:
        """Continue the run that is kept, or start one."""
        fields, origins = settings_of(run)
        kept = self.kept_id() or secrets.token_hex(8)
        self.keep_id(kept)
        try:
            self._run = self._opened(run, kept, os.environ.get("WANDB_MODE"))
        except self._wandb.errors.CommError as error:
            self._say(f"{error}; its files are kept, send them with `wandb sync`")
            self._wandb.teardown()  # its service still holds the name of the run
            self._run = self._opened(run, kept, "offline")
        self._run.config.update({**fields, "origins": origins}, allow_val_change=True)
        # A resumed run repeats steps; wandb's own counter would refuse those.
        self._run.define_metric("*", step_metric="step")

    def _opened(self, run: RunStart, kept: str, mode: str | None) -> Any:
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or run.folder.name,
            id=kept,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            mode=mode,
            settings=self._wandb.Settings(
                console="off",  # what the training prints is its own
                silent=True,
                disable_git=True,
                x_disable_meta=True,  # of this process, not of the training
                init_timeout=ANSWERS_S,
                finish_timeout=LEAVES_S,
            ),
        )

    def points(self, values: Mapping[str, float], step: int) -> None:
        """Log points."""
        self._run.log({**values, "step": step})

    def note(self, name: str, text: str) -> None:
        """Set a value of the summary."""
        self._run.summary[name] = text

    def images(self, images: list[Image], step: int) -> None:
        """Log the drawings as one row of images."""
        shown = [self._wandb.Image(Pillow.open(io.BytesIO(each.data)), caption=each.name) for each in images]
        self._run.log({"worst": shown, "step": step})

    def page(self, path: str) -> None:
        """Log the page."""
        self._run.log({"report": self._wandb.Html(path, inject=False)})

    def finish(self) -> None:
        """End the run; wandb knows a good end and a bad one."""
        code, reason = self.ended or (-1, "killed")
        self._run.summary["exit"] = f"{code}: {reason}"
        self._run.finish(exit_code=code)
