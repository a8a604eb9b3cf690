"""The time after which a rank counts as hung; tests/distributed/test_hang.py tests what happens then."""

import json
import re
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sightline.hardware import watchdog
from sightline.hardware.watchdog import Watchdog
from sightline.hardware.world import CONNECT_TIMEOUT, World


@pytest.mark.parametrize("timeout_s", [5.0, 3600.0])
def test_what_is_announced_as_long_has_never_less_time_than_a_step(timeout_s: float):
    ours = Watchdog(World(), timeout_s, print, print, "")
    ours.beat()
    assert ours._limit_s == timeout_s
    ours.beat(is_long=True)
    assert ours._limit_s == max(timeout_s, CONNECT_TIMEOUT.total_seconds())


def test_time_in_which_the_process_stood_still_does_not_count():
    ours = Watchdog(World(), 5.0, print, print, "")
    before = ours._last = time.monotonic() - 100
    ours._forgive(1.0)  # a busy machine
    assert ours._last == before
    ours._forgive(30.0)
    assert ours._last == before + 30
    ours._forgive(1000.0)
    assert before + 100 <= ours._last <= time.monotonic(), "never into the future"


def two_ranks() -> list[Watchdog]:
    """As if each had a process of its own: they meet in a store only."""
    store = dist.HashStore()
    return [Watchdog(World(rank=rank, size=2, store=store), 2.0, print, print, "") for rank in (0, 1)]


def test_whoever_asks_hears_all_that_still_run():
    asks, answers = two_ranks()
    with answers:
        said = asks.explain(RuntimeError("[a.cc:3] Broken pipe. This is typically a dead peer"))
    assert said == "nobody knows which rank the others wait for (Broken pipe)"
    asks.tell_end(5, "Broken pipe")  # too late: it ends because it has lost another
    assert "ended" not in answers.explain(RuntimeError("reset"))


@pytest.mark.parametrize(("code", "said"), [(5, "rank 1 ended with exit 5: no room"), (0, "rank 1 is lost: ")])
def test_a_rank_that_ended_by_itself_says_why_unless_it_was_done(code: int, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.3)
    asks, ends = two_ranks()
    ends.tell_end(code, "no room")
    assert asks.explain(RuntimeError("reset")).startswith(said)


def test_collectives_wait_a_minute_longer_than_we_do_from_the_first_step_on():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=CONNECT_TIMEOUT)
    try:
        limits = dist.group.WORLD._get_backend(torch.device("cpu")).options
        ours, _ = two_ranks()
        ours.beat(is_long=True)
        assert limits._timeout == CONNECT_TIMEOUT
        ours.beat()
        assert limits._timeout == timedelta(seconds=2 + 60)
    finally:
        dist.destroy_process_group()


def test_the_rank_that_began_the_fewest_collectives_is_late_and_one_without_word_is_lost():
    ours = Watchdog(World(), 5.0, print, print, "")
    ours.world = World(rank=0, size=3)
    at = [{"place": f"f{rank}() of a.py:{rank}", "collectives": 7 - (rank == 1)} for rank in range(3)]
    assert (
        ours._verdict(dict(enumerate(at)), "why: ", "") == "why: rank 1 is late, in f1() of a.py:1, and the others wait"
    )
    assert ours._verdict(dict(enumerate(at)), "", "reset") == (
        "rank 1 is late, in f1() of a.py:1, and the others wait (reset)"
    )
    same = {rank: {**words, "collectives": 7} for rank, words in enumerate(at)}
    assert ours._verdict(same, "", "") == "nobody knows which rank the others wait for"
    uncounted = {rank: {"place": words["place"]} for rank, words in enumerate(at)}
    assert ours._verdict(uncounted, "", "") == "nobody knows which rank the others wait for"
    assert ours._verdict({0: at[0], 2: at[2]}, "why: ", "").startswith("why: rank 1 is lost: killed, out of memory, ")


def test_one_process_alone_has_only_its_own_error_to_tell():
    assert Watchdog(World(), 5.0, print, print, "").explain(ValueError("reset by peer")) == "reset by peer"


def test_a_rank_that_hears_the_alarm_writes_its_stacks_once_and_says_where_it_is():
    store, told = dist.HashStore(), []
    asks, answers = (Watchdog(World(rank=rank, size=2, store=store), 0.1, told.append, print, "") for rank in (0, 1))
    with answers:
        words = asks._consult()
        time.sleep(0.2)  # ten more looks
    assert told == ["another rank has given up"]
    assert words[1]["place"].endswith(tuple("0123456789")) and "() of " in words[1]["place"]


class Refusing:
    """A group, or a store, that answers nothing: another backend, or who held it has gone."""

    def __getattr__(self, name: str):
        def refuse(*given):
            raise RuntimeError(name)

        return refuse


def test_a_backend_that_does_not_count_leaves_the_place():
    ours = Watchdog(World(), 5.0, print, print, "")
    ours.world = World(side_group=Refusing())
    here = ours._place()
    assert list(here) == ["place"] and re.fullmatch(r"_place\(\) of watchdog\.py:\d+", here["place"])
    assert list(Watchdog(World(), 5.0, print, print, "")._place()) == ["place", "collectives"]


def test_a_store_that_has_gone_is_no_error_and_leaves_only_what_is_known_here():
    _, ours = two_ranks()
    ours._store = Refusing()
    ours._leave_word({"place": "here"})
    ours._raise_alarm()
    assert ours._alarm_is_raised() is False
    assert list(ours._hear(5.0)) == [1] and "() of " in ours._hear(5.0)[1]["place"]


@pytest.mark.parametrize(("rank", "has_answered"), [(0, False), (0, True), (1, False)])
def test_a_hung_rank_tells_once_and_leaves_with_exit_8(rank: int, has_answered: bool, monkeypatch: pytest.MonkeyPatch):
    """The one with the lowest number reports, and leaves last: it may hold the store."""
    told, lost, ended, slept = [], [], [], []
    monkeypatch.setattr(watchdog.os, "_exit", ended.append)
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: slept.append(seconds))
    store = dist.HashStore()
    ours = Watchdog(World(rank=rank, size=2, store=store), 5.0, told.append, lambda *more: lost.append(more), "logs/")
    other = {"place": "f() of a.py:3", "collectives": 1}
    store.set(f"words/{1 - rank}", json.dumps(other))
    before = set(threading.enumerate())
    ours._end("no step was done in 9 s", has_answered)
    for timer in set(threading.enumerate()) - before:
        if isinstance(timer, threading.Timer):
            assert timer.daemon and (timer.interval, timer.args) == (watchdog.LEAVE_S, (8,))
            timer.cancel()
    assert told == ([] if has_answered else ["no step was done in 9 s"]) and ended == [8]
    [(said, is_reported)] = lost
    assert said.startswith("no step was done in 9 s: ") and is_reported is (rank == 0)
    assert said.endswith("; the stacks of all ranks are in logs/; if the step is only slow, raise --run.timeout-s")
    assert (watchdog.FAREWELL_S in slept) is (rank == 0)
