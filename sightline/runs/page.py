"""What a training shows to the page about it, and asks of one. The commands bring report/live.py; any other may do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sightline.parts import Bound, Dataset, Scores
from sightline.recipe.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from sightline.data.loading.order import TrainOrder
    from sightline.hardware.devices import Device

EVERY_S = 60.0  # from the start of one page to the next, and from one drawing of the worst samples to the next


@dataclass(frozen=True)
class Shown:
    """What a page may look at of a training: its data as they are bound, and the network that is best so far."""

    recipe: Recipe
    sets: Mapping[str, Dataset]
    train: Bound
    order: TrainOrder
    val: Bound
    local_batch: int  # of an evaluation
    device: Device
    network: Callable[[], nn.Module]


class Page(Protocol):
    """The page of a run at work; rank 0 has one. None of its methods may keep the training waiting for long."""

    @property
    def has_begun(self) -> bool:
        """Whether the run is so old that a page shows it at work."""

    def look(self) -> None:
        """Start to write the page again if the last one is old enough; do not wait for it."""

    def evaluated(self, shown: Shown, scores: Scores) -> dict[str, Any]:
        """Draw the worst samples of the best evaluation so far; return the drawings as plain values."""

    def keep_facts(self, shown: Shown) -> str:
        """Count and draw the data, once for the run. Return why that failed, "" if it did not."""

    def close(self) -> None:
        """Leave off; what is at work on a page ends."""

    def ended(self) -> None:
        """Write the page of the run that has ended, unless that fails."""
