"""A recipe whose table of rates is computed in a loop."""

from dataclasses import replace

from sightline.config import Recipe
from sightline.recipes import demo_classification
from sightline.train.schedules import ScheduleConfig

epochs, rates = [], []
for turn in range(3):
    epochs.append(turn)
    rates.append(0.1 / 2**turn)


def recipe() -> Recipe:
    """Return the demo's recipe with a table of rates."""
    schedule = ScheduleConfig(kind="table", table_epochs=tuple(epochs), table_rates=tuple(rates))
    return replace(demo_classification.recipe(), name="loops", schedule=schedule)
