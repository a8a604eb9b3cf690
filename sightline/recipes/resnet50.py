"""ResNet-50 on ImageNet as in the PyTorch reference: SGD, batch 256, 90 epochs, drops at 30, 60 and 80.

    sightline train resnet50 --data.path IMAGENET --run.out runs/resnet50

IMAGENET holds train/ and val/ with 1,000 class folders each. An epoch of 1,281,167 images has 5,004 steps at batch 256.
The learning rate is 0.1 for a batch of 256 and scales with it: the first four epochs rise from an eighth of it. At
batch 2,048 these are the rates of the original (0.1, 0.275, 0.45, 0.625, 0.8, ...), which used them at any batch.
Expected: 76.1 % top-1, published by torchvision for this model at 90 epochs; not reproduced by us (no ImageNet here).
About 4 hours on one H200, computed from its step on JPEGs (8,191 img/s: benchmarks/notes/results.md, row 1c), not run.
"""

from sightline.data.classification import ClassificationData
from sightline.models.config import ArchConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import ClassificationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig

# Absolute rates for batch 2,048, used at any batch.
FORMER = {
    "optimizer.lr_for_batch": 0,
    "schedule.kind": "table",
    "schedule.unit": "step",
    "schedule.drop_epochs": (),
    "schedule.warmup_epochs": 0.0,
    "schedule.warmup_factor": 0.0,
    "schedule.table_epochs": (1, 2, 3, 4, 30, 60, 80),
    "schedule.table_rates": (0.275, 0.45, 0.625, 0.8, 0.08, 0.008, 0.0008),
}


def recipe() -> Recipe:
    """Return the recipe with the numbers of the original script and its README, at any batch."""
    return Recipe(
        name="resnet50",
        model=ArchConfig(arch="resnet50"),
        data=ClassificationData(classes=1000, samples=1_281_167, size=224, eval_resize=256, eval_size=224),
        task=ClassificationConfig(),
        optimizer=OptimizerConfig(kind="sgd", lr=0.1, lr_for_batch=256, momentum=0.9, weight_decay=1e-4),
        schedule=ScheduleConfig(
            kind="step", unit="epoch", drop_epochs=(30, 60, 80), warmup_epochs=4, warmup_factor=0.125
        ),
        # The original does not evaluate under autocast.
        train=TrainConfig(epochs=90, global_batch=256, precision="bf16", eval_autocast=False, seed=123),
        former=FORMER,
    )
