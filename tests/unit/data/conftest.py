"""Makers of shards for the tests of sources, and a cache folder of their own."""

import io
import os
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from sightline.data.records import encode_example, frame


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Path:
    """No test leaves an index in the user's own cache."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def write_records() -> Callable[..., Path]:
    """write_records(path, [features, ...]): one TFRecord file."""

    def write(path: Path, examples: Iterable[dict]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(frame(encode_example(features)) for features in examples))
        return path

    return write


@pytest.fixture
def write_tar() -> Callable[..., Path]:
    """write_tar(path, [(name, content), ...]): one tar file; a TarInfo stands for itself."""

    def write(path: Path, members: Iterable[tuple[str | tarfile.TarInfo, bytes]], **options) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w", **options) as archive:
            for name, content in members:
                info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return path

    return write


@pytest.fixture
def settle() -> Callable[[Path], None]:
    """settle(root): everything below was last changed long ago, so that an index of it is kept."""

    def set_times(root: Path) -> None:
        for path in [root, *root.rglob("*")]:
            os.utime(path, ns=(10**18, 10**18))

    return set_times
