"""Warnings at the start of training: each recipe with and without the reason for it."""

import pytest

from sightline import config, recipes
from sightline.train.warnings import start_warnings

TABLE = "--schedule.kind table --schedule.table-epochs 1 2 3 4 30 60 80 --schedule.table-rates"
WEIGHTS = "--model.weights=given.pth"


def told(name: str, *flags: str, images: int = 10**6) -> list[str]:
    recipe, _ = config.load(name, flags)
    return start_warnings(recipe, recipe.optimizer.base_lr(recipe.train.global_batch, 1), (), images)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"resnet50 {TABLE} 0.275 0.45 0.625 0.8 0.08 0.008 0.0008", ["made for a global batch of 2048 and are not"]),
        (f"resnet50 {TABLE} 0.275 0.45 0.625 0.8 0.08 0.008 0.0008 --train.global-batch=2048", []),
        (f"resnet50 {TABLE} 1 2 3 4 5 6 7", []),  # one's own
        ("resnet50 --schedule.kind=cosine", []),
        (f"resnet50 --train.global-batch=2048 {WEIGHTS}", ["rises to 0.8; above 0.1 sgd is likely to destroy"]),
        (f"resnet50_keras {WEIGHTS}", []),
        (f"resnet50_keras --train.global-batch=512 {WEIGHTS}", ["rises to 0.2; above 0.1 sgd_keras"]),
        (f"resnet50_keras --train.global-batch=512 --optimizer.trunk-lr-scale=0.5 {WEIGHTS}", []),
        ("resnet50_keras --train.global-batch=512", []),  # without weights there is nothing to destroy
        (f"resnet50_lars {WEIGHTS}", []),
        (f"demo_detection {WEIGHTS}", ["rises to 0.003; above 0.001 adamw is likely to destroy what given.pth"]),
        (f"ssd_resnet34 --train.global-batch=1024 {WEIGHTS}", []),
        (f"finetune_classification {WEIGHTS}", []),
        (f"finetune_classification --train.global-batch=1024 {WEIGHTS}", ["rises to 0.0032; above 0.001 adamw"]),
        ("finetune_classification", ["no --model.weights: finetune_classification trains from scratch"]),
        ("finetune_detection --train.head-epochs=0", ["or add --optimizer.trunk-lr-scale 1"]),
        ("finetune_detection --train.head-epochs=0 --optimizer.trunk-lr-scale=1", []),
        ("unet2d", []),
    ],
)
def test_a_line_for_every_reason_and_none_without(command: str, expected: list[str]):
    lines = told(*command.split())
    assert len(lines) == len(expected) and all(part in line for part, line in zip(expected, lines, strict=True)), lines
    assert all("--" in line and "\n" not in line for line in lines)  # a remedy, in one line


@pytest.mark.parametrize("name", recipes.names())
def test_no_recipe_warns_about_its_own_defaults(name: str):
    recipe = recipes.find(name).recipe()
    weights = [WEIGHTS] if name.startswith("finetune_") else []  # which these are for
    assert recipe.schedule.warnings(recipe.train.epochs) == [] == told(name, *weights)


@pytest.mark.parametrize("name", ["demo_classification", "demo_detection"])
def test_few_images_and_random_weights_lead_to_fine_tuning(name: str, tmp_path):
    data = f"--data.path={tmp_path}"
    (line,) = told(name, data, images=1000)
    assert line.startswith("1000 images are few for training from scratch")
    command = line.partition("sightline train ")[2].split()
    assert command == [name.removeprefix("demo_"), "--data", str(tmp_path)]
    assert command[0] in recipes.names()
    assert told(name, data, images=1001) == [] == told(name, "--data.path=synthetic:samples=8", images=8)
    assert "few" not in str(told(name, data, WEIGHTS, images=8))


@pytest.mark.parametrize("name", ["finetune_classification", "demo_segmentation"])
def test_few_images_are_expected_by(name: str):
    assert "few" not in str(told(name, images=8))
