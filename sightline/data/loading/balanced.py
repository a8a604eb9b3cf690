"""Balanced order: every class is drawn equally often, whatever its number of samples.

A pure function of (seed, step) as order.py is. Each class goes through permutations of its samples, one after another,
so that none is seen again before all others of its class were.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sightline.data.draws import generator
from sightline.data.loading.order import TrainOrder, permutation
from sightline.errors import BadData, UsageError


class ClassMembers:
    """The samples of each class that has any; compared by identity, as a key of the cache."""

    def __init__(self, labels: np.ndarray, classes: int):
        order = np.argsort(labels, kind="stable")
        ends = np.searchsorted(labels[order], np.arange(classes + 1))  # others belong to damaged records
        parts = [order[start:end] for start, end in itertools.pairwise(ends)]
        self.of_class = [part for part in parts if len(part)]
        if not self.of_class:
            raise BadData("sampling=balanced: no training sample has a label of a class; `sightline check` lists them")


@lru_cache(maxsize=4)
def balanced_epoch(seed: int, epoch: int, length: int, members: ClassMembers) -> tuple[np.ndarray, np.ndarray]:
    """Return (passes, indices) of the samples of one epoch; `passes` counts how often each sample was drawn before.

    Draw t of the run belongs to class t % classes, so counts differ by one draw at most. The classes of an epoch are
    shuffled, then each class fills its places with its next samples.
    """
    count = len(members.of_class)
    group = (epoch * length + permutation(seed, epoch, length)) % count
    by_group = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[by_group], np.arange(count + 1))
    passes, indices = np.empty((2, length), np.int64)
    for number, samples in enumerate(members.of_class):
        places = by_group[ends[number] : ends[number + 1]]
        at = -(-(epoch * length - number) // count)  # draws of this class in earlier epochs
        while len(places):
            number_of_pass, start = divmod(at, len(samples))
            order = generator(seed, number_of_pass, number, "balanced order").permutation(len(samples))[start:]
            now, places = places[: len(order)], places[len(order) :]
            passes[now], indices[now] = number_of_pass, samples[order[: len(now)]]
            at += len(now)
    return passes, indices


@dataclass(frozen=True)
class BalancedOrder(TrainOrder):
    """Endless batches in which all classes come equally often. An epoch has as many steps as without; what it draws is
    what its steps take, so nothing is dropped or repeated at its end.

    The epoch number of a sample, by which it is augmented, is that of its pass: a sample that comes several times in an
    epoch looks different each time.
    """

    members: ClassMembers | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats > 1:
            raise UsageError(
                f"train.repeats={self.repeats} cannot be combined with data.sampling=balanced, which repeats images of "
                f"small classes by itself; use --train.repeats 1 or --data.sampling uniform"
            )

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (passes, indices) of this rank's samples in a step."""
        assert self.members is not None, "balanced sampling needs classes"
        length = self.items if self.last == "wrap" else self.steps_per_epoch * self.items_per_step
        start = step * self.items_per_step + self.rank * self.local_batch
        epochs, places = np.divmod(start + np.arange(self.local_batch), length)
        passes, indices = np.empty((2, self.local_batch), np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            its_passes, its_indices = balanced_epoch(self.seed, int(epoch), length, self.members)
            passes[chosen], indices[chosen] = its_passes[places[chosen]], its_indices[places[chosen]]
        return passes, indices
