"""How few bytes are loaded without processes of their own, and predicted without compiling kernels."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.files import sizes
from sightline.files.sizes import loads_here, pays_compiling


def test_files_of_folders_and_images_in_memory_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizes, "FEW_BYTES", 100_000)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "x.jpg").write_bytes(bytes(60_000))
    (tmp_path / "y.jpg").write_bytes(bytes(30_000))
    assert loads_here([tmp_path / "a", tmp_path / "y.jpg"])
    assert not loads_here([tmp_path, tmp_path / "y.jpg"])
    assert loads_here([np.zeros((50, 50, 3), np.uint8), Image.new("RGB", (50, 50))])
    assert not loads_here([np.zeros((200, 200, 3), np.uint8)]) and not loads_here([Image.new("L", (400, 400))])
    assert loads_here([tmp_path / "missing.jpg"]) and loads_here([])


def test_links_count_as_the_files_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizes, "FEW_BYTES", 100_000)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "x").write_bytes(bytes(120_000))
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "x.nii.gz").symlink_to(tmp_path / "store" / "x")
    assert not loads_here([tmp_path / "given"]) and not loads_here([tmp_path / "given" / "x.nii.gz"])
    (tmp_path / "given" / "x.nii.gz").unlink()
    (tmp_path / "given" / "y.nii.gz").symlink_to(tmp_path / "missing")
    assert loads_here([tmp_path / "given"])


def test_looking_ends_where_it_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizes, "FEW_BYTES", 1000)
    for number in range(20):
        (tmp_path / f"{number}.jpg").write_bytes(bytes(600))
    asked: list[str] = []
    size = sizes._size
    monkeypatch.setattr(sizes, "_size", lambda path: asked.append(str(path)) or size(path))
    assert not loads_here([tmp_path])
    assert len(asked) == 2


def test_kernels_pay_for_more_than_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizes, "FEW_BYTES", 500)
    monkeypatch.setattr(sizes, "MANY_BYTES", 1000)
    (tmp_path / "x.jpg").write_bytes(bytes(600))
    assert not loads_here([tmp_path]) and not pays_compiling([tmp_path])
    (tmp_path / "y.jpg").write_bytes(bytes(600))
    assert pays_compiling([tmp_path])
