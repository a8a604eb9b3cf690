"""`sightline prepare shapes`: a drawn world in the real formats of the three tasks, from nothing but a seed.

Each part (classification, detection, segmentation) is a folder of its own, written piece by piece; the `shapes.json` in
it says, when it is complete, what was drawn.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sightline.data.prepare.shapes.formats import FORMATS, Job
from sightline.data.writing.pieces import Written, alone_in, finished, jobs_or_cores, write_pieces
from sightline.errors import UsageError
from sightline.files.whole import refuse_link, write_text, written_whole
from sightline.terminal.progress import Progress

_RECORD = "shapes.json"
# The two options that say how much of each part is drawn, in the order of its splits.
_AMOUNTS: dict[str, tuple[str, str]] = {
    "classification": ("train_per_class", "val_per_class"),
    "detection": ("train_pictures", "val_pictures"),
    "segmentation": ("train_volumes", "test_volumes"),
}
_WORTH_PROCESSES = 300  # items; below this, starting processes takes longer than drawing

Part = Literal["classification", "detection", "segmentation"]


@dataclass(frozen=True)
class ShapesOptions:
    """Draw a small data set for each task: shapes to classify, to detect, and lesions in volumes to segment.

    classification/{train,val}/CLASS/*.jpg, detection/ as COCO 2017, segmentation/Task01_Shapes as Medical Decathlon.
    The same seed gives the same files on the same NumPy and Pillow, however many processes draw them.
    """

    out: Path
    """Folder to write into; parts that are already there are kept."""
    seed: int = 0
    """Everything drawn follows from this number."""
    only: tuple[Part, ...] = ("classification", "detection", "segmentation")
    """The parts to draw."""
    train_per_class: int = 400
    """Classification: training images of each of the ten classes."""
    val_per_class: int = 100
    """Classification: held-out images of each class."""
    train_pictures: int = 400
    """Detection: training images."""
    val_pictures: int = 100
    """Detection: held-out images."""
    train_volumes: int = 20
    """Segmentation: labelled volumes."""
    test_volumes: int = 4
    """Segmentation: volumes without labels."""

    def __post_init__(self) -> None:
        for part in self.only:
            if part not in _AMOUNTS:
                raise UsageError(f"only={part!r} is not a part; known: {', '.join(_AMOUNTS)}")
        if not self.only:
            raise UsageError(f"only is empty, so there is nothing to draw; name one or more of {', '.join(_AMOUNTS)}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed} is out of range; use 0 or a positive number below 2**63")
        for field in (field for fields in _AMOUNTS.values() for field in fields):
            if getattr(self, field) < 1:
                raise UsageError(f"{field}={getattr(self, field)} draws nothing; use 1 or more")


def prepare(options: ShapesOptions, progress: Progress) -> dict[str, int]:
    """Draw what is missing and return counts; progress(what, done, total) is called as work proceeds."""
    wanted = sum(job.items for part in _parts(options) for job in part.jobs())
    return draw_parts(options, progress, jobs_or_cores(0) if wanted >= _WORTH_PROCESSES else 1)


def draw_parts(options: ShapesOptions, progress: Progress, processes: int) -> dict[str, int]:
    """Do as `prepare` with a chosen number of processes, which changes the time it takes and nothing else."""
    out, parts = Path(options.out), _parts(options)
    counts = [finished(part, _RECORD) if out.is_dir() else None for part in parts]
    if None in counts:
        with alone_in(out):
            for name in _AMOUNTS:  # a start of an earlier version, which drew each part under such a name
                shutil.rmtree(out / f".{name}.drawing", ignore_errors=True)
            counts = [write_pieces(part, processes, progress, _RECORD) for part in parts]
    pairs = zip(parts, counts, strict=True)
    return {f"{part.name}/{what}": number for part, found in pairs for what, number in (found or {}).items()}


def _parts(options: ShapesOptions) -> list[DrawnPart]:
    amounts = {name: {field: getattr(options, field) for field in fields} for name, fields in _AMOUNTS.items()}
    names = [name for name in _AMOUNTS if name in options.only]
    return [DrawnPart(name, Path(options.out, name), options.seed, amounts[name]) for name in names]


@dataclass(frozen=True)
class DrawnPart:
    """One part, as `write_pieces` writes it."""

    name: str
    out: Path
    seed: int
    amounts: dict[str, int]

    def jobs(self) -> list[Job]:
        return FORMATS[self.name].jobs(self.seed, *self.amounts.values())

    def decided(self) -> dict[str, Any]:
        return {"seed": self.seed, "options": self.amounts}

    def check(self) -> None:
        refuse_link(self.out)

    def pieces(self) -> dict[str, list[int]]:
        return {self.name: [job.items for job in self.jobs()]}

    def room(self) -> int:
        return FORMATS[self.name].item_bytes * sum(job.items for job in self.jobs())

    def write(self, part: str, number: int) -> Written:
        files, entries = [], []
        for drawn in FORMATS[self.name].draw(self.jobs()[number]):
            for path, data in drawn.files.items():
                with written_whole(self.out, path) as file:
                    file.write(data)
                files.append((path, len(data)))
            entries.append(drawn.entry)
        return Written(files, {"entries": entries})

    def finish(self, written: list[Written]) -> dict[str, int]:
        tables = FORMATS[self.name].tables([entry for piece in written for entry in piece.notes["entries"]])
        for path, text in tables.files.items():
            write_text(self.out, path, text)
        return tables.counts
