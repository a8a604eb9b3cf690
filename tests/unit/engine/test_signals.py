"""How long a signal may wait, and when ranks leave together; tests/faults/test_signals.py sends signals."""

import signal
from types import SimpleNamespace

import pytest

from sightline.engine import signals
from sightline.engine.signals import StopSignals
from sightline.errors import Interrupted
from sightline.hardware.world import World


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))
    return now


def at(ours: StopSignals, clock: list[float], *seconds: float, is_step: bool = True) -> None:
    for each in seconds:
        clock[0] += each
        ours.agree(is_step)


def test_the_longest_time_between_two_steps_counts(clock: list[float]):
    ours = StopSignals(World())
    assert (ours.interval_s, ours.answer_s) == (0.0, 0.0)
    at(ours, clock, 60.0)  # it compiles
    assert ours.interval_s == 0.0
    at(ours, clock, 0.25, 0.125)
    assert (ours.interval_s, ours.answer_s) == (0.25, 0.25)
    ours.restart()
    at(ours, clock, 9.0, 0.5)
    assert ours.interval_s == ours.answer_s == 0.5, "what came between was none of a step"


def test_batches_of_an_evaluation_say_nothing_about_a_step(clock: list[float]):
    ours = StopSignals(World())
    at(ours, clock, 1.0, 2.0, is_step=False)
    assert (ours.interval_s, ours.answer_s) == (2.0, 0.0)
    at(ours, clock, 1.0)
    assert ours.answer_s == 2.0


def test_ranks_leave_one_step_after_any_of_them_got_a_signal(clock: list[float], monkeypatch: pytest.MonkeyPatch):
    started, beats, found = [], [], [0]
    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(World, "start_max", lambda self, value: started.append(value) or (found[0], work))
    ours = StopSignals(World(rank=1, size=2, beat=lambda: beats.append(1)))
    at(ours, clock, 1.0, 2.0)
    assert started == [0, 0] and len(beats) == 2 and ours.answer_s == 4.0, "its own step and one more"
    ours._pending = signal.SIGTERM
    ours.check()  # several must leave together
    found[0] = signal.SIGTERM
    at(ours, clock, 1.0)
    assert started == [0, 0, signal.SIGTERM]
    with pytest.raises(Interrupted) as raised:
        at(ours, clock, 1.0)
    assert raised.value.signal_number == signal.SIGTERM and len(started) == 3


@pytest.mark.parametrize(
    ("number", "saves", "has_begun", "said"),
    [
        (signal.SIGINT, True, True, "Ctrl-C: saving after this step; again: leave without saving"),
        (signal.SIGINT, True, False, "Ctrl-C: stopping; no step was made yet; again: leave without saving"),
        (signal.SIGINT, False, False, "Ctrl-C: stopping after this batch; again: leave at once"),
        (signal.SIGTERM, True, True, "SIGTERM (signal 15): saving after this step"),
    ],
)
def test_an_answer_says_what_comes(number: int, saves: bool, has_begun: bool, said: str):
    ours = StopSignals(World(), saves)
    ours.has_begun = has_begun
    assert ours._answer(number) == said
    ours._pending = number
    with pytest.raises(Interrupted):
        ours.agree()
