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


@contextlib.contextmanager
def without_engines() -> Iterator[None]:
    """Run all layers as those for which plain torch and a pass of ours are faster than an engine."""
    global has_engines
    has_engines = False
    try:
        yield
    finally:
        has_engines = True
