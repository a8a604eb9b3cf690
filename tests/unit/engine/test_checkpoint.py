"""Checkpoints: what is written, found, kept and refused. Damage and crashes are in tests/faults."""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from sightline.engine import checkpoint
from sightline.engine.checkpoint import FORMAT, Checkpoints, find, read
from sightline.engine.progress import TrainProgress
from sightline.errors import BadCheckpoint

TENSORS = {
    "model": {
        "weight": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "counter": torch.tensor(7),
    },
    "optimizer": {"weight:momentum_buffer": torch.full((1, 2, 3, 4), -0.0)},
}
STATE = {"progress": {"step": 3}, "recipe": {"recipe": "some"}, "float": 0.1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def checkpoints(run: Path, told: list[str]) -> Checkpoints:
    run.mkdir()
    return Checkpoints(run / "checkpoints", keep=2, say=told.append)


def save(checkpoints: Checkpoints, *steps: int, best: int = -1) -> None:
    for step in steps:
        checkpoints.save(step, TENSORS, {**STATE, "progress": {"step": step}}, best)


def test_what_is_saved_is_read_bit_for_bit(checkpoints: Checkpoints):
    path = checkpoints.save(3, TENSORS, STATE, best_step=3)
    assert path.name == "ckpt-00000003"
    tensors, state = read(path)
    assert state == {"format": FORMAT, **STATE}
    assert {stem: set(named) for stem, named in tensors.items()} == {
        stem: set(named) for stem, named in TENSORS.items()
    }
    for stem, named in TENSORS.items():
        for name, tensor in named.items():
            got = tensors[stem][name]
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            # As bytes, because -0.0 equals 0.0.
            assert got.contiguous().flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))


def test_files_are_closed_again(checkpoints: Checkpoints, run: Path):
    """A run that saves for weeks may open no more files than it did at its start."""
    save(checkpoints, 1, best=1)
    before = os.listdir("/proc/self/fd")
    save(checkpoints, 2, 3, best=3)
    read(find(run, "latest"))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_manifest_lists_every_file_with_its_sha256(checkpoints: Checkpoints):
    path = checkpoints.save(3, TENSORS, STATE, best_step=3)
    manifest = json.loads((path / "manifest.json").read_text())
    files = {p.name for p in path.iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == files == {"model.safetensors", "optimizer.safetensors", "state.json"}
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_saving_takes_a_copy_of_the_moment(checkpoints: Checkpoints):
    weight = torch.zeros(4)
    path = checkpoints.save(1, {"model": {"w": weight}}, STATE, -1)
    weight.fill_(9)
    assert not read(path)[0]["model"]["w"].any()


def test_the_newest_is_found_by_number(checkpoints: Checkpoints):
    assert checkpoints.newest() is None and checkpoints.names() == []
    save(checkpoints, 99_999_999, 100_000_000)  # nine digits sort before eight as text
    assert checkpoints.names() == ["ckpt-100000000", "ckpt-99999999"]
    _, state, path = checkpoints.newest()
    assert path.name == "ckpt-100000000" and state["progress"]["step"] == 100_000_000


def test_the_newest_ones_and_the_best_are_kept(checkpoints: Checkpoints):
    save(checkpoints, 1, 2, 3)
    assert checkpoints.names() == ["ckpt-00000003", "ckpt-00000002"]
    save(checkpoints, 4, best=4)
    save(checkpoints, 5, 6, 7, best=4)
    assert checkpoints.names() == ["ckpt-00000007", "ckpt-00000006", "ckpt-00000004"]
    save(checkpoints, 8, best=8)  # a new best frees the old one
    assert checkpoints.names() == ["ckpt-00000008", "ckpt-00000007"]
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["best", "ckpt-00000007", "ckpt-00000008", "latest"]


def test_there_is_never_less_than_one(run: Path):
    run.mkdir()
    checkpoints = Checkpoints(run / "checkpoints", keep=1, say=print)
    for step in range(1, 5):
        save(checkpoints, step)
        assert checkpoints.names() == [f"ckpt-{step:08d}"]


def test_the_checkpoint_just_written_is_never_the_one_removed(run: Path):
    """After going back to an older checkpoint of the folder, new ones have lower numbers than those that lie there."""
    run.mkdir()
    checkpoints = Checkpoints(run / "checkpoints", keep=1, say=print)
    save(checkpoints, 20)
    save(checkpoints, 12)
    assert "ckpt-00000012" in checkpoints.names()
    assert find(run, "latest").name == "ckpt-00000012"


def test_the_same_step_saved_again_replaces_the_first(checkpoints: Checkpoints):
    checkpoints.save(5, TENSORS, {**STATE, "note": "before evaluation"}, -1)
    checkpoints.save(5, TENSORS, {**STATE, "note": "after"}, 5)
    assert checkpoints.names() == ["ckpt-00000005"]
    assert checkpoints.newest()[1]["note"] == "after"
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["best", "ckpt-00000005", "latest"]


def test_finding_by_what_a_user_types(checkpoints: Checkpoints, run: Path):
    save(checkpoints, 1, best=1)
    save(checkpoints, 2, 3, best=1)
    folder = run / "checkpoints"
    assert find(run, "best") == folder / "ckpt-00000001"
    assert find(run, "latest") == folder / "ckpt-00000003"
    assert find(run, "ckpt-00000002") == folder / "ckpt-00000002"
    assert find(folder / "ckpt-00000002", "best") == folder / "ckpt-00000002"  # a checkpoint itself
    with pytest.raises(
        BadCheckpoint, match=r"holds no 'ckpt-9'; there are ckpt-00000003, ckpt-00000002, ckpt-00000001"
    ):
        find(run, "ckpt-9")


def test_a_pointer_to_what_is_gone_falls_back_to_the_newest(checkpoints: Checkpoints, run: Path):
    save(checkpoints, 1, best=1)
    save(checkpoints, 2, best=1)
    shutil.rmtree(run / "checkpoints" / "ckpt-00000001")
    assert find(run, "best").name == "ckpt-00000002"
    (run / "checkpoints" / "latest").unlink()
    assert find(run, "latest").name == "ckpt-00000002"


def test_a_pointer_cannot_lead_out_of_the_folder(checkpoints: Checkpoints, run: Path):
    save(checkpoints, 1)
    (run / "checkpoints" / "best").write_text("../../elsewhere\n")
    assert find(run, "best") == run / "checkpoints" / "ckpt-00000001"


def test_folders_that_hold_no_run_are_refused(run: Path):
    with pytest.raises(BadCheckpoint, match=r"does not exist"):
        find(run, "best")
    run.mkdir(parents=True)
    with pytest.raises(BadCheckpoint, match=r"is neither a run folder nor a checkpoint"):
        find(run, "best")
    (run / "checkpoints").mkdir()
    with pytest.raises(BadCheckpoint, match=r"holds no checkpoint; has the run reached its first save?"):
        find(run, "best")


def rewrite_state(path: Path, **changes) -> None:
    """As another version of the program would have written it: whole, with a manifest that fits."""
    state = json.loads((path / "state.json").read_text()) | changes
    (path / "state.json").write_text(json.dumps(state))
    content = (path / "state.json").read_bytes()
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_another_format_is_refused(checkpoints: Checkpoints):
    path = checkpoints.save(3, TENSORS, STATE, -1)
    rewrite_state(path, note="whole")
    assert read(path)[1]["note"] == "whole"
    rewrite_state(path, format=FORMAT + 1)
    with pytest.raises(BadCheckpoint, match=rf"ckpt-00000003 has format {FORMAT + 1}, this version reads {FORMAT}"):
        read(path)


def test_a_newer_format_is_not_taken_for_damage(checkpoints: Checkpoints, told: list[str]):
    """An older program started in the folder of a newer one must not move its checkpoints aside."""
    path = checkpoints.save(3, TENSORS, STATE, -1)
    rewrite_state(path, format=FORMAT + 1)
    with pytest.raises(BadCheckpoint, match="format"):
        checkpoints.newest()
    assert path.is_dir()


@pytest.mark.parametrize("packages", [["torch"], "torch", {"torch": ["2.9"]}, 5])
def test_packages_that_no_run_has_written_are_damage(checkpoints: Checkpoints, packages: object):
    """Resuming compares them one by one."""
    path = checkpoints.save(3, TENSORS, STATE, -1)
    for whole in ({}, {"packages": None}, {"packages": {"torch": "2.9"}}):
        rewrite_state(path, environment=whole)
        assert read(path)[1]["environment"] == whole
    rewrite_state(path, environment={"packages": packages})
    with pytest.raises(BadCheckpoint, match=r"ckpt-00000003 is damaged: state.json cannot be read \(environment"):
        read(path)


def test_a_save_that_was_cut_between_its_two_renames_is_taken_up_again(checkpoints: Checkpoints, run: Path):
    for step in (1, 2):
        checkpoints.save(step, TENSORS, STATE, best_step=1)
    folder = run / "checkpoints"
    names = sorted(each.name for each in folder.iterdir() if each.name.startswith("ckpt-") and each.is_dir())
    (folder / names[1]).rename(folder / f"{names[1]}.old")
    shutil.copytree(folder / names[0], folder / f"{names[0]}.old")
    checkpoints._recover_old()
    assert sorted(each.name for each in folder.iterdir() if each.name.startswith("ckpt-") and each.is_dir()) == names
    assert read(folder / names[1])[1]["progress"] == {"step": 3}


def test_tensors_of_another_model_are_named():
    one = {"a": torch.zeros(2), "b": torch.zeros(3)}
    checkpoint.check_fit("model", one, dict(reversed(one.items())))
    with pytest.raises(BadCheckpoint, match="the checkpoint's model does not fit this model: b, c on one side only"):
        checkpoint.check_fit("model", one, {"a": torch.zeros(2), "c": torch.zeros(3)})
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(BadCheckpoint, match="b"):
            checkpoint.check_fit("model", one, {"a": torch.zeros(2), "b": other})


def test_of_a_damaged_checkpoint_that_was_given_itself_none_is_proposed(checkpoints: Checkpoints, run: Path):
    for step in (1, 2):
        checkpoints.save(step, TENSORS, STATE, best_step=1)
    newest = checkpoints.folder / "ckpt-00000002"
    (newest / "model.safetensors").write_bytes(b"damage")
    with pytest.raises(BadCheckpoint, match=r"use --checkpoint ckpt-00000001 \(step 3, intact\)$"):
        checkpoint.read_of_run(run, "latest")
    with pytest.raises(BadCheckpoint) as raised:
        checkpoint.read_of_run(newest, "latest")
    assert "use --checkpoint" not in str(raised.value)


def test_a_checkpoint_that_a_crash_left_between_two_renames_is_found(checkpoints: Checkpoints):
    save(checkpoints, 3)
    path = checkpoints.folder / "ckpt-00000003"
    path.rename(path.with_name(f"{path.name}.old"))
    found = checkpoints.newest()
    assert found is not None and found[2] == path and found[1]["progress"] == {"step": 3}
    assert checkpoints.names() == [path.name]


def evaluated(
    checkpoints: Checkpoints, step: int, top1: float | None, loss: float = 1.0, scored: int | None = None
) -> None:
    scored = step if scored is None else scored
    found = TrainProgress(step=step, scores={"top1": top1, "loss": loss}, scored_step=scored)
    checkpoints.save(step, TENSORS, {**STATE, "progress": dataclasses.asdict(found)}, -1)


def test_a_lost_best_checkpoint_gives_way_to_the_best_of_the_others(run: Path, told: list[str]):
    run.mkdir()
    checkpoints = Checkpoints(run / "checkpoints", keep=9, say=told.append)
    for step, top1, loss in ((1, 0.5, 1.0), (2, 0.9, 1.0), (3, 0.75, 2.0), (4, 0.75, 1.0), (5, None, 1.0)):
        evaluated(checkpoints, step, top1, loss)
    evaluated(checkpoints, 6, 0.99, scored=5)  # of another step
    found = [progress.step for progress in checkpoints._evaluated("top1")]
    assert found == [2, 4, 3, 1], "of equal scores that with the lower loss"
    folder, newest = run / "checkpoints", run / "checkpoints" / "ckpt-00000006"
    assert checkpoints.damage_of_best(-1, newest) is None and checkpoints.damage_of_best(6, newest) is None
    assert checkpoints.damage_of_best(2, newest) is None
    assert checkpoints.damage_of_best(77, newest) is None, "it was never in this folder"
    (folder / "ckpt-00000002" / "state.json").write_text("{}")
    damage = checkpoints.damage_of_best(2, newest)
    assert damage is not None and "ckpt-00000002" in str(damage)
    best = checkpoints.replace_best(2, damage, "top1")
    assert (best.step, best.scores["top1"]) == (4, 0.75)
    assert (folder / "best").read_text() == "ckpt-00000004\n" and not (folder / "ckpt-00000002").exists()
    moved = "; moved to ckpt-00000002.corrupt. The best is now ckpt-00000004, top1 0.7500"
    assert told == [f"the best checkpoint is lost: {damage}{moved}"]
    gone = checkpoints.damage_of_best(2, newest)
    assert str(gone) == f"{folder / 'ckpt-00000002'} is missing"


def test_without_another_that_was_evaluated_the_next_evaluation_sets_the_best(run: Path, told: list[str]):
    run.mkdir()
    checkpoints = Checkpoints(run / "checkpoints", keep=9, say=told.append)
    evaluated(checkpoints, 1, 0.5, scored=0)
    best = checkpoints.replace_best(7, BadCheckpoint("it is missing"), "top1")
    assert best == TrainProgress()
    assert told == [
        "the best checkpoint is lost: it is missing. No other was evaluated: the next evaluation sets the best, and "
        "until then evaluate, predict and export use the newest"
    ]
