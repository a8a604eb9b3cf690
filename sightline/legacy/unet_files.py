"""Files of the Unet2D README under the names and in the form that the original wrote: eval_log.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sightline.data.volumes.plan import TASKS
from sightline.errors import BadData, UsageError


def task_code(text: str) -> str:
    """Return 01 to 10 for a task as it was typed; the launcher made 1 of 01."""
    code = text.zfill(2)
    if code not in TASKS:
        raise UsageError(f"--task {text}: the Decathlon has tasks 01 to 10")
    return code


def run_of(ckpt_path: str | None, results: str) -> tuple[str, str]:
    """Return the run folder and the checkpoint that --ckpt_path means: RESULTS/checkpoints/last.ckpt is the latest."""
    if not ckpt_path:
        return results, "best"
    path = Path(ckpt_path)
    if path.suffix in (".ckpt", ".pt"):
        if path.parent.name != "checkpoints":
            raise UsageError(
                f"--ckpt_path {ckpt_path}: expected RESULTS/checkpoints/last.ckpt, or a run folder of ours"
            )
        return str(path.parent.parent), "latest" if path.stem == "last" else "best"
    if path.parent.name == "checkpoints":
        return str(path.parent.parent), path.name
    return str(path), "best"


def write_eval_log(run: Path, which: str, out: Path) -> None:
    """Write {"Mean dice": ..., "L1": ...}, in per cent with two digits, from the scores of a run's checkpoint."""
    found = sorted(run.glob("scores-ckpt-*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise BadData(f"{run} has no scores of a checkpoint ({which}); evaluate it first")
    scores = _read(found[-1])
    values = {"Mean dice": round(100 * scores["values"]["dice"], 2)}
    for number, row in enumerate(scores["tables"]["classes"], start=1):
        values[f"L{number}"] = round(100 * row["dice"], 2)
    _write(out, values)


def _write(out: Path, values: dict[str, float]) -> None:
    from sightline.files.whole import write_whole

    write_whole(out, lambda path: path.write_text(json.dumps(values) + "\n", encoding="utf-8"))


def _read(path: Path) -> dict[str, Any]:
    return _parsed(path.read_text(encoding="utf-8"))


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BadData(f"not JSON: {text[:60]}: {error}") from error
    if not isinstance(found, dict):
        raise BadData(f"expected an object, found {text[:60]}")
    return found
