"""An archive of torch.export is a program: it is loaded if this process wrote it, or if the user trusts it."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostile_pt2 import ATTACKS, changed, hostile
from torch import nn

from sightline import config
from sightline.errors import BadData, UsageError
from sightline.export.formats import torch_export
from sightline.export.formats.torch_export import _is_harmless
from sightline.export.served import Served


@pytest.fixture(scope="module")
def served() -> Served:
    recipe, _ = config.load("demo_classification", ["--data.eval-size=4"])
    spec = recipe.data.declared()[0]
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))  # a second less than the recipe's
    return Served(network, recipe.task.build(), recipe.data.served(spec), raw=False).eval()


@pytest.fixture(scope="module")
def archive(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "net.pt2"
    torch_export.write(served, "{}", path)
    return path


@pytest.fixture
def stranger(archive: Path, tmp_path: Path) -> Path:
    """The same network in other bytes."""
    return changed(archive, tmp_path / "net.pt2")


@torch.no_grad()
def test_an_archive_that_this_process_wrote_runs(archive: Path, served: Served):
    image = served.random_input(3)
    torch.testing.assert_close(torch_export.load(archive, served)(image), served(image))
    assert json.loads(torch_export.about(archive)) == {}


@torch.no_grad()
def test_another_one_runs_only_if_the_user_trusts_it(stranger: Path, served: Served):
    with pytest.raises(UsageError, match=r"net\.pt2 is an exported program: loading it can run code .* add --trust"):
        torch_export.load(stranger)
    image = served.random_input(3)
    torch.testing.assert_close(torch_export.load(stranger, trust=True)(image), served(image))


def test_a_file_that_takes_the_place_of_ours_is_not_loaded(
    archive: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = tmp_path / "own.pt2"
    shutil.copy(archive, own)
    torch_export.load(own, served)
    evil, ran = hostile(archive, tmp_path, "guard", monkeypatch)
    evil.replace(own)
    with pytest.raises(UsageError, match="exported program"):
        torch_export.load(own, served)
    assert not ran()


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_in_a_trusted_archive_is_still_refused(
    attack: str, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    evil, ran = hostile(archive, tmp_path, attack, monkeypatch)
    with pytest.raises(BadData, match=ATTACKS[attack].told):
        torch_export.load(evil, trust=True)
    assert not ran()
    with contextlib.suppress(Exception):  # the attack is real: torch runs it, and may fail after that
        torch.export.load(evil).module()(torch.zeros(2, 4, 4, 3, dtype=torch.uint8))
    if not ran():
        pytest.skip(f"torch {torch.__version__} itself does not run this")


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
def test_an_archive_with_what_export_never_writes_is_refused(
    archive: Path, tmp_path: Path, ending: str, change: Callable[[bytes], bytes], new: str, told: str
):
    path = changed(archive, tmp_path / "net.pt2", ending, change, new)
    with pytest.raises(BadData, match=told):
        torch_export.load(path, trust=True)


def test_a_description_too_large_for_memory_is_not_read(archive: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_export, "MAX_READ_BYTES", 1)
    with pytest.raises(BadData, match=r"net.pt2: \S+ has \d+ bytes, at most 1 are read"):
        torch_export.about(archive)


@pytest.mark.parametrize("text", ["Symbol('s77', positive=True, integer=True)", "Mul(Integer(2), Symbol('s0'))", "s77"])
def test_sizes_are_plain(text: str):
    assert _is_harmless("expr_str", text)


@pytest.mark.parametrize(
    "text",
    ["exit()", "exit ()", "S('exit()')", "a.b", "().__class__", "x[0]", "(lambda: 1)()", "(exec)('1')", "S('s0')"],
)
def test_other_expressions_are_not(text: str):
    assert not _is_harmless("expr_str", text)
