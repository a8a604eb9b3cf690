"""Names shared by the steps of a bottleneck: bottleneck.py strings them together, two files compute them."""

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """A batch norm in the backward pass: one fp32 number per channel each."""

    mean: Tensor
    rstd: Tensor
    gamma: Tensor
    dgamma: Tensor
    dbeta: Tensor
