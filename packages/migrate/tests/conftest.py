"""These tests need torch and pytest alone; what starts scripts is in tests/migrate of the repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sightline_migrate import activate, deactivate
from sightline_migrate.reporting import record
from sightline_migrate.session import Session

# Hides every GPU from torch, as "" does; but to a migrated script that says that there is no device at all.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "none"}


def skip_beside_a_gpu(items: list[pytest.Item], folder: Path) -> None:
    """Skips what calls torch.cuda in this process where that answers: these tests are about machines without it."""
    if torch.cuda.is_available():
        for item in items:
            if folder in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(reason="torch finds a CUDA device; hide it: CUDA_VISIBLE_DEVICES=none")
                )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_beside_a_gpu(items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NO_GPU.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def on_cpu() -> Iterator[Callable[..., Session]]:
    """on_cpu(**options) activates for the rest of the test, in this process."""
    record.reset()

    def start(**options: object) -> Session:
        found = activate(target="cpu", **options)
        assert found is not None
        return found

    yield start
    deactivate()
    record.reset()
