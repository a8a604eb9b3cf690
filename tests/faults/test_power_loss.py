"""A power cut in or after a save leaves the old checkpoint or the new one, whole; after it, the new one (B5: 4).

Every state that power.py can rebuild is read by the loader that a resumed run uses.
"""

import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch
from power import power_cuts, put, record

from sightline import cli
from sightline.engine.checkpoint import Checkpoints, read
from sightline.files.checkpoint_folder import find

# Saves as (step, value, best step): those before, those that the power may be cut in; how many are kept.
SAVES = {
    "next step, best": ([(1, 1.0, 1), (2, 2.0, 1)], [(3, 10.0, 3)], 2),
    "next step, only one kept": ([(1, 1.0, 1)], [(2, 10.0, 2)], 1),
    "best, then another": ([(1, 1.0, 1)], [(2, 2.0, 2), (3, 10.0, 2)], 2),
    "same step again": ([(1, 1.0, 1), (2, 2.0, 1)], [(2, 10.0, 1)], 2),
    "after going back": ([(1, 1.0, 1), (2, 2.0, 2), (4, 4.0, 2)], [(3, 10.0, 2)], 2),
    "first of a new folder": ([], [(1, 10.0, 1)], 2),
}
MOST = 5000  # combinations of one moment; all of them are tried where there are fewer


def save(run: Path, step: int, value: float, best_step: int, keep: int) -> None:
    tensors = {stem: {"w": torch.full((9,), value), "b": torch.tensor(step)} for stem in ("model", "optimizer")}
    state = {"value": value, "best_step": best_step, "progress": {"step": step}}
    checkpoints = Checkpoints(run / "checkpoints", keep, print)
    checkpoints.prove_writable()
    checkpoints.save(step, tensors, state, best_step)


def values_in(run: Path, keep: int) -> dict[str, float | None]:
    """The values of what a resumed run loads, and of what `evaluate` finds; None where there never was a checkpoint."""
    said: list[str] = []
    found = Checkpoints(run / "checkpoints", keep, said.append).newest()
    assert not said, "a damaged checkpoint had the name of a whole one"
    if found is None:
        return {"resumed": None}
    loaded = {"resumed": found[:2]} | {which: read(find(run, which)) for which in ("latest", "best")}
    for tensors, state in loaded.values():
        assert sorted(tensors) == ["model", "optimizer"]
        for named in tensors.values():
            assert bool((named["w"] == state["value"]).all()) and named["b"] == state["progress"]["step"], "a mix"
    return {which: state["value"] for which, (_, state) in loaded.items()}


@pytest.fixture
def disk(tmp_path) -> Path:
    """The folder that holds a run: its own entry, and all above, were there before."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def best_values(saves: list[tuple[int, float, int]]) -> list[float]:
    """The value of the best checkpoint after each save."""
    values = itertools.accumulate(saves, lambda found, each: found | {each[0]: each[1]}, initial={})
    return [found[best_step] for found, (_, _, best_step) in zip(itertools.islice(values, 1, None), saves, strict=True)]


def check_cuts(disk: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> int:
    """Cut the power at every moment of the saves; return how many states there were."""
    before, during, keep = SAVES[name]
    for each in before:
        save(disk / "run", *each, keep)
    looks = record(disk, lambda: [save(disk / "run", *each, keep) for each in during])
    monkeypatch.setattr(os, "fsync", lambda _: None)  # what follows a power cut is checked by the other cuts
    saved = {value for _, value, _ in (*before, *during)} | (set() if before else {None})
    best = best_values([*before, *during])
    found: dict[frozenset, dict[str, float | None]] = {}
    for moment, choices in enumerate(power_cuts(looks, disk)):
        for state in choices.states(most, seed=moment):
            key = frozenset(state.items())
            if key not in found:
                found[key] = values_after(state, disk.with_name("cut"), during[-1], keep)
            assert found[key]["resumed"] in saved
            assert found[key].get("best", best[0]) in best[max(len(before) - 1, 0) :], "neither the old best nor a new"
            if moment == len(looks) - 1:
                last = {"resumed": during[-1][1], "latest": during[-1][1], "best": best[-1]}
                assert found[key] == last, "the save has returned, its checkpoint is lost"
    return len(found)


def values_after(
    state: dict[str, bytes | None], folder: Path, last: tuple[int, float, int], keep: int
) -> dict[str, float | None]:
    """What is found after a power cut that left this state; a resumed run must be able to save there."""
    put(state, folder)
    found = values_in(folder / "run", keep)
    save(folder / "run", 9, 9.0, last[2], keep)
    assert values_in(folder / "run", keep)["resumed"] == 9.0
    shutil.rmtree(folder)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "best, then another",
        pytest.param("after going back", marks=pytest.mark.slow),
        pytest.param("first of a new folder", marks=pytest.mark.slow),
    ],
)
def test_power_cut_at_sampled_moments_of_a_save(disk, monkeypatch, name):
    assert check_cuts(disk, monkeypatch, name, most=6) > 20, "the power must have been cut in many ways"


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVES)
def test_power_cut_with_every_subset_of_unsynced_writes(disk, monkeypatch, name):
    assert check_cuts(disk, monkeypatch, name, most=MOST) > 100


@pytest.fixture(scope="module")
def with_split(sightline, shapes, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run stopped in step 5, of data without a val split, and its flags: all kinds of files lie in its folder."""
    data = shutil.copytree(shapes / "train", tmp_path_factory.mktemp("data") / "all")
    out = tmp_path_factory.mktemp("stopped") / "run"
    flags = ["--data.path", str(data), "--data.classes", "10", "--run.tensorboard"]
    assert sightline.run(out, *flags, FAULT="term@train:5").code == 143
    assert {"split.json", "data.yaml", "config.yaml", "log.jsonl", "exit.json"} <= {p.name for p in out.iterdir()}
    return out, flags


@pytest.mark.slow
@pytest.mark.parametrize("left", ["zeros", "empty", "lost"])
def test_files_beside_the_checkpoints_may_not_survive_a_power_cut(sightline, with_split, tmp_path, left):
    """But for those the run reads again: they are flushed before they get their names, so they are whole or lost."""
    whole, flags = with_split
    reference = sightline.run(Path(shutil.copytree(whole, tmp_path / "whole")), *flags)
    assert reference.code == 0, reference
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    for path in [path for path in out.rglob("*") if path.is_file() and "checkpoints" not in path.parts]:
        if left == "lost" or path.name in ("split.json", "data.yaml"):
            path.unlink()
        else:
            path.write_bytes(bytes(path.stat().st_size) if left == "zeros" else b"")
    again = sightline.run(out, *flags)
    assert again.code == 0, again
    assert again.bits == reference.bits


def test_what_a_run_reads_again_is_flushed_before_it_gets_its_name(shapes, tmp_path, monkeypatch):
    flushed, named = [], {}

    def fsync(file: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)

    def rename(source, target, call=os.rename, **folders) -> None:
        named[Path(target).name] = Path(source).name in flushed
        call(source, target, **folders)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    data = ["--data.path", str(shapes / "train"), "--data.classes", "10", "--data.size", "24"]
    few = ["--train.max-steps", "1", "--run.workers", "0", "--run.progress", "off", "--run.device", "cpu"]
    out = ["--run.out", str(tmp_path / "run")]
    assert cli.main(["train", "demo_classification", *data, *few, *out, "--model.width", "4"]) == 0
    assert named["split.json"] and named["data.yaml"] and named["latest"]
    assert not named["config.yaml"], "what nobody needs again does not wait for the disk"
