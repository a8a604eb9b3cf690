"""What a network becomes before it trains: batch norms that share, heads."""

import pytest
from torch import nn

from sightline.engine.model import join_batch_norms
from sightline.errors import UsageError
from sightline.hardware.world import World
from sightline.models import norm


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The groups that rank 0 of four makes."""
    made: list[list[int]] = []
    answers = {"is_initialized": True, "get_world_size": 4, "get_rank": 0}
    for name, answer in answers.items():
        monkeypatch.setattr(norm.dist, name, lambda answer=answer: answer)
    monkeypatch.setattr(norm.dist, "new_group", lambda ranks: made.append(ranks) or ranks)
    return made


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm2d(2)))


@pytest.mark.parametrize(
    ("ranks", "group", "note"),
    [
        (1, -1, ""),
        (4, 0, ""),
        (4, 1, ""),
        (4, -1, "train.bn_group: 2 batch-norms have the statistics of 4 ranks in training"),
        (4, 2, "train.bn_group: 2 batch-norms have the statistics of 2 ranks in training"),
        (4, 4, "train.bn_group: 2 batch-norms have the statistics of 4 ranks in training"),
    ],
)
def test_batch_norms_share_in_groups_of_ranks(ranks: int, group: int, note: str, grouped: list):
    model = network()
    names = list(model.state_dict())
    assert join_batch_norms(model, group, World(size=ranks)) == note
    assert list(model.state_dict()) == names
    plain = [type(each) for each in model.modules()].count(nn.BatchNorm2d)
    assert plain == (0 if note else 2)
    size = ranks if group == -1 else group
    assert grouped == ([[*range(first, first + size)] for first in range(0, ranks, size)] if note else [])
    assert not note or model[1].group == [*range(size)]


def test_a_group_that_does_not_divide_the_ranks_is_refused_and_a_network_without_norms_left_alone(grouped: list):
    with pytest.raises(UsageError, match=r"^train.bn_group=3 does not divide the number of ranks, 4; use 0 \(each its"):
        join_batch_norms(network(), 3, World(size=4))
    model = nn.Sequential(nn.Linear(2, 2))
    note = "train.bn_group=2: the model has no batch-norm; left alone"
    assert join_batch_norms(model, 2, World(size=4)) == note
