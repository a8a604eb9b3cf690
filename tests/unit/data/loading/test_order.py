"""The order of samples: every dataset size from 1 to 40, every split over 1 to 4 ranks, against plain lists."""

import re

import numpy as np
import pytest

from sightline.data.loading.order import PADDING, EvalOrder, TrainOrder, permutation
from sightline.errors import UsageError

SIZES = range(1, 41)
BATCHES = (1, 2, 3, 4, 6, 8, 12, 24, 48)
SEED = 5
EPOCHS = 3


def cases(last: str, ranks: int):
    for samples in SIZES:
        for batch in BATCHES:
            if batch % ranks == 0 and (samples >= batch or last == "pad"):
                yield samples, batch, [TrainOrder(samples, batch, SEED, last, rank, ranks) for rank in range(ranks)]


def joined(orders: list[TrainOrder], step: int) -> tuple[list[int], list[int]]:
    """(epochs, indices) of the global batch: the parts of all ranks one after the other."""
    parts = [order.batch(step) for order in orders]
    assert all(len(epochs) == len(indices) == orders[0].local_batch for epochs, indices in parts)
    return [int(e) for epochs, _ in parts for e in epochs], [int(i) for _, indices in parts for i in indices]


def epoch_order(samples: int, epoch: int) -> list[int]:
    return permutation(SEED, epoch, samples).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_drop_leaves_out_what_fills_no_batch(ranks: int):
    for samples, batch, orders in cases("drop", ranks):
        steps = samples // batch
        assert orders[0].steps_per_epoch == steps
        for epoch in range(EPOCHS):
            got = [joined(orders, epoch * steps + k) for k in range(steps)]
            assert all(epochs == [epoch] * batch for epochs, _ in got)
            assert [i for _, indices in got for i in indices] == epoch_order(samples, epoch)[: steps * batch]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pad_fills_the_last_batch_from_the_start_of_the_epoch(ranks: int):
    for samples, batch, orders in cases("pad", ranks):
        steps = -(-samples // batch)
        assert orders[0].steps_per_epoch == steps
        for epoch in range(EPOCHS):
            got = [joined(orders, epoch * steps + k) for k in range(steps)]
            assert all(epochs == [epoch] * batch for epochs, _ in got)
            endless = epoch_order(samples, epoch) * (batch // samples + 2)
            assert [i for _, indices in got for i in indices] == endless[: steps * batch]


@pytest.mark.parametrize("last", ["drop", "pad", "wrap"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cap_shortens_every_epoch(last: str, ranks: int):
    """Each epoch starts its own order; a wrapped stream continues, and only its epochs are shorter."""
    samples, batch = 30, 4
    for cap, steps in ((1, 1), (3, 3), (7, 7), (99, 8 if last == "pad" else 7)):
        orders = [TrainOrder(samples, batch, SEED, last, rank, ranks, cap=cap) for rank in range(ranks)]
        assert orders[0].steps_per_epoch == steps
        for epoch in range(EPOCHS):
            got = [i for k in range(steps) for i in joined(orders, epoch * steps + k)[1]]
            if last == "wrap":
                stream = [i for e in range(EPOCHS + 1) for i in epoch_order(samples, e)]
                assert got == stream[epoch * steps * batch : (epoch + 1) * steps * batch]
            else:
                assert got == (epoch_order(samples, epoch) * 2)[: steps * batch]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_wrap_is_one_endless_stream(ranks: int):
    for samples, batch, orders in cases("wrap", ranks):
        assert orders[0].steps_per_epoch == samples // batch
        steps = EPOCHS * samples // batch
        got = [joined(orders, step) for step in range(steps)]
        stream = [(epoch, index) for epoch in range(EPOCHS) for index in epoch_order(samples, epoch)]
        flat = [pair for epochs, indices in got for pair in zip(epochs, indices, strict=True)]
        assert flat == stream[: steps * batch]


@pytest.mark.parametrize("last", ["drop", "pad", "wrap"])
def test_a_batch_is_a_pure_function_of_its_step(last: str):
    """Asked for in any order, from new objects, and with the cache of permutations thrown away in between."""
    steps = list(range(40))
    forwards = {step: TrainOrder(29, 6, SEED, last, 1, 2).batch(step) for step in steps}
    for step in np.random.default_rng(0).permutation(steps * 2).tolist():
        if step % 7 == 0:
            permutation.cache_clear()
        again = TrainOrder(29, 6, SEED, last, 1, 2).batch(step)
        assert [a.tolist() for a in again] == [a.tolist() for a in forwards[step]]


def test_handing_a_batch_out_does_not_expose_the_permutation():
    order = TrainOrder(8, 8, SEED)
    _, indices = order.batch(0)
    before = indices.tolist()
    indices[:] = 0
    assert order.batch(0)[1].tolist() == before


def test_permutations_are_complete_and_differ_by_seed_and_epoch():
    keys = [(seed, epoch) for seed in (0, 1, 2**62) for epoch in (0, 1, 1000)]
    drawn = [permutation(seed, epoch, 100).tolist() for seed, epoch in keys]
    assert all(sorted(order) == list(range(100)) for order in drawn)
    assert len({tuple(order) for order in drawn}) == len(keys)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_evaluation_sees_every_sample_once(ranks: int):
    for samples in SIZES:
        for batch in BATCHES:
            orders = [EvalOrder(samples, batch, rank, ranks) for rank in range(ranks)]
            steps = {order.steps_per_epoch for order in orders}
            assert len(steps) == 1  # or ranks would wait for each other for ever
            rows = orders[0].local_batch
            assert batch <= rows * ranks < batch + ranks
            got = [order.batch(step)[1] for step in range(steps.pop()) for order in orders]
            assert all(len(indices) == rows for indices in got)
            flat = np.concatenate(got).tolist()
            assert flat[:samples] == list(range(samples))
            assert set(flat[samples:]) <= {PADDING}
            assert len(flat) - samples < rows * ranks


@pytest.mark.parametrize(("batch", "ranks"), [(1001, 8), (3, 2), (1, 4), (10, 4), (5, 3)])
def test_a_batch_that_ranks_cannot_share_is_refused_with_values_that_work(batch: int, ranks: int):
    with pytest.raises(UsageError) as refusal:
        TrainOrder(5000, batch, SEED, ranks=ranks)
    text = str(refusal.value)
    assert text.startswith(f"global_batch={batch} cannot be split over {ranks} devices; use a multiple of {ranks}")
    below, above = map(int, re.search(r"--train\.global-batch (\d+) or (\d+)$", text).groups())
    assert below < above
    for proposed in (below, above):
        assert TrainOrder(5000, proposed, SEED, ranks=ranks).local_batch * ranks == proposed


@pytest.mark.parametrize("last", ["drop", "wrap"])
def test_a_batch_larger_than_the_data_is_refused_with_what_works(last: str):
    with pytest.raises(UsageError) as refusal:
        TrainOrder(30, 64, SEED, last)
    text = str(refusal.value)
    assert text.startswith("global_batch=64 is larger than the 30 training samples")
    assert "--train.global-batch 30 or less" in text and "--train.last-batch pad" in text
    assert TrainOrder(30, 30, SEED, last).steps_per_epoch == 1
    assert TrainOrder(30, 64, SEED, "pad").steps_per_epoch == 1


def test_the_order_of_a_seed_is_that_of_every_version():
    """A run that is resumed by a later version must not see other samples."""
    order = TrainOrder(12, 4, 3)
    assert [order.batch(step)[1].tolist() for step in range(6)] == [
        *([11, 3, 2, 10], [4, 8, 1, 5], [0, 7, 6, 9]),
        *([7, 1, 2, 6], [11, 3, 10, 5], [8, 0, 4, 9]),
    ]
