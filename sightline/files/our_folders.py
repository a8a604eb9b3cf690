"""Recognise the folders that sightline writes: runs, folders of runs, predictions. Inside a data folder they are not
data."""

from __future__ import annotations

import os
from pathlib import Path

from sightline.errors import UsageError
from sightline.files.regular import regular

_PREDICTIONS = b'{\n "format": '  # predictions.json begins so
_BESIDE_RUNS = ("report.html", "folds.json", "postprocessing.json")
_DEPTH = 4  # runs/PROJECT/RUN/fold-0


def is_result(folder: Path | str, depth: int = _DEPTH) -> bool:
    """Return whether a folder is a run, the checkpoints of one, predictions, or holds nothing but such folders."""
    path = os.fspath(folder)
    above, name = os.path.split(path)
    if _is_run(path) or _is_predictions(path) or (name == "checkpoints" and _is_run(above)):
        return True
    return depth > 1 and _holds_only_results(path, depth)


def refuse_among_data(out: Path, data: str, suffixes: tuple[str, ...]) -> None:
    """Refuse a run folder that is the folder of the data, or one inside it that holds samples, such as a class."""
    if not os.path.isdir(data):
        return
    real, root = os.path.realpath(out), os.path.realpath(data)
    if real == root:
        what = "is the folder of the data"
    elif os.path.commonpath([real, root]) == root and not is_result(out) and _holds_any(real, suffixes):
        what = "holds samples of the data"
    else:
        return
    raise UsageError(f"--run.out {out} {what}; give the run a folder of its own, e.g. --run.out runs/first")


def _holds_any(folder: str, suffixes: tuple[str, ...]) -> bool:
    return any(name.lower().endswith(suffixes) for _, _, names in os.walk(folder) for name in names)


def _is_run(path: str) -> bool:
    def has(name: str) -> bool:
        return os.path.exists(os.path.join(path, name))

    # A start that failed early has no config.yaml yet.
    return (has("config.yaml") and (has("log.jsonl") or has("checkpoints"))) or (has(".lock") and has("log.jsonl"))


def _is_predictions(path: str) -> bool:
    file = os.path.join(path, "predictions.json")
    if not os.path.isfile(file):
        return False
    try:
        with open(file, "rb", opener=regular) as opened:
            return opened.read(len(_PREDICTIONS)) == _PREDICTIONS
    except OSError:
        return False


def _holds_only_results(path: str, depth: int) -> bool:
    found = False
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if not entry.is_dir():
                    if entry.name in _BESIDE_RUNS or entry.name.endswith(".log"):
                        continue
                    return False
                if not is_result(entry.path, depth - 1):
                    return False
                found = True
    except OSError:
        return False
    return found
