"""What writes the predictions of files: mask_files.py, volume_files.py and predictions.py, or a task of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.parts import Batch, DataSpec, PredictOptions

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PredictJob:
    """What a reporter needs: the files by name, the folder of the results, and how to show them."""

    folder: Path
    files: Mapping[str, Path]
    spec: DataSpec
    options: PredictOptions
    say: Callable[[str], None]


class Reporter(ABC):
    """Writes predictions into the output folder of `predict`."""

    unreadable: list[dict[str, str]]

    @abstractmethod
    def add(self, names: Sequence[str | None], predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Write one batch's predictions; `names[i]` is None for padding and unreadable files."""

    @abstractmethod
    def note_unreadable(self, name: str, reason: str) -> None:
        """Record a file that cannot be read; the others are still predicted."""

    @abstractmethod
    def write(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Write the list of all files, at the end. Returns its content: `about`, "files" and "unreadable"."""
