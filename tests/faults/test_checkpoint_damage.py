"""Damaged checkpoints are noticed, named, moved aside and walked past; when none is left the run says so (B5: 5-8)."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from sightline.errors import BadCheckpoint
from sightline.train import checkpoint
from sightline.train.checkpoint import Checkpoints

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
OLD, NEW = "ckpt-00000001", "ckpt-00000002"


@pytest.fixture
def folder(tmp_path):
    """Two good checkpoints, of steps 1 and 2."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        tensors = {stem: {"w": torch.full((1000,), float(step))} for stem in ("model", "optimizer")}
        Checkpoints(folder, 2, print).save(step, tensors, {"progress": {"step": step}}, best_step=1)
    return folder


def assert_walks_back(folder: Path, *reasons: str) -> None:
    """The older checkpoint is found, and what was said about the newer one holds these words."""
    said: list[str] = []
    tensors, state, path = Checkpoints(folder, 2, said.append).newest()
    assert path.name == OLD and state["progress"]["step"] == 1
    assert all(bool((named["w"] == 1.0).all()) for named in tensors.values())
    assert len(said) == 1 and all(reason in said[0] for reason in (NEW, f"{NEW}.corrupt", *reasons)), said
    assert sorted(p.name for p in folder.glob("ckpt-*")) == [OLD, f"{NEW}.corrupt"]
    assert Checkpoints(folder, 2, said.append).newest()[2].name == OLD and len(said) == 1, "told once"


@pytest.mark.parametrize("percent", [0, 1, 50, 99])
@pytest.mark.parametrize("name", FILES)
def test_truncated(folder, name, percent):
    path = folder / NEW / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * percent // 100])
    assert_walks_back(folder, name, "damaged", *([] if name == "manifest.json" else [f"instead of {len(whole)}"]))


@pytest.mark.parametrize("name", FILES[:3])
@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.999])
def test_one_bit_flipped(folder, name, place):
    path = folder / NEW / name
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)
    assert_walks_back(folder, name, "sha256")


def test_every_flipped_byte_of_the_manifest_is_survived(folder):
    """Where the flip is in a name, a size or a hash it is noticed; in white space it may not matter."""
    path = folder / NEW / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            tensors, state = checkpoint.read(folder / NEW)
        except BadCheckpoint:
            continue
        assert state["progress"]["step"] == 2 and bool((tensors["model"]["w"] == 2.0).all())


@pytest.mark.parametrize("name", FILES)
def test_file_missing(folder, name):
    (folder / NEW / name).unlink()
    assert_walks_back(folder, name, "missing")


def test_manifest_of_other_shapes(folder):
    for text in (
        "[]",
        "7",
        "{}",
        '{"files": []}',
        '{"files": {}}',
        '{"files": {"state.json": 3}}',
        '{"files": {"../x"',
    ):
        (folder / NEW / "manifest.json").write_text(text)
        with pytest.raises(BadCheckpoint, match="damaged"):
            checkpoint.read(folder / NEW)
    assert_walks_back(folder, "manifest.json")


def test_manifest_cannot_name_files_elsewhere(folder):
    manifest = json.loads((folder / NEW / "manifest.json").read_text())
    manifest["files"]["../latest"] = {"bytes": 14, "sha256": ""}
    (folder / NEW / "manifest.json").write_text(json.dumps(manifest))
    assert_walks_back(folder, "../latest")


def test_empty_folder_or_file_in_the_place_of_a_checkpoint(folder):
    shutil.rmtree(folder / NEW)
    (folder / NEW).write_text("not a folder")
    assert_walks_back(folder, "manifest.json")
    (folder / NEW).mkdir()
    said: list[str] = []
    assert Checkpoints(folder, 2, said.append).newest()[2].name == OLD
    assert "corrupt1" in said[0], "the name of the first damaged one is taken"


@pytest.mark.parametrize("pointer", ["latest", "best"])
@pytest.mark.parametrize(
    "content", [None, "", "ckpt-00000099\n", "../../elsewhere\n"], ids=["absent", "empty", "gone", "outside"]
)
def test_pointer_missing_or_dangling(folder, pointer, content):
    if content is None:
        (folder / pointer).unlink()
    else:
        (folder / pointer).write_text(content)
    said: list[str] = []
    assert Checkpoints(folder, 2, said.append).newest()[2].name == NEW
    assert not said
    assert checkpoint.find(folder.parent, pointer).name == NEW


def test_all_damaged_is_an_error_every_time(folder):
    for name in (OLD, NEW):
        (folder / name / "state.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(BadCheckpoint, match="no checkpoint that verifies"):
            Checkpoints(folder, 2, lambda _: None).newest()


def test_no_checkpoint_yet_is_none(tmp_path):
    assert Checkpoints(tmp_path / "absent", 2, print).newest() is None
    (tmp_path / "ckpt-00000001.tmp-77").mkdir()
    assert Checkpoints(tmp_path, 2, print).newest() is None, "killed in its first save: a fresh start loses nothing"


def test_run_goes_on_from_the_older_one_to_equal_bits(sightline, reference, tmp_path):
    whole = reference()
    out = shutil.copytree(whole.out, tmp_path / "run")
    with (out / "checkpoints" / "ckpt-00000016" / "model.safetensors").open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"\x07")
    again = sightline.run(out)
    assert again.code == 0, again
    assert "ckpt-00000016/model.safetensors is damaged: its sha256" in again.warnings
    assert again.events("resume")[-1]["step"] == 8
    assert again.bits == whole.bits


def test_run_with_only_damaged_ones_ends_with_exit_4_and_never_starts_afresh(sightline, reference, tmp_path):
    out = shutil.copytree(reference().out, tmp_path / "run")
    for path in (out / "checkpoints").glob("ckpt-*"):
        (path / "manifest.json").unlink()
    for _ in range(2):
        again = sightline.run(out)
        assert again.code == again.exit_code_in_folder == 4, again
        assert "no checkpoint that verifies" in again.stderr
        assert "manifest.json is missing" in again.warnings
        assert again.checkpoints == ["ckpt-00000008.corrupt", "ckpt-00000016.corrupt"]
        assert len(again.events("start")) == 1, "that of the first run"
