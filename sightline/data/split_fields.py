"""Fields of data that may come without a val split, and what a run keeps of the split it drew."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sightline.data.sources import Images
from sightline.data.sources.layouts import ALL, DESCRIPTION, SPLIT, kept_split
from sightline.errors import UsageError
from sightline.files.plain_yaml import to_text
from sightline.parts import DataConfig, undecisive

_CHOOSING = {"val_fraction", "split"}  # fields that choose the samples that validate


@dataclass(frozen=True)
class SplitFields:
    """Settings: which samples validate if the data have no val split."""

    val_fraction: float = 0.2
    """Data without a val split: share of the training samples (of each class) that validate. They are chosen by their
    names, the same ones for every seed, and kept in split.json of the run folder."""
    split: str = undecisive("")
    """Data without a val split: JSON file that lists the samples that validate, e.g. split.json of another run; all:
    every sample, for `evaluate` only."""

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise UsageError(f"val_fraction={self.val_fraction} must be between 0 and 1, e.g. 0.2")

    def in_run(self, folder: Path, typed: Collection[str] = ()) -> Self:
        """Return these fields with the split that a run keeps, if it keeps one and none was typed: the first start
        decides."""
        if not _CHOOSING.isdisjoint(typed):
            return self
        return dataclasses.replace(self, split=kept_split(folder) or self.split)

    def whole(self, typed: Collection[str]) -> Self:
        """Return these fields with all samples of data without a val split in it, unless one of them was typed. Refuse
        a typed `all` for data that have one: it would score that alone."""
        if _CHOOSING.isdisjoint(typed):
            return dataclasses.replace(self, split=ALL)
        if self.split == ALL and isinstance(self, DataConfig) and SPLIT not in self.open("val", 0).kept:
            path = getattr(self, "path", "")
            raise UsageError(
                f"--data.split {ALL}: {path} has a val split; give one part, e.g. --data.path {path}/train"
            )
        return self


def kept_of(source: Images) -> dict[str, str]:
    """Return what a run keeps of its data: data.yaml says where they are, split.json which samples validate."""
    kept = {DESCRIPTION: to_text(source.layout.as_values())} if source.layout else {}
    if source.held_out is not None:
        names = [os.fsdecode(name) for name in source.held_out.all()]
        kept[SPLIT] = json.dumps({"val": names}, indent=0) + "\n"
    return kept
