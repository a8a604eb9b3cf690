"""The output of `inspect` against published numbers and the fact sheet of the original."""

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
