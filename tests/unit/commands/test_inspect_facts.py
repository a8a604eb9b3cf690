"""The output of `inspect` against published numbers and the fact sheet of the original."""

import dataclasses
import json

import pytest

from sightline import config
from sightline.commands.inspect_facts import as_text, inspect
from sightline.errors import UsageError

# Of the original script, made for batch 2,048: the rate from each of these epochs on.
TABLE = {0: 0.1, 1: 0.275, 2: 0.45, 3: 0.625, 4: 0.8, 29: 0.8, 30: 0.08, 60: 0.008, 80: 0.0008, 89: 0.0008}


def test_resnet50_is_the_original(tmp_path):
    recipe, run = config.load("resnet50")
    found = inspect(recipe, run, lr_at=[epoch * 5004 for epoch in TABLE])
    scaled = {str(epoch * 5004): rate / 8 for epoch, rate in TABLE.items()}
    assert found["parameters"] == 25_557_032
    assert found["forward_gflop"] == pytest.approx(8.18, abs=0.01)
    assert found["steps_per_epoch"] == 5004 and found["steps"] == 90 * 5004
    assert found["lr_at"] == pytest.approx(scaled, rel=1e-12)
    assert found["groups"] == [{"weight_decay": 1e-4, "tensors": 161, "parameters": 25_557_032}]
    assert (recipe.train.global_batch, recipe.train.seed, recipe.train.precision) == (256, 123, "bf16")
    assert "25,557,032 parameters" in as_text(found, [], as_json=False)


@pytest.mark.parametrize("samples_per_step", [16, 1024])
def test_the_rates_scale_with_the_batch_and_are_not_compressed(samples_per_step: int):
    recipe, run = config.load("resnet50", ["--train.epochs=40", f"--train.global-batch={samples_per_step}"])
    steps = [epoch * (1_281_167 // samples_per_step) for epoch in TABLE if epoch < 40]
    expected = [rate * samples_per_step / 2048 for epoch, rate in TABLE.items() if epoch < 40]
    assert list(inspect(recipe, run, lr_at=steps)["lr_at"].values()) == pytest.approx(expected, rel=1e-12)


def test_decay_of_norms_and_biases_apart():
    flags = ["--optimizer.norm-weight-decay=0", "--optimizer.bias-weight-decay=0"]
    found = inspect(*config.load("resnet50", flags))
    # 53 batch norms with two tensors each, and the bias of the head.
    assert [(g["weight_decay"], g["tensors"]) for g in found["groups"]] == [(1e-4, 54), (0.0, 107)]


def test_the_form_of_decay_is_shown():
    """Keras' 1e-4 is 2e-4 in the gradient: the number alone would mislead."""
    text = as_text(inspect(*config.load("resnet50_keras")), [], as_json=False)
    assert "decay by 0.0001 (keras_l2)" in text and "decay by 0\n" in text


def test_steps_are_counted_from_what_the_recipe_declares():
    recipe, run = config.load("resnet50", ["--data.samples=1000"])
    assert inspect(recipe, run)["steps_per_epoch"] == 3
    recipe, run = config.load("resnet50", ["--data.samples=0"])
    assert "steps" not in inspect(recipe, run)
    with pytest.raises(UsageError, match="--data.path or --data.samples"):
        inspect(recipe, run, lr_at=[0])


def test_data_that_are_there_are_looked_at():
    path = "synthetic:classes=7,samples=70,size=32"
    found = inspect(*config.load("demo_classification", [f"--data.path={path}", "--data.classes=7"]), lr_at=[0])
    assert (found["classes"], found["samples"]) == (7, 70)
    assert found["steps_per_epoch"] == 2, "in the batch that training takes"


DROPS = {0: 0.0, 287: 0.096 * 287 / 575, 575: 0.096, 4599: 0.096, 4600: 0.0096, 5749: 0.0096, 5750: 0.00096}
STRETCHED = {575: 0.096, 6899: 0.096, 6900: 0.0096, 8624: 0.0096, 8625: 0.00096}
COSINE = {0: 0.0, 805: 0.09696, 1724: 0.09696, 4025: 0.04896, 6325: 0.00096, 7359: 0.00096}
COSINE_FLAGS = [
    "--train.epochs=64",
    "--schedule.kind=cosine",
    "--schedule.drop-epochs",
    "--schedule.warmup-epochs=7",
    "--schedule.hold-epochs=15",
    "--schedule.decay-epochs=55",
    "--schedule.floor=0.01",
    "--optimizer.norm-weight-decay=0",
    "--model.freeze=first_block",
]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--train.epochs=64"], DROPS),
        (["--train.epochs=90", "--schedule.drop-epochs", "60", "75"], STRETCHED),
        (COSINE_FLAGS, COSINE),
    ],
    ids=["k=0", "k=5", "cosine"],
)
def test_rates_of_ssd_are_the_originals(flags: list[str], expected: dict[int, float]):
    recipe, run = config.load("ssd_resnet34", ["--train.global-batch=1024", *flags])
    found = inspect(recipe, run, lr_at=list(expected), ranks=8)
    assert found["steps_per_epoch"] == 115 and found["parameters"] == 19_972_534
    assert found["lr_at"] == pytest.approx({str(step): rate for step, rate in expected.items()}, abs=1e-12)


def test_ssd_on_one_device_is_the_original():
    found = inspect(*config.load("ssd_resnet34"), lr_at=[4585])
    assert (found["steps_per_epoch"], found["steps"]) == (917, 50 * 917) and found["lr_at"] == {"4585": 0.012}
    # Biases and batch-norms decay as well.
    assert found["groups"] == [{"weight_decay": 5e-4, "tensors": 29 * 3 + 10 * 2 + 6 * 2, "parameters": 19_972_534}]


def test_the_later_ssd_keeps_batch_norms_and_its_first_layers():
    found = inspect(*config.load("ssd_resnet34", COSINE_FLAGS))
    frozen = 7 * 7 * 3 * 64 + 2 * 64 + 3 * 3 * 64 * 64 + 2 * 64
    norms = 2 * (7 * 64 + 9 * 128 + 13 * 256) - 2 * 2 * 64
    decays = {group["weight_decay"]: group["parameters"] for group in found["groups"]}
    assert decays == {5e-4: 19_972_534 - frozen - norms, 0.0: norms}


def test_facts_are_told_line_by_line():
    found = {
        "recipe": "mine", "parameters": 1234567, "forward_gflop": 4.0899, "classes": 10,
        "groups": [{"weight_decay": 1e-4, "tensors": 54, "parameters": 25000},
                   {"weight_decay": 0.0, "tensors": 7, "parameters": 3}],
        "base_lr": {"1": 0.1, "2": 0.1, "8": 0.1}, "config": {"optimizer": {"decay_form": "keras_l2", "lr": 0.05,
                                                                              "lr_for_batch": 128}},
        "samples": 1281167, "steps_per_epoch": 5004, "steps": 450360, "lr_at": {"0": 0.1, "5004": 0.012345678},
        "weights": {"note": "of torchvision", "tensors": [
            {"state": "loaded", "name": "a.weight", "here": "3x3", "there": "3x3"},
            {"state": "converted", "name": "conv1.weight", "here": "64x3", "there": "conv1/kernel 3x64"},
            {"state": "at random", "name": "fc", "here": "10x3", "there": ""},
            {"state": "unused", "name": "old", "here": "", "there": "5"},
        ]},
    }  # fmt: skip
    lines = [
        "mine: 1,234,567 parameters, 4.09 GFLOP forward per image, 10 classes",
        "  25,000 parameters in 54 tensors decay by 0.0001 (keras_l2)",
        "  3 parameters in 7 tensors decay by 0",
        "  base rate 0.1 (0.05 per 128 samples)",
        "  1,281,167 samples, 5004 steps per epoch, 450360 in all",
        "  learning rate at step 0: 0.1",
        "  learning rate at step 5004: 0.0123457",
        "  weights: of torchvision",
        "  1 tensors loaded, 1 tensors converted, 1 tensors at random, 1 tensors unused (--json lists every one)",
        "    converted conv1.weight  64x3 <- conv1/kernel 3x64",
        "    at random fc            10x3 <- -",
        "    unused    old           - <- 5",
    ]
    assert as_text(found, [], False).splitlines() == [*lines, "  every value is the recipe's own"]
    why = ["train.epochs 3: flag: --epochs", "data.size 64: the data"]
    assert as_text(found, why, False).splitlines() == [
        *lines, "  differs from the recipe:", *(f"    {line}" for line in why)
    ]  # fmt: skip
    assert json.loads(as_text(found, why, True)) == found
    plain = {name: value for name, value in found.items() if name not in ("steps", "weights")}
    plain |= {"base_lr": {"1": 0.1, "2": 0.2}, "config": {"optimizer": {"decay_form": "gradient"}}}
    assert as_text(plain, [], False).splitlines()[1:] == [
        "  25,000 parameters in 54 tensors decay by 0.0001",
        "  3 parameters in 7 tensors decay by 0",
        "  base rate 0.1 on 1 rank(s), 0.2 on 2 rank(s)",
        "  every value is the recipe's own",
    ]
    alone = {**plain, "base_lr": {"1": 0.1, "2": 0.1}, "weights": {"note": "gone", "tensors": []}}
    assert as_text(alone, [], False).splitlines()[3:5] == [
        "  base rate 0.1",
        "  weights: gone",
    ]
    meant = {**alone, "config": {"optimizer": {"decay_form": "gradient", "lr": 0.1, "lr_for_batch": 256}}}
    assert "  base rate 0.1\n" in as_text(meant, [], False)  # for the batch that the run has
    only = {**plain, "weights": {"note": "x", "tensors": [{"state": "kept", "name": "a", "here": "1", "there": ""}]}}
    assert "  1 tensors kept\n    kept      a  1 <- -" in as_text(only, [], False)


def test_ranks_and_steps_that_cannot_be_are_refused():
    recipe, run = config.load("resnet50")
    with pytest.raises(UsageError, match="^--ranks 0 must be at least 1$"):
        inspect(recipe, run, ranks=0)
    with pytest.raises(UsageError, match="^--lr-at -3 is not a step; steps are counted from 0$"):
        inspect(recipe, run, lr_at=[0, -3, -1])
    with pytest.raises(UsageError, match="^--lr-at needs to know the steps per epoch: give --data.path or"):
        inspect(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, samples=0)), run, lr_at=[0])
