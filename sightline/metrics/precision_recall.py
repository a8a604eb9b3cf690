"""Precision, recall and F1 of a class; precision over recall as scores.json holds it.

A curve is 101 numbers for recalls 0, 0.01, ... 1, for few classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

RECALLS = np.arange(101) / 100  # COCO's; by linspace, 0.35 would be a little more
CURVES = 5  # classes with a curve of their own, so that 1,000 classes take no more room than ten


def rates(right: float, truths: float, found: float, recall: str = "recall") -> dict[str, float | None]:
    """Return recall, precision and F1 from counts; None where there is nothing to divide by."""
    return {
        recall: right / truths if truths else None,
        "precision": right / found if found else None,
        "f1": 2 * right / (truths + found) if truths + found else None,
    }


def mean(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are known; NaN if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def interpolated(recall: np.ndarray, precision: np.ndarray) -> np.ndarray:
    """Return the best precision at each of RECALLS or above, 0 where none is reached, as COCO does. `recall` rises."""
    best = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(recall, RECALLS)
    return np.append(best, 0.0)[places]


def curve_table(curves: Sequence[tuple[str, float, np.ndarray]]) -> list[dict[str, Any]]:
    """Return rows for the mean over all classes (class None) and for the classes with the lowest scores; a curve comes
    with the name of its class and its score."""
    if not curves:
        return []
    worst = sorted(curves, key=lambda curve: curve[1])[:CURVES] if len(curves) > 1 else []
    mean = np.mean([curve for _, _, curve in curves], axis=0)
    return [curve_row(None, mean), *(curve_row(name, curve) for name, _, curve in worst)]


def curve_row(name: str | None, precision: np.ndarray) -> dict[str, Any]:
    """Return a row of the table; None stands for all classes."""
    return {"class": name, "precision": [round(value, 4) for value in precision.tolist()]}
