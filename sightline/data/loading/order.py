"""The order of samples: a pure function of (seed, step), so a position in the run is one integer.

Global batch k holds the k-th `global_batch` samples of the epoch's permutation; rank r takes its r-th part.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from sightline.data.draws import generator
from sightline.errors import UsageError

PADDING = -1  # the index of a row without a sample; in evaluation only


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, items: int) -> np.ndarray:
    """Return the order of one epoch."""
    return generator(seed, epoch, 0, "order").permutation(items)


@dataclass(frozen=True)
class TrainOrder:
    """Endless shuffled batches. `last` decides about the last partial batch: drop, pad, or wrap into the next epoch.

    `repeats` (repeated augmentation) does not change the length of an epoch: each index of the permutation appears
    `repeats` times in a row until the epoch is full, so only the first items / repeats of them are seen. Each copy
    gets its own epoch number, so it is augmented differently. Within a batch all first copies come first, then all
    second ones: copies of an image go to different ranks, as with torchvision's RASampler, and `mix`, which takes the
    previous image, does not mix an image with itself.
    """

    items: int  # of one sample each, unless samples_per_item is more
    global_batch: int  # samples
    seed: int
    last: Literal["drop", "pad", "wrap"] = "drop"
    rank: int = 0
    ranks: int = 1
    repeats: int = 1
    cap: int = 0  # most steps of an epoch; 0: no limit
    least: int = 0  # least steps of an epoch; with wrap only
    samples_per_item: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"repeats={self.repeats} must be 1 (every sample once an epoch) or more, e.g. 3")
        if self.global_batch % self.ranks:
            below = max(self.ranks, self.global_batch // self.ranks * self.ranks)
            raise UsageError(
                f"global_batch={self.global_batch} cannot be split over {self.ranks} devices; use a multiple of "
                f"{self.ranks}, e.g. --train.global-batch {below} or {below + self.ranks}"
            )
        if self.samples_per_item > 1:
            self._check_items()
        if self.steps_per_epoch == 0:
            raise UsageError(
                f"global_batch={self.global_batch} is larger than the {self.items} training samples, which leaves no "
                f"step; use --train.global-batch {self.items} or less, or --train.last-batch pad"
            )

    def _check_items(self) -> None:
        """Raise UsageError unless a batch, and each rank's part of it, is a whole number of items. Messages call them
        volumes of slices: no other data have several samples per item."""
        batch, each, devices = self.global_batch, self.samples_per_item, self.ranks
        if batch % each:
            raise UsageError(
                f"global_batch={batch} is not a whole number of volumes of {each} slices; use a multiple of {each}, "
                f"e.g. --train.global-batch {max(each, batch // each * each)}, or another --data.nvol"
            )
        volumes = f"{self.items_per_step} volumes of {each} slices"
        if self.items_per_step % devices:
            counts = range(-(-self.items_per_step // devices) * devices, batch + 1, devices)
            more = next(count for count in counts if batch % count == 0)
            raise UsageError(
                f"global_batch={batch} is {volumes}, which cannot be split over {devices} devices; use a multiple of "
                f"{devices} volumes, e.g. --data.nvol {more}"
            )
        if self.steps_per_epoch == 0:
            raise UsageError(
                f"global_batch={batch} takes {volumes} and there are {self.items} to train on, which leaves no step; "
                "use a smaller --data.nvol, or --train.last-batch pad"
            )

    @property
    def items_per_step(self) -> int:
        """Items that one step loads on all ranks together."""
        return self.global_batch // self.samples_per_item

    @property
    def local_batch(self) -> int:
        """Items of one step on this rank: rows of a loaded batch."""
        return self.items_per_step // self.ranks

    @property
    def local_samples(self) -> int:
        """Samples of one step on this rank."""
        return self.local_batch * self.samples_per_item

    @property
    def samples_per_epoch(self) -> int:
        """All training samples, including those of a dropped last batch."""
        return self.items * self.samples_per_item

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer updates per epoch."""
        whole = -(-self.items // self.items_per_step) if self.last == "pad" else self.items // self.items_per_step
        whole = max(whole, self.least)
        return min(whole, self.cap or whole)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, indices) of this rank's items in a step; copy r of `repeats` has epoch * repeats + r."""
        if self.last == "wrap":
            stream = step * self.items_per_step + np.arange(self.items_per_step)
            epochs, places = np.divmod(stream, self.items)
        else:
            epoch, k = divmod(step, self.steps_per_epoch)
            epochs = np.full(self.items_per_step, epoch)
            places = (k * self.items_per_step + np.arange(self.items_per_step)) % self.items
        places, copies = np.divmod(places, self.repeats)
        part = np.argsort(copies, kind="stable")[self.rank * self.local_batch : (self.rank + 1) * self.local_batch]
        epochs, places, copies = epochs[part], places[part], copies[part]
        indices = np.empty(self.local_batch, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = permutation(self.seed, int(epoch), self.items)[places[chosen]]
        return epochs * self.repeats + copies, indices


@dataclass(frozen=True)
class EvalOrder:
    """Every sample once, in order; the last batch is filled with PADDING so that shapes stay static."""

    samples: int
    global_batch: int
    rank: int = 0
    ranks: int = 1

    @property
    def local_batch(self) -> int:
        """Samples of one step on this rank."""
        return -(-self.global_batch // self.ranks)

    @property
    def steps_per_epoch(self) -> int:
        """Batches that cover the split."""
        return -(-self.samples // (self.local_batch * self.ranks))

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, indices) of this rank's samples in batch `step`."""
        start = (step * self.ranks + self.rank) * self.local_batch
        indices = start + np.arange(self.local_batch)
        indices[indices >= self.samples] = PADDING
        return np.zeros_like(indices), indices
