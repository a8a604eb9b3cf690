"""`sightline runs`: the run folders below a folder, read from their files alone. Imports no torch, follows no links.

Files may be damaged, of another version or of another program: a run that cannot be read is listed as damaged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sightline.errors import UsageError
from sightline.files.plain_yaml import read_yaml
from sightline.files.regular import regular
from sightline.files.typed_json import loads, read_json, typed
from sightline.runs.attempts import EXIT, read_exit
from sightline.runs.folder import BEST_SCORES, LOCK, LOG, MAX_SCORES_BYTES, is_at_work
from sightline.runs.screen import as_hours, as_score
from sightline.terminal import visible

CONFIG = "config.yaml"
MAX_DEPTH = 4  # folders below the one that is given: runs/PROJECT/RUN/fold-0 and one more
MAX_LINE_BYTES = 2**20
MAX_REASON = 200
LAST_TIME = 2.0**33  # seconds since 1970, in the year 2242
NOT_STARTED = b'"started": false}'
SIGNALS = 128  # exit codes above it are signals
_KIND = re.compile(rb'\{"event": "(start|train|epoch|evaluate_end|time_to_train|exit)"')  # what `train` alone writes
_GAP, _LEAST = "  ", 8  # between two cells; letters of a cell that is cut
_HEADER = ("run", "recipe", "data", "best", "at epoch", "epochs", "time", "state")

State = Literal["running", "finished", "stopped", "failed", "damaged"]


@dataclass(frozen=True)
class RunSummary:
    """One run as its folder describes it; None where it does not say."""

    name: str  # path below the folder that was given
    path: str
    recipe: str | None
    data: str | None
    headline: str | None  # name of the best score
    best: float | None
    best_epoch: int | None
    epochs_done: int | None
    epochs: int | None
    seconds: float | None  # at work, over all starts
    state: State
    exit_code: int | None
    reason: str


def find_runs(root: Path) -> list[RunSummary]:
    """Return the runs in and below a folder, sorted by name."""
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder; give the one that holds your runs, e.g. `sightline runs demo`")
    found = (_read(folder, str(folder.relative_to(root)), names) for folder, names in _folders(root, MAX_DEPTH))
    return sorted((run for run in found if run), key=lambda run: run.name)


def read_run(folder: Path) -> RunSummary | None:
    """Read one run; None if the folder is not one."""
    return next((_read(found, ".", names) for found, names in _folders(folder, 0)), None)


def _folders(folder: Path, depth: int) -> Iterator[tuple[Path, set[str]]]:
    """Yield every folder with the names of its files; what cannot be listed is left out."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    yield folder, {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    for entry in entries if depth else []:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and entry.name != "checkpoints":
            yield from _folders(Path(entry.path), depth - 1)


def _read(folder: Path, name: str, names: set[str]) -> RunSummary | None:
    """Read a run; None if the folder is not one."""
    works = LOCK in names and EXIT not in names and is_at_work(folder)  # exit.json is written last
    if not ({CONFIG, LOCK} & names and ({LOG, EXIT} & names or works)):
        return None
    problems: list[str] = []
    config = _guarded(problems, CONFIG, lambda: read_yaml(folder / CONFIG)) if CONFIG in names else {}
    if config and not isinstance(config.get("recipe"), str):
        return None  # another program's
    best = _guarded(problems, BEST_SCORES, lambda: _read_best(folder)) if BEST_SCORES in names else None
    work = _guarded(problems, LOG, lambda: _read_log(folder / LOG)) if LOG in names else None
    told = read_exit(folder) if EXIT in names else {}
    if EXIT in names and not told:
        problems.append(f"{EXIT} cannot be read")
    state, reason = _state(works, told, problems)
    headline, score, best_epoch = best or (None, None, None)
    epochs_done, seconds = work or (None, None)
    return RunSummary(
        name=folder.resolve().name if name == "." else name,
        path=str(folder.absolute()),
        recipe=config["recipe"] if config else None,
        data=_field(config, "data", "path", str),
        headline=headline,
        best=score,
        best_epoch=best_epoch,
        epochs_done=epochs_done,
        epochs=_field(config, "train", "epochs", int),
        seconds=seconds,
        state=state,
        exit_code=told.get("code"),
        reason=reason,
    )


def _state(works: bool, told: dict[str, Any], problems: Sequence[str]) -> tuple[State, str]:
    if works:
        return "running", ""
    if problems:
        return "damaged", "; ".join(problems)
    if not told:
        return "stopped", "killed: no process is running, and there is no exit.json"
    if told["code"] == 0:
        return "finished", told["reason"]
    return "stopped" if told["code"] > SIGNALS else "failed", told["reason"]


def _guarded(problems: list[str], name: str, read: Any) -> Any:
    """Return what `read` does; note the problem and return None where the file cannot be read."""
    try:
        return read()
    except (UsageError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{name} cannot be read ({error})"[:MAX_REASON])
        return None


def _read_best(folder: Path) -> tuple[str | None, float | None, int]:
    """Return name, value and epoch of the best score. The headline is the first that every task returns."""
    scores = read_json(folder / BEST_SCORES, MAX_SCORES_BYTES)
    values = typed(scores["values"], dict[str, float | bool | None])
    headline = next((name for name in values if name != "samples"), None)
    return headline, values.get(headline), typed(scores["epoch"], int)


def _read_log(path: Path) -> tuple[int | None, float | None]:
    """Return epochs done and seconds at work, from each start to the last line before the next one. Only lines that
    count are parsed: a long run has tens of thousands."""
    starts: list[list[bytes]] = []  # the first and the last line of each
    progress, ended = b"", False
    with open(path, "rb", opener=regular) as file:
        for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            kind = _KIND.match(line)
            if kind is None or not line.endswith(b"\n"):  # the last line of a run that was killed may be half a line
                continue
            if kind[1] == b"start":
                starts.append([line, line])
                ended = False
            elif starts and not ended:
                ended = kind[1] == b"exit"  # a start that is refused later adds an exit, but no time at work
                if not (ended and line.rstrip().endswith(NOT_STARTED)):  # the start before was killed
                    starts[-1][1] = line
            if kind[1] in (b"train", b"epoch"):  # `train` counts epochs from 0: as many are done
                progress = line
    times = [[typed(loads(line)["time"], float) for line in lines] for lines in starts]
    done = typed(loads(progress)["epoch"], int) if progress else 0 if starts else None
    if not times or not all(0 <= time < LAST_TIME for pair in times for time in pair):
        return done, None
    return done, sum(max(0.0, last - first) for first, last in times)


def _field(config: Any, part: str, field: str, kind: type) -> Any:
    try:
        return typed(config[part][field], kind)
    except (KeyError, TypeError, ValueError):
        return None


def as_json(runs: Sequence[RunSummary]) -> str:
    """Return the runs for programs."""
    return json.dumps([asdict(run) for run in runs], indent=1)


def as_text(runs: Sequence[RunSummary], root: Path, columns: int = 0) -> str:
    """Return the table for people, and below it why runs failed or cannot be read. Where a terminal has fewer columns,
    data and recipes are cut; the names of runs stay, to be typed."""
    if not runs:
        return f"no runs below {root}"
    rows = [_HEADER, *map(_row, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for column in (_HEADER.index("data"), _HEADER.index("recipe")) if columns else ():
        too_wide = sum(widths) + len(_GAP) * (len(widths) - 1) - columns
        widths[column] -= max(0, min(too_wide, widths[column] - _LEAST))
    rows = [tuple(map(_cut, row, widths)) for row in rows]
    lines = [_GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    bad = [run for run in runs if run.state in ("failed", "damaged")]
    reasons = ((run.name, run.reason.partition("\n")[0]) for run in bad)
    return "\n".join([*lines, *(f"{_line(name)}: {_line(reason)[:MAX_REASON]}" for name, reason in reasons)])


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 2]}.."


def _row(run: RunSummary) -> tuple[str, ...]:
    data = run.data or "-"
    if not data.startswith("synthetic:"):
        data = "/".join(Path(data).parts[-2:])
    done, epochs = ("-" if each is None else str(each) for each in (run.epochs_done, run.epochs))
    cells = (
        run.name,
        run.recipe or "-",
        data,
        f"{run.headline} {as_score(run.best)}" if run.headline else "-",
        "-" if run.best_epoch is None else str(run.best_epoch),
        f"{done}/{epochs}",
        "-" if run.seconds is None else as_hours(run.seconds),
        f"failed, exit {run.exit_code}" if run.state == "failed" else run.state,
    )
    return tuple(map(_line, cells))


def _line(text: str) -> str:
    """Return text that keeps to its line and steers no terminal."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")
