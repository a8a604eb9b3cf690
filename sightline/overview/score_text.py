"""Scores as a person reads them after a command: a table of classes, one of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sightline.parts import Scores
from sightline.runs.score_names import COCO_MORE, of_class, shown
from sightline.runs.screen import COUNTED, as_score, counted

CLASSES_SHOWN = 20
WORST_SHOWN = 5


def of_classes(scores: Scores, file: str, shows_worst: bool = False) -> list[str]:
    """Format the first rows of the table of classes, which `file` holds whole."""
    rows, lines = scores.tables.get("classes", []), []
    for row in rows[:CLASSES_SHOWN]:
        values = "  ".join(f"{of_class(key)} {_number(row[key])}" for key in row if key not in ("class", *COUNTED))
        lines.append(f"  {row['class']:24} {values}{counted(row)}")
    if len(rows) > CLASSES_SHOWN:
        lines.append(f"  and {len(rows) - CLASSES_SHOWN} more classes in {file}")
    if shows_worst and scores.worst:
        worst = ", ".join(f"{row['name']} {row['dice']:.4f}" for row in scores.worst[:WORST_SHOWN])
        lines.append(f"  lowest: {worst}")
    named = [row for row in scores.worst[:WORST_SHOWN] if "path" in row]  # to be given to `predict`
    return [*lines, *(f"  worst: {row['path']}{_mistakes_of(row)}" for row in named)]


def _mistakes_of(row: dict[str, Any]) -> str:
    """Say what is wrong with one of the worst samples: a class, or boxes."""
    if "predicted" in row:
        return f"  predicted as {row['predicted']}"
    if "missed" in row:
        return f"  {row['missed']} of {row['truths']} objects missed, {row['wrong']} wrong"
    return f"  IoU {as_score(row['iou'])}" if "iou" in row else ""


def of_checkpoints(rows: Sequence[dict[str, Any]]) -> str:
    """Format step and scores of each checkpoint as a table; of COCO's scores the first two."""
    names = [name for name in shown(rows[0]["values"]) if name not in COCO_MORE] if rows else []
    lines = ["      step  " + "  ".join(f"{name:>6}" for name in names)]
    for row in rows:
        cells = (f"{_number(row['values'].get(name)):>{max(6, len(name))}}" for name in names)
        lines.append(f"{row['step']:10}  " + "  ".join(cells))
    return "\n".join(lines)


def _number(value: float | str | None) -> str:
    return str(value) if isinstance(value, int | str) else f"{as_score(value):>6}"
