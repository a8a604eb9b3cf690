"""ResNet-50 on ImageNet as in the Keras reference: SGD, 90 epochs, learning rate drops at epochs 30, 60 and 80.

    sightline train resnet50_keras --data.path IMAGENET --run.out runs/resnet50_keras

IMAGENET is class folders, tar shards or TFRecords (docs/reference/data.md). An epoch of 1,281,167 images has 5,004
steps at batch 256. For eight devices with 256 images each use `--train.global-batch 2048` (625 steps). The learning
rate is 0.1 for a batch of 256 and scales with it. `--model.arch keras_resnet101v2` etc. train the networks of
keras.applications.
Expected: 76.2 % top-1 on one accelerator, 76.3 % on eight (the vendor's page for release 1.0.0); not reproduced by us
(no ImageNet here), the time was not measured. docs/reference/recipes.md lists the deliberate differences from the
original.
"""

from sightline.data.augment.fields import TF_MEAN, TF_STD
from sightline.data.classification import ClassificationData
from sightline.models.config import ArchConfig
from sightline.recipe.recipe import Recipe
from sightline.tasks.config import ClassificationConfig
from sightline.train.config import TrainConfig
from sightline.train.optimizers import OptimizerConfig
from sightline.train.schedules import ScheduleConfig


def recipe() -> Recipe:
    """Return the recipe with the numbers of the original script."""
    return Recipe(
        name="resnet50_keras",
        model=ArchConfig(arch="resnet50_tf"),
        data=ClassificationData(
            classes=1000,
            background="last",  # 1001 outputs, labels 0 to 999
            samples=1_281_167,
            crop="tf",
            crop_scale=(0.05, 1.0),
            crop_ratio=(0.75, 1.33),
            interpolation="legacy",
            mean=TF_MEAN,
            std=TF_STD,
        ),
        task=ClassificationConfig(),
        optimizer=OptimizerConfig(
            kind="sgd_keras",
            lr=0.1,
            lr_for_batch=256,
            momentum=0.9,
            weight_decay=1e-4,
            norm_weight_decay=0.0,
            decay_form="keras_l2",
        ),
        schedule=ScheduleConfig(
            kind="step", drop_epochs=(30, 60, 80), drop_after=True, warmup_epochs=5, warmup_from="zero"
        ),
        train=TrainConfig(epochs=90, global_batch=256, precision="bf16"),
    )
