"""Read a run folder: its curves, scores, events, config and environment. Imports no torch.

Every file may be missing, damaged or of another version: what cannot be read is listed, and the rest is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sightline.errors import UsageError
from sightline.files.checkpoint_folder import folder_of_runs, nearest_run
from sightline.files.plain_yaml import read_yaml
from sightline.files.regular import regular
from sightline.files.typed_json import loads, read_json
from sightline.overview.listing import CONFIG, MAX_LINE_BYTES, RunSummary, read_run
from sightline.recipe import store
from sightline.recipe.show import reason
from sightline.report.html import is_score
from sightline.runs.folder import BAD_SAMPLES, BEST_SCORES, DRAWINGS, LOG, MAX_SCORES_BYTES, SCORES, SUSPICIOUS

ENVIRONMENT = "environment.json"
MOST_EVENTS = 200  # the first half and the last one
MOST_BAD_BYTES = 2**22
SKIPPED = "sample skipped: "  # warnings that BAD_SAMPLES lists too
CURVES = ("train", "evaluate")  # events, and groups of curves
NOT_CURVES = {"event", "time", "epoch", "step", "samples", "eta_s", "volumes"}
TOLD = {  # events that a reader looks for, and their sentence
    "start": "started at step {step}",
    "resume": "resumed from {checkpoint}, step {step}",
    "warning": "warning: {text}",
    "bad_step": "step {step} was not finite",
    "exit": "ended with exit {code}: {reason}",
}


@dataclass
class RunStory:
    """One run."""

    summary: RunSummary
    fields: dict[str, str] = field(default_factory=dict)  # "part.field" -> value
    why: dict[str, str] = field(default_factory=dict)  # "part.field" -> where a value that is not the recipe's is from
    environment: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # "train/loss" -> (step, value)
    epochs: list[tuple[float, float]] = field(default_factory=list)  # step at which an epoch ended, and its number
    best: dict[str, Any] = field(default_factory=dict)  # the content of scores-best.json
    last: dict[str, Any] = field(default_factory=dict)  # the content of scores.json
    test: dict[str, Any] = field(default_factory=dict)  # of `evaluate --split test`, of the best checkpoint
    drawings: dict[str, Any] = field(default_factory=dict)  # of the worst samples of the best scores
    suspicious: dict[str, Any] = field(default_factory=dict)  # the content of suspicious.json
    events: list[tuple[float, str]] = field(default_factory=list)  # time and sentence
    skipped: dict[str, str] = field(default_factory=dict)  # samples that could not be read, and why
    images_per_s: float = 0.0  # of the last start that ended, as its last line said
    problems: list[str] = field(default_factory=list)

    @property
    def scores(self) -> dict[str, Any]:
        """Return the best scores, or the last ones where there is no best."""
        return self.best or self.last

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return a table of the scores; rows that are not objects are left out."""
        tables = self.scores.get("tables")
        found = tables.get(table) if isinstance(tables, dict) else None
        return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def read_story(folder: Path) -> RunStory:
    """Read a run; UsageError if the folder is not one."""
    summary = read_run(folder)
    if not folder.exists():
        raise UsageError(f"{folder} does not exist{nearest_run(folder)}")
    if summary is None:
        what = "not a run folder; give one that `sightline train` wrote, e.g. runs/resnet50"
        raise UsageError(f"{folder} is {folder_of_runs(folder) or what}")
    story = RunStory(summary)
    config = _read(story, CONFIG, lambda: read_yaml(folder / CONFIG))
    origins = store.origins_of(config.pop(store.ORIGINS, {}))
    story.fields = _flat(config)
    story.why = {name: reason(said)[:200] for name, said in origins.items() if name in story.fields}
    story.environment = _read(story, ENVIRONMENT, lambda: read_json(folder / ENVIRONMENT, 2**20))
    story.best = _read(story, BEST_SCORES, lambda: read_json(folder / BEST_SCORES, MAX_SCORES_BYTES))
    story.last = _read(story, SCORES, lambda: read_json(folder / SCORES, MAX_SCORES_BYTES))
    story.test = _of_test(story, folder)
    story.drawings = _read(story, DRAWINGS, lambda: read_json(folder / DRAWINGS, MAX_SCORES_BYTES))
    story.suspicious = _read(story, SUSPICIOUS, lambda: read_json(folder / SUSPICIOUS, MAX_SCORES_BYTES))
    for name, read_lines in ((LOG, _read_log), (BAD_SAMPLES, _read_skipped)):
        try:
            read_lines(folder / name, story)
        except OSError as error:
            if name == LOG or not isinstance(error, FileNotFoundError):
                story.problems.append(f"{name} cannot be read: {error.strerror}")
    return story


def _of_test(story: RunStory, folder: Path) -> dict[str, Any]:
    """Return scores of the test split of the run's own data; of several checkpoints those of the best, else the last
    one's."""
    files = (path.name for path in sorted(folder.glob("scores-*-test.json")))
    found = [_read(story, name, lambda name=name: read_json(folder / name, MAX_SCORES_BYTES)) for name in files]
    own = [each for each in found if each.get("data") == story.fields.get("data.path")]
    return next((each for each in own if each.get("step") == story.best.get("step")), own[-1] if own else {})


def _read(story: RunStory, name: str, read: Any) -> dict[str, Any]:
    try:
        found = read()
    except FileNotFoundError:
        return {}
    except (UsageError, OSError, ValueError) as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            story.problems.append(f"{name} cannot be read: {error}"[:300])
        return {}
    if not isinstance(found, dict):
        story.problems.append(f"{name} does not hold an object")
        return {}
    return found


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for part, values in config.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            found[f"{part}.{name}".rstrip(".")] = str(value)
    return found


def _read_log(path: Path, story: RunStory) -> None:
    """Collect curves and events. A run that was rewound or resumed repeats steps: the later value counts."""
    curves: dict[str, dict[float, float]] = {}
    ends: dict[float, float] = {}  # of epochs
    broken = 0
    own = story.fields.get("data.path")
    with open(path, "rb", opener=regular) as file:
        for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            try:
                event = loads(line)
                kind, time = str(event["event"]), float(event["time"])
            except (ValueError, KeyError, TypeError, OverflowError):  # OverflowError: a whole number beyond all floats
                broken += 1
                continue
            if kind == "evaluate" and event.get("data", own) != own:  # no point of the curves of val
                continue
            epoch, step = event.get("epoch"), event.get("step")
            if kind == "evaluate" and is_score(epoch) and is_score(step) and min(epoch, step) >= 1:
                ends[epoch] = step  # it is evaluated where an epoch ends
            if kind in CURVES and is_score(step):
                for name, value in event.items():
                    if name not in NOT_CURVES and (value is None or _is_number(value)):
                        points = curves.setdefault(f"{kind}/{name}", {})
                        points[step] = value if is_score(value) else math.nan
            if kind in ("start", "resume", "exit"):
                story.images_per_s = speed if is_score(speed := event.get("images_per_s")) else 0.0
            if kind in TOLD and not str(event.get("text", "")).startswith(SKIPPED):
                story.events.append((time, _sentence(kind, event)))
    if left_out := max(0, len(story.events) - MOST_EVENTS):
        first, last = story.events[: MOST_EVENTS // 2], story.events[-MOST_EVENTS // 2 :]
        story.events = [*first, (last[0][0], f"{left_out} events are left out here"), *last]
    if broken > 1:  # the last line of a run that was killed may be half a line
        story.problems.append(f"{broken} lines of {LOG} cannot be read")
    story.epochs = _rising(sorted((step, epoch) for epoch, step in ends.items()))
    story.curves = {name: sorted(points.items()) for name, points in curves.items()}


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points above all before them: a log that was put together from two runs may fall back."""
    rising: list[tuple[float, float]] = []
    for step, epoch in points:
        if not rising or (step > rising[-1][0] and epoch > rising[-1][1]):
            rising.append((step, epoch))
    return rising


def _read_skipped(path: Path, story: RunStory) -> None:
    with open(path, "rb", opener=regular) as file:
        lines = file.read(MOST_BAD_BYTES).splitlines()
    for line in lines:
        try:
            row = loads(line)
            if "data" not in row:  # else of `evaluate` on other data
                story.skipped[str(row["name"])] = str(row["reason"])
        except (ValueError, KeyError, TypeError):  # half a line
            continue


def _sentence(kind: str, event: Mapping[str, Any]) -> str:
    try:
        return TOLD[kind].format(**event)[:500]
    except (KeyError, IndexError, ValueError):
        return kind


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
