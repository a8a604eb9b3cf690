"""Repeated augmentation: the order against plain lists, for every size, split and rule for the last batch."""

import itertools

import numpy as np
import pytest

from sightline.data.loading.order import TrainOrder, permutation
from sightline.errors import UsageError

SEED = 5
EPOCHS = 3
SIZES = (1, 2, 5, 7, 12, 24, 29, 40)
BATCHES = (1, 2, 4, 6, 12, 48)


def epoch_list(samples: int, epoch: int, repeats: int) -> list[tuple[int, int]]:
    """(epoch number for the draws, index): every index `repeats` times in a row, cut to the length of the epoch."""
    order = permutation(SEED, epoch, samples).tolist()
    return [(epoch * repeats + copy, index) for index in order for copy in range(repeats)][:samples]


def in_batches(pairs: list[tuple[int, int]], batch: int, repeats: int) -> list[tuple[int, int]]:
    """Each batch with all its first copies first."""
    parts = [pairs[start : start + batch] for start in range(0, len(pairs), batch)]
    return [pair for part in parts for pair in sorted(part, key=lambda pair: pair[0] % repeats)]


def joined(orders: list[TrainOrder], step: int) -> list[tuple[int, int]]:
    """The global batch: the parts of all ranks one after the other."""
    parts = [order.batch(step) for order in orders]
    assert all(len(epochs) == len(indices) == orders[0].local_batch for epochs, indices in parts)
    assert all(epochs.dtype == indices.dtype == np.int64 for epochs, indices in parts)
    return [(int(e), int(i)) for epochs, indices in parts for e, i in zip(epochs, indices, strict=True)]


def cases(last: str, ranks: int, repeats: int):
    for samples, batch in itertools.product(SIZES, BATCHES):
        if batch % ranks == 0 and (samples >= batch or last == "pad"):
            yield (
                samples,
                batch,
                [TrainOrder(samples, batch, SEED, last, rank, ranks, repeats) for rank in range(ranks)],
            )


@pytest.mark.parametrize("repeats", [1, 3, 50])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("last", ["drop", "pad", "wrap"])
def test_an_epoch_is_a_list_of_repeats_and_the_last_batch_follows_its_rule(last: str, ranks: int, repeats: int):
    for samples, batch, orders in cases(last, ranks, repeats):
        steps = orders[0].steps_per_epoch
        assert steps == (-(-samples // batch) if last == "pad" else samples // batch), "as without repeats"
        if last == "wrap":
            steps = EPOCHS * samples // batch
            stream = [pair for epoch in range(EPOCHS) for pair in epoch_list(samples, epoch, repeats)]
            assert [pair for step in range(steps) for pair in joined(orders, step)] == in_batches(
                stream[: steps * batch], batch, repeats
            )
            continue
        for epoch in range(EPOCHS):
            got = [pair for k in range(steps) for pair in joined(orders, epoch * steps + k)]
            whole = epoch_list(samples, epoch, repeats)
            expected = whole * (batch // samples + 2) if last == "pad" else whole
            assert got == in_batches(expected[: steps * batch], batch, repeats)


@pytest.mark.parametrize("last", ["drop", "pad", "wrap"])
def test_one_repeat_is_none(last: str):
    for step in range(30):
        plain, one = TrainOrder(29, 6, SEED, last, 1, 2), TrainOrder(29, 6, SEED, last, 1, 2, repeats=1)
        assert [a.tolist() for a in plain.batch(step)] == [a.tolist() for a in one.batch(step)]


def test_no_two_copies_of_a_sample_are_drawn_alike():
    order = TrainOrder(24, 6, SEED, repeats=3)
    pairs = [pair for step in range(5 * order.steps_per_epoch) for pair in joined([order], step)]
    assert len(pairs) == len(set(pairs)) == 5 * 24
    first_epoch = {index for _, index in pairs[:24]}
    assert first_epoch == set(permutation(SEED, 0, 24)[:8].tolist())
    assert {index for _, index in pairs} > first_epoch, "another epoch sees others"


def test_copies_of_an_image_meet_different_ranks_and_are_never_neighbours():
    parts = [TrainOrder(24, 12, SEED, rank=rank, ranks=3, repeats=3).batch(0)[1].tolist() for rank in range(3)]
    assert parts[0] == parts[1] == parts[2]
    assert len(set(parts[0])) == 4
    alone = TrainOrder(24, 12, SEED, repeats=3).batch(0)[1].tolist()
    assert all(a != b for a, b in zip(alone, alone[1:] + alone[:1], strict=True))


@pytest.mark.parametrize("repeats", [0, -2])
def test_less_than_one_is_refused(repeats: int):
    with pytest.raises(UsageError, match=f"repeats={repeats} must be 1 .* or more, e.g. 3"):
        TrainOrder(24, 6, SEED, repeats=repeats)
