"""Random numbers as a pure function of their key: nothing to save, nothing to restore.

Every draw of the data path names (seed, epoch, index, operation); a Philox counter turns the name into numbers.
Worker count, restarts and world size therefore change nothing, and an operation added later shifts no other.
"""

import zlib

import numpy as np


def generator(seed: int, epoch: int, index: int, operation: str) -> np.random.Generator:
    """The generator that belongs to one operation on one sample (or one batch, or one epoch)."""
    counter = np.array([0, index, epoch, 0], dtype=np.uint64)
    key = np.array([seed, zlib.crc32(operation.encode())], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
