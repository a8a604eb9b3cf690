"""Fixtures every folder of tests uses: the shared sample data, a drawn data set, the device marker."""

import atexit
import gc
import os
import shutil
from pathlib import Path

# Before the first import of torch: one thread per process gives stable bits and lets test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

REPO = Path(__file__).resolve().parents[1]
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 << 30  # what the folders of all test processes stay far below

# Temporary folders lie in memory where there is room: a run leaves hundreds of small files, and some disks take
# a millisecond to create or delete each.
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `device` where there is none; torch is imported only if there is such a test."""
    marked = [item for item in items if item.get_closest_marker("device")]
    if not marked:
        return
    import torch

    if not torch.accelerator.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; torch finds none on this machine"))


_file = [Path()]
atexit.register(gc.unfreeze)  # libraries may check at the end that what they made is gone


def pytest_collectreport() -> None:
    """Freeze what each file brought, or every second collection while the next are imported looks at all of it."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze, before the first test of each file, what collecting the tests and earlier files left: modules, caches and
    thousands of tests, none of them in a user's process. Each call of the API begins with a collection, which would
    look at all of them, half a second each time."""
    if item.path != _file[0]:
        _file[0] = item.path
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Small real data sets kept beside the repository, too large to be part of it."""
    path = REPO.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs the sample data sets in ../shared/data, which are not part of the repository")
    return path


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class-folder data set of ten drawn classes, 8 + 4 images each; for reading only, copy it to change it."""
    from sightline.data.prepare.shapes import ShapesOptions, prepare

    base = tmp_path_factory.getbasetemp()
    # Test processes share one folder: prepare() lets one of them draw while the others wait.
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shapes"
    prepare(
        ShapesOptions(out, only=("classification",), train_per_class=8, val_per_class=4), lambda what, done, total: None
    )
    return out / "classification"


@pytest.fixture
def torchvision_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torchvision resize bytes as bytes on every CPU: without AVX2 it takes floats, which round differently."""
    from torchvision.transforms.v2.functional import _geometry

    monkeypatch.setattr(_geometry, "_do_native_uint8_resize_on_cpu", lambda interpolation: True)
