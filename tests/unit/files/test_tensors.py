"""Our writer of safetensors files against the library's own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from sightline.files.tensors import read_tensors, write_tensors

TYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.int32]
TYPES += [torch.float32, torch.float64, torch.int64]
SHAPES = [(), (3,), (2, 3, 4), (0,)]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {
        f'layer{(place * 7) % 5}.{"ä" if shape == (3,) else "w"}"{dtype}{len(shape)}': torch.randint(
            0, 100, shape, generator=numbers
        ).to(dtype)
        for place, dtype in enumerate(TYPES)
        for shape in SHAPES
    }


def test_the_bytes_are_those_of_the_library(tensors, tmp_path: Path):
    write_tensors(tmp_path / "a", tensors)
    assert (tmp_path / "a").read_bytes() == save(tensors)


def test_what_is_written_is_read(tensors, tmp_path: Path):
    write_tensors(tmp_path / "a.safetensors", tensors)
    for found in (read_tensors(tmp_path / "a.safetensors"), load_file(tmp_path / "a.safetensors")):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_no_tensors_make_a_file_that_is_read(tmp_path: Path):
    write_tensors(tmp_path / "a.safetensors", {})
    assert (tmp_path / "a.safetensors").read_bytes() == save({})
    assert read_tensors(tmp_path / "a.safetensors") == {}


@pytest.mark.parametrize("kind", [torch.complex64, torch.uint16])
def test_types_of_buffers_that_networks_of_ours_do_not_have_are_written_too(kind: torch.dtype, tmp_path: Path):
    tensors = {"b": torch.ones(3).to(kind), "a": torch.zeros(2)}
    write_tensors(tmp_path / "t", tensors)
    assert (tmp_path / "t").read_bytes() == save(tensors)


def of_header(path: Path, content: bytes = b"12345678", **entries: object) -> Path:
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


@pytest.mark.parametrize(
    ("shape", "place", "said"),
    [
        ([2], [0, 8], ""),
        ([2], [0, 9], "of shape [2] at bytes [0, 9] of 8"),
        ([2], [8, 0], "of shape [2] at bytes [8, 0] of 8"),
        ([2], [0, 4, 8], "expected dtype, shape and data_offsets"),
        ([2], [0], "of shape [2] at bytes [0] of 8"),
        ([2**30, 0, 2**30], [0, 0], "of shape [1073741824, 0, 1073741824] at bytes [0, 0] of 8"),
        ([3], [0, 8], "'a', F32 of shape [3], has 8 bytes"),
        ([2.0], [0, 8], "expected dtype, shape and data_offsets"),
        ([-2], [0, 8], "expected dtype, shape and data_offsets"),
        (2, [0, 8], "expected dtype, shape and data_offsets"),
    ],
)
def test_what_a_header_claims_is_compared_with_the_file(shape: object, place: object, said: str, tmp_path: Path):
    path = of_header(tmp_path / "t", a={"dtype": "F32", "shape": shape, "data_offsets": place})
    if not said:
        assert read_tensors(path)["a"].numpy().tobytes() == b"12345678"
        return
    with pytest.raises(ValueError, match="^tensor 'a'") as raised:
        read_tensors(path)
    assert str(raised.value).endswith(said)


def test_the_header_of_a_file_has_a_limit(tmp_path: Path, monkeypatch):
    path = of_header(tmp_path / "t", b"1234", a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    length = path.stat().st_size - 12
    monkeypatch.setattr("sightline.files.tensors.MAX_HEADER_BYTES", length)
    assert read_tensors(path)["a"].numpy().tobytes() == b"1234"
    monkeypatch.setattr("sightline.files.tensors.MAX_HEADER_BYTES", length - 1)
    said = f"its {length + 12} bytes begin with a header of {length}, at most {length - 1} are read"
    with pytest.raises(ValueError, match=said):
        read_tensors(path)
    monkeypatch.undo()
    for data, said in (
        (b"1234567", "its 7 bytes begin with a header of"),
        ((3).to_bytes(8, "little") + b"{}", "its 10 bytes begin with a header of 3, at most 4194304 are read"),
        ((2).to_bytes(8, "little") + b"[]", r"its header is \[\], expected names of tensors"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=said):
            read_tensors(path)
