"""Names shared by the steps of a bottleneck: bottleneck.py strings them together, two files compute them."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """A batch norm in the backward pass: one fp32 number per channel each."""

    mean: Tensor
    rstd: Tensor
    gamma: Tensor
    dgamma: Tensor
    dbeta: Tensor


WIDEST = 256  # channels of a tile, of which a pass takes the largest divisor of all channels
has_engines = True  # whether layers run by cuDNN's engines where these are faster
takes_first = False  # whether the first engine that is right runs, be it faster or not


@contextlib.contextmanager
def without_engines() -> Iterator[None]:
    """Run all layers as those for which plain torch and a pass of ours are faster than an engine."""
    global has_engines
    has_engines = False
    try:
        yield
    finally:
        has_engines = True


@contextlib.contextmanager
def first_engines() -> Iterator[None]:
    """Run all layers by the first engine that is right, for checks of shapes that no step has: nothing is timed."""
    global takes_first
    takes_first = True
    try:
        yield
    finally:
        takes_first = False
