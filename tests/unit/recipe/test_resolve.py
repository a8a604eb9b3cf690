"""Where values come from: the recipe, a run, what follows from others, the data, a network, a file, a flag."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline import api, cli, config, recipes
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.recipe import store
from sightline.recipe.recipe import Run
from sightline.recipe.settings import Origin, Settings
from sightline.recipe.show import why

NAME = "demo_classification"
CONSTANTS = """
from dataclasses import replace

from sightline.recipes import demo_classification
from sightline.train.optimizers import OptimizerConfig

LR = 0.2


def recipe():
    base = demo_classification.recipe()
    return replace(base, name="constants", optimizer=OptimizerConfig(lr=LR))
"""


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """Ten images of two classes: fewer than the demo's batch of 64."""
    for index in range(10):
        file = tmp_path / "ten" / ("cat", "dog")[index % 2] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (24, 24), (25 * index, 9, 90)).save(file)
    return tmp_path / "ten"


def origins(recipe: config.Recipe) -> dict[str, str]:
    return dict(recipe.origins)


# The layers


def test_a_later_origin_wins_however_it_comes():
    settings = Settings(recipes.find(NAME).recipe(), Run())
    for order in ((Origin.FLAG, Origin.DATA), (Origin.DATA, Origin.FLAG)):
        found = settings
        for origin in order:
            found = found.put(origin, {"data.classes": int(origin)}, origin.name)
        assert found["data.classes"].value == int(Origin.FLAG) and found.is_typed("data.classes")


def test_values_know_whether_a_file_or_a_flag_set_them(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"recipe: {NAME}\ntrain: {{epochs: 3, seed: 4}}\n")
    recipe, _ = config.load(NAME, ["--train.seed", "5", "--lr=0.1"], file)
    found = origins(recipe)
    assert found == {"train.epochs": f"file: {file}", "train.seed": "flag: --train.seed", "optimizer.lr": "flag: --lr"}


def test_what_the_data_decide_says_so(ten: Path):
    recipe = config.of_object(recipes.find(NAME).recipe(), Run(), {"data": ten}).recipe
    assert (recipe.data.classes, recipe.train.global_batch, recipe.optimizer.lr) == (2, 4, 0.0125)
    found = origins(recipe)
    for name in ("data.classes", "train.global_batch", "optimizer.lr"):
        kind, _, said = found[name].partition(": ")
        assert kind in ("data", "derived") and "8 + 2" in said, found[name]
    assert found["data.path"] == "flag: data="


def test_the_origin_of_a_value_is_in_the_run_and_comes_back(ten: Path, tmp_path: Path):
    result = api.train(
        NAME, data=ten, out=tmp_path / "run", epochs=1, workers=0, device="cpu",
        flags={"model.width": 4, "data.size": 24, "run.progress": "off", "run.report": "off"},
    )  # fmt: skip
    settings = config.of_run("inspect", result.folder)
    lines = why(settings.differing())
    assert "train.epochs 1, not 20: epochs=" in lines
    assert any(line.startswith("train.global_batch 4, not 64: 8 + 2 images") for line in lines), lines
    assert any(line.startswith("data.eval_size 24, not 64: matches data.size") for line in lines), lines
    assert not any(line.startswith(("train.seed", "optimizer.momentum")) for line in lines)
    state = json.loads((result.folder / "checkpoints" / "ckpt-00000002" / "state.json").read_text())
    assert state["origins"]["train.epochs"] == "flag: epochs="
    assert state["origins"]["train.precision"].startswith("derived: ")


def test_inspect_says_why_and_not_what_everything_is(ten: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["inspect", NAME, "--data", str(ten), "--epochs", "7"]) == 0
    said = capsys.readouterr().out
    assert "    train.epochs 7, not 20: --epochs\n" in said and "    train.global_batch 4, not 64: 8 + 2 images" in said
    assert "momentum" not in said


def test_a_rate_that_is_typed_switches_off_that_of_many_ranks_unless_both_are():
    """Also where they come in two layers, flags and keywords."""
    rates = [{"lr": 0.1}, {"optimizer.lr_many": 5.0}]
    for given in (rates, rates[::-1], [rates[0] | rates[1]]):
        optimizer = config.named("resnet50_lars", *given).recipe.optimizer
        assert (optimizer.lr, optimizer.lr_many) == (0.1, 5.0)
    recipe = config.named("resnet50_lars", rates[0]).recipe
    assert recipe.optimizer.lr_many == 0.0 and recipe.origins["optimizer.lr_many"] == "flag: lr="


def test_a_stored_value_without_an_origin_gets_none_of_its_neighbours(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(
        f"recipe: {NAME}\ntrain: {{epochs: 1, seed: 9}}\norigins: {{train.epochs: 'flag: --epochs', no.field: x}}\n"
    )
    assert why(config.of_run("inspect", tmp_path).differing()) == [
        "train.epochs 1, not 20: --epochs", "train.seed 9, not 0: as the run has it",
    ]  # fmt: skip
    recipe, _ = config.load(NAME, [], file)
    assert recipe.origins["train.epochs"] == f"file: {file}, there --epochs"
    assert recipe.origins["train.seed"] == f"file: {file}"


@pytest.mark.parametrize("text", ["[1]", "x", "3", "", "{train.epochs: [1]}", "{1: 2}"])
def test_origins_that_cannot_be_are_left_alone(tmp_path: Path, text: str):
    (tmp_path / "config.yaml").write_text(f"recipe: {NAME}\ntrain: {{epochs: 1}}\norigins: {text}\n")
    assert config.of_run("inspect", tmp_path)["train.epochs"].value == 1


def test_the_consent_to_resume_is_for_one_start(tmp_path: Path):
    recipe, run = config.load(NAME, ["--run.override", "--run.keep=3"])
    (tmp_path / "config.yaml").write_text(store.dump(recipe, run))
    _, again = config.load(NAME, [], tmp_path / "config.yaml")
    assert (again.override, again.keep) == (False, 3)


def test_a_field_under_the_wrong_part_leads_to_the_right_one(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("train: {lr: 0.1}\n")
    with pytest.raises(UsageError, match="unknown key 'train.lr'; did you mean 'optimizer.lr'"):
        config.load(NAME, [], tmp_path / "mine.yaml")
    with pytest.raises(UsageError, match="mine.yaml is a config file, not a recipe; give it as --config .*mine.yaml"):
        config.asked("train", [str(tmp_path / "mine.yaml")])


def test_inspect_of_a_run_whose_data_or_recipe_are_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gone = tmp_path / "gone"
    (tmp_path / "config.yaml").write_text(f"recipe: {NAME}\ndata: {{path: {gone}}}\n")
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert f"the data of {tmp_path} were in {gone}, which is gone; add --data.path DIR" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("recipe: mine\n")
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "made with your own recipe 'mine'; add --recipe PATH/TO/mine.py" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "show"])
def test_a_run_that_names_a_recipe_file_runs_none(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "theirs.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "config.yaml").write_text(f"recipe: {file}\n")
    assert cli.main([command, str(tmp_path)]) == 2
    assert "add --recipe PATH/TO/theirs.py" in capsys.readouterr().err and not (tmp_path / "ran").exists()
    assert cli.main([command, str(tmp_path), "--recipe", str(file)]) == 2  # it defines no recipe()
    assert (tmp_path / "ran").exists()


def test_inspect_names_what_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for folder, said in ((tmp_path, "is not a run folder"), (tmp_path / "gone" / "x", "does not exist")):
        assert cli.main(["inspect", str(folder)]) == 2
        assert said in capsys.readouterr().err


# Python


def test_numbers_of_numpy_and_iterators_are_taken():
    numbers = {"epochs": np.int64(3), "lr": np.float32(0.5), "data.mean": np.array([0.1, 0.2, 0.3])}
    recipe, _ = config.load(NAME, numbers)
    assert (recipe.train.epochs, recipe.optimizer.lr, recipe.data.mean) == (3, 0.5, (0.1, 0.2, 0.3))
    assert {type(recipe.train.epochs), type(recipe.optimizer.lr)} == {int, float}


def test_flags_of_an_iterator_are_not_lost(ten: Path, tmp_path: Path):
    words = ["--optimizer.lr", "0.1", "--model.width=4", "--data.size=24", "--run.report=off", "--run.progress=off"]
    result = api.train(NAME, data=ten, out=tmp_path / "run", epochs=1, workers=0, device="cpu", flags=iter(words))
    assert config.of_run("inspect", result.folder)["optimizer.lr"].value == 0.1


def test_what_a_script_sets_on_a_recipe_is_its_word(ten: Path):
    base = recipes.load(NAME)
    mine = dataclasses.replace(base, train=dataclasses.replace(base.train, global_batch=16))
    recipe = config.of_object(mine, Run(), {"data": ten}).recipe
    assert (recipe.train.global_batch, recipe.data.classes) == (16, 2)
    assert recipe.origins["train.global_batch"] == "flag: set in Python"
    decided, run = config.load(NAME, {"data": ten})
    assert decided.optimizer.lr == 0.2 * 4 / 64
    again = dataclasses.replace(decided, optimizer=dataclasses.replace(decided.optimizer, lr=0.3))
    assert config.of_object(again, run).recipe.optimizer.lr == 0.3


@pytest.mark.parametrize(
    "made",
    [lambda: Run(workers="3"), lambda: Run(keep=None), lambda: Run(override="no")],
    ids=["text", "none", "switch"],
)
def test_a_value_of_another_type_is_refused_where_it_is_set(made):
    with pytest.raises(UsageError, match=r"run\.\w+=.* must be"):
        made()


# One way for every recipe


def test_a_task_of_ones_own_trains_on_data_with_other_classes(ten: Path, tmp_path: Path):
    """The example of docs/howto/task.md had `has 2 classes, the recipe declares 10`."""
    text = Path(__file__).resolve().parents[3].joinpath("docs", "howto", "task.md").read_text("utf-8")
    example = text[text.index('"""The demo\'s classifier with a binary loss') :].partition("```")[0]
    own = tmp_path / "own_task.py"
    own.write_text(example)
    small = ["--model.width=4", "--data.size=24", "--run.workers=0", "--run.device=cpu", "--run.report=off"]
    code = cli.main(["train", str(own), "--data", str(ten), "--epochs", "1", "--out", str(tmp_path / "run"), *small])
    assert code == 0 and (tmp_path / "run" / "checkpoints").is_dir()


def test_a_recipe_with_constants_scales_its_rate(ten: Path, tmp_path: Path):
    own = tmp_path / "constants.py"
    own.write_text(CONSTANTS)
    recipe = config.named(str(own), {"data": ten}).recipe
    assert (recipe.train.global_batch, recipe.optimizer.lr) == (4, 0.2 * 4 / 64)


def test_a_recipe_object_takes_the_classes_of_the_data_as_its_name_does(ten: Path):
    by_name = config.named(NAME, {"data": ten})
    by_object = config.of_object(recipes.find(NAME).recipe(), Run(), {"data": ten})
    assert by_name.recipe == by_object.recipe and by_name.recipe.data.classes == 2


def test_classes_that_are_typed_stay_and_what_was_resolved_stays_resolved(ten: Path):
    recipe = config.of_object(recipes.find(NAME).recipe(), Run(), {"data": ten, "batch_size": 5}).recipe
    assert config.of_object(recipe, Run()).recipe == recipe and recipe.train.global_batch == 5
    assert config.of_object(recipe, Run(), {"data.classes": 7}).recipe.data.classes == 7


# A recipe's own bf16


def old_run() -> dict[str, object]:
    """The values of a recipe as versions before origins stored a bf16 that nobody had typed."""
    stored = json.loads(json.dumps(store.to_json(recipes.find("resnet50").recipe())))
    stored["train"]["precision"] = "bf16_or_fp32"
    return stored


@pytest.mark.parametrize("native", [True, False])
def test_an_old_run_is_evaluated_in_what_the_device_does_well(native: bool, monkeypatch: pytest.MonkeyPatch):
    cpu = dataclasses.replace(devices.select("cpu"), has_bf16=lambda: native)
    recipe, _ = config.of_stored(old_run()).build()
    assert recipe.train.precision == "bf16"
    assert cpu.precision_of(recipe) == ("bf16" if native else "fp32")
    typed, _ = config.of_stored(old_run(), "", ["--train.precision", "bf16"]).build()
    assert cpu.precision_of(typed) == "bf16"


def test_an_old_run_resumes_whatever_its_bf16_became():
    recipe = recipes.find("resnet50").recipe()
    for now in ("bf16", "fp32"):
        resumed = recipe.decided({"train.precision": now}, "this device")
        assert store.diff(old_run(), resumed) == []
    other = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, precision="fp16"))
    assert store.diff(old_run(), other) == ["train.precision: bf16 -> fp16"]


def test_a_run_that_stored_it_resumes_and_is_scored(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flags = {"model.width": 4, "data.size": 24, "train.max_steps": 2, "run.progress": "off", "run.report": "off"}
    own = tmp_path / "halves.py"
    own.write_text(CONSTANTS.replace('name="constants"', 'name="halves", train=replace(base.train, precision="bf16")'))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # no bf16 here
    started = {"data": ten, "out": tmp_path / "run", "workers": 0, "device": "cpu"}
    first = api.train(own, epochs=2, flags=flags, **started)
    kept = first.folder / "checkpoints" / "ckpt-00000002"
    state = json.loads((kept / "state.json").read_text())
    assert state["recipe"]["train"]["precision"] == "fp32"
    state["recipe"]["train"]["precision"] = "bf16_or_fp32"
    del state["origins"]
    text = json.dumps(state)
    (kept / "state.json").write_text(text)
    manifest = json.loads((kept / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (kept / "manifest.json").write_text(json.dumps(manifest))
    scores = api.evaluate(first.folder, {"run.device": "cpu"}, recipe_file=str(own))
    assert scores.values["loss"] == pytest.approx(first.values["loss"], abs=1e-6), "in fp32, as before"
    longer = api.train(own, epochs=2, flags=flags | {"train.max_steps": 4}, **started)
    assert longer.ended == "2 epochs are done" or "4 steps" in longer.ended
