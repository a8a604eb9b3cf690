"""`sightline prepare static`: training batches of a detection data set as files, to be replayed bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sightline.data.detection import DetectionData
from sightline.data.loading.static import LastBatch, dump
from sightline.errors import UsageError
from sightline.terminal.progress import Progress


@dataclass(frozen=True)
class StaticOptions:
    """Write training batches, augmented and normalised in fp32, which `--data.static DIR` replays in their order.

    They are the first that a run of this seed and batch size sees. In Python, sightline.data.loading.static.dump
    writes those of any recipe's data.
    """

    out: Path
    """Folder to write into; new or empty."""
    batch: int
    """Samples of a batch; a run that replays them needs the same on its device."""
    steps: int
    """Number of batches."""
    seed: int = 0
    """As --train.seed."""
    last_batch: LastBatch = "drop"
    """As --train.last-batch, which decides where an epoch ends; ssd_resnet34 has pad."""
    data: DetectionData = field(default_factory=DetectionData)
    """The images, and what is done to them."""

    def __post_init__(self) -> None:
        for name in ("batch", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} writes nothing; use 1 or more")
        if self.data.static:
            raise UsageError("--data.static is what is written here; leave it out")


def prepare(options: StaticOptions, progress: Progress) -> dict[str, int]:
    """Write the batches and return counts; progress(what, done, total) is called as work proceeds."""
    return dump(options.data, options.out, options.batch, options.steps, options.seed, progress, options.last_batch)
