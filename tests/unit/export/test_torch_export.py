"""An archive of torch.export that could run code is not loaded."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sightline.errors import BadData
from sightline.export.formats import torch_export
from sightline.export.formats.torch_export import _is_harmless


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "net.pt2"
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(torch.nn.Linear(2, 1), (torch.zeros(2, 2),), dynamic_shapes=(batch,))
    torch.export.save(program, path)
    return path


def changed(archive: Path, out: Path, ending: str, change: Callable[[bytes], bytes], new: str = "") -> Path:
    """Copy an archive, with one of its files changed, or one more."""
    with zipfile.ZipFile(archive) as given, zipfile.ZipFile(out, "w") as copy:
        for name in given.namelist():
            copy.writestr(name, change(given.read(name)) if name.endswith(ending) else given.read(name))
        if new:
            copy.writestr(given.namelist()[0].partition("/")[0] + new, b"code")
    return out


def test_a_plain_archive_runs(archive: Path):
    assert torch_export.load(archive)(torch.zeros(5, 2)).shape == (5, 1)


def pickled(weights: bytes) -> bytes:
    return json.dumps(json.loads(weights)).replace('"use_pickle": false', '"use_pickle": true').encode()


def evaluated(model: bytes) -> bytes:
    text = json.loads(model)
    return json.dumps(text).replace("Symbol('", "__import__('os').system('").encode()


def reading_files(model: bytes) -> bytes:
    return model.replace(b"torch.ops.aten.linear.default", b"torch.ops.aten.from_file.default")


@pytest.mark.parametrize(
    ("ending", "change", "new", "told"),
    [
        ("weights_config.json", pickled, "", "use_pickle"),
        ("models/model.json", evaluated, "", "expr_str"),
        ("no file", bytes, "/data/aotinductor/model/net.so", "aotinductor"),
        ("sample_inputs/model.pt", lambda _: b"cposix\nsystem\n(S'true'\ntR.", "", "cannot be opened"),
        ("no file", bytes, "/data/sample_inputs/model.PT", "model.PT"),
        ("no file", bytes, "/data/constants/OPAQUE_OBJ_0", "OPAQUE_OBJ_0"),
        ("models/model.json", reading_files, "", "target"),
    ],
    ids=["pickle", "expression", "library", "inputs", "inputs by case", "object by case", "operation"],
)
def test_an_archive_that_could_run_code_is_refused(archive: Path, tmp_path: Path, ending, change, new: str, told: str):
    path = changed(archive, tmp_path / "net.pt2", ending, change, new)
    with pytest.raises(BadData, match=told):
        torch_export.load(path)


@pytest.mark.parametrize("text", ["Symbol('s77', positive=True, integer=True)", "Mul(Integer(2), Symbol('s0'))", "s77"])
def test_sizes_are_plain(text: str):
    assert _is_harmless("expr_str", text)


@pytest.mark.parametrize(
    "text",
    ["exit()", "exit ()", "S('exit()')", "a.b", "().__class__", "x[0]", "(lambda: 1)()", "(exec)('1')", "S('s0')"],
)
def test_other_expressions_are_not(text: str):
    assert not _is_harmless("expr_str", text)
