"""Checkpoints that a run leaves, resuming by the same command, and the limits of a checkpoint from a stranger."""

import shutil
from pathlib import Path

import pytest

from sightline import cli
from sightline.engine import checkpoint

TINY = """train demo_classification --model.width=4 --data.path=synthetic:classes=10,samples=16,size=16 --data.size=16
    --data.eval-resize=16 --data.eval-size=16 --train.global-batch=8 --train.precision=fp32 --train.epochs=14
    --run.workers=0 --run.report=off --run.device=cpu --run.progress=off""".split()


def listed(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("ckpt-*"))


def test_one_is_kept_besides_the_best(tmp_path: Path):
    run = tmp_path / "run"
    assert cli.main([*TINY, "--run.keep=1", "--train.max-steps=24", f"--run.out={run}"]) == 0
    best = (run / "checkpoints" / "best").read_text().strip()
    assert listed(run) == sorted({"ckpt-00000024", best})


GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "checkpoint_format1"
HERE = ["--recipe", str(GOLDEN / "tiny.py"), "--checkpoint", "latest", "--run.workers=0", "--run.device=cpu"]


def with_recipe(run: Path, **changes: dict) -> Path:
    """The run that is kept, with other values in the recipe of its checkpoint, whose checksums fit."""
    shutil.copytree(GOLDEN / "run", run)
    path = checkpoint.find(run, "latest")
    tensors, state = checkpoint.read(path)
    for part, fields in changes.items():
        state["recipe"][part] |= fields
    shutil.rmtree(path)
    checkpoint.write(path, tensors, state)
    return run


def test_a_checkpoint_cannot_say_where_results_are_written(sightline, tmp_path: Path):
    """List items in its recipe used to become flags of the command."""
    elsewhere = tmp_path / "elsewhere"
    run = with_recipe(tmp_path / "run", train={"fp32_ops": [f"--run.out={elsewhere}", "--data.path=/etc"]})
    said = sightline("evaluate", run, *HERE)
    assert said.code == 0, said
    assert (run / "scores-ckpt-00000006.json").is_file() and not elsewhere.exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": {"epochs": "many"}}, "'train.epochs' is 'many'; expected a whole number"),
        ({"train": {"global_batch": 0}}, "train.global_batch=0 must be at least 1"),
        ({"train": {"epohcs": 3}}, "unknown key 'train.epohcs'; did you mean 'train.epochs'?"),
        ({"optimizer": {"lr": None}}, "'optimizer.lr' is None; expected a number"),
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_stored_recipe_that_cannot_be_ends_with_exit_4(sightline, tmp_path: Path, command: str, changes, told: str):
    run = with_recipe(tmp_path / "run", **changes)
    rest = [] if command == "evaluate" else [tmp_path, "--out", tmp_path / "out"]
    said = sightline(command, run, *rest, *HERE)
    assert said.code == 4 and told in said.err and "ckpt-00000006" in said.err


def test_a_network_much_larger_than_its_weights_is_not_built(sightline, tmp_path: Path):
    """A width of a million would take terabytes; the weights of the checkpoint are those of a width of 4."""
    run = tmp_path / "run"
    assert cli.main([*TINY, "--train.max-steps=2", f"--run.out={run}"]) == 0
    path = checkpoint.find(run, "latest")
    tensors, state = checkpoint.read(path)
    state["recipe"]["model"]["width"] = 1_000_000
    shutil.rmtree(path)
    checkpoint.write(path, tensors, state)
    said = sightline("evaluate", run, "--checkpoint=latest", "--run.workers=0", "--run.device=cpu")
    assert said.code == 4 and "its recipe asks for a network of more than 256 MB" in said.err


def test_a_checkpoint_without_a_part_that_is_needed_ends_with_exit_4(sightline, tmp_path: Path):
    run = with_recipe(tmp_path / "run")
    path = checkpoint.find(run, "latest")
    tensors, whole = checkpoint.read(path)
    again = [
        GOLDEN / "tiny.py",
        f"--run.out={tmp_path / 'again'}",
        f"--run.resume={path}",
        *HERE[-2:],
        "--run.override",
    ]
    for part in ("progress", "recipe", "spec"):
        shutil.rmtree(path)
        checkpoint.write(path, tensors, {name: values for name, values in whole.items() if name != part})
        said = sightline("evaluate", run, *HERE)
        assert said.code == 4 and f"its state.json holds no {part}" in said.err
    shutil.rmtree(path)
    checkpoint.write(path, tensors, {name: values for name, values in whole.items() if name != "progress"})
    said = sightline("train", *again)
    assert said.code == 4 and "its state.json holds no progress" in said.err


def test_averages_of_damaged_checkpoints_end_with_exit_4(sightline, tmp_path: Path):
    run = with_recipe(tmp_path / "run")
    other = shutil.copytree(checkpoint.find(run, "latest"), tmp_path / "other")
    (other / "state.json").write_text('{"format": 1, "progress": {"step": [1]}}')
    said = sightline("average", checkpoint.find(run, "latest"), other, "--out", tmp_path / "mean")
    assert said.code == 4 and "other/state.json is damaged" in said.err
