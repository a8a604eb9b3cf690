"""What `inspect` says of a recipe, against published numbers and the fact sheet of the original."""

import pytest

from sightline import config
from sightline.errors import UsageError
from sightline.measure.inspect import as_text, inspect

# Of the original script: the rate from each of these epochs on.
TABLE = {0: 0.1, 1: 0.275, 2: 0.45, 3: 0.625, 4: 0.8, 29: 0.8, 30: 0.08, 60: 0.008, 80: 0.0008, 89: 0.0008}


def test_resnet50_is_the_original(tmp_path):
    recipe, run = config.load("resnet50")
    found = inspect(recipe, run, lr_at=[epoch * 5004 for epoch in TABLE])
    assert found["parameters"] == 25_557_032
    assert found["forward_gflop"] == pytest.approx(8.18, abs=0.01)
    assert found["steps_per_epoch"] == 5004 and found["steps"] == 90 * 5004
    assert found["lr_at"] == {str(epoch * 5004): rate for epoch, rate in TABLE.items()}
    assert found["groups"] == [{"weight_decay": 1e-4, "tensors": 161, "parameters": 25_557_032}]
    assert (recipe.train.global_batch, recipe.train.seed, recipe.train.precision) == (256, 123, "bf16")
    assert "25,557,032 parameters" in as_text(found, as_json=False)


def test_the_table_is_neither_compressed_nor_scaled():
    recipe, run = config.load("resnet50", ["--train.epochs=40", "--train.global-batch=1024"])
    found = inspect(recipe, run, lr_at=[4 * 1251, 39 * 1251])
    assert list(found["lr_at"].values()) == [0.8, 0.08]


def test_decay_of_norms_and_biases_apart():
    flags = ["--optimizer.norm-weight-decay=0", "--optimizer.bias-weight-decay=0"]
    found = inspect(*config.load("resnet50", flags))
    # 53 batch norms with two tensors each, and the bias of the head.
    assert [(g["weight_decay"], g["tensors"]) for g in found["groups"]] == [(1e-4, 54), (0.0, 107)]


def test_the_form_of_decay_is_told():
    """Keras' 1e-4 is 2e-4 in the gradient: the number alone would mislead."""
    text = as_text(inspect(*config.load("resnet50_keras")), as_json=False)
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
    assert (found["classes"], found["samples"], found["steps_per_epoch"]) == (7, 70, 1)
