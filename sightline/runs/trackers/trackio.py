"""Trackio: a run in the local database of TRACKIO_DIR, or on the server that its environment variables name."""

from __future__ import annotations

import io
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image as Pillow

from sightline.runs.loggers import RunStart
from sightline.runs.trackers.tracker import PROJECT, Image, Tracker, settings_of


def tracker(say: Callable[[str], None]) -> Trackio:
    """Return the tracker; trackio says what it could not do as warnings, of which the first is reported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    return Trackio(say)


class Trackio(Tracker):
    """One run of Trackio for a run folder, through all of its starts. Trackio knows a run by its name."""

    name = "trackio"

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        import trackio

        self._trackio: Any = trackio
        self._say = say
        self._run: Any = None
        self._step = 0
        self._has_said = False
        warnings.showwarning = self._warned
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", r"(?i).*trackio")

    def open(self, run: RunStart) -> None:
        """Continue the run that is kept, or start one."""
        fields, origins = settings_of(run)
        name = self.kept_id() or f"{run.folder.name}-{secrets.token_hex(3)}"
        self.keep_id(name)
        config = {**fields, **{f"origin.{each}": said for each, said in origins.items()}}
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        self._run = self._trackio.init(project=project, name=name, resume="allow", config=config, embed=False)

    def points(self, values: Mapping[str, float], step: int) -> None:
        """Log points."""
        self._step = step
        self._run.log(dict(values), step=step)

    def note(self, name: str, text: str) -> None:
        """Log a text; Trackio shows it with the numbers of its time."""
        self._run.log({name: self._trackio.Markdown(f"`{text}`")}, step=self._step)

    def images(self, images: list[Image], step: int) -> None:
        """Log the drawings, each under its place."""
        for each in images:
            image = self._trackio.Image(Pillow.open(io.BytesIO(each.data)), caption=each.name)
            self._run.log({f"worst/{each.name[:2]}": image}, step=step)

    def page(self, path: str) -> None:
        """Log the page."""
        self._run.log({"report": self._trackio.Html(path, inject=False)}, step=self._step)

    def finish(self) -> None:
        """Send the rest."""
        code, reason = self.ended or (-1, "killed")
        self._run.log({"exit": self._trackio.Markdown(f"{code}: {reason}")}, step=self._step)
        self._run.finish()

    def _warned(self, message: Warning | str, *where: Any, **more: Any) -> None:
        if not self._has_said:
            self._has_said = True
            self._say(str(message))
