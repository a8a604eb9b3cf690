"""Pictures with labels (a plan of `_forms.py`) written piece by piece (`_pieces.py`): imagenet and convert."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline.data.writing.forms import Plan, check_names, room_for, write_piece
from sightline.data.writing.pieces import Written, write_pieces, write_text
from sightline.errors import BadData
from sightline.files.archive import clean_name
from sightline.parts import Split
from sightline.terminal.progress import Progress

_SPLITS: tuple[Split, ...] = ("train", "val")


def write_all(plan: Plan, data_bytes: int, jobs: int, progress: Progress) -> dict[str, int]:
    """Writes what is missing of a plan; returns counts. `data_bytes` is how much the pictures take, all together."""
    return write_pieces(_LabelledPictures(plan, data_bytes), jobs, progress)


@dataclass(frozen=True)
class _LabelledPictures:
    plan: Plan
    data_bytes: int

    @property
    def out(self) -> Path:
        return self.plan.out

    def decided(self) -> dict[str, Any]:
        plan = self.plan
        shards = None if plan.form == "folder" else dict(plan.shards)
        inputs = {split: source.fingerprint for split, source in plan.sources.items()}
        return {"form": plan.form, "shards": shards, "repair": plan.repair, "inputs": inputs}

    def check(self) -> None:
        for source in self.plan.sources.values():
            for name in source.classes:  # they become folders
                if clean_name(name, str(self.out)) != name or "/" in name or name.startswith("."):
                    raise BadData(f"class {name!r} cannot be the name of a folder; rename it")
        for split in self.plan.sources:
            check_names(self.plan, split)

    def pieces(self) -> dict[str, list[int]]:
        plan = self.plan
        return {split: [plan.count(split, number) for number in range(plan.pieces(split))] for split in plan.sources}

    def room(self) -> int:
        pictures = sum(len(source) for source in self.plan.sources.values())
        return room_for(self.plan.form, pictures, self.data_bytes)

    def write(self, part: str, number: int) -> Written:
        split = next(split for split in _SPLITS if split == part)
        return write_piece(self.plan, split, number)

    def finish(self, written: list[Written]) -> dict[str, int]:
        plan = self.plan
        counts: dict[str, int] = {split: len(source) for split, source in plan.sources.items()}
        if plan.repair:
            for what in ("repaired", "unreadable"):
                counts[what] = sum(piece.counts[what] for piece in written)
        if plan.form != "folder":
            classes = next(iter(plan.sources.values())).classes
            write_text(plan.out, "classes.txt", "".join(f"{name}\n" for name in classes))
        else:
            os.sync()  # shards were brought to the disk one by one; a million files are so in one go
        return counts
