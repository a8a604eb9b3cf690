"""Loggers of other packages: what they are told, and that their errors cost a line and no run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sightline.errors import UsageError
from sightline.runs.loggers import Harmless, Logger, RunStart


class Noted(Logger):
    def __init__(self, *fails: Exception):
        self.told: list[tuple] = []
        self.fails = list(fails)

    def _note(self, *what: object) -> None:
        self.told.append(what)
        if self.fails:
            raise self.fails.pop(0)

    def start(self, run: RunStart) -> None:
        self._note("start", run)

    def event(self, name: str, values: Mapping[str, Any]) -> None:
        self._note("event", name, values)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self._note("scalars", group, values, step)

    def close(self, code: int, reason: str) -> None:
        self._note("close", code, reason)


START = RunStart(Path("run"), {}, (), 0, 0)


def test_what_comes_before_the_start_is_told_after_it():
    logger, said = Noted(), []
    ours = Harmless(logger, said.append)
    values = {"a": 1}
    ours.event("log", values)
    ours.scalars("train", {"loss": 1.0}, 0)  # there is no step before the start
    values["a"] = 2
    assert logger.told == []
    ours.start(START)
    ours.event("epoch", values)
    ours.scalars("train", {"loss": 2.0}, 3)
    ours.close(0, "finished")
    assert logger.told == [
        ("start", START),
        ("event", "log", {"a": 1}),
        ("event", "epoch", {"a": 2}),
        ("scalars", "train", {"loss": 2.0}, 3),
        ("close", 0, "finished"),
    ]
    assert said == []
    refused = Noted()
    unstarted = Harmless(refused, said.append)
    unstarted.event("log", {})
    unstarted.close(2, "refused")
    assert refused.told == []


def test_the_first_error_is_told_and_the_calls_go_on():
    said: list[str] = []
    logger = Noted(ValueError("no room"), ValueError("again"))
    ours = Harmless(logger, said.append)
    ours.start(START)
    ours.event("epoch", {})
    ours.close(0, "finished")
    end = "; the run continues, and further errors of this logger are not reported"
    assert said == [f"Noted.start() failed: ValueError: no room{end}"] and len(logger.told) == 3
    ours = Harmless(Noted(UsageError("no such project; make it")), said.append)
    ours.start(START)
    assert said[1:] == [f"no such project; make it{end}"]


def test_a_logger_that_wants_nothing_needs_no_method():
    class Silent(Logger):
        """Has nothing of its own."""

    logger = Silent()
    logger.start(START)
    logger.event("a", {})
    logger.scalars("train", {}, 1)
    logger.close(0, "finished")
