"""What tests of kernels on CUDA share."""

from collections.abc import Iterator

import pytest
import torch

from sightline import kernels
from sightline.hardware import devices


@pytest.fixture
def fresh_cuda() -> Iterator[None]:
    """Skip elsewhere, draw fresh numbers at every run, and turn kernels on again."""
    found = devices.select()
    if found.kind != "cuda":
        pytest.skip(f"written for cuda, this is {found.kind}")
    print(f"torch.manual_seed({torch.seed()})")
    yield
    kernels.use("auto")
