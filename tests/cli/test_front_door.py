"""What a new user types first: short flags, misspelt words, --help, starts that are refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from sightline import recipes
from sightline.recipe import suggest

NAME = "demo_classification"
TWO = "2 numbers with spaces between them"
SWITCH = "--train.deterministic is a switch: write it alone, or --train.no-deterministic"
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SMALL = ["--model.width=4", "--data.size=24", "--data.eval-resize=24", "--data.eval-size=24"]


def golden(name: str) -> dict[str, str]:
    """The flags of a recipe with their defaults."""
    lines = (GOLDEN / f"flags_{name}.txt").read_text(encoding="utf-8").splitlines()
    return {flag: value for flag, _, value in (line.partition(" ") for line in lines)}


# Short flags


def test_short_flags_train_and_the_config_holds_the_long_ones(sightline, shapes: Path, tmp_path: Path):
    out = tmp_path / "run"
    short = ["--data", shapes, "--epochs=1", "--batch-size", 40, "--lr=0.03", "--out", out, "--device=cpu"]
    said = sightline("train", NAME, *SMALL, *short, "--workers", 0, "--resume=auto", "--weights=")
    assert said.code == 0, said
    stored = yaml.safe_load((out / "config.yaml").read_text())
    assert stored["data"]["path"] == str(shapes)
    assert (stored["train"]["epochs"], stored["train"]["global_batch"]) == (1, 40)
    assert stored["optimizer"]["lr"] == 0.03
    assert (stored["run"]["out"], stored["run"]["device"], stored["run"]["workers"]) == (str(out), "cpu", 0)


def test_no_short_flag_collides_with_a_real_one():
    real = {flag for name in recipes.names() for flag in golden(name)}
    assert set(suggest.ALIASES).isdisjoint({*real, "--config", "--help", "--help-all"})
    assert set(suggest.ALIASES.values()) <= real
    assert len(set(suggest.ALIASES.values())) == len(suggest.ALIASES)


# Recipes of one's own


def test_a_recipe_is_checked_however_it_is_written(sightline, tmp_path: Path):
    own = tmp_path / "own.py"
    for source in (
        f"from sightline.recipes.{NAME} import recipe\n",
        f"from sightline.recipes import {NAME}\nbase = {NAME}.recipe()\n"
        "def recipe():\n    return type(base)(**vars(base))\n",
        f"from dataclasses import replace\nfrom sightline.recipes import {NAME}\nbase = {NAME}.recipe()\n"
        "def task():\n    return base.task\ndef recipe():\n    return replace(base, task=task())\n",
    ):
        own.write_text(source)
        said = sightline("train", own, "--bath-size", 3)
        assert said.code == 2 and "did you mean --train.global-batch?" in said.err
        said = sightline("train", own, "--epoch", 3)
        assert said.code == 2 and "did you mean --epochs?" in said.err
        assert "--model.bn-momentum" in sightline("train", own, "--help-all").out
        assert "(default: 64)" in sightline("train", own, "--help").out


def test_a_file_that_is_not_python_or_makes_no_recipe_is_named(sightline, tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text("def recipe(:\n    pass\n")
    said = sightline("train", own)
    assert (said.code, said.err) == (2, f"error: {own}, line 1, is not Python: invalid syntax\n")
    own.write_text("def recipe():\n    return 3\n")
    said = sightline("train", own)
    assert said.code == 2 and f"recipe() of {own} returned int, expected a Recipe" in said.err


def test_a_recipe_of_ones_own_is_checked_like_ours(sightline, tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text(
        f"from dataclasses import replace\nfrom sightline.recipes import {NAME}\n"
        "from sightline.train.schedules import ScheduleConfig\n\n\ndef recipe():\n"
        f"    base = {NAME}.recipe()\n"
        "    return replace(base, name='own', schedule=ScheduleConfig(kind='constant'))\n"
    )
    said = sightline("train", own, "--bath-size", 3)
    assert said.code == 2 and "did you mean --train.global-batch?" in said.err


# Suggestions


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--bath-size", "--train.global-batch"),
        ("--batch_sise=3", "--train.global-batch"),
        ("--trian.epochs", "--train.epochs"),
        ("--data.paht", "--data.path"),
        ("--data_path", "--data.path"),
        ("--data-dir", "--data.path"),
        ("--momentum", "--optimizer.momentum"),
        ("--num-workers", "--run.workers"),
        ("--model", "--model.arch"),
        ("--run.no-tensorbord", "--run.no-tensorboard"),
        ("--bs", "--batch-size"),
        ("--imgsz", "--data.size"),
        ("--img-size=3", "--data.size"),
    ],
)
def test_an_unknown_flag_leads_to_the_nearest(sightline, typed: str, meant: str):
    said = sightline("train", "resnet50", typed, 3)
    assert said.code == 2 and f"did you mean {meant}?" in said.err, said


def test_a_flag_of_the_command_itself_is_suggested_too(sightline, tmp_path: Path):
    run = tmp_path / "mine"
    run.mkdir()
    (run / "config.yaml").write_text(f"recipe: {NAME}\n")
    for command, typed, meant in (
        (["predict", run, "a.jpg"], "--topk", "--top"),
        (["predict", run, "a.jpg"], "--run.divice", "--run.device or --run.devices"),
        (["export", run], "--fromat", "--format"),
        (["evaluate", run], "--checkpiont", "--checkpoint"),
        (["evaluate", NAME, "--weights", "a.pth"], "--chekpoint", "--checkpoint"),
        (["check", NAME], "--jsno", "--json"),
    ):
        said = sightline(*command, typed, 3)
        begin = f"error: unknown flag {typed} of {command[0]} {NAME}; did you mean {meant}? "
        assert said.code == 2 and said.err.startswith(begin) and len(said.err.splitlines()) == 1, said
        assert f"`sightline {command[0]} --help` shows those of {command[0]}\n" in said.err
    assert sightline("export", run, "more").err.startswith("error: unexpected 'more'; `sightline export --help` ")
    for command in ("report", "show", "evaluate"):
        assert f"mien does not exist; did you mean {run}?\n" in sightline(command, tmp_path / "mien").err
    (run / "config.yaml").write_text("recipe: [")  # the parser, which knows the recipe of a checkpoint, is next
    assert "is neither a run folder nor a checkpoint" in sightline("export", run, "--fromat", 3).err


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--epochs two", "--train.epochs is 'two', expected a whole number"),
        ("--train.epochs=1.5", "--train.epochs is '1.5', expected a whole number"),
        ("--lr fast", "--optimizer.lr is 'fast', expected a number"),
        ("--batch-size atuo", "--train.global-batch is 'atuo', expected a whole number or auto"),
        ("--epochs --lr 3", "--train.epochs needs a value, expected a whole number"),
        ("--run.on-nan skp", "--run.on-nan is 'skp', expected one of stop, skip, rewind; did you mean skip?"),
        ("--train.deterministic true --lr 1", SWITCH),
        ("--lr 1 --train.deterministic=1", SWITCH),
        ("--train.no-deterministic yes", SWITCH),
        ("--data.crop-scale 0.1 x", f"--data.crop-scale is '0.1 x', expected {TWO}"),
        ("--data.crop-scale=0.1 --lr 1", f"--data.crop-scale is '0.1', expected {TWO}"),
        ("--data.crop-scale 0.1 0.5 1", f"--data.crop-scale is '0.1 0.5 1', expected {TWO}"),
        ("--data.crop-scale 0.1,1", f"--data.crop-scale is '0.1,1', expected {TWO}"),
        ("--data.crop-scale --lr 1", f"--data.crop-scale needs values, expected {TWO}"),
        ("--data.mean 1 2", "--data.mean is '1 2', expected 3 numbers with spaces between them"),
        (
            "--schedule.drop-epochs 3 x",
            "--schedule.drop-epochs is '3 x', expected whole numbers with spaces between them",
        ),
    ],
)
def test_a_value_that_a_flag_cannot_have_is_one_line(sightline, typed: str, message: str):
    said = sightline("train", NAME, *typed.split())
    assert (said.code, said.err) == (2, f"error: {message}\n"), said


def test_unknown_flags_beside_a_config_file_get_a_suggestion(sightline, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(f"recipe: {NAME}\n")
    said = sightline("train", "--config", tmp_path / "mine.yaml", "--bath-size", 3)
    assert said.code == 2 and "did you mean --train.global-batch?" in said.err


def test_words_without_a_neighbour_get_no_suggestion(sightline):
    said = sightline("train", "resnet50", "--xyzzy", 3)
    assert said.code == 2 and "unknown flag --xyzzy" in said.err and "did you mean" not in said.err
    assert "did you mean" not in sightline("show", "resnet50", "--count", 3).err
    said = sightline("train", "resnet50", "images", "--epochs", 3)
    assert said.code == 2 and "e.g. --data.path images" in said.err


def test_the_name_of_a_network_leads_to_its_recipe(sightline):
    for name in ("resnet18", "vit_b_16", "resnet50_tf"):
        assert f"`resnet50 --model.arch {name}`" in sightline("train", name).err
        assert sightline("inspect", "resnet50", "--model.arch", name).code == 0
    for name in ("unet_3d", "UNet3D", "3d_unet"):
        assert "did you mean 'unet3d'?" in sightline("train", name).err
    assert "\nunet3d  " in sightline("list").out
    assert "did you mean 'resnet50'?" in sightline("train", "resnet_50").err


def test_wrong_words_are_refused_before_torch_is_imported(tmp_path: Path):
    refused = [
        ["trian"],
        ["train", "resnet18"],
        ["launch", "resnet18"],
        ["benchmark", "resnet18", "--steps", "1"],
        ["list", "resnet18"],
        ["train", "gone.py"],
        ["train", "--config", "gone.yaml"],
        ["train", NAME, "--bath-size", "3"],
        ["train", NAME, "--epochs", "two"],
        ["train", NAME, "--data", "gone"],
        ["check", NAME, "--data.path=gone"],
        ["show", NAME, "--data.path=gone"],
        ["show", "runs/gone"],
        ["train", NAME, "--help-all", "gone"],
    ]
    code = (
        "import json, sys\n"
        "from sightline import cli\n"
        "codes = [cli.main(each) for each in json.loads(sys.argv[1])]\n"
        f"codes.append(cli.main(['train', '{NAME}', '--help']))\n"
        "print(json.dumps([codes, sorted({'torch', 'torchvision', 'numpy', 'tyro'} & set(sys.modules))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(refused)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    codes, imported = json.loads(done.stdout.splitlines()[-1])
    assert codes == [2] * len(refused) + [0] and imported == [], done.stderr
    assert len(done.stderr.splitlines()) == len(refused) and list(tmp_path.iterdir()) == []


# Help


@pytest.mark.parametrize("name", recipes.names())
def test_help_shows_about_twenty_flags_and_three_examples(sightline, monkeypatch, name: str):
    monkeypatch.setenv("COLUMNS", "80")
    said = sightline("train", name, "--help")
    lines = said.out.splitlines()
    assert said.code == 0 and max(map(len, lines)) <= 80 and len(lines) <= 82
    shown = [line for line in lines if line.startswith("  --")]
    assert 18 <= len(shown) <= 23
    assert sum(line.startswith("  sightline train ") for line in lines) == 3
    assert said.out.count(" --data DIR --weights ") == (2 if name.startswith(("finetune_", "ssd_")) else 0)
    assert f"(default: {golden(name)['--train.epochs']})" in said.out
    assert all(any(line.startswith(f"  {short}, {long}") for line in shown) for short, long in suggest.ALIASES.items()
               if long in golden(name))  # fmt: skip
    assert sightline("train", name, "--epochs", 3, "-h").out == said.out


def test_help_all_shows_every_flag_or_those_of_a_part(sightline):
    everything = sightline("train", NAME, "--help-all")
    assert everything.code == 0 and all(flag in everything.out for flag in golden(NAME))
    for typed in (["--help-all", "optimizer"], ["--help-all=optimizer"]):
        part = sightline("train", NAME, *typed)
        assert part.code == 0
        for flag in golden(NAME):
            assert (flag in part.out) == flag.startswith("--optimizer."), flag
    assert "known: model, data," in sightline("train", NAME, "--help-all", "optimiser").err


# Starts that are refused


def refused_starts(shapes: Path) -> list[list[str]]:
    return [["--data", ""], ["--data", str(shapes), "--data.classes=7"], ["--data", str(shapes.parent / "gone")]]


def test_a_refused_first_start_leaves_no_folder(sightline, shapes: Path, tmp_path: Path):
    for flags in (*refused_starts(shapes), ["--data", str(shapes), "--weights", str(tmp_path / "gone.pth")]):
        said = sightline("train", NAME, *SMALL, "--workers=0", "--device=cpu", "--out", tmp_path / "a" / "run", *flags)
        assert said.code in (2, 3, 4), said
        assert list(tmp_path.rglob("*")) == [], flags


def test_a_refused_first_fold_leaves_no_folder(sightline, tmp_path: Path):
    said = sightline("train", "unet2d", "--data.fold", "all", "--device=cpu", "--out", tmp_path / "folds")
    assert said.code == 2 and "no data" in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_refused_start_keeps_files_that_were_there(sightline, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    assert sightline("train", NAME, "--workers=0", "--device=cpu", "--out", tmp_path).code == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_exit_json_of_a_finished_run_survives_a_usage_error(sightline, shapes: Path, tmp_path: Path):
    out = tmp_path / "run"
    command = ["train", NAME, *SMALL, "--workers=0", "--device=cpu", "--out", out, "--batch-size=40"]
    assert sightline(*command, "--data", shapes, "--epochs=1").code == 0
    before = (out / "exit.json").read_bytes()
    for wrong in (["--epochs=1"], ["--data", shapes, "--epochs=1", "--lr=0.7"], ["--data", shapes, "--epohcs=1"]):
        assert sightline(*command, *wrong).code == 2
        assert (out / "exit.json").read_bytes() == before


def test_tensorboard_that_is_not_installed_leaves_a_run_as_it_was(sightline, shapes: Path, tmp_path: Path, monkeypatch):
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    command = ["train", NAME, *SMALL, "--workers=0", "--device=cpu", "--batch-size=40", "--data", shapes, "--epochs=1"]
    said = sightline(*command, "--out", tmp_path / "a" / "run", "--run.tensorboard")
    assert said.code == 2 and "needs the package tensorboard" in said.err and list(tmp_path.iterdir()) == [], said
    assert sightline(*command, "--out", tmp_path / "run").code == 0
    before = (tmp_path / "run" / "exit.json").read_bytes()
    assert sightline(*command, "--out", tmp_path / "run", "--run.tensorboard").code == 2
    assert (tmp_path / "run" / "exit.json").read_bytes() == before
