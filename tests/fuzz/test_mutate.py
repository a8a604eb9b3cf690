"""The fuzzer finds what it looks for: a check that cannot fail checks nothing."""

import os
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from sightline.errors import BadSample

HERE = Path(__file__).resolve().parent
MUTATE = runpy.run_path(str(HERE / "mutate.py"))
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
        (refuses_for_want_of_memory, "refused for want of memory"),
        (lambda data: os.kill(os.getpid(), signal.SIGKILL), "killed the reader (SIGKILL)"),
        (loops, "took too much CPU time (SIGPROF)"),
    ],
)
def test_what_a_reader_must_not_do_is_found(reader, found):
    outcome = fuzz(reader, SEEDS, 2, cpu_s=0.1 if reader is loops else 10, memory_mb=40)
    assert (outcome.accepted, outcome.refused) == (0, 0)
    assert found in outcome.foreign[0] and outcome.foreign[0].startswith("mutation 0: ")


def test_a_reader_that_takes_too_much_memory_is_found():
    """In a process of its own: a test process that has run for minutes may hold room that it does not use."""
    code = f"""import runpy
fuzz = runpy.run_path({str(HERE / "mutate.py")!r})["fuzz"]
print(fuzz(lambda data: bytearray(b"x") * (80 << 20), [b"seed" * 9], 2, memory_mb=40).foreign[0])
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(HERE.parents[1])}, capture_output=True, text=True)
    assert done.stdout.startswith("mutation 0: took ") and "MB, more than 40" in done.stdout, done.stderr


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
