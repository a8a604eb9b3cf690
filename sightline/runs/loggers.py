"""One interface for all that receives the numbers of a run: log.jsonl (events.py), trackers/, the benchmark log, and
loggers that a user gives to `api.train(..., loggers=[...])`. Rank 0 alone has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sightline.errors import SightlineError


@dataclass(frozen=True)
class RunStart:
    """Facts about a start of a run, known before its first step."""

    folder: Path
    fields: Mapping[str, Any]  # every field of the recipe and the run by its dotted name, e.g. "optimizer.lr"
    scores: tuple[str, ...]  # names of the scores of an evaluation, the one that decides first
    step: int  # optimizer steps done before; 0 for a new run
    resumes: int  # earlier starts of this run
    origins: Mapping[str, str] = field(default_factory=dict)  # {"optimizer.lr": "flag: --lr"}; none of a recipe's own


class Logger(Protocol):
    """Receiver of what a run reports. Inherit from it and override what you need; the rest does nothing."""

    def start(self, run: RunStart) -> None:
        """Note the settings of the run. Comes once per start of a run, before all others."""
        return

    def event(self, name: str, values: Mapping[str, Any]) -> None:
        """Note an event as log.jsonl has it, e.g. "checkpoint", "warning", "evaluate"."""
        return

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each number; `group` is train, epoch, evaluate or time_to_train."""
        return

    def close(self, code: int, reason: str) -> None:
        """End, after the last event; `code` is the exit code, 0 for a run that finished."""
        return


class Harmless(Logger):
    """A logger whose errors are reported once and never end a run. Events from before `start` are passed on after it,
    and never where the start is refused."""

    def __init__(self, logger: Logger, warn: Callable[[str], None]):
        self._logger = logger
        self._warn = warn
        self._early: list[tuple[str, dict[str, Any]]] | None = []  # events before `start`; None after it
        self._has_failed = False

    def start(self, run: RunStart) -> None:
        early, self._early = self._early, None
        self._call("start", run)
        for name, values in early or ():
            self.event(name, values)

    def event(self, name: str, values: Mapping[str, Any]) -> None:
        if self._early is not None:
            self._early.append((name, dict(values)))
        self._call("event", name, dict(values))

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self._call("scalars", group, dict(values), step)

    def close(self, code: int, reason: str) -> None:
        self._call("close", code, reason)

    def _call(self, method: str, *values: Any) -> None:
        if self._early is not None:
            return
        try:
            getattr(self._logger, method)(*values)
        except Exception as error:  # noqa: BLE001  # of a user's own code, or of a tracker that cannot be reached
            if not self._has_failed:
                self._has_failed = True
                what = f"{type(self._logger).__name__}.{method}() failed: {type(error).__name__}: {error}"
                what = str(error) if isinstance(error, SightlineError) else what
                self._warn(f"{what}; the run continues, and further errors of this logger are not reported")
