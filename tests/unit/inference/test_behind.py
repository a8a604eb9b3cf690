"""The thread behind the network: order, a bound on what waits, errors and stops."""

import threading
import time

import pytest
import torch

from sightline.hardware import devices
from sightline.inference import behind
from sightline.inference.behind import Behind

CPU = devices.KINDS["cpu"]


class Slow:
    """A sink that waits for a go, and keeps what it is called with."""

    def __init__(self, fails_at: str = ""):
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.go = threading.Event()
        self.began = threading.Event()
        self.fails_at = fails_at

    def add(self, names, predictions, batch):
        self._note(names[0])

    def note_unreadable(self, name, reason):
        self._note(f"{name}: {reason}")

    def _note(self, text: str) -> None:
        self.began.set()
        assert self.go.wait(30)
        if text == self.fails_at:
            raise ValueError(f"no room for {text}")
        self.threads.add(threading.get_ident())
        self.calls.append(text)


def use(sink: Slow, names: list[str], pause_s: float = 0.0, ends: Exception | None = None) -> None:
    with Behind(sink, CPU) as writer:
        for name in names:
            give(writer, name)
            time.sleep(pause_s)
        if ends:
            raise ends


def give(writer: Behind, name: str) -> None:
    writer.add([name], {"logits": torch.zeros(1)}, {})


def test_calls_come_in_order_on_one_other_thread():
    sink = Slow()
    sink.go.set()
    with Behind(sink, CPU) as writer:
        for number in range(20):
            give(writer, str(number))
            if number % 5 == 0:
                writer.note_unreadable(f"bad {number}", "it is damaged")
    expected = []
    for number in range(20):
        expected += [str(number), *([f"bad {number}: it is damaged"] if number % 5 == 0 else [])]
    assert sink.calls == expected
    assert len(sink.threads) == 1 and threading.get_ident() not in sink.threads


def test_what_waits_is_bounded():
    """The network's thread waits with the batch after those that may: memory does not grow with slow writing."""
    sink, given = Slow(), []

    def produce() -> None:
        with Behind(sink, CPU) as writer:
            for number in range(3 * behind.WAITING):
                give(writer, str(number))
                given.append(number)

    producer = threading.Thread(target=produce)
    producer.start()
    assert sink.began.wait(30)
    end = time.monotonic() + 30
    while len(given) < behind.WAITING + 1 and time.monotonic() < end:  # one is in the sink's hands
        time.sleep(0.01)
    time.sleep(3 * behind.POLL_S)
    assert len(given) == behind.WAITING + 1
    sink.go.set()
    producer.join(30)
    assert len(given) == len(sink.calls) == 3 * behind.WAITING


@pytest.mark.parametrize(
    ("share", "at_once"),
    [pytest.param(0.3, 3, marks=pytest.mark.slow), (0.5, 2), pytest.param(0.6, 1, marks=pytest.mark.slow), (1.5, 1)],
)
def test_bytes_of_what_waits_are_bounded(monkeypatch: pytest.MonkeyPatch, share: float, at_once: int):
    """A batch waits, in the network's thread, until it has room; one of any size has it when all others are written."""
    monkeypatch.setattr(behind, "WAITING_BYTES", 4000)
    halves = {"logits": torch.zeros(int(500 * share))}, {"image": torch.zeros(int(500 * share))}
    sink, given = Slow(), []

    def produce() -> None:
        with Behind(sink, CPU) as writer:
            for number in range(6):
                writer.add([str(number)], *halves)
                given.append(number)

    producer = threading.Thread(target=produce)
    producer.start()
    assert sink.began.wait(30)
    end = time.monotonic() + 30
    while len(given) < at_once and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(3 * behind.POLL_S)
    assert len(given) == at_once
    sink.go.set()
    producer.join(30)
    assert sink.calls == [*map(str, range(6))]


def test_who_waits_for_room_sees_an_error_of_the_sink(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(behind, "WAITING_BYTES", 1)
    sink = Slow(fails_at="1")
    sink.go.set()
    with pytest.raises(ValueError, match="no room for 1"):
        use(sink, ["0", "1", "2", "3"])
    assert sink.calls == ["0"]


def test_an_error_of_the_sink_ends_the_network():
    sink = Slow(fails_at="1")
    sink.go.set()
    with pytest.raises(ValueError, match="no room for 1"):
        use(sink, [*map(str, range(1000))], pause_s=0.001)
    assert sink.calls == ["0"]


def test_an_error_at_the_last_batch_is_raised_too():
    sink = Slow(fails_at="last")
    sink.go.set()
    with pytest.raises(ValueError, match="no room for last"):
        use(sink, ["last"])


def test_a_stop_hands_on_what_was_predicted():
    sink = Slow()
    sink.go.set()
    with pytest.raises(InterruptedError):
        use(sink, ["0", "1", "2"], ends=InterruptedError())
    assert sink.calls == ["0", "1", "2"]
