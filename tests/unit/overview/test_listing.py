"""The best score of `sightline runs` is the first that an evaluation returns, and that is every task's headline."""

import pytest
import torch

from sightline import recipes
from sightline.parts import DataSpec


@pytest.mark.parametrize("name", recipes.names())
def test_the_headline_is_the_first_score_of_every_task(name: str):
    task = recipes.find(name).recipe().task.build()
    spec = DataSpec(("a", "b", "c", "d"), 3, (8, 8), (0.0,) * 3, (1.0,) * 3)
    assert task.metric(spec, torch.device("cpu")).names()[0] == task.headline
