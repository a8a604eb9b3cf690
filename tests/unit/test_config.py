"""How a recipe, a YAML file and flags become frozen objects and config.yaml, and what is refused on the way."""

import dataclasses
import json
import runpy
import textwrap
import tracemalloc
from functools import cache
from pathlib import Path

import pytest

from sightline import config, recipes
from sightline.config import Recipe, Run, TrainConfig
from sightline.errors import BadCheckpoint, UsageError
from sightline.recipe import store

NAME = "demo_classification"
EVERY_RECIPE = pytest.mark.parametrize("name", recipes.names())
COVER = runpy.run_path(str(Path(__file__).resolve().parents[1] / "recipes" / "cover.py"))
CHANGED = [
    "--train.epochs=7",
    "--train.ema=0.99",
    "--train.deterministic",
    "--train.seed=9007199254740993",  # one more than a float can hold
    "--optimizer.kind=adamw",
    "--optimizer.lr=0.0012345678901234567",
    "--optimizer.momentum=0.9",
    "--optimizer.no-nesterov",
    "--optimizer.beta1=0.8",
    "--schedule.kind=step",
    "--schedule.final-lr=0",
    "--schedule.drop-epochs",
    "3",
    "6",
    "--run.out=a folder: with # signs/and 'quotes'",
    "--run.no-channels-last",
    "--run.compile=off",
    "--run.keep=5",
]


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def loaded(folder: Path, text: str, *flags: str) -> tuple[Recipe, Run]:
    return config.load(NAME, flags, yaml_file(folder, text))


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(UsageError) as error:
        loaded(folder, text)
    assert "config.yaml" in str(error.value)
    return str(error.value)


# Round trips


# Every recipe as it is; changed, by default one for every class of part, since the changes are the same for all.
AS_IT_IS_AND_CHANGED = pytest.mark.parametrize(
    ("name", "how"), [*((name, "as it is") for name in recipes.names()), *COVER["params"](COVER["classes"], "changed")]
)


@cache
def made(name: str, how: str) -> tuple[Recipe, Run]:
    return config.load(name, CHANGED if how == "changed" else [])


@AS_IT_IS_AND_CHANGED
def test_what_is_dumped_is_loaded_again(tmp_path: Path, name: str, how: str):
    recipe, run = made(name, how)
    path = yaml_file(tmp_path, "")
    path.write_text("# read, not remembered\n" + store.dump(recipe, run))
    assert config.load(name, [], path) == (recipe, run)
    assert config.recipe_named_in(path) == name


@AS_IT_IS_AND_CHANGED
def test_what_a_checkpoint_stores_is_loaded_again(name: str, how: str):
    recipe, _ = made(name, how)
    stored = json.loads(json.dumps(store.to_json(recipe)))
    again, run = config.of_stored(stored).build()
    assert (again, run) == (recipe, Run())
    assert store.diff(stored, recipe) == []


def test_flags_change_what_a_checkpoint_stores():
    recipe, _ = made(NAME, "changed")
    again, _ = config.of_stored(store.to_json(recipe), "", ["--train.epochs", "5"]).build()
    assert again == dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, epochs=5)) != recipe


def test_text_that_yaml_would_read_as_something_else_survives(tmp_path: Path):
    for text in ("off", "1e3", "2020-01-01", "a: b", "ünï", "--y"):
        recipe, run = config.load(NAME, [f"--data.path={text}"])
        path = yaml_file(tmp_path, "")
        path.write_text(store.dump(recipe, run), encoding="utf-8")
        assert config.load(NAME, [], path)[0].data.path == text


def test_no_text_of_a_file_is_read_as_a_flag(tmp_path: Path):
    """A list used to be spliced into the command line: an item could then say where a run writes."""
    items = ("--run.out=elsewhere", "--train.epochs", "99", "-x", "--help", "--", "plain")
    recipe = config.load(NAME)[0]
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, fp32_ops=items))
    stored = json.loads(json.dumps(store.to_json(recipe)))
    assert config.of_stored(stored).build() == (recipe, Run())
    path = yaml_file(tmp_path, store.dump(recipe, Run()))
    assert config.load(NAME, [], path) == (recipe, Run())
    changed, run = config.load(NAME, ["--train.epochs", "5"], path)
    assert (changed.train.epochs, changed.train.fp32_ops, run) == (5, items, Run())


def test_words_behind_the_flags_are_not_taken_for_items_of_a_stored_list():
    stored = store.to_json(config.load(NAME, ["--train.fp32-ops", "fc"])[0])
    stored = {**stored, "train": {"fp32_ops": ["fc"]}}  # as the last one of the stored fields
    with pytest.raises(UsageError, match="unexpected 'stray'"):
        config.of_stored(stored, "", ["stray"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": {"epoch": 3}}, r"unknown key 'train.epoch'; did you mean 'train.epochs'\?"),
        ({"train": {"epochs": "many"}}, "'train.epochs' is 'many'; expected a whole number"),
        ({"train": {"epochs": 10**30}}, "'train.epochs' is .*; expected a number of 64 bits"),
        ({"train": {"epochs": -3}}, "train.epochs=-3 must be at least 1"),
        ({"train": {"fp32_ops": [["fc"]]}}, "'train.fp32_ops' is .*; expected a text"),
        ({"train": {"fp32_ops": "fc"}}, "'train.fp32_ops' is 'fc'; expected a list"),
        ({"train": {"precision": "fp8"}}, "expected one of auto, fp32, bf16, fp16"),
        ({"data": {"mean": [0.5]}}, "'data.mean' is .*; expected 3 values"),
        ({"train": [1]}, "expected `'train'` to hold fields"),
        ({"optimizer": {"kind": "adam", "nesterov": True}}, "optimizer.nesterov=True belongs to kind=sgd"),
        ({"recipe": 7}, "the checkpoint's recipe is called 7"),
        ({"recipe": ["x"]}, r"the checkpoint's recipe is called \['x'\]"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_stored_recipe_that_cannot_be_is_a_bad_checkpoint(changes: dict, told: str):
    with pytest.raises(BadCheckpoint, match=told):
        config.of_stored({"recipe": NAME, **changes}).build()


def test_flags_may_mend_a_stored_recipe():
    stored = {"recipe": NAME, "train": {"epochs": -3}}
    assert config.of_stored(stored, "", ["--train.epochs=3"]).build()[0].train.epochs == 3
    with pytest.raises(UsageError, match="train.epochs=-4"):
        config.of_stored({"recipe": NAME}, "", ["--train.epochs=-4"]).build()


def test_values_of_a_file_are_checked_together_with_the_flags(tmp_path: Path):
    with pytest.raises(UsageError, match="needs --schedule.drop-epochs"):
        loaded(tmp_path, "schedule: {kind: step}")
    assert loaded(tmp_path, "schedule: {kind: step}", "--schedule.drop-epochs", "3")[0].schedule.drop_epochs == (3,)


# Who wins


def test_flags_override_yaml_and_yaml_the_recipe(tmp_path: Path):
    default = recipes.find(NAME).recipe()
    text = "train: {epochs: 3, seed: 4}\nrun: {keep: 9}\nschedule: {warmup_epochs: 0.5}"
    recipe, run = loaded(tmp_path, text, "--train.seed", "5", "--run.prefetch", "7")
    assert (recipe.train.epochs, recipe.train.seed) == (3, 5)
    assert (run.keep, run.prefetch) == (9, 7)
    assert recipe.train.global_batch == default.train.global_batch
    assert recipe.schedule == dataclasses.replace(default.schedule, warmup_epochs=0.5)
    assert recipe.model == default.model and recipe.data == default.data


def test_a_flag_takes_back_what_yaml_switched_on(tmp_path: Path):
    text = "train: {deterministic: true}\nrun: {channels_last: false}\nschedule: {kind: step, drop_epochs: [1, 2]}"
    recipe, run = loaded(tmp_path, text)
    assert recipe.train.deterministic and not run.channels_last and recipe.schedule.drop_epochs == (1, 2)
    back = ["--train.no-deterministic", "--run.channels-last", "--schedule.drop-epochs", "4"]
    recipe, run = loaded(tmp_path, text, *back)
    assert not recipe.train.deterministic and run.channels_last and recipe.schedule.drop_epochs == (4,)


@pytest.mark.parametrize("form", [["--optimizer.lr", "5"], ["--optimizer.lr=5"]], ids=str)
def test_a_rate_that_is_asked_for_holds_for_any_number_of_ranks(tmp_path: Path, form: list[str]):
    """The recipe has 2.5 for one rank and 9.5 for more: neither may win over what the user typed."""
    rates = [config.load("resnet50_lars", flags)[0].optimizer.base_lr(2048, 8) for flags in ([], form)]
    assert rates == [9.5, 5.0]
    path = yaml_file(tmp_path, "optimizer: {lr: 4}")
    assert config.load("resnet50_lars", [], path)[0].optimizer.base_lr(2048, 8) == 4.0
    assert config.load("resnet50_lars", form, path)[0].optimizer.base_lr(2048, 8) == 5.0
    for many in ("--optimizer.lr-many=7", "--optimizer.lr_many=7"):
        both = config.load("resnet50_lars", [*form, many])[0].optimizer
        assert (both.base_lr(2048, 1), both.base_lr(2048, 8)) == (5.0, 7.0)


def test_sizes_of_evaluation_follow_the_size_unless_one_of_them_is_named(tmp_path: Path):
    def sizes(*flags: str, file: Path | None = None) -> tuple[int, int, int]:
        data = config.load("resnet50", ["--data.classes=4", *flags], file)[0].data
        return data.size, data.eval_size, data.eval_resize

    assert sizes() == (224, 224, 256)
    assert sizes("--data.size=160") == (160, 160, 183)
    assert sizes("--data.size=160", "--data.eval-size=192") == (160, 192, 256)
    assert sizes("--data.size=160", "--data.eval-resize=200") == (160, 224, 200)
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: resnet50\ndata:\n  size: 112\n")
    assert sizes(file=file) == (112, 112, 128)
    lines = config.asked("train", ["resnet50", "--config", str(file)]).resolved().lines
    assert lines == ("evaluation size set to 112 (resized to 128 first) to match --data.size",)
    file.write_text("recipe: resnet50\ndata:\n  eval_size: 128\n  eval_resize: 146\n")
    assert sizes("--data.size=112", file=file) == (112, 128, 146)


def test_without_flags_values_of_a_file_are_checked(tmp_path: Path):
    with pytest.raises(UsageError, match="train.epochs=0 must be at least 1"):
        loaded(tmp_path, "train: {epochs: 0}")
    with pytest.raises(UsageError, match="run.keep=0 must be at least 1"):
        loaded(tmp_path, "run: {keep: 0}")


def test_changing_one_field_of_a_part_leaves_the_others(tmp_path: Path):
    """Where three other libraries silently turned one optimizer into another."""
    default = recipes.find(NAME).recipe().optimizer
    changed = dataclasses.replace(default, lr=0.7)
    assert changed != default
    assert config.load(NAME, ["--optimizer.lr", "0.7"])[0].optimizer == changed
    assert loaded(tmp_path, "optimizer: {lr: 0.7}")[0].optimizer == changed


def test_a_recipe_of_ones_own_is_loaded_by_its_path(tmp_path: Path):
    source = (recipes.FOLDER / f"{NAME}.py").read_text()
    path = tmp_path / "mine.py"
    path.write_text(source.replace(f'name="{NAME}"', 'name="mine"'))
    recipe, _ = config.load(str(path), ["--train.seed", "1"])
    assert (recipe.name, recipe.train.seed) == ("mine", 1)
    assert dataclasses.replace(recipe, name=NAME) == config.load(NAME, ["--train.seed", "1"])[0]
    stored = store.to_json(recipe)
    assert config.of_stored(stored, str(path)).build()[0] == recipe
    with pytest.raises(UsageError, match=r"your own recipe 'mine'; add --recipe PATH/TO/mine.py"):
        config.of_stored(stored).build()


def test_a_recipe_of_ones_own_may_define_parts_of_its_own(tmp_path: Path):
    """A file with postponed annotations and a dataclass in it, as Python files have them."""
    path = tmp_path / "sharper.py"
    path.write_text(
        textwrap.dedent(f'''
        """A task of one's own."""
        from __future__ import annotations

        import dataclasses
        from dataclasses import dataclass

        from sightline.recipes import {NAME}
        from sightline.tasks.classification import Classification


        @dataclass(frozen=True)
        class Sharper(Classification):
            sharpness: float = 2.0
            """How sharp."""


        def recipe():
            return dataclasses.replace({NAME}.recipe(), name="sharper", task=Sharper(0.1))
        ''')
    )
    recipe, _ = config.load(str(path), ["--task.sharpness", "3"])
    assert recipe.task.sharpness == 3.0 and recipe.task.label_smoothing == 0.1
    assert config.of_stored(store.to_json(recipe), str(path)).build()[0].task.sharpness == 3.0


def test_recipe_files_that_cannot_be_used_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"recipe file .*gone.py does not exist"):
        config.load(str(tmp_path / "gone.py"))
    (tmp_path / "empty.py").write_text('"""Nothing."""')
    with pytest.raises(UsageError, match=r"empty.py defines no recipe\(\)"):
        config.load(str(tmp_path / "empty.py"))


def test_an_unknown_recipe_is_refused_with_the_nearest_name():
    with pytest.raises(UsageError) as error:
        config.load("demo_clasification")
    assert str(error.value).startswith(
        "unknown recipe 'demo_clasification'; did you mean 'demo_classification'? Known: "
    )
    assert all(name in str(error.value) for name in recipes.names())
    with pytest.raises(UsageError, match=r"^unknown recipe 'xyz'\. Known: "):
        config.load("xyz")


def test_a_run_in_place_of_a_recipe_is_told_apart(tmp_path: Path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(
        UsageError, match=f"^{tmp_path} is a run, not a recipe; give its recipe, and .* --out {tmp_path}$"
    ):
        config.load(str(tmp_path))


def test_a_file_that_names_no_recipe(tmp_path: Path):
    with pytest.raises(UsageError, match="names no recipe; give one on the command line or write `recipe: NAME`"):
        config.recipe_named_in(yaml_file(tmp_path, "train: {epochs: 3}"))


# YAML that is refused


def test_unknown_keys_are_refused_with_the_nearest(tmp_path: Path):
    assert "unknown key 'train.epoch'; did you mean 'train.epochs'?" in refusal(tmp_path, "train: {epoch: 3}")
    assert "unknown key 'trian.epochs'" in refusal(tmp_path, "trian: {epochs: 3}")
    assert "unknown key 'run.zzz'" in refusal(tmp_path, "run: {zzz: 3}")
    assert "unknown key 'train.no-deterministic'" in refusal(tmp_path, "train: {no-deterministic: 1}")


@pytest.mark.parametrize(
    "text",
    [
        "train: {1: 2}",
        "1: {epochs: 2}",
        "train: {true: 2}",
        "? [train]\n: {epochs: 3}",
        "train: 3",
        "train: [epochs, 3]",
        "- train",
        "just text",
        "",
        "train: {epochs: }",
        "train: {epochs: {a: 3}}",
        "data: {mean: [[0.1], 0.2, 0.3]}",
        "data: {mean: [0.1, {a: 1}, 0.3]}",
        "train: {epochs: [unclosed",
        "a: \t- b\n\x07",
        "train: {epochs: 2020-99-99}",
        "train: {epochs: " + "9" * 5000 + "}",
        "[" * 1_000,
    ],
    ids=lambda text: repr(text[:30]),
)
def test_what_is_no_config_file_is_refused(tmp_path: Path, text: str):
    refusal(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "train: {epochs: 1.5}",
        "train: {epochs: many}",
        "train: {epochs: true}",
        "train: {epochs: [1, 2]}",
        "train: {deterministic: 3}",
        "train: {precision: fp8}",
        "data: {mean: [0.1, 0.2]}",
        "data: {mean: 0.1}",
        "data: {path: [a, b]}",
        "data: {path: [--run.keep, 3]}",
        "model: {depth: 19}",
    ],
    ids=str,
)
def test_values_of_the_wrong_type_are_refused_as_usage(tmp_path: Path, text: str):
    with pytest.raises(UsageError) as error:
        loaded(tmp_path, text)
    part, field = text.split(": {")[0], text.split("{")[1].split(":")[0]
    assert f"{part}.{field}" in str(error.value)


def test_on_and_off_need_no_quotes(tmp_path: Path):
    """YAML 1.1 reads them as true and false."""
    recipe, run = loaded(tmp_path, "data: {augment: off}\nrun: {compile: on, graph: off}")
    assert (recipe.data.augment, run.compile, run.graph) == ("off", "on", "off")


def test_a_file_out_of_all_proportion_is_not_read(tmp_path: Path):
    assert "is larger than 65536 bytes" in refusal(tmp_path, "# " + "x" * (1 << 16))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(UsageError, match="cannot be read as YAML"):
            config.load(NAME, [], path)
    (tmp_path / "latin.yaml").write_bytes(b"data: {path: caf\xe9}")
    with pytest.raises(UsageError, match="cannot be read as YAML"):
        config.load(NAME, [], tmp_path / "latin.yaml")


DOUBLING = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 8)}]}}" for n in range(1, 6)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\n".join(["a0: &a0 {k0: 0, k1: 0, k2: 0, k3: 0}", *DOUBLING]), "anchors and aliases are not read"),
        ("train: &x {epochs: 3}", "anchors and aliases are not read"),
        ("train: {epochs: *x}", "anchors and aliases are not read"),
        ("train: {<<: {epochs: 3}}", "merge keys are not read"),
    ],
)
def test_what_makes_yaml_grow_is_refused(tmp_path: Path, text: str, told: str):
    """The first, 300 bytes, became 130,000 values."""
    tracemalloc.start()
    assert told in refusal(tmp_path, text)
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()


@pytest.mark.parametrize("tag", ["!!python/object/apply:pathlib.Path.touch", "!!python/object/new:pathlib.Path"])
def test_tags_that_make_objects_are_refused_and_nothing_is_run(tmp_path: Path, tag: str):
    target = tmp_path / "made by the file"
    inner = f"!!python/object/apply:pathlib.Path ['{target}']"
    assert "could not determine a constructor" in refusal(tmp_path, f"train: {{epochs: {tag} [{inner}]}}")
    assert not target.exists()


# Fields that are refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer.beta1=0.5"], "optimizer.beta1=0.5 belongs to kind=adam, not to kind=sgd"),
        (["--optimizer.kind=adamw", "--optimizer.nesterov"], "optimizer.nesterov=True belongs to kind=sgd"),
        (["--schedule.drop-epochs", "3"], r"schedule.drop_epochs=\(3,\) belongs to kind=step"),
        (["--schedule.kind=step"], "needs --schedule.drop-epochs"),
        (["--train.epochs=0"], "train.epochs=0 must be at least 1"),
        (["--train.global-batch=-4"], "train.global_batch=-4 must be at least 1"),
        (["--train.accumulation=0"], "train.accumulation=0 must be at least 1"),
        (["--train.eval-every-epochs=0"], "train.eval_every_epochs=0 must be at least 1"),
        (["--train.ema=1"], r"train.ema=1.0 must be in \[0, 1\)"),
        (["--train.ema=nan"], r"train.ema=nan must be in \[0, 1\)"),
        (["--train.clip=-1"], "train.clip=-1.0 must be a finite number, at least 0"),
        (["--train.clip=nan"], "train.clip=nan"),
        (["--train.seed=-1"], "train.seed=-1 must be at least 0"),
        (["--train.seed=9223372036854775808"], "--train.seed is .* expected a number of 64 bits"),
        (["--run.keep=0"], "run.keep=0 must be at least 1"),
        (["--run.prefetch=0"], "run.prefetch=0 must be at least 1"),
        (["--run.log-every-steps=0"], "run.log_every_steps=0 must be at least 1"),
        (
            ["--run.tensorboard-every-steps=15"],
            "tensorboard_every_steps=15 must be a multiple of run.log_every_steps=10",
        ),
        (["--run.checkpoint-every-steps=-1"], "run.checkpoint_every_steps=-1 must be at least 0"),
        (["--run.workers=-2"], "run.workers=-2 must be at least -1"),
        (["--run.threads=-1"], "run.threads=-1 must be at least 0"),
        (["--run.max-bad-steps=0"], "run.max_bad_steps=0 must be at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_cannot_work_are_refused(flags: list[str], message: str):
    base = ["--optimizer.no-nesterov"] if "adamw" in " ".join(flags) else []
    with pytest.raises(UsageError, match=message):
        config.load(NAME, [*base, *flags])


@pytest.mark.parametrize("flags", [["--trian.epochs", "3"], ["--train.epochs", "x"], ["stray"], ["--name", "x"]])
def test_flags_that_cannot_be_read_are_refused(flags: list[str]):
    with pytest.raises(UsageError, match=flags[0]):
        config.load(NAME, flags)


# What counts as a change


def test_diff_names_what_decides_the_result_and_nothing_else():
    flags = ["--train.epochs=12", "--optimizer.lr=0.2", "--data.crop-scale", "0.5", "1.0", "--model.width=32"]
    before, _ = config.load(NAME, [*flags, "--data.path=here"])
    stored = json.loads(json.dumps(store.to_json(before)))
    same, _ = config.load(NAME, [*flags, "--data.path=elsewhere", "--data.max-bad-samples=3", "--run.keep=7"])
    assert store.diff(stored, same) == []
    flags = ["--train.epochs=13", "--optimizer.lr=0.3", "--data.crop-scale", "0.1", "1.0", "--model.width=8"]
    other, _ = config.load(NAME, flags)
    assert store.diff(stored, other) == [
        "model.width: 32 -> 8",
        "data.crop_scale: [0.5, 1.0] -> [0.1, 1.0]",
        "optimizer.lr: 0.2 -> 0.3",
        "train.epochs: 12 -> 13",
    ]
    stored, weights = json.loads(json.dumps(store.to_json(config.load(NAME)[0]))), "resnet18.pth"
    assert store.diff(stored, config.load(NAME, [f"--model.weights={weights}"])[0]) == [
        f"model.weights: (none) -> {weights}"
    ]


def test_diff_names_fields_that_came_or_went():
    """As after an upgrade: a checkpoint of another version has fields this one has not, or lacks some."""
    recipe, _ = config.load(NAME)
    stored = store.to_json(recipe)
    del stored["train"]["clip"]  # at its default now, so nothing has changed
    del stored["train"]["epochs"]
    stored["train"]["warmth"] = 3
    stored["recipe"] = "other"
    assert store.diff(stored, recipe) == [
        "recipe: other -> demo_classification",
        "train.warmth: 3 -> absent",
        f"train.epochs: absent -> {recipe.train.epochs}",
    ]


def test_configs_are_frozen_and_their_checks_assign_nothing():
    recipe, run = config.load(NAME)
    for part in (recipe, run, recipe.train, recipe.optimizer, recipe.schedule, recipe.model, recipe.data, recipe.task):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.name = "x"
    assert dataclasses.replace(recipe.train) == recipe.train
    assert TrainConfig(epochs=1, global_batch=2).precision == "auto"
