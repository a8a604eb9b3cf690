"""`benchmark` and `predict` on two ranks, as users type them: beside one rank, and a rank that dies."""

import contextlib
import io
import json
import os
import runpy
import shutil
import statistics
from pathlib import Path

import nibabel
import numpy as np
import pytest
import warm

from sightline import cli, config
from sightline.hardware.launch.place import is_rank_0
from sightline.inference.shares import Share
from sightline.train import start

BLOBS = runpy.run_path(str(Path(__file__).parents[1] / "recipes/conftest.py"))["write_blobs"]
HERE = "--run.workers=0 --run.device=cpu --train.precision=fp32".split()
QUIET = ["--run.report=off", "--train.max-steps=1"]
TINY = "--model.width=4 --data.size=24 --data.eval-resize=24 --data.eval-size=24".split()
STEPS, WARMUP, REPEATS, BATCH = 2, 1, 2, 8
SIZES = f"--steps {STEPS} --warmup {WARMUP} --repeats {REPEATS}".split()
BENCHMARK = ["benchmark", "demo_classification", *TINY, *HERE, f"--train.global-batch={BATCH}", *SIZES]

SMALL_UNET = [*HERE, "--model.width=4", "--data.task=own", "--data.path=blobs", f"--train.global-batch={BATCH}"]
MEASURED_UNET = ["benchmark", "unet2d", *SMALL_UNET, "--steps=1", "--warmup=1", "--repeats=1", "--data=real"]
TRAINED_UNET = ["train", "unet2d", *SMALL_UNET, *QUIET]


def commands() -> dict[str, list[str]]:
    """By the folder that each of them writes."""
    shapes = ["--data.path=shapes"]
    return {
        "step": [*BENCHMARK, "--out=step", "--logname=step/perf"],
        "loader": [*BENCHMARK, "--out=loader", "--loader", *shapes],
        "images": ["predict", "run", "files", "--out=images", *HERE, "--data.on-bad-sample=skip"],
        "measured": [*MEASURED_UNET, "--out=measured"],
        "trained": [*TRAINED_UNET, "--run.out=trained"],
        "volumes": ["predict", "seg", "scans", "--out=volumes", "--save-probabilities", *HERE],
        "unnamed": ["predict", "run", "files", *HERE],  # which ends with exit 3: a file cannot be read
    }


def typed(words: list[str]) -> dict:
    said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said[0]), contextlib.redirect_stderr(said[1]):
        code = cli.main(words)
    return {"code": code, "out": said[0].getvalue(), "err": said[1].getvalue()}


def main(out: Path) -> None:
    """Run on each rank."""
    os.chdir(out)
    found = {name: typed(words) for name, words in commands().items()}
    if not is_rank_0():
        Share.begin = lambda self, at: os._exit(0)  # where a rank dies that has taken its share
    found["lost"] = typed(["predict", "run", "files", "--out=lost", *HERE])
    Path(f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def prepare(folder: Path, shapes: Path) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        shutil.copytree(shapes, "shapes")
        shutil.copytree(shapes / "val", "files")  # 40 images, 16 in a batch
        Path("files", "0.jpg").write_text("no image")
        BLOBS(folder / "blobs", range(8))
        Path("scans").mkdir()
        for number in range(3):
            noise = np.random.default_rng(number).normal(100, 20, (30 + number, 28, 5)).astype(np.float32)
            nibabel.save(nibabel.Nifti1Image(noise, np.eye(4)), f"scans/case{number}.nii.gz")
        flags = [*TINY, *HERE, *QUIET, "--data.path=shapes", "--train.global-batch=16", "--run.out=run"]
        assert cli.main(["train", "demo_classification", *flags]) == 0
        assert cli.main([*TRAINED_UNET, "--data.nvol=2", "--run.out=seg"]) == 0
        alone = {name: typed(commands()[name]) for name in ("images", "volumes")}
        for name in alone:
            Path(name).rename(f"{name}-alone")
        Path("alone.json").write_text(json.dumps(alone))
        warm.run(__file__, folder, 2)
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    return warm.once(tmp_path_factory, "commands", lambda folder: prepare(folder, shapes))


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, dict]:
    """What ranks 0 and 1 said by command, and what one rank alone did. Rank 1 dies in the last command."""
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("0", "alone")}


def result_of(folder: Path) -> dict:
    [path] = folder.glob("*.json")  # only one rank writes
    return json.loads(path.read_text())


@pytest.mark.parametrize("part", ["step", "loader"])
def test_all_ranks_are_measured_beside_one(folder: Path, said: dict, part: str):
    result = result_of(folder / part)
    row, one = (each[part]["contenders"][0] for each in (result, result["ranks"]["alone"]))
    ranks = result["ranks"]
    assert (ranks["size"], ranks["backend"], ranks["batch_per_rank"], result["batch"]) == (2, "gloo", 4, 8)
    assert [each["rank"] for each in row["ranks"]] == [0, 1]
    steps = result["loader"]["batches"] if part == "loader" else STEPS
    assert (row["images"], one["images"]) == (steps * BATCH, steps * BATCH // 2)
    for number, seconds in enumerate(row["seconds"]):
        assert seconds == max(each["seconds"][number] for each in row["ranks"])
        assert row["images_per_s"]["all"][number] == row["images"] / seconds
    assert len(row["seconds"]) == REPEATS and all(each["images"] == steps * 4 for each in row["ranks"])
    assert ranks["efficiency"][part] == row["images_per_s"]["median"] / (2 * one["images_per_s"]["median"])
    shown = said["0"][part]["out"]
    each = statistics.median(rank["images_per_s"]["median"] for rank in row["ranks"])
    assert f"{part}: each rank img/s min " in shown and f"median {each:,.0f}, max " in shown
    assert f"one rank alone {one['images_per_s']['median']:,.0f} (" in shown and "of 2 times one" in shown


def test_the_step_of_ranks_trains_on_all_their_images(folder: Path):
    """Counted on the device, by the step itself; latencies are those of both ranks."""
    result = result_of(folder / "step")
    [row] = result["step"]["contenders"]
    assert row["images_trained"] == row["calls"] * BATCH and row["bad_steps"] == 0
    assert len(row["latency_s"]) == 2 * STEPS
    assert json.loads((folder / "step" / "perf").read_text()) == result["perf"]
    assert result["perf"]["throughput_train"] == pytest.approx(row["images_per_s"]["median"], abs=1e-3)


def test_a_batch_takes_a_volume_per_rank_of_the_first_start(folder: Path, said: dict, monkeypatch):
    """One rank, which would take one volume itself, resumes with the two of the first start."""
    assert result_of(folder / "measured")["config"]["data"]["nvol"] == 2
    line = "a batch takes its slices from 2 volumes, one per device; the run keeps this data.nvol=2"
    assert said["0"]["trained"]["code"] == 0 and said["0"]["trained"]["out"].count(line) == 1
    monkeypatch.chdir(folder)
    fold, _ = config.load("unet2d", SMALL_UNET)  # another fold of the run takes as many
    assert start.with_batch_of(fold, config.Run(out="trained")).data.nvol == 2
    shutil.copytree("trained", "resumed")
    resumed = typed([*TRAINED_UNET, "--train.max-steps=2", "--run.out=resumed"])
    assert resumed["code"] == 0 and "resuming from step 1" in resumed["out"] and line not in resumed["out"]
    assert "  nvol: 2\n" in Path("resumed/config.yaml").read_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("kind", "files"), [("images", 42), ("volumes", 11)])
def test_ranks_predict_what_one_predicts(folder: Path, said: dict, kind: str, files: int):
    """Every file to the byte, the table in the same order, and the same lines; 41 images are three batches of 16."""
    both, alone = (contents(folder / name) for name in (kind, f"{kind}-alone"))
    assert sorted(both) == sorted(alone) and len(alone) == files
    assert [name for name in alone if both[name] != alone[name]] == []
    assert said["0"][kind] == said["alone"][kind] and said["0"][kind]["code"] == 0


def test_ranks_agree_on_a_folder_and_one_of_them_reports(folder: Path, said: dict):
    assert sorted(path.name for path in (folder / "run").glob("predictions*")) == ["predictions"]
    assert said["0"]["unnamed"]["code"] == 3 and "1 of 41 files cannot be read" in said["0"]["unnamed"]["err"]


def test_a_rank_that_dies_is_an_error_and_leaves_no_table(folder: Path, said: dict):
    lost = said["0"]["lost"]
    assert lost["code"] == 8, lost
    assert "a rank was lost while predicting" in lost["err"] and "predictions.json was not written" in lost["err"]
    assert not (folder / "lost" / "predictions.json").exists()
