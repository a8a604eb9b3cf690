"""The last screen of `sightline train`: scores, what is hardest, and the next commands, from the files of the run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size

from sightline.files.regular import regular
from sightline.files.typed_json import loads, read_json
from sightline.runs.folder import BAD_SAMPLES, BEST_SCORES, MAX_SCORES_BYTES, SCORES
from sightline.runs.score_names import of_class
from sightline.runs.screen import as_score, counted

SHOWN = 3  # classes, and mistakes
MOST_BAD_BYTES = 2**22
INDENT = 16
MOST_OF_A_NAME = 24  # columns
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)


def as_text(
    folder: Path, checkpoint: str, recipe_file: str = "", has_test: bool = False, can_predict: bool = True
) -> str:
    """Return the screen; `checkpoint` is what `evaluate` and `predict` use, `recipe_file` the user's own recipe; the
    command that scores the test split is named if the data have one, `predict` if the task has a reporter."""
    last, best = _read(folder / SCORES), _read(folder / BEST_SCORES)
    shown = best or last  # no score was a number, or the best one is that of the run it began with: --run.resume PATH
    if not shown:
        return f"finished: not evaluated; results are in {folder}"
    headline = next(iter(shown["values"]), "")  # the first score of every task; that of multi-label data is another
    lines = [
        f"finished: {'best ' * bool(best)}{_compared(headline, shown, last)}",
        f"results are in {folder}; evaluate and predict use {checkpoint}",
        *_listed("worst classes:", _worst_classes(headline, shown)),
        *_listed("mistakes:", _mistakes(shown)),
    ]
    if skipped := _skipped(folder, shown):
        lines += _listed("skipped:", [f"{skipped} sample{'s' * (skipped > 1)}, listed in {folder / BAD_SAMPLES}"])
    image = (_file_to_predict(shown) or "IMAGE") if can_predict else ""
    return "\n".join([*lines, "next:", *next_commands(folder, recipe_file, image, has_test)])


def next_commands(folder: Path, recipe_file: str, image: str, has_test: bool) -> Iterator[str]:
    """Yield the commands that most people type next, quoted for a shell; `predict` only of an image."""
    more = ["--recipe", recipe_file] if recipe_file else []
    scores = ["evaluate", _argument(folder)]
    tests = [[*scores, "--split", "test"]] if has_test else []
    predicts = [["predict", _argument(folder), image]] if image else []
    for words in (scores, *tests, *predicts):
        yield "  " + shlex.join(["sightline", *words, *more])


def _argument(path: Path) -> str:
    return f"./{path}" if str(path).startswith("-") else str(path)


def _read(path: Path) -> dict[str, Any]:
    """Return an evaluation; {} where there is none that can be read, which is no reason to fail a run that is done."""
    try:
        found = read_json(path, MAX_SCORES_BYTES)
        return found if {"values", "tables", "worst", "epoch", "step"} <= found.keys() else {}
    except DAMAGED:
        return {}


def _compared(headline: str, best: dict[str, Any], last: dict[str, Any]) -> str:
    score = as_score(best["values"].get(headline))
    text = f"{headline} {score} at epoch {best['epoch']}"
    if last and last["step"] != best["step"]:
        text += f"; last {as_score(last['values'].get(headline))} at epoch {last['epoch']}"
    return text


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    titles = [title, *[""] * len(lines)]
    return [f"{title:<{INDENT}}{line}" for title, line in zip(titles, lines, strict=False)]


def _worst_classes(headline: str, scores: dict[str, Any]) -> list[str]:
    """Return the classes with the lowest scores; none where all are perfect, or without samples."""
    rows = [row for row in scores["tables"].get("classes", []) if (row.get(headline) or 0) < 1]
    rows = sorted((row for row in rows if row.get(headline) is not None), key=lambda row: row[headline])[:SHOWN]
    width = max((cell_len(_short(row["class"])) for row in rows), default=0)
    lines = []
    for row in rows:
        score = f"{of_class(headline)} {as_score(row[headline])}"
        lines.append(f"{set_cell_size(_short(row['class']), width)}  {score}{counted(row)}")
    return lines


def _mistakes(scores: dict[str, Any]) -> list[str]:
    tables = scores["tables"]
    samples = {row["class"]: row.get("samples") for row in tables.get("classes", [])}
    return [
        f"{_short(row['class'])} predicted as {_short(row['predicted'])}: "
        f"{row['samples']} of {samples.get(row['class'])}"
        for row in tables.get("confusion", [])[:SHOWN]
    ]


def _short(name: str) -> str:
    return name if cell_len(name) <= MOST_OF_A_NAME else f"{set_cell_size(name, MOST_OF_A_NAME - 3)}..."


def _skipped(folder: Path, scores: dict[str, Any]) -> int:
    """Count the samples that could not be read, over all starts of the run."""
    try:
        with open(folder / BAD_SAMPLES, "rb", opener=regular) as file:
            rows = [loads(line) for line in file.read(MOST_BAD_BYTES).splitlines()]
        return len({(row["feed"], row["name"]) for row in rows if "data" not in row})  # else of `evaluate` elsewhere
    except DAMAGED:
        return int(scores["values"].get("skipped", 0))


def _file_to_predict(scores: dict[str, Any]) -> str:
    """Return the file of the worst sample, where samples are files; from here, if it lies below."""
    path = next((row["path"] for row in scores["worst"] if isinstance(row.get("path"), str)), "")
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here)
