"""The runs of all folds side by side (`--data.fold all`): the best scores of each, their mean and their spread; and the
runs that a command names, one by one or by the folder of all folds."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sightline.data.volumes.plan import is_plain_name
from sightline.errors import BadData, UsageError
from sightline.files.checkpoint_folder import MANIFEST, STATE, names_in
from sightline.files.our_folders import is_result
from sightline.files.regular import is_file
from sightline.files.typed_json import read_json, typed
from sightline.recipe.recipe import Recipe
from sightline.runs.folder import BEST_SCORES, MAX_SCORES_BYTES, SCORES
from sightline.runs.screen import as_score

DOCUMENT = "folds.json"
EXPORTED = (".onnx", ".pt2")


def runs_of(folder: Path) -> list[Path]:
    """Return the runs of all folds if this is their folder, else the path itself."""
    path = folder / DOCUMENT
    if not is_file(path):
        return [folder]
    try:
        names = [typed(row["folder"], str) for row in read_json(path, MAX_SCORES_BYTES)["folds"]]
        if not names or len(set(names)) < len(names) or not all(map(is_plain_name, names)):
            raise ValueError(f"its folders are {names}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadData(f"{path} cannot be read ({error}); name the runs one by one, e.g. {folder}/fold-0") from error
    return [folder / name for name in names]


def split_runs(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of `predict RUN ... INPUT ...`: the first names a run or an exported file, later run folders name
    further runs. A later exported file is an input, which cannot be read: it may have come with a stranger's images."""
    first, rest = Path(words[0]), words[1:]
    runs = [word for word in rest if _is_run(Path(word))]
    inputs = [word for word in rest if word not in runs]
    is_swapped = bool(runs) or (len(rest) == 1 and is_exported(Path(rest[0])))
    if is_swapped and not (_is_run(first) or is_exported(first)) and (first.is_file() or not inputs):
        meant = [*runs, words[0], *inputs] if runs else [*rest, words[0]]
        raise UsageError(f"{first} is not a run, and the run comes first: `sightline predict {shlex.join(meant)}`")
    if not inputs:
        raise UsageError(f"predict {' '.join(words)}: all of these are runs; add images, volumes or folders of them")
    return [words[0], *runs], inputs


def is_exported(path: Path) -> bool:
    """Return whether this is a file that `export` may have written."""
    return path.suffix in EXPORTED and path.is_file()


def _is_run(path: Path) -> bool:
    """Return whether a folder has the signs of ours: checkpoints, or a description of all folds."""
    if (path / DOCUMENT).is_file() or ((path / MANIFEST).is_file() and (path / STATE).is_file()):
        return True
    return bool(names_in(path / "checkpoints")) or ((path / "checkpoints").is_dir() and is_result(path))


def refuse_without(recipe: Recipe) -> None:
    """Refuse `--data.fold all` for data without folds."""
    data = recipe.data
    if not (hasattr(data, "fold") and hasattr(data, "folds")):
        raise UsageError(f"--data.fold all: {type(data).__name__} of {recipe.name} has no folds; leave it out")


def refuse_folds(folder: Path) -> None:
    """Refuse to score all folds together: every case of their val splits was trained on by the others."""
    if (folder / DOCUMENT).is_file():
        raise UsageError(
            f"{folder} holds the runs of all folds, and each case was trained on by all of them but one; {DOCUMENT} "
            f"has the score of each on its own cases. Score cases that none has seen: `sightline predict {folder} "
            f"IMAGES --out MASKS`, then `sightline evaluate MASKS --labels LABELS`"
        )


def read_fold(folder: Path, fold: int, headline: str) -> dict[str, Any]:
    """Return the best scores of a finished run, those of the checkpoint that `evaluate` and `predict` use."""
    path = folder / BEST_SCORES
    if not path.exists() and (folder / SCORES).exists():
        path = folder / SCORES  # no score was a number, so none was the best: the last one says so
    try:
        best = read_json(path, MAX_SCORES_BYTES)
        classes = {row["class"]: row[headline] for row in best["tables"].get("classes", []) if headline in row}
        scores = {"epoch": best["epoch"], "step": best["step"], headline: best["values"][headline]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadData(
            f"fold {fold} is trained, but {path} cannot be read ({error}); remove {folder} to train it again"
        ) from error
    return {"fold": fold, "folder": folder.name, **scores, "classes": classes}


def summary(recipe: str, headline: str, folds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what folds.json holds: a row per fold; mean and spread (standard deviation over n - 1) of the headline and
    of every class, null where a fold has no such score."""
    columns = {headline: [row[headline] for row in folds]}
    names = list(dict.fromkeys(name for row in folds for name in row["classes"]))
    classes = {name: [row["classes"].get(name) for row in folds] for name in names}
    return {
        "recipe": recipe,
        "headline": headline,
        "folds": list(folds),
        "mean": {**_over(columns, 1, statistics.fmean), "classes": _over(classes, 1, statistics.fmean)},
        "spread": {**_over(columns, 2, statistics.stdev), "classes": _over(classes, 2, statistics.stdev)},
    }


def _over(columns: dict[str, list[float | None]], least: int, measure: Any) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, values in columns.items():
        known = [value for value in values if value is not None]
        found[name] = measure(known) if len(known) == len(values) >= least else None
    return found


def as_text(document: dict[str, Any]) -> str:
    """Format the table for people."""
    headline, names = document["headline"], list(document["mean"]["classes"])
    widths = {name: max(6, len(name)) for name in (headline, *names)}

    def line(title: str, row: dict[str, Any]) -> str:
        values = {headline: row[headline], **row["classes"]}
        return f"{title:<8}" + "".join(f"  {as_score(values.get(name)):>{width}}" for name, width in widths.items())

    lines = [f"{'fold':<8}" + "".join(f"  {name:>{width}}" for name, width in widths.items())]
    lines += [f"{line(str(row['fold']), row)}  epoch {row['epoch']}" for row in document["folds"]]
    return "\n".join([*lines, line("mean", document["mean"]), line("spread", document["spread"])])
