"""Random numbers are named by their key and by nothing else."""

import itertools
import pickle
import subprocess
import sys
import zlib

import numpy as np
import pytest

from sightline.data.draws import generator

KEY = (3, 5, 7, "crop")
NEIGHBOURS = [(4, 5, 7, "crop"), (3, 6, 7, "crop"), (3, 5, 8, "crop"), (3, 5, 7, "flip"), (3, 7, 5, "crop")]


def numbers(key: tuple[int, int, int, str]) -> list[int]:
    return generator(*key).integers(0, 2**63, 8).tolist()


def test_the_same_key_gives_the_same_numbers():
    assert numbers(KEY) == numbers(KEY)
    first = generator(*KEY)
    generator(*NEIGHBOURS[0]).random(1000)  # what others draw does not matter
    np.random.default_rng(0).random(5)
    assert first.integers(0, 2**63, 8).tolist() == numbers(KEY)


@pytest.mark.parametrize("key", [KEY, (2**63 - 1, 2**40, 2**50, ""), (0, 0, 0, "order")], ids=str)
def test_numbers_are_those_of_numpys_philox_with_this_key_and_counter(key: tuple[int, int, int, str]):
    seed, epoch, index, operation = key
    words = np.array([seed, zlib.crc32(operation.encode())], dtype=np.uint64)
    philox = np.random.Philox(key=words, counter=np.array([0, index, epoch, 0], dtype=np.uint64))
    ours, theirs = generator(*key), np.random.Generator(philox)
    assert ours.bit_generator.random_raw(9).tolist() == philox.random_raw(9).tolist()
    assert ours.normal(size=5).tolist() == theirs.normal(size=5).tolist()
    assert pickle.loads(pickle.dumps(ours)).random() == theirs.random()


def test_another_process_draws_the_same():
    """Python's own hash() is salted per process; the name of an operation must not go through it."""
    code = f"from sightline.data.draws import generator; print(generator(*{KEY}).integers(0, 2**63, 8).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(numbers(KEY))


@pytest.mark.parametrize("other", NEIGHBOURS, ids=str)
def test_any_other_component_gives_other_numbers(other: tuple[int, int, int, str]):
    assert not set(numbers(KEY)) & set(numbers(other))


def test_a_grid_of_keys_has_no_two_alike():
    operations = ("order", "crop", "flip", "mixup", "pattern", "noise", "replacement-0", "replacement-1")
    grid = itertools.product((0, 1, 2), (0, 1, 2), range(20), operations)
    drawn = [int(generator(*key).integers(0, 2**63)) for key in grid]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_large_components_are_taken_whole(place: int):
    """A seed of 2**63 - 1 and one of 2**32 - 1 must not fall together."""
    small, large = list(KEY), list(KEY)
    small[place], large[place] = 2**32 - 1, 2**63 - 1
    assert not set(numbers(tuple(small))) & set(numbers(tuple(large)))


def test_long_draws_of_neighbours_do_not_run_into_each_other():
    """The counter of a key is stepped by drawing; it must not reach the key of the next index."""
    here, there = (generator(0, 0, index, "crop").integers(0, 2**63, 20_000) for index in (0, 1))
    assert not np.intersect1d(here, there).size
