"""Fields of data that may come without a val split. Imports neither torch nor NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from sightline.errors import UsageError
from sightline.parts import DataConfig
from sightline.recipe.part import Above, Below, Part, not_compared

_CHOOSING = {"val_fraction", "split"}  # fields that choose the samples that validate


@dataclass(frozen=True)
class SplitFields(Part):
    """Settings: which samples validate if the data have no val split."""

    part = "data"

    val_fraction: Annotated[float, Above(0), Below(1, "0.2 is usual")] = 0.2
    """Data without a val split: share of the training samples (of each class) that validate. They are chosen by their
    names, the same ones for every seed, and kept in split.json of the run folder."""
    split: str = not_compared("")
    """Data without a val split: JSON file that lists the samples that validate, e.g. split.json of another run; all:
    every sample, for `evaluate` only."""

    def in_run(self, folder: Path, typed: Collection[str] = ()) -> Self:
        """Return these fields with the split that a run keeps, if it keeps one and none was typed: the first start
        decides."""
        from sightline.data.sources.layouts import kept_split

        if not _CHOOSING.isdisjoint(typed):
            return self
        return dataclasses.replace(self, split=kept_split(folder) or self.split)

    def whole(self, typed: Collection[str]) -> Self:
        """Return these fields with all samples of data without a val split in it, unless one of them was typed. Refuse
        a typed `all` for data that have one: it would score that alone."""
        from sightline.data.sources.layouts import ALL, SPLIT

        if _CHOOSING.isdisjoint(typed):
            return dataclasses.replace(self, split=ALL)
        if self.split == ALL and isinstance(self, DataConfig) and SPLIT not in self.open("val", 0).kept:
            path = getattr(self, "path", "")
            raise UsageError(
                f"--data.split {ALL}: {path} has a val split; give one part, e.g. --data.path {path}/train"
            )
        return self
