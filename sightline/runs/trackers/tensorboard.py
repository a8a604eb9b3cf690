"""TensorBoard: curves in the run folder, and a row in the table of runs (HParams)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sightline.errors import UsageError
from sightline.runs.loggers import Logger, RunStart


class TensorBoard(Logger):
    """Curves, and a row in the table of runs (HParams) from the start of the run on. Of training, every log line has a
    point, or those of every so many steps."""

    def __init__(self, every_steps: int) -> None:
        try:
            from torch.utils import tensorboard
        except ImportError:
            raise UsageError(
                "--run.track tensorboard needs the package tensorboard: `pip install sightline[tensorboard]`"
            ) from None
        self._module: Any = tensorboard
        self._every_steps = every_steps
        self._board: Any = None
        self._end: Any = None  # of the row: the run has finished

    def start(self, run: RunStart) -> None:
        """Open the folder and write the row: every field, and which curves are its scores."""
        self._board = self._module.SummaryWriter(str(run.folder / "tensorboard"))
        plain = {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in run.fields.items()}
        scores = {f"evaluate/{name}": 0.0 for name in run.scores}
        *begin, self._end = self._module.summary.hparams(plain, scores)
        for part in begin:
            self._board.file_writer.add_summary(part)
        self._board.flush()

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Add the points."""
        if group == "train" and self._every_steps and step % self._every_steps:
            return
        for name, value in values.items():
            self._board.add_scalar(f"{group}/{name}", value, step)

    def close(self, code: int, reason: str) -> None:
        """Mark the row as finished where the run has."""
        if code == 0:
            self._board.file_writer.add_summary(self._end)
        self._board.close()
