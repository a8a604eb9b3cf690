"""The fuzzer finds what it looks for: a check that cannot fail checks nothing."""

import os
import runpy
import signal
import warnings
from pathlib import Path

import pytest

from sightline.errors import BadSample

MUTATE = runpy.run_path(str(Path(__file__).with_name("mutate.py")))
fuzz, mutated = MUTATE["fuzz"], MUTATE["mutated"]
SEEDS = [bytes(range(256)) * 4, b'{"width": 640, "names": ["a", "b"]}']


def refuses(data):
    raise BadSample("a", "damaged")


def refuses_for_want_of_memory(data):
    try:
        bytearray(1 << 50)
    except MemoryError as error:
        raise BadSample("a", "damaged") from error


def loops(data):
    while True:
        pass


@pytest.mark.parametrize(
    ("reader", "found"),
    [
        (lambda data: {}[data], "KeyError"),
        (lambda data: warnings.warn("odd", stacklevel=1), "UserWarning: odd"),
        (lambda data: bytearray(b"\xff") * (80 << 20), "MB, more than 40"),
        (refuses_for_want_of_memory, "refused for want of memory"),
        (lambda data: os.kill(os.getpid(), signal.SIGKILL), "killed the reader (SIGKILL)"),
        (loops, "took too much CPU time (SIGPROF)"),
    ],
)
def test_what_a_reader_must_not_do_is_found(reader, found):
    outcome = fuzz(reader, SEEDS, 2, cpu_s=0.1 if reader is loops else 10, memory_mb=40)
    assert (outcome.accepted, outcome.refused) == (0, 0) or "MB" in found
    assert found in outcome.foreign[0] and outcome.foreign[0].startswith("mutation 0: ")


def test_what_is_read_and_what_is_refused_is_counted():
    outcome = fuzz(lambda data: refuses(data) if len(data) % 2 else None, SEEDS, 200)
    odd = sum(len(mutated(SEEDS, number)) % 2 for number in range(200))
    assert (outcome.accepted, outcome.refused, outcome.foreign) == (200 - odd, odd, [])


def test_mutations_are_the_same_every_time_and_differ_from_each_other():
    made = [mutated(SEEDS, number, [b"TOKEN"]) for number in range(300)]
    assert made == [mutated(SEEDS, number, [b"TOKEN"]) for number in range(300)]
    assert len(set(made)) > 280
    assert any(b"TOKEN" in data for data in made)
    assert any(b"99999999999999999999" in data for data in made)
