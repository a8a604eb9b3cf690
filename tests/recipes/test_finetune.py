"""Promises of recipes that fine-tune beyond those of all recipes: they start from weights, head first, and say so."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sightline import api
from sightline.engine.orders import train_order
from sightline.train.schedules import length_of

HEADS = {"finetune_classification": ("fc.",), "finetune_detection": ("extras.", "heads.")}
HEADS |= {"finetune_segmentation": ("heads.",), "segmentation": ("decoder.", "head.")}
FEW_CLASSES = {
    "finetune_classification": "synthetic:classes=4,samples=24,size=28",
    "finetune_detection": "synthetic:classes=4,samples=24,size=60",
    "segmentation": "synthetic:classes=4,samples=24,size=40",
}


def weights(result, step: int = 6) -> Path:
    return result.folder / "checkpoints" / f"ckpt-{step:08d}" / "model.safetensors"


@pytest.mark.parametrize(
    "name", ["finetune_classification", *(pytest.param(n, marks=pytest.mark.slow) for n in list(FEW_CLASSES)[1:])]
)
def test_weights_of_other_classes_fill_the_trunk_which_then_waits_for_the_head(name: str, finished, train, tmp_path):
    donor = weights(finished(name))
    flags = [f"--data.path={FEW_CLASSES[name]}", "--data.classes=4", "--train.head-epochs=1"]
    flags += [f"--model.weights={donor}"]
    tuned = train(name, tmp_path / "run", *flags)
    assert tuned.error is None and "; the head" in tuned.shown and "warning" not in tuned.shown
    given, first, last = load_file(donor), load_file(weights(tuned, 3)), load_file(weights(tuned))
    trunk = [key for key in given if not key.startswith(HEADS[name]) and "running" not in key and "num_" not in key]
    assert trunk and all(torch.equal(given[key], first[key]) for key in trunk)
    assert not any(torch.equal(given[key], last[key]) for key in trunk)


@pytest.mark.parametrize("name", [name for name in HEADS if name.startswith("finetune_")])
def test_without_weights_it_says_that_it_trains_from_scratch(name: str, finished, load):
    shown = finished(name).shown
    assert f"warning: no --model.weights: {name} trains from scratch" in shown
    assert "or add --train.head-epochs 0 --optimizer.trunk-lr-scale 1" in shown
    model = load(name)[0].model.build(load(name)[0].data.open("train", 0).spec)
    names = [key for key, _ in model.named_parameters()]
    assert load(name)[0].model.head_prefixes(model) == HEADS[name]
    assert 0 < sum(key.startswith(HEADS[name]) for key in names) < len(names)


@pytest.mark.parametrize(
    ("name", "samples", "steps"),
    [("finetune_classification", samples, steps) for samples, steps in ((50, 1000), (1600, 1000), (50_000, 31_240))]
    + [("finetune_detection", samples, steps) for samples, steps in ((50, 2000), (50_000, 125_000))],
)
def test_fifty_samples_have_enough_steps_and_fifty_thousand_an_end(name: str, samples: int, steps: int):
    recipe, _ = api.load(name, [f"--data.path=synthetic:classes=4,samples={samples},size=32"])
    assert length_of(recipe.train, train_order(recipe.train, samples, 1)).steps == steps


@pytest.mark.slow
def test_it_learns_from_weights_what_it_does_not_learn_from_scratch_in_as_many_steps(tmp_path: Path, train):
    """The same patterns with other numbers of classes: those of the first four of ten."""
    data = ["--data.augment=off", "--train.global-batch=32"]
    ten = ["--data.path=synthetic:classes=10,samples=320,size=28", "--train.epochs=4", "--optimizer.lr=0.01"]
    plain = ["--train.head-epochs=0", "--optimizer.trunk-lr-scale=1"]
    donor = train("finetune_classification", tmp_path / "donor", *data, *ten, *plain)
    four = [*data, "--data.path=synthetic:classes=4,samples=64,size=28", "--data.classes=4", "--train.epochs=4"]
    four += ["--train.ema=0.5", "--optimizer.lr=0.01"]
    tuned = train("finetune_classification", tmp_path / "tuned", *four, f"--model.weights={weights(donor, 40)}")
    scratch = train("finetune_classification", tmp_path / "scratch", *four, *plain)
    assert tuned.scores.values["loss"] < scratch.scores.values["loss"]
