"""Log lines and TensorBoard points of the originals that count both in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sightline.legacy.table import Given

OURS = 10  # steps between log lines where nobody asks for another number
KEY = "save_summary_steps"


def log_lines(given: Given, key: str) -> Sequence[str]:
    """Write the steps between log lines, which the flag `key` asks for."""
    lines, _ = _steps(given, key)
    return [] if lines == OURS else ["--run.log-every-steps", str(lines)]


def board_points(given: Given, key: str) -> Sequence[str]:
    """Write that TensorBoard is on, with the steps between its points of training where not every line has one."""
    lines, points = _steps(given, key)
    return ["--run.tensorboard", *([] if points == lines else ["--run.tensorboard-every-steps", str(points)])]


def _steps(given: Given, key: str) -> tuple[int, int]:
    """Return the steps between lines and between points. A point has the numbers of a line: if it is asked for between
    two, there are more lines; if nobody asks, there are fewer points."""
    lines, points = given[key], given[KEY]
    if KEY not in given.named and points % lines:
        return lines, lines
    return math.gcd(lines, points), points
