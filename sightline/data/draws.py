"""Random numbers as a pure function of their key: nothing to save, nothing to restore.

Every draw of the data path names (seed, epoch, index, operation); a Philox counter turns the name into numbers.
Worker count, restarts and world size therefore change nothing, and an operation added later shifts no other.
"""

import zlib

import numpy as np
from numpy.random.bit_generator import ISeedSequence


class _Key(ISeedSequence):
    """The key itself in place of a seed: Philox(key=...) would first ask the system for a seed, for 20 microseconds."""

    def __init__(self, *words: int):
        self.words = np.array(words, dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> np.ndarray:
        """Return the two words that Philox asks for."""
        return self.words


def generator(seed: int, epoch: int, index: int, operation: str) -> np.random.Generator:
    """The generator that belongs to one operation on one sample (or one batch, or one epoch)."""
    counter = np.array([0, index, epoch, 0], dtype=np.uint64)
    key = _Key(seed, zlib.crc32(operation.encode()))
    return np.random.Generator(np.random.Philox(key, counter=counter))  # type: ignore[arg-type]  # numpy's stub
