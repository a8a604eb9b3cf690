"""The thread that makes batches ahead of the step."""

import threading
from functools import partial

import pytest

from sightline.data.loading.ahead import DEPTH, THREADS, Ahead
from sightline.errors import Interrupted


class Maker:
    """Counts up for each feed; waits for `allowed` before the batch that `holds` names."""

    def __init__(self, holds=()):
        self.made = []
        self.at = {}
        self.holds = dict(holds)
        self.allowed, self.has_come, self.is_ahead = (threading.Event() for _ in range(3))

    def __call__(self, name):
        number = self.at[name] = self.at.get(name, -1) + 1
        self.made.append((name, number))
        if len(self.made) == DEPTH:
            self.is_ahead.set()
        return partial(self.bring, name, number)

    def bring(self, name, number):
        held = self.holds.get((name, number))
        if held:
            self.has_come.set()
            self.allowed.wait(20)
        if isinstance(held, Exception):
            raise held
        return {"number": number}


def nothing() -> None:
    """No stop is requested, and a thread needs no device."""


@pytest.fixture
def opened():
    made = []

    def build(maker, check_stop=nothing):
        made.append(Ahead(THREADS, maker, nothing, check_stop))
        return made[-1]

    yield build
    for ahead in made:
        ahead.close()
        assert not any(thread.is_alive() for thread in ahead._threads)


def test_batches_come_in_order_and_no_more_than_asked_for(opened):
    maker = Maker()
    ahead = opened(maker)
    ahead.start("train", 7)
    assert [ahead.take("train")["number"] for _ in range(7)] == list(range(7))
    ahead.rest()
    assert len(maker.made) == 7
    with pytest.raises(AssertionError, match="past the end"):
        ahead.take("train")


def test_a_few_are_made_before_anyone_asks_and_no_more(opened):
    maker = Maker({("train", DEPTH - 1): True})
    maker.allowed.set()
    ahead = opened(maker)
    ahead.start("train", 9)
    assert maker.has_come.wait(20)
    ahead.rest()
    assert maker.made == [("train", number) for number in range(DEPTH)]


def test_a_batch_that_takes_longer_is_waited_for_and_stays_in_its_place(opened):
    maker = Maker({("train", 0): True})
    ahead = opened(maker)
    ahead.start("train", 5)
    assert maker.has_come.wait(20)
    assert maker.is_ahead.wait(20)  # the other thread makes the next ones meanwhile
    maker.allowed.set()
    assert [ahead.take("train")["number"] for _ in range(5)] == list(range(5))


def test_one_feed_rests_while_the_other_works_and_keeps_what_is_ready(opened):
    maker = Maker()
    ahead = opened(maker)
    ahead.start("train", 6)
    taken = [ahead.take("train")["number"] for _ in range(2)]
    ahead.rest()
    before = maker.at["train"]
    ahead.start("val", 3)
    assert [ahead.take("val")["number"] for _ in range(3)] == [0, 1, 2]
    assert maker.at["train"] == before
    ahead.rest()
    ahead.resume("train")
    taken += [ahead.take("train")["number"] for _ in range(4)]
    assert taken == list(range(6))


def test_a_new_start_forgets_what_was_ready(opened):
    maker = Maker()
    ahead = opened(maker)
    ahead.start("train", 5)
    ahead.take("train")
    ahead.rest()
    maker.at["train"] = 99
    ahead.start("train", 2)
    assert [ahead.take("train")["number"] for _ in range(2)] == [100, 101]


def test_an_error_is_raised_where_its_batch_is_taken(opened):
    maker = Maker({("train", 1): ValueError("a broken image")})
    maker.allowed.set()
    ahead = opened(maker)
    ahead.start("train", 5)
    assert ahead.take("train")["number"] == 0
    with pytest.raises(ValueError, match="a broken image"):
        ahead.take("train")
    ahead.rest()
    assert len(maker.made) <= 1 + DEPTH


def test_a_stop_request_is_answered_while_waiting(opened):
    maker = Maker({("train", 0): True})

    def check_stop():
        raise Interrupted(15)

    ahead = opened(maker, check_stop)
    ahead.start("train", 5)
    with pytest.raises(Interrupted):
        ahead.take("train")
    maker.allowed.set()


def test_a_thread_that_cannot_begin_says_so():
    def begin():
        raise RuntimeError("no such device")

    ahead = Ahead(THREADS, Maker(), begin, nothing)
    ahead.start("train", 5)
    with pytest.raises(RuntimeError, match="no such device"):
        ahead.take("train")
    ahead.close()
