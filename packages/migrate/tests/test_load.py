"""Checkpoints that were written on a GPU, read in every way scripts do."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline_migrate import deactivate
from sightline_migrate.reporting import record
from sightline_migrate.session import Session

Start = Callable[..., Session]
FORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "string": {"map_location": "cuda:0"},
    "device": {"map_location": torch.device("cuda", 1)},
    "dict": {"map_location": {"cuda:1": "cuda:0"}},
    "function": {"map_location": lambda storage, location: storage.cuda(0)},
    "host": {"map_location": "cpu"},
}
VALUES = {"weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor([7])}


@pytest.fixture
def written_on_a_gpu(tmp_path: Path) -> Path:
    """torch.save marks each storage with its place, in the pickle inside the archive; here with cuda:1."""
    host, path = io.BytesIO(), tmp_path / "gpu.pt"
    torch.save(VALUES, host)
    with zipfile.ZipFile(host) as read, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as write:
        for entry in read.infolist():
            content = read.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert content.count(b"X\x03\x00\x00\x00cpu") == 1  # the second use refers to the first
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1")
            write.writestr(entry.filename, content)
    return path


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_load(form: str, weights_only: bool, written_on_a_gpu: Path, on_cpu: Start):
    on_cpu()
    loaded = torch.load(written_on_a_gpu, weights_only=weights_only, **FORMS[form])
    for name, value in VALUES.items():
        assert torch.equal(loaded[name], value) and loaded[name].device.type == "cpu"
    named = {each.rule.name for each in record.records.values()}
    assert ("torch.load" in named) == (form not in ("function", "host"))


def test_without_migration_it_cannot_be_read(written_on_a_gpu: Path, on_cpu: Start):
    on_cpu()
    deactivate()
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(written_on_a_gpu, weights_only=True)


def test_save_and_load(tmp_path: Path, on_cpu: Start):
    on_cpu()
    model = torch.nn.Linear(2, 2).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", map_location="cuda")
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    torch.save(model, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(whole.weight, model.weight)


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE:UserWarning")
def test_legacy_load(tmp_path: Path, on_cpu: Start, monkeypatch: pytest.MonkeyPatch):
    import argparse

    torch.save({"args": argparse.Namespace(lr=0.1)}, tmp_path / "a.pt")
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", raising=False)
    on_cpu(legacy_load=True)
    assert torch.load(tmp_path / "a.pt")["args"].lr == 0.1
    assert torch.load(tmp_path / "a.pt", weights_only=True)["args"].lr == 0.1
    deactivate()
    with pytest.raises(Exception, match="weights_only"):
        torch.load(tmp_path / "a.pt")


@pytest.mark.parametrize(("option", "asked"), [("fp16_to_bf16", torch.bfloat16), ("float32", torch.float32)])
def test_bytes_keep_their_type(option: str, asked: torch.dtype, tmp_path: Path, on_cpu: Start):
    """A conversion changes what a script asks for; bytes of a file or of another process are what they are."""
    values, zipped, legacy, plain = torch.arange(5, dtype=torch.float16), io.BytesIO(), io.BytesIO(), tmp_path / "bytes"
    torch.save(values, zipped)
    torch.save(values, legacy, _use_new_zipfile_serialization=False)
    plain.write_bytes(values.numpy().tobytes())
    zipped.seek(0), legacy.seek(0)
    on_cpu(**{option: True})
    read = {
        "zip": torch.load(zipped),
        "legacy": torch.load(legacy),
        "pickle": pickle.loads(pickle.dumps(values)),
        "from_file": torch.from_file(str(plain), size=5, dtype=torch.float16),
    }
    for name, tensor in read.items():
        assert tensor.dtype is torch.float16 and tensor.tolist() == [0, 1, 2, 3, 4], name
    assert torch.zeros(1, dtype=torch.float16).dtype is asked
    assert torch.load(io.BytesIO(zipped.getvalue())).half().dtype is asked
