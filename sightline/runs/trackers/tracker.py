"""What all trackers share: which run of theirs is ours, points with epoch and step, scores of classes, drawings.

A tracker is a Logger in a process of its own (apart.py), so that its methods may take long, and may raise.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sightline.files.typed_json import read_json
from sightline.files.whole import write_text
from sightline.runs.folder import DRAWINGS, MAX_SCORES_BYTES, SCORES
from sightline.runs.loggers import Logger, RunStart
from sightline.runs.trackers.secrets import plain

KEPT = "trackers"  # folder in the run folder: a file for each tracker, with what it calls the run
PROJECT = "sightline"  # of trackers that sort runs by project, unless their own environment variable names one
CLASSES = 100  # most classes whose scores become curves; scores.json has all
MARKS = {"begin", "end"}  # of an evaluation, without a number


@dataclass(frozen=True)
class Image:
    """A drawing of one of the worst samples: JPEG, and what it shows."""

    name: str
    data: bytes


class Tracker(Logger):
    """A Logger that sends. `open` continues the tracker's run that belongs to the folder, or starts one."""

    name: ClassVar[str]
    ENOUGH: ClassVar[int] = 500  # points that `flush` sends before more calls are taken
    now = 0.0  # when the training made the call

    def __init__(self) -> None:
        self.epoch: float | None = None  # as log.jsonl counts it
        self.ended: tuple[int, str] | None = None  # exit code and reason; None of a training that was killed
        self._drawn = -1  # step of the drawings that were sent

    @abstractmethod
    def open(self, run: RunStart) -> None:
        """Continue or start the tracker's run, with the settings of ours."""

    @abstractmethod
    def points(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each value."""

    @abstractmethod
    def note(self, name: str, text: str) -> None:
        """Set a text about the run."""

    @abstractmethod
    def images(self, images: list[Image], step: int) -> None:
        """Show drawings of the worst samples at a step."""

    @abstractmethod
    def page(self, path: str) -> None:
        """Show the report."""

    @abstractmethod
    def finish(self) -> None:
        """End the tracker's run, as `ended` says."""

    @property
    def waiting(self) -> int:
        """How many points `flush` would send."""
        return 0

    def flush(self) -> None:
        """Send points that were collected."""
        return

    def is_unreachable(self, error: Exception) -> bool:
        """Whether the same may work later, because nobody answered."""
        return False

    def start(self, run: RunStart) -> None:
        """Open the tracker's run."""
        self.run = run
        self.open(run)

    def event(self, name: str, values: Mapping[str, Any]) -> None:
        """Remember the epoch; note where the newest checkpoint lies."""
        if isinstance(values.get("epoch"), int | float):
            self.epoch = float(values["epoch"])
        if name == "checkpoint":
            self.note("checkpoint", str(self.run.folder / "checkpoints" / str(values["name"])))

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Add points; after an evaluation show drawings that are new."""
        if group == "evaluate" and set(values) <= MARKS:
            return
        found = {f"{group}/{name}": float(value) for name, value in values.items()}
        self.points(found | ({} if self.epoch is None else {"epoch": self.epoch}), step)
        if group == "evaluate":
            self._show_drawings()

    def close(self, code: int, reason: str) -> None:
        """Note how the run ended, and show the last drawings."""
        self.ended = (code, reason)
        self._show_drawings()

    def kept_id(self) -> str:
        """Return what this tracker calls the run of the folder; "" if it does not know it yet."""
        found = _read(self.run.folder / KEPT / f"{self.name}.json").get("run", "")
        return found if isinstance(found, str) and re.fullmatch(r"[\w.-]{1,128}", found) else ""

    def keep_id(self, value: str) -> None:
        """Write down what this tracker calls the run, for the next start."""
        write_text(self.run.folder, f"{KEPT}/{self.name}.json", json.dumps({"run": value}) + "\n", durable=True)

    def _show_drawings(self) -> None:
        kept = _read(self.run.folder / DRAWINGS)
        step = kept.get("step", -1)
        if step != self._drawn and (images := list(_images(kept.get("drawings", {})))):
            self.images(images, step)
        self._drawn = step


def as_name(value: object) -> str:
    """Return a name as every tracker takes it."""
    return re.sub(r"[^\w .-]", "_", str(value)).strip(" .")[:100] or "_"


def scores_of_classes(folder: Path) -> dict[str, float]:
    """Return the scores of the classes in the evaluation that was just written, as points of the group evaluate."""
    rows = _read(folder / SCORES).get("tables", {}).get("classes", [])
    return {
        f"classes/{as_name(row['class'])}/{as_name(score)}": float(value)
        for row in rows[:CLASSES]
        for score, value in row.items()
        if score != "class" and isinstance(value, int | float) and math.isfinite(value)
    }


def settings_of(run: RunStart) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a run and the origins of those that are not the recipe's own, without secrets."""
    return {n: plain(v) for n, v in run.fields.items()}, {n: plain(text) for n, text in run.origins.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, MAX_SCORES_BYTES)
    except (OSError, ValueError):  # none yet
        return {}
    return found if isinstance(found, dict) else {}


def _images(drawings: Mapping[str, Mapping[str, str]]) -> Iterator[Image]:
    for place, (index, tiles) in enumerate(drawings.items(), 1):
        for what, data in tiles.items():
            try:
                yield Image(f"{place:02d} {as_name(what)} of sample {as_name(index)}", base64.b64decode(data))
            except binascii.Error:
                continue
