"""Balanced sampling as a pure function of (seed, step): counts, passes, ranks, the end of an epoch."""

from collections import Counter

import numpy as np
import pytest

from sightline.data.loading.balanced import BalancedOrder, ClassMembers
from sightline.errors import BadData, UsageError

SEED, COUNTS = 3, {0: 3, 1: 40, 2: 17, 4: 1}  # class 3 has no samples
LABELS = np.random.default_rng(0).permutation(np.repeat(list(COUNTS), list(COUNTS.values())))
MEMBERS = ClassMembers(LABELS, 5)
LASTS = pytest.mark.parametrize("last", ["drop", "pad", "wrap"])


def order_of(last: str = "drop", rank: int = 0, ranks: int = 1, seed: int = SEED) -> BalancedOrder:
    return BalancedOrder(len(LABELS), 8, seed, last, rank, ranks, members=MEMBERS)


def drawn(order: BalancedOrder, steps: int) -> tuple[np.ndarray, np.ndarray]:
    passes, indices = zip(*(order.batch(step) for step in range(steps)), strict=True)
    return np.concatenate(passes), np.concatenate(indices)


@LASTS
def test_every_class_is_drawn_equally_often_in_every_epoch(last: str):
    order = order_of(last)
    assert order.steps_per_epoch == {"drop": 7, "pad": 8, "wrap": 7}[last]
    length = 61 if last == "wrap" else order.steps_per_epoch * 8
    _, indices = drawn(order, 8 * order.steps_per_epoch)
    for epoch in range(7):
        counts = Counter(LABELS[indices[epoch * length : (epoch + 1) * length]].tolist())
        assert set(counts) == set(COUNTS) and max(counts.values()) - min(counts.values()) <= 1


@LASTS
def test_no_sample_comes_again_before_all_others_of_its_class(last: str):
    passes, indices = drawn(order_of(last), 40)
    for label, count in COUNTS.items():
        mine, its_passes = indices[LABELS[indices] == label], passes[LABELS[indices] == label]
        for start in range(0, len(mine) - count + 1, count):
            assert sorted(mine[start : start + count]) == np.flatnonzero(label == LABELS).tolist()
            assert set(its_passes[start : start + count]) == {start // count}
        seconds = mine[count : 2 * count].tolist()
        assert count < 17 or (seconds and seconds != mine[: len(seconds)].tolist())  # another permutation


def test_a_sample_is_never_augmented_twice_in_the_same_way():
    pairs = list(zip(*drawn(order_of(), 70), strict=True))
    assert len(set(pairs)) == len(pairs)


@LASTS
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_batches_of_one_process(last: str, ranks: int):
    for step in (0, 6, 7, 30):
        parts = [order_of(last, rank, ranks).batch(step) for rank in range(ranks)]
        for column, whole in enumerate(order_of(last).batch(step)):
            assert np.concatenate([part[column] for part in parts]).tolist() == whole.tolist()


def test_a_batch_depends_on_seed_and_step_alone():
    forwards = [order_of().batch(step)[1].tolist() for step in range(20)]
    again = ClassMembers(LABELS.copy(), 5)
    for step in (19, 3, 11):
        order = BalancedOrder(len(LABELS), 8, SEED, members=again)
        assert order.batch(step)[1].tolist() == forwards[step]
    assert order_of(seed=4).batch(0)[1].tolist() != forwards[0]


def test_repeats_are_refused():
    with pytest.raises(UsageError, match=r"train.repeats=3 cannot be combined with data.sampling=balanced"):
        BalancedOrder(len(LABELS), 8, SEED, repeats=3, members=MEMBERS)


def test_labels_of_no_class_leave_nothing_to_draw():
    with pytest.raises(BadData, match="sampling=balanced: no training sample has a label of a class"):
        ClassMembers(np.array([-1, 7, 3]), 3)
    assert [part.tolist() for part in ClassMembers(np.array([2, -1, 0, 3, 2]), 3).of_class] == [[2], [0, 4]]
