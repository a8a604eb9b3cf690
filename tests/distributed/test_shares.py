"""The samples of all ranks together: each once and none left out, for any data set, batch and number of ranks, also
where that number changes in the middle of a run. Drawn at random, against counts; no processes needed."""

from collections import Counter

import numpy as np
import pytest

from sightline.data.loading.order import PADDING, EvalOrder, TrainOrder

CASES = 400
RANKS = (1, 2, 3, 4, 5, 7, 8, 16, 64)


def drawn(random: np.random.Generator, last: str) -> dict:
    """Draw options that a TrainOrder accepts, for several ranks."""
    ranks, each = int(random.choice(RANKS)), int(random.choice((1, 1, 2, 5, 32)))
    items = ranks * int(random.integers(1, 5))  # of one step
    least = 1 if last == "pad" else items
    return {
        "items": least + int(random.integers(0, 3 * items + 20)),
        "global_batch": items * each,
        "seed": int(random.integers(0, 1 << 62)),
        "last": last,
        "repeats": int(random.choice((1, 1, 2, 3, 9))),
        "samples_per_item": each,
        "ranks": ranks,
    }


def shares(options: dict, step: int) -> list[list[tuple[int, int]]]:
    """(epoch of its draws, index) of what each rank takes."""
    parts = [TrainOrder(**options, rank=rank).batch(step) for rank in range(options["ranks"])]
    return [list(zip(epochs.tolist(), indices.tolist(), strict=True)) for epochs, indices in parts]


@pytest.mark.parametrize("last", ["drop", "pad", "wrap"])
def test_ranks_share_an_epoch_without_rest_or_overlap(last: str):
    random = np.random.default_rng(1)
    for _ in range(CASES):
        options = drawn(random, last)
        order = TrainOrder(**options)
        assert order.local_samples * order.ranks == order.global_batch
        assert order.samples_per_epoch == options["items"] * options["samples_per_item"]
        samples, items, copies = order.items, order.items_per_step, order.repeats
        steps = order.steps_per_epoch if last != "wrap" else -(-samples // items)
        taken = [shares(options, step) for step in range(steps)]
        assert {len(share) for step in taken for share in step} == {items // order.ranks}
        stream = [pair for step in taken for share in step for pair in share]
        counts = Counter(stream)
        if last == "drop":  # a sample may be left out, but none comes twice
            assert set(counts.values()) == {1} and samples - len(stream) < items
        elif last == "pad":  # all come; only the last batch has them again
            assert len(counts) == samples and len(stream) - samples < items
        else:  # all come before any of the next epoch does
            assert set(counts.values()) == {1}
            assert sum(epoch < copies for epoch, _ in counts) == samples
        # Every copy of an image is one of `repeats`, with draws of its own.
        first = Counter(index for epoch, index in counts if epoch < copies)
        assert max(first.values()) <= copies and set(first) <= set(range(samples))
        if last != "drop":
            assert len(first) == -(-samples // copies)


@pytest.mark.parametrize("last", ["drop", "pad", "wrap"])
def test_the_stream_continues_whatever_the_number_of_ranks(last: str):
    """A position counted in samples: a restart with more or fewer ranks neither repeats nor leaves out a sample."""
    random = np.random.default_rng(2)
    for _ in range(CASES // 4):
        options = drawn(random, last)
        items = options["global_batch"] // options["samples_per_item"]
        divisors = [n for n in range(1, items + 1) if items % n == 0]
        for step in random.integers(0, 50, 4).tolist():
            [alone] = shares({**options, "ranks": 1}, step)
            among = shares({**options, "ranks": int(random.choice(divisors))}, step)
            assert [pair for share in among for pair in share] == alone


def test_evaluation_shares_everything_once():
    random = np.random.default_rng(3)
    for _ in range(CASES):
        samples, batch = int(random.integers(1, 400)), int(random.integers(1, 70))
        ranks = int(random.choice(RANKS))
        orders = [EvalOrder(samples, batch, rank, ranks) for rank in range(ranks)]
        [steps] = {order.steps_per_epoch for order in orders}  # or ranks would wait for each other for ever
        given = Counter(int(i) for order in orders for step in range(steps) for i in order.batch(step)[1])
        padding = given.pop(PADDING, 0)
        assert given == Counter(range(samples))
        assert padding == steps * ranks * orders[0].local_batch - samples
